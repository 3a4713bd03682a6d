"""The driver's part of reporting: one supervisor for each started query.

On a thread of its own, it commits each epoch to the service once Spark has committed the batch, in
order. It reports what the tasks could not, because the service was unavailable, or was killed with
reports that waited for their commit. That is safe: Spark has committed the batch, so the driver
knows what holds from then on. While nothing is left to read, it says so. Once a bounded query has
drained its input, it makes the sources final, and ends the query when all of its stages are final.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto
from http import HTTPStatus
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.errors import (
    InputAhead,
    LimitReached,
    Refused,
    StaleEpoch,
    StaleRun,
    UnknownJob,
    UnknownStage,
)
from spark_agent.client.reports import RangeReport, StageProgress
from spark_agent.client.responses import RunOutcome
from spark_agent.client.spec import StageSpec
from spark_agent.clock import Clock
from spark_agent.exceptions import (
    CONTINUES,
    AggregatorError,
    FinalSourceError,
    OldCheckpointError,
    old_checkpoint_message,
)
from spark_agent.executor.in_flight import StageInFlight
from spark_agent.executor.tally import Count, Tallies, pop_tallies
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.sources.control import END_MS
from spark_agent.supervision.assignment import Assignment, Committed, QueryHandle
from spark_agent.supervision.diagnostics import (
    log_missing_inputs,
    log_silence,
    log_unfinished,
    older_ledger_message,
    reset_message,
)
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.finalisation import Finalisation
from spark_agent.supervision.idle_shards import QuietWatch
from spark_agent.supervision.in_flight_reports import InFlightReports
from spark_agent.supervision.joined_shards import JoinedNotes, JoinedShards
from spark_agent.supervision.pending_reports import PendingReports, add_reports
from spark_agent.supervision.row_counts import RowCounts
from spark_agent.times import MAX_MS

_log: Final = logging.getLogger("spark_agent")

_LAST_EPOCH: Final = 2**63 - 1
_TICK_MS: Final = 200
_LONGEST_PAUSE_MS: Final = 5_000
_SHUTDOWN_GRACE_MS: Final = 2_000
_RENEWALS_PER_LEASE: Final = 3
"""Renewals of a lease that the driver keeps, before the lease would expire."""
_LONGEST_REASON: Final = 1_000
"""Characters that the service takes of the reason why a run has ended."""
_LOG_AGAIN_MS: Final = 60_000
"""Interval at which a repeated error is logged."""


class Signal(Enum):
    """Notifications of a supervisor, besides committed batches."""

    DRAINED = auto()
    """The query has read everything its sources had."""
    ENDED = auto()
    """The query has terminated."""
    STOP = auto()
    """The pipeline is being stopped."""


class Supervisor:
    """Supervises one query until it ends. Only its own thread touches its state.

    The public methods are thread-safe.
    """

    def __init__(
        self,
        assignment: Assignment,
        *,
        client: Client,
        run: int | None,
        open_run: Callable[[Sequence[str]], int],
        tallies: Tallies,
        in_flight: Mapping[str, StageInFlight],
        joined_notes: JoinedNotes,
        clock: Clock,
    ) -> None:
        """`in_flight` is of the sources that have percentile watermarks."""
        self._assignment = assignment
        self._client = client
        self._run = run
        self._open_run = open_run
        self._tallies = tallies
        self._query: QueryHandle | None = None
        self._failure: str | None = None
        self._abandoned: str | None = None
        self._clock = clock
        self._inbox: queue.SimpleQueue[CommittedBatch | Signal] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_thread, name=f"tidegauge-{assignment.query}", daemon=True
        )
        self._step_done = threading.Condition()
        self._failing = False
        self._uncommitted: CommittedBatch | None = None
        self._latest_epoch = -1
        self._silence_told = False
        self._committed = Committed()
        self._settled_epoch = -1
        """The last epoch that is committed and of which the driver has sent what tasks could not."""
        self._pending = PendingReports(clock, assignment.watched)
        # Complete from the start: another thread replaces values while this one goes through them.
        self._unread: dict[str, Collection[str]] = dict.fromkeys(assignment.by_shard, ())
        self._shard_waits: dict[str, Mapping[str, str]] = {
            stage: {} for stage in assignment.by_shard
        }
        self._finalisation = Finalisation(assignment, client, self._unread)
        self._joined = JoinedShards(assignment, client, joined_notes)
        self._logged: dict[type[AggregatorError], int] = {}
        self._last_error: str | None = None
        self._shutdown_deadline_ms: int | None = None
        self._waits_because: str | None = None
        self._renew_leases_ms: int | None = None
        self._counts = RowCounts(assignment.job)
        self._in_flight = InFlightReports(in_flight, assignment.watched, clock)
        self._quiet = QuietWatch(
            assignment,
            self._finalisation.not_final,
            client=client,
            tallies=tallies,
            in_flight=self._in_flight,
            unread=self._unread,
            clock=clock,
        )

    def start(self) -> None:
        """Start the thread. Batches that Spark commits before `attach` are handled too."""
        self._thread.start()

    def attach(self, query: QueryHandle) -> None:
        """Set the query, which exists only once Spark has started it."""
        with self._step_done:
            self._query = query
            failure = self._failure
        if failure is not None:
            query.fail(failure)

    def abandon(self, because: str) -> None:
        """End without a query: it could not be started."""
        self._abandoned = because
        self.notify(Signal.STOP)

    def fail_query(self, message: str) -> None:
        """Make the query fail with this error, as soon as it is attached."""
        _log.error("%s", message)
        with self._step_done:
            self._failure = message
            query = self._query
        if query is not None:
            query.fail(message)

    @property
    def failure(self) -> str | None:
        """Why the query has to fail; None: it does not."""
        with self._step_done:
            return self._failure

    @property
    def last_error(self) -> str:
        """Why its last step failed; if none did, somebody else holds the shards."""
        return self._last_error or "another driver holds the shards"

    def wait_because(self, reason: str | None) -> None:
        """Keep the sources' leases while the query waits for this reason; None: it does not wait.

        A paused shard is not a dead one. Its tasks' leases would run out while no batch runs.
        """
        self._waits_because = reason

    @property
    def waits_because(self) -> str | None:
        """Why the query's next batch has to wait; None: it does not."""
        return self._waits_because if self.alive else None

    def note_shards(self, stage: str, *, unread: Collection[str], waits: Mapping[str, str]) -> None:
        """Note which shards of a source have unread files, and why which of them get none or fewer."""
        before = self._shard_waits.get(stage, {})
        for shard, because in waits.items():
            if shard not in before:
                _log.info("query %s goes on, with less of one shard: %s", self.query, because)
        self._unread[stage], self._shard_waits[stage] = unread, waits

    @property
    def shard_waits(self) -> dict[str, dict[str, str]]:
        """Why single shards get nothing to read in the next batch, or less, by source stage."""
        found = {stage: dict(waits) for stage, waits in self._shard_waits.items() if waits}
        return found if self.alive else {}

    def notify(self, event: CommittedBatch | Signal) -> None:
        """Queue an event. Never blocks: it is called from Spark's listener bus."""
        self._inbox.put(event)

    def commit_epoch(self, batch: CommittedBatch, timeout_ms: int) -> bool:
        """Commit a batch's epoch, send what its tasks could not report, and wait for both; return
        whether that was in time. Else a run that ends by itself would end before its last windows.

        Returns at once while the service does not answer: the batches must go on.
        """
        self.notify(batch)
        return self._wait(lambda: self._settled_epoch >= batch.epoch, timeout_ms)

    def finalise_sources(self, timeout_ms: int) -> bool:
        """Make the sources of a drained query final and wait; return whether they became so in time."""
        self.notify(Signal.DRAINED)
        return self._wait(lambda: self._finalisation.are_final, timeout_ms, even_if_failing=True)

    def _wait(
        self, done: Callable[[], bool], timeout_ms: int, *, even_if_failing: bool = False
    ) -> bool:
        with self._step_done:
            self._step_done.wait_for(
                lambda: done() or (self._failing and not even_if_failing) or not self.alive,
                timeout_ms / 1_000,
            )
            return done()

    def join(self, timeout_ms: int) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_ms / 1_000)

    @property
    def alive(self) -> bool:
        """True while it supervises its query."""
        return self._thread.is_alive()

    @property
    def query(self) -> str:
        """The name of this start of the query."""
        return self._assignment.query

    @property
    def stages(self) -> list[str]:
        """The stages that its query executes."""
        return self._assignment.stages

    @property
    def sources(self) -> Sequence[StageSpec]:
        """The source stages that its query executes."""
        return self._assignment.sources

    @property
    def counts(self) -> Counter[str]:
        """Counts of what should be rare; keys as in `Count`."""
        return self._counts.total

    def _run_thread(self) -> None:
        try:
            self._supervise()
        finally:
            for stage in self._assignment.stages:
                pop_tallies(self._tallies, self._assignment.query, stage, _LAST_EPOCH)
            self._notify_step(failing=True)

    def _supervise(self) -> None:
        try:
            self._follow()
        except StaleRun as error:
            self._on_fenced(error)
            return  # Its run is over.
        except UnknownStage as error:
            self._on_removed(error)
        except (OldCheckpointError, FinalSourceError) as error:
            # The service was away when the query was started.
            self.fail_query(str(error))
        else:
            self._log_if_unreported()
            self._log_if_unfinished()
            self._end_run()
            return
        if self.failure is not None:
            self._notify_step(failing=True)
            self._await_end()
            self._end_run()

    def _await_end(self) -> None:
        """Wait until Spark has ended the query, so that its error is known."""
        while self._shutdown_deadline_ms is None:
            self._receive(_LONGEST_PAUSE_MS)

    def _follow(self) -> None:
        """Supervise the query to its end.

        Raises `StaleRun`, `UnknownStage`, `OldCheckpointError` or `FinalSourceError` if its stages are
        not, or no longer, its own.
        """
        pause_ms = _TICK_MS
        while not self._finished():
            self._receive(pause_ms)
            try:
                self._step()
            except (StaleRun, UnknownStage, OldCheckpointError, FinalSourceError):
                raise
            except UnknownJob:
                # The service has a new ledger. Opening a run declares the job again.
                self._run = None
            except AggregatorError as error:
                self._log_error(error)
                if isinstance(error, LimitReached):
                    self._on_limit(error)
                self._notify_step(failing=True)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
            else:
                self._last_error = None
                self._settled_epoch = self._committed.epoch
                self._notify_step(failing=False)
                pause_ms = _TICK_MS

    def _end_run(self) -> None:
        """End the run with the query's outcome, so that nobody takes it for dead, or for alive.

        It is the last that the service hears of the run: its commits have been sent, as far as the
        service took them. One attempt is made, which the client's patience limits.
        """
        if self._run is None:
            return
        outcome, because = self._outcome()
        try:
            self._client.end_run(
                self._assignment.job, self._run, outcome, because[:_LONGEST_REASON]
            )
        except (StaleRun, UnknownJob) as error:
            _log.debug("query %s: its run is over already: %s", self._assignment.query, error)
        except Refused as error:
            if error.status != HTTPStatus.NOT_FOUND:
                self._log_unended(outcome, error)
            elif outcome != "failed":
                # A service that is older than this agent knows no ends.
                self._release_leases(self._run)
        except AggregatorError as error:
            self._log_unended(outcome, error)

    def _outcome(self) -> tuple[RunOutcome, str]:
        query = self._query
        if query is None:
            return "failed", self._abandoned or "the query was not started"
        failure = query.failure()
        if failure is not None:
            return "failed", failure.replace("\0", "")
        if self._finalisation.is_stopping or query.has_ended_by_itself():
            return "finished", ""
        return "stopped", ""

    def _log_unended(self, outcome: RunOutcome, error: AggregatorError) -> None:
        _log.warning(
            "query %s has %s, and the service could not be told: it will take the query for dead"
            " until its next start. %s",
            self._assignment.query,
            "been stopped" if outcome == "stopped" else outcome,
            error,
        )

    def _release_leases(self, run: int) -> None:
        """Give back the leases, which the tasks hold: their tokens are not known here. The driver's
        claim takes them over.
        """
        try:
            reporter = self._reporter(run)
            leases = [reporter.claim(stage, None) for stage in self._assignment.stages]
            self._client.release(
                self._assignment.job, [each for each in leases if each is not None]
            )
        except AggregatorError as error:
            _log.debug("query %s: leases are not given back: %s", self._assignment.query, error)

    def _log_if_unreported(self) -> None:
        """Log that the service has not taken what the query's last batches had to report."""
        if self._uncommitted is None and not self._pending:
            return
        for stage in self._assignment.stages:
            tallies = pop_tallies(self._tallies, self._assignment.query, stage, self._latest_epoch)
            self._counts.record(stage, tallies)
        _log.warning(
            "query %s has ended, and the service has not taken its last reports: it is away, or another "
            "query holds its stages' ranges. Nothing is early. But a shard without new rows stands "
            "still until its next row, or until a bounded run makes it final. Stages: %s",
            self._assignment.query,
            ", ".join(self._assignment.stages),
        )

    def _log_if_unfinished(self) -> None:
        """Log why stages of a query that has ended are unfinished, if that is unexpected.

        If the query failed, Spark's own error says why.
        """
        if self._query is None or self._query.failure() is not None:
            return
        try:
            watermarks = self._client.watermarks(self._assignment.job)
        except AggregatorError:
            watermarks = {}
        for stage, inputs in self._assignment.inputs.items():
            here = watermarks.get(stage)
            if here is not None and here.final:
                continue
            if self._assignment.bounded:
                log_unfinished(stage, inputs, watermarks)
            elif here is not None and here.input_ms is None:
                log_missing_inputs(stage, inputs, watermarks)

    def _notify_step(self, *, failing: bool) -> None:
        with self._step_done:
            self._failing = failing
            self._step_done.notify_all()

    def _log_error(self, error: AggregatorError) -> None:
        """Log an error now and then, not on every retry; nor if every other step fails."""
        self._last_error = str(error)
        now_ms = self._clock.steady_ms()
        logged_ms = self._logged.get(type(error))
        if logged_ms is None or now_ms - logged_ms >= _LOG_AGAIN_MS:
            self._logged[type(error)] = now_ms
            _log.warning("query %s: %s; retrying", self._assignment.query, error)

    def _on_limit(self, error: LimitReached) -> None:
        """Fail a query that would never end, since shards of its sources cannot join.

        Others go on, and retry: as soon as there is room, their shards join.
        """
        if self._assignment.bounded and self.failure is None:
            self.fail_query(
                f"tidegauge: query {self._assignment.query} cannot make its sources final: {error}. "
                f"Raise that setting of the service, or have fewer shards or key ranges; then start it "
                f"again from its checkpoint"
            )

    def _on_fenced(self, error: StaleRun) -> None:
        current = error.problem.get("run")
        if current is None:
            self._stop_if_wanted(reset_message(self._assignment.job))
        elif self._run is not None and current < self._run:
            self._stop_if_wanted(older_ledger_message(self._assignment.query, self._run, current))
        else:
            self._stop_if_wanted(self._fenced_by(error))

    def _on_removed(self, error: UnknownStage) -> None:
        self._stop_if_wanted(
            f"tidegauge: query {self._assignment.query} executes a stage that the job has no more: "
            f"{error}. Its specification was replaced while the query ran. Declare the stage again, "
            f"or start the query of the new pipeline"
        )

    def _stop_if_wanted(self, message: str) -> None:
        if self._assignment.on_fenced == "stop":
            self.fail_query(message)
        else:
            _log.warning("%s", message)

    def _fenced_by(self, error: StaleRun) -> str:
        stages = ", ".join(self._assignment.stages)
        holder = error.problem.get("holder")
        by = f" by {holder}" if holder else ""
        return (
            f"tidegauge: query {self._assignment.query} is fenced: its stages ({stages}) were taken "
            f"over{by}. {error.problem.get('detail', error)}. The job would not know "
            f"of anything it wrote from now on. If two drivers run this pipeline, stop one of "
            f"them; with on_fenced='continue' the query would go on regardless"
        )

    def _finished(self) -> bool:
        if self._shutdown_deadline_ms is None:
            return False
        unfinished = self._pending or self._finalisation.is_unfinished
        done = self._uncommitted is None and not unfinished
        return done or self._clock.steady_ms() >= self._shutdown_deadline_ms

    def _receive(self, timeout_ms: int) -> None:
        """Wait for the first event, then handle all that are queued."""
        try:
            self._handle(self._inbox.get(timeout=timeout_ms / 1_000))
            while True:
                self._handle(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _handle(self, event: CommittedBatch | Signal) -> None:
        match event:
            case CommittedBatch():
                self._on_batch(event)
            case Signal.DRAINED:
                self._finalisation.is_drained = True
            case Signal.ENDED | Signal.STOP:
                self._finalisation.check_drained(self._query, self._committed.epoch)
                self._set_shutdown_deadline()

    def _set_shutdown_deadline(self) -> None:
        """Set when to give up. A query that was ended is followed by another start, which makes good for
        its last reports. A bounded one that has read everything may not be.
        """
        failed = self._query is not None and self._query.failure() is not None
        grace_ms = _SHUTDOWN_GRACE_MS
        if self._finalisation.is_unfinished and not failed:
            grace_ms = max(grace_ms, self._assignment.finish_timeout_ms)
        if self._shutdown_deadline_ms is None:
            self._shutdown_deadline_ms = self._clock.steady_ms() + grace_ms

    def _on_batch(self, batch: CommittedBatch) -> None:
        """Handle a committed batch once: both the feed and Spark's listener bus report it."""
        if batch.epoch <= self._latest_epoch:
            return
        self._latest_epoch = batch.epoch
        # Only the latest matters: watermarks rise from epoch to epoch.
        self._uncommitted = batch
        for stage in self._assignment.keyed[:1]:
            self._counts.add(stage.name, {Count.DROPPED_ROWS: batch.dropped_rows})

    def _step(self) -> None:
        if self._run is None:
            self._run = self._open_run(self._assignment.stages)
        run = self._run
        self._joined.rejoin(self._reporter(run))
        self._finalisation.find_joined_shards()
        if self._uncommitted is not None:
            # Before the commit, which would be one more proof that the run finds nothing in them.
            self._quiet.report_backlogs(self._reporter(run), self._uncommitted)
            self._commit(run, self._uncommitted)
            self._uncommitted = None
        reporter = self._reporter(run)
        self._pending.report(reporter)
        self._in_flight.report(reporter)
        # A batch that has ended meanwhile is still in the inbox.
        looks = self._waits_because is None and self._inbox.empty()
        self._quiet.watch(
            reporter,
            self._committed,
            self._query if looks else None,
            drained=self._finalisation.is_drained,
        )
        self._keep_leases(reporter)
        if self._assignment.bounded and self.failure is None:
            self._finalisation.check_drained(self._query, self._committed.epoch)
            self._finalisation.finish(reporter, self._pending, self._committed, self._query)
            if self._finalisation.obstacle is not None:
                self.fail_query(self._finalisation.obstacle)

    def _reporter(self, run: int) -> DriverReporter:
        return DriverReporter(
            client=self._client,
            job=self._assignment.job,
            query=self._assignment.query,
            ttl_ms=self._assignment.ttl_ms,
            run=run,
            epoch=self._committed.epoch,
        )

    def _commit(self, run: int, batch: CommittedBatch) -> None:
        self._joined.check_ledger()
        promised = self._progress(batch)
        stages: dict[str, StageProgress | None] = {
            stage.name: None for stage in self._assignment.sources
        }
        # While Spark has no watermark to promise by, the epoch is committed all the same: the service
        # tells whether the job is further.
        stages |= {stage.name: StageProgress(None) for stage in self._assignment.keyed}
        stages |= promised
        applied: Mapping[str, int] = {}
        try:
            applied = self._client.commit(self._assignment.job, run, batch.epoch, stages)
            self._joined.acknowledge(batch.epoch)
        except StaleEpoch as error:
            self._warn_of_old_checkpoint(batch, error)
        except InputAhead as error:
            # The checkpoint is newer than the job. Nothing of this epoch was applied: it is pending.
            _log.info("query %s, epoch %d: %s", self._assignment.query, batch.epoch, error)
        self._committed = Committed(batch.epoch, promised, self._emitted_ms(batch, promised))
        self._reconcile(batch, promised, applied)

    def _emitted_ms(
        self, batch: CommittedBatch, promised: Mapping[str, StageProgress]
    ) -> dict[str, int]:
        return {
            stage: each.input_ms
            for stage, each in promised.items()
            if each.input_ms is not None
            and batch.keeps_nothing
            and self._assignment.promises[stage].is_of_windows
        }

    def _progress(self, batch: CommittedBatch) -> dict[str, StageProgress]:
        """Return how far each keyed stage is after a batch, given Spark's watermark in it."""
        if batch.watermark_ms <= 0:  # Spark has no watermark yet, which it writes as 1970
            return {}
        if batch.watermark_ms >= END_MS - 1:
            return dict.fromkeys(self._assignment.promises, StageProgress(MAX_MS))
        return {
            stage: promise.progress(batch.watermark_ms)
            for stage, promise in self._assignment.promises.items()
        }

    def _warn_of_old_checkpoint(self, batch: CommittedBatch, error: StaleEpoch) -> None:
        """Say once why an epoch is below the job's. What the batch had to report is pending."""
        if self._counts.rereads:
            return
        self._counts.rereads = True
        latest = error.problem.get("last_epoch", "a later one")
        message = old_checkpoint_message(self._assignment.query, f"ran batch {batch.epoch}", latest)
        if self._assignment.on_lost_checkpoint == "continue":
            _log.warning("%s", message)
        else:
            self.fail_query(f"{message}. {CONTINUES}")

    def _reconcile(
        self,
        batch: CommittedBatch,
        promised: Mapping[str, StageProgress],
        applied: Mapping[str, int],
    ) -> None:
        """Compare what was applied with what the batch had to report; keep the rest as pending."""
        told = False
        for stage in self._assignment.sources:
            tallies = pop_tallies(self._tallies, self._assignment.query, stage.name, batch.epoch)
            told = told or bool(tallies)
            self._counts.record(stage.name, tallies)
            newest: dict[str, RangeReport] = {}
            for tally in tallies:
                add_reports(newest, tally.promises)
                if stage.is_dynamic:
                    self._finalisation.add_joined(stage.name, tally.promises)
                    self._joined.note(stage.name, tally.promises)
                self._in_flight.add(stage, tally)
            # If several epochs were committed at once, only the last one's reports were applied.
            if applied.get(stage.name, 0) < len(newest) or len(tallies) > 1:
                # The reports may have been applied or not, so some rows are counted twice. To leave
                # out their count would be worse: the shard would look as if it had none.
                self._pending.add(stage.name, newest)
        for stage in self._assignment.keyed:
            tallies = pop_tallies(self._tallies, self._assignment.query, stage.name, batch.epoch)
            told = told or bool(tallies)
            self._counts.record(stage.name, tallies)
            is_applied = applied.get(stage.name, 0) >= len(stage.ranges)
            self._pending.set_progress(stage.name, None if is_applied else promised.get(stage.name))
        if batch.rows and not told and not self._silence_told:
            self._silence_told = True
            log_silence(self._assignment.query, self._assignment.stages, batch.epoch, batch.rows)

    def _keep_leases(self, reporter: DriverReporter) -> None:
        """Hold the leases of what this query executes while no task does: nobody is gone.

        A query that has nothing to read, or waits for its next trigger or its throttle, runs no task
        for longer than a lease lasts. The next batch's tasks outrank this claim. Before the first
        batch is committed there is none, since it would outrank that batch's own tasks.
        """
        now_ms = self._clock.steady_ms()
        if self._committed.epoch < 0 or self._finalisation.is_drained:
            return
        if self._renew_leases_ms is None:
            self._renew_leases_ms = now_ms + self._assignment.ttl_ms // _RENEWALS_PER_LEASE
        elif now_ms >= self._renew_leases_ms:
            for stage in self._assignment.stages:
                # For one that may be idle, the lease would prove that somebody looks.
                if stage not in self._assignment.watched:
                    reporter.claim(stage, None)
            self._renew_leases_ms = now_ms + self._assignment.ttl_ms // _RENEWALS_PER_LEASE
