"""The driver's part of reporting: one supervisor for each started query.

On a thread of its own, the supervisor commits each epoch to the service once Spark has committed the
batch, in order. It sends the reports that the tasks could not send, because the service was unavailable,
or was killed with reports that waited for their commit. A late report is safe: Spark has committed the
batch, so the promise holds from then on. While nothing is left to read, the supervisor reports an empty
backlog. Once a bounded query has drained its input, the supervisor makes the sources final, and ends the
query when all of its stages are final.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Final, Protocol

from py4j.protocol import Py4JError

from spark_agent.client.client import Client
from spark_agent.client.errors import LimitReached, StaleRun, UnknownJob, UnknownStage
from spark_agent.client.responses import RunOutcome
from spark_agent.clock import Clock
from spark_agent.exceptions import (
    AggregatorError,
    FinalSourceError,
    OldCheckpointError,
    QueryFailedError,
    SparkLostError,
)
from spark_agent.executor.in_flight import StageInFlight
from spark_agent.executor.tally import Tallies, shards_with_rows
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.sources.kafka import unread
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.clock_promises import ClockPromises
from spark_agent.supervision.complete_shards import CompleteShards
from spark_agent.supervision.diagnostics import (
    fenced_message,
    limit_message,
    log_if_unfinished,
    log_unreported,
    lost_message,
    newer_run_message,
    older_ledger_message,
    removed_message,
    reset_message,
    supervisor_failed_message,
)
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.epoch_commits import EpochCommits
from spark_agent.supervision.finalisation import Finalisation
from spark_agent.supervision.idle_shards import QuietWatch
from spark_agent.supervision.in_flight_reports import InFlightReports
from spark_agent.supervision.joined_shards import JoinedNotes, JoinedShards
from spark_agent.supervision.lease_keeper import LeaseKeeper
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.retired_ranges import RetiredRanges
from spark_agent.supervision.run_end import end_run
from spark_agent.supervision.session_readings import SessionReadings
from spark_agent.supervision.shard_states import ShardStates, StateNotes
from spark_agent.supervision.storage_errors import StorageErrors
from spark_agent.supervision.topic_ids import TopicIds, TopicNotes

_log: Final = logging.getLogger("spark_agent")

_TICK_MS: Final = 200
_LONGEST_PAUSE_MS: Final = 5_000
_SHUTDOWN_GRACE_MS: Final = 2_000
_READING_GRACE_MS: Final = 30_000
"""The longest wait at the end for a reading of open sessions, a job of Spark's."""
_LOOK_MS: Final = 5_000
"""Time without a batch from Spark's listener bus, after which the query's record is read."""
_LOG_AGAIN_MS: Final = 60_000
"""Interval at which a repeated error is logged."""


class Notes(JoinedNotes, StateNotes, TopicNotes, Protocol):
    """Notes in the query's checkpoint: `spark_agent.driver.preconditions.Resumption`."""


class Signal(Enum):
    """Notifications of a supervisor, besides committed batches."""

    DRAINED = auto()
    """The query has read everything its sources had."""
    ENDED = auto()
    """The query has terminated."""
    STOP = auto()
    """The pipeline is being stopped."""


def _pause_ms(due_ms: Iterable[int | None], began_ms: int, now_ms: int) -> int:
    """Return the pause after a step: a tick, or less if leases are due before. A shard whose task's
    lease has expired would be without a worker meanwhile.

    Leases that were due at the begin of the step are not kept at present.

    >>> _pause_ms((None, 900), began_ms=100, now_ms=110), _pause_ms((150, 900), 100, 110)
    (200, 40)
    >>> _pause_ms((105, None), 100, 110), _pause_ms((100, 50), 100, 110)
    (1, 200)
    """
    pauses_ms = (max(each - now_ms, 1) for each in due_ms if each is not None and each > began_ms)
    return min([_TICK_MS, *pauses_ms])


class Supervisor:
    """Supervises one query until it ends. Only its own thread touches its state.

    The public methods are thread-safe.
    """

    def __init__(
        self,
        query: StartedQuery,
        running: RunningQuery,
        *,
        client: Client,
        run: int | None,
        open_run: Callable[[Sequence[str]], int],
        newer_own_run: Callable[[int, StaleRun], int],
        tallies: Tallies,
        in_flight: Mapping[str, StageInFlight],
        notes: Notes,
        waits: BatchWaits,
        read: ReadThrough,
        resumed_after: int,
        clock: Clock,
    ) -> None:
        """`newer_own_run` returns the run after a run that is its own as well, or raises the error.
        `in_flight` is of the sources that have percentile watermarks. `resumed_after`: the last batch
        that Spark had committed before; -1: none.
        """
        self.query = query
        self.running = running
        self._client = client
        self._tallies = tallies
        self._run = run
        self._resumed_after = resumed_after
        self._open_run = open_run
        self._newer_own_run = newer_own_run
        self._waits = waits
        self._clock = clock
        self._abandoned: str | None = None
        self._inbox: queue.SimpleQueue[CommittedBatch | Signal] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_thread, name=f"tidegauge-{query.name}", daemon=True
        )
        self._step_done = threading.Condition()
        self._failing = False
        self._settled_epoch = -1
        """The last epoch that is committed and of which the driver has sent what tasks could not."""
        self._look_due_ms = 0
        self._sessions_are_due = False
        self._run_ends = False
        self._logged: dict[type[AggregatorError], int] = {}
        self._last_error: str | None = None
        self._shutdown_deadline_ms: int | None = None
        self._storage = StorageErrors(query.name, clock)
        self._retired = RetiredRanges(client, query.job)
        self._finalisation = Finalisation(query, running, client, waits)
        self._complete = CompleteShards(query, waits, self._finalisation, clock)
        self._joined = JoinedShards(query, client, notes)
        self._in_flight = InFlightReports(in_flight, query.stages.watched, clock)
        self._states = ShardStates(query, notes, tallies)
        self._sessions = SessionReadings(query, clock)
        self._commits = EpochCommits(
            query,
            running,
            client=client,
            tallies=tallies,
            joined=self._joined,
            finalisation=self._finalisation,
            in_flight=self._in_flight,
            states=self._states,
            read=read,
            sessions=self._sessions,
            clock=clock,
        )
        self._topics = TopicIds(query.name, running, notes, clock, active=query.stages.reads_topics)
        self._read = read
        self._leases = LeaseKeeper(query, running.is_in_batch, self._finalisation.not_final, clock)
        self._clock_promises = ClockPromises(query, read, self._finalisation.not_final, clock)
        self._quiet = QuietWatch(
            query,
            running,
            self._finalisation.not_final,
            client=client,
            tallies=tallies,
            in_flight=self._in_flight,
            waits=waits,
            clock=clock,
        )

    def start(self) -> None:
        """Start the thread. Batches that Spark commits before `attach` are handled too."""
        self._thread.start()

    def abandon(self, because: str) -> None:
        """End without a query: it could not be started."""
        self._abandoned = because
        self.notify(Signal.STOP)

    @property
    def last_error(self) -> str:
        """Error of its last step. A step without one was denied shards, which another driver holds."""
        return self._last_error or "another driver holds the shards"

    def notify(self, event: CommittedBatch | Signal) -> None:
        """Queue an event. Never blocks: it is called from Spark's listener bus."""
        self._inbox.put(event)

    def notify_end(self, signal: Signal) -> None:
        """Queue the query's last batch, then its end.

        Spark's listener bus may lag: it may report a batch only after the query has ended.
        """
        # Spark itself may have ended, and its record of the batch with it.
        with suppress(Exception):
            newest = self.running.recent_batch()
            if newest is not None:
                self.notify(newest)
        self.notify(signal)

    def commit_epoch(self, batch: CommittedBatch, timeout_ms: int) -> bool:
        """Commit a batch's epoch, send what its tasks could not report, and wait for both; return
        whether that was in time. Else a run that ends by itself would end before its last windows.

        Returns at once while the service does not answer: the batches must go on.
        """
        self.notify(batch)
        return self._wait(lambda: self._settled_epoch >= batch.epoch, timeout_ms)

    def has_read_sessions(self) -> bool:
        """Return whether the promises go by the sessions of the last batch, before a run ends by itself.

        From the first call on, readings do not pause: the next query may be started by this one's end.
        """
        # Set by the thread of the query, and never unset: the next step of the other thread reads it.
        self._run_ends = True
        return not self._sessions_are_due

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
    def counts(self) -> Counter[str]:
        """Counts of what should be rare; keys as in `Count`."""
        return self._commits.counts.total

    @property
    def bounds(self) -> dict[str, dict[str, int]]:
        """Bounds of out-of-orderness that strategies have learned, by source and shard (ms)."""
        return self._states.bounds.of

    def _run_thread(self) -> None:
        try:
            self._supervise()
        finally:
            self._commits.drop_tallies()
            self._sessions.close()
            self._notify_step(failing=True)

    def _supervise(self) -> None:
        try:
            self._follow()
        except StaleRun as error:
            self._on_fenced(error)
            return  # Its run is over.
        except SparkLostError:
            _log.error("%s", lost_message(self.query.name))
            self._end_run()
            return
        except UnknownStage as error:
            self._stop_if_wanted(removed_message(self.query.name, error))
        except (OldCheckpointError, FinalSourceError, QueryFailedError) as error:
            # The service was away at the start, a topic was made again, or a shard cannot join.
            self.running.fail(str(error))
        except Exception as error:  # noqa: BLE001  (whatever it is)
            # Without its supervisor, the query would go on unreported, and might end well.
            _log.exception("query %s: its supervisor has failed", self.query.name)
            with suppress(Py4JError, ConnectionError):
                self.running.fail(supervisor_failed_message(self.query.name, error))
        else:
            if not self._commits.are_reported:
                self._commits.count_unreported()
            if not self._has_reported_all:
                log_unreported(self.query.name, self.query.stages.names)
            self._log_if_unfinished()
            self._end_run()
            return
        if self.running.failure is not None:
            self._notify_step(failing=True)
            self._await_end()
            self._end_run()

    def _await_end(self) -> None:
        """Wait until Spark has ended the query, so that its error is known."""
        while self._shutdown_deadline_ms is None and not self.running.is_lost:
            # A bounded query's end reads from Spark, which may be lost.
            with suppress(Py4JError, ConnectionError):
                self._receive(_LONGEST_PAUSE_MS)

    def _follow(self) -> None:
        """Supervise the query to its end.

        Raises `StaleRun`, `UnknownStage`, `OldCheckpointError` or `FinalSourceError` if its stages are
        not, or no longer, its own, `QueryFailedError` if a topic was made again, or the service has no
        room for new shards, and `SparkLostError` if Spark does not answer.
        """
        pause_ms = _TICK_MS
        began_ms = self._clock.steady_ms()
        while not self._finished():
            try:
                self._receive(pause_ms)
                began_ms = self._clock.steady_ms()
                self._check_connection()
                self._look_for_batch()
                self._commits.promise_by_state()
                self._step()
            except (StaleRun, UnknownStage, OldCheckpointError, FinalSourceError, SparkLostError):
                raise
            except UnknownJob:
                # The service has a new ledger. Opening a run declares the job again.
                self._run = None
                self._complete.verify_soon()
            except LimitReached as error:
                # Without the shards, no epoch may be committed, however long the query would go on.
                raise QueryFailedError(limit_message(self.query.name, error)) from error
            except AggregatorError as error:
                self._storage.interrupt()
                self._log_error(error)
                self._notify_step(failing=True)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
            except (Py4JError, ConnectionError) as error:
                self._check_connection()
                self._storage.note(error)
                self._last_error = self._storage.latest
                self._notify_step(failing=True)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
            else:
                self._storage.clear()
                self._last_error = None
                self._sessions_are_due = self._sessions.is_due or (
                    self.query.open_sessions is not None and bool(self._commits.pending)
                )
                self._settled_epoch = self._commits.committed.epoch
                self._notify_step(failing=False)
                due_ms = (self._leases.due_ms, self._quiet.due_ms)
                pause_ms = _pause_ms(due_ms, began_ms, self._clock.steady_ms())
        if self.running.error is None:
            self._storage.check()

    def _check_connection(self) -> None:
        """Raise `SparkLostError` if Spark is lost: a step without a call to Spark would go on."""
        if self.running.is_lost:
            raise SparkLostError

    def _end_run(self) -> None:
        if self._run is not None:
            outcome, because = self._outcome()
            end_run(self.query, self._client, self._reporter(self._run), outcome, because)

    def _outcome(self) -> tuple[RunOutcome, str]:
        if not self.running.has_started:
            return "failed", self._abandoned or "the query was not started"
        error = self.running.error or self.running.failure
        if error is not None:
            return "failed", error.replace("\0", "")
        by_itself = self.running.has_ended_by_itself(self.query.trigger)
        return "finished" if self._finalisation.is_stopping or by_itself else "stopped", ""

    def _log_if_unfinished(self) -> None:
        """Log why stages of a query that has ended are unfinished, if that is unexpected.

        If the query failed, Spark's own error is the reason.
        """
        if not self.running.has_started or self.running.error is not None:
            return
        try:
            watermarks = self._client.watermarks(self.query.job)
        except AggregatorError:
            watermarks = {}
        log_if_unfinished(self.query, watermarks)

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
            _log.warning("query %s: %s; retrying", self.query.name, error)

    def _on_fenced(self, error: StaleRun) -> None:
        current = error.problem.get("run")
        if current is None:
            message = reset_message(self.query.job)
        elif self._run is not None and current < self._run:
            message = older_ledger_message(self.query.name, self._run, current)
        else:
            message = fenced_message(self.query.name, self.query.stages.names, error)
        self._stop_if_wanted(message)

    def _stop_if_wanted(self, message: str) -> None:
        if self.query.on_fenced == "stop":
            self.running.fail(message)
        else:
            _log.warning("%s", message)

    def _finished(self) -> bool:
        if self._shutdown_deadline_ms is None:
            return False
        done = self._has_reported_all and not self._finalisation.is_unfinished
        return done or self._clock.steady_ms() >= self._shutdown_deadline_ms

    @property
    def _has_reported_all(self) -> bool:
        is_due = self._complete.is_due(self._commits.committed.epoch) or self._sessions.is_due
        return self._commits.are_reported and not is_due

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
                self._add(event)
            case Signal.DRAINED:
                self._finalisation.is_drained = True
            case Signal.ENDED | Signal.STOP:
                if self.running.has_ended_by_itself(self.query.trigger):
                    self._read.note_end()
                try:
                    self._finalisation.check_drained(self._commits.committed.epoch)
                finally:
                    self._set_shutdown_deadline()

    def _add(self, batch: CommittedBatch) -> None:
        self._commits.add(batch)
        self._look_due_ms = self._clock.steady_ms() + _LOOK_MS

    def _look_for_batch(self) -> None:
        """Add the query's last batch if Spark's listener bus, whose queue may be full, has dropped it.

        A query without a control source has not another notification, and may not run another batch
        for long.
        """
        now_ms = self._clock.steady_ms()
        if self._commits.uncommitted is not None or now_ms < self._look_due_ms:
            return
        self._look_due_ms = now_ms + _LOOK_MS
        batch = self.running.batch_after(max(self._commits.committed.epoch, self._resumed_after))
        if batch is not None:
            self._add(batch)

    def _set_shutdown_deadline(self) -> None:
        """Set when to give up. A query that was ended is followed by another start, which makes good for
        its last reports. A bounded one that has read everything may not be, and the sessions of one that
        runs each night are read before the morning.
        """
        grace_ms = _SHUTDOWN_GRACE_MS
        if self._sessions.is_due:
            grace_ms = _READING_GRACE_MS
        if self._finalisation.is_unfinished and self.running.error is None:
            grace_ms = max(grace_ms, self.query.timing.finish_timeout_ms)
        if self._shutdown_deadline_ms is None:
            self._shutdown_deadline_ms = self._clock.steady_ms() + grace_ms

    def _step(self) -> None:
        if self._run is None:
            if not self.running.has_started:
                # Spark may still reject the query, and a run would fence the one that has the stages.
                return
            self._run = self._open_run(self.query.stages.names)
        run = self._run
        while True:
            try:
                self._step_of(run)
            except StaleRun as error:
                # Higher each time, and at most one for each attempt at the request that opened it.
                self._run = run = self._newer_own_run(run, error)
                _log.warning("%s", newer_run_message(self.query.name, run))
            else:
                return

    def _step_of(self, run: int) -> None:
        self._retired.begin_step()
        self._joined.rejoin(self._reporter(run))
        self._finalisation.find_joined_shards()
        is_due = self._commits.uncommitted is not None or self._finalisation.is_drained
        self._topics.check(now=is_due)
        if (batch := self._commits.uncommitted) is not None:
            self._join_shards(self._reporter(run), batch)
            # Before the commit, which would be one more proof that the run finds nothing in them.
            self._quiet.report_backlogs(self._reporter(run), batch)
            self._commits.commit(run)
            self._quiet.report_unread(self._reporter(run), batch)
        at_end = self._run_ends or self._shutdown_deadline_ms is not None
        if self._sessions.poll(at_end=at_end):
            self._commits.promise_by_sessions()
        committed, reporter = self._commits.committed, self._reporter(run)
        self._commits.pending.report(reporter)
        # In the step of the commit: `commit_epoch` returns once the last windows may come out.
        self._complete.report(reporter, self._commits.pending, committed.epoch)
        self._clock_promises.report(reporter, at_end=self._shutdown_deadline_ms is not None)
        self._in_flight.report(reporter, self._finalisation.not_final)
        ended = self._quiet.watch(
            reporter,
            committed,
            # A batch that has ended meanwhile is still in the inbox.
            polls=self._waits.because is None and self._inbox.empty(),
            drained=self._finalisation.is_drained,
        )
        self._leases.renew_soon(ended)
        if reporter.may_hold and not self._finalisation.is_drained:
            self._leases.keep(
                reporter,
                committed,
                oldest_ms=self._read.all_ms,
                waits=self._waits.because is not None,
                held=self._quiet.held,
            )
        if self.query.bounded and self.running.failure is None:
            self._finalisation.check_drained(committed.epoch)
            self._finalisation.finish(reporter, self._commits.pending, committed)
            if self._finalisation.obstacle is not None:
                self.running.fail(self._finalisation.obstacle)

    def _join_shards(self, reporter: DriverReporter, batch: CommittedBatch) -> None:
        """Let the shards join that are new in a batch, and partitions of topics that wait unread.

        A task's report lets its shard join, unless the report was dropped or rejected.
        """
        for stage in self.query.stages.dynamic:
            read = shards_with_rows(self._tallies, self.query.name, stage, batch.epoch)
            # Once drained, a partition that is added is not among what the query was to read.
            topics = (
                () if self._finalisation.is_drained else self.query.stages.topics.get(stage, ())
            )
            shards = {*read, *unread(batch.read, batch.latest, topics)}
            self._finalisation.add_joined(stage, self._joined.join(reporter, stage, shards))

    def _reporter(self, run: int) -> DriverReporter:
        return DriverReporter(
            client=self._client,
            job=self.query.job,
            query=self.query.name,
            ttl_ms=self.query.timing.ttl_ms,
            run=run,
            epoch=self._commits.committed.epoch,
            resumed_after=self._resumed_after,
            # Read once more: a query that does not stop in time still runs its tasks.
            has_ended=self._shutdown_deadline_ms is not None and self.running.has_ended,
            retired=self._retired.of,
        )
