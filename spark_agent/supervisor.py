"""The driver's part of reporting: one supervisor for each started query.

On a thread of its own, it commits each epoch to the service once Spark has committed the batch, in
order. It reports what the tasks could not, because the service was unavailable, or was killed with
reports that waited for their commit. That is safe: Spark has committed the batch, so the driver
knows what holds from then on. While nothing is left to read, it watches the shards that the service may
take for idle. Once a bounded query has drained
its input, it makes the sources final, and ends the query when all of its stages are final.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from spark_agent.client import (
    MAX_MS,
    AggregatorError,
    Client,
    InputAhead,
    Lease,
    LeaseConflict,
    LeaseLost,
    RangeReport,
    Rank,
    StageProgress,
    StaleEpoch,
    StaleRun,
    UnknownJob,
)
from spark_agent.clock import Clock
from spark_agent.control_source import END_MS
from spark_agent.diagnostics import log_missing_inputs, log_unfinished
from spark_agent.in_flight import StageInFlight
from spark_agent.metrics import count_rows
from spark_agent.operators import Promise
from spark_agent.plan import CommittedBatch
from spark_agent.spec import StageSpec
from spark_agent.tally import Count, Tallies, Tally, pop_tallies, shards_with_rows
from spark_agent.times import instant_text

_log: Final = logging.getLogger("spark_agent")

DRIVER_ATTEMPT: Final = 2**31 - 1
"""The attempt in the driver's claims. It outranks all tasks of its epoch, which have ended by then,
but not the next epoch's tasks, since the epoch is compared first."""

_LAST_EPOCH: Final = 2**63 - 1
_TICK_MS: Final = 200
_LONGEST_PAUSE_MS: Final = 5_000
_SHUTDOWN_GRACE_MS: Final = 2_000
_RENEWALS_PER_LEASE: Final = 3
"""How many times a lease that the driver keeps is renewed before it would run out."""
_LOOK_MS: Final = 2_000
"""How often a query that has nothing to read says so."""
_REPEAT_MS: Final = 20_000
"""How often the service is told anew what is in flight. It is soft state there, and may be lost."""
_WATCH_MS: Final = 1_500
"""The driver's lease on shards that it watches. It ends soon after a batch has begun to read."""

_SKETCHES_PER_REPORT: Final = 100
"""Each takes several kilobytes."""

_COUNT_MESSAGES: Final[Mapping[str, str]] = {
    Count.REPORTS_DROPPED: "reports were dropped by their tasks; the driver sends them instead",
    Count.LATE_ROWS: "rows are older than their source had promised: does its strategy fit?",
    Count.DROPPED_ROWS: "rows were dropped by Spark as late",
    Count.ROWS_BEFORE_1970: (
        "rows are dated before 1970, where Spark's watermark starts: its operators drop them"
    ),
    Count.FAR_FUTURE_ROWS: "rows are dated further ahead of the clock than the tolerance allows",
    Count.UNKNOWN_SHARD_ROWS: "rows belong to a shard that is not in the specification",
    Count.SPLIT_SHARDS: (
        "times a shard's rows were in several tasks of a batch: this source is not partitioned by "
        "shard, so leave out partitioned_by_shard=True"
    ),
}
_REREAD_MESSAGE: Final = (
    "rows are older than their source had promised: this query rereads input that the job has "
    "already covered, since its checkpoint is new or older than the job"
)


class Signal(Enum):
    """What a supervisor is notified of, besides committed batches."""

    DRAINED = auto()
    """The query has read everything its sources had."""
    ENDED = auto()
    """The query has terminated."""
    STOP = auto()
    """The pipeline is being stopped."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a supervisor looks after: a started query, and the stages that it executes."""

    job: str
    query: str
    """The name of this start of the query, which its tasks use too."""
    sources: Sequence[StageSpec]
    keyed: Sequence[StageSpec]
    promises: Mapping[str, Promise]
    """How each keyed stage's promise follows from Spark's watermark."""
    bounded: bool
    ttl_ms: int
    stops_when_fenced: bool = True
    stops_when_rereading: bool = True
    """Whether it fails if its checkpoint is behind the job."""
    reads_all: bool = True
    """Whether each batch reads all available data: no source is rate limited."""
    looks_often: bool = True
    """Whether it looks for new data all the time, so that what its last trigger found is of now."""
    may_idle: Collection[str] = ()
    """The keyed stages below a source that may be idle."""
    inputs: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    """By keyed stage: every stage that its input watermark depends on."""

    @property
    def stages(self) -> list[str]:
        """The names of all stages."""
        return [stage.name for stage in (*self.sources, *self.keyed)]


@dataclass(frozen=True, slots=True)
class QueryHandle:
    """How a supervisor controls and inspects its query."""

    stop: Callable[[], None]
    """Stop it, once its stages are final."""
    fail: Callable[[str], None]
    """Make it fail with this error."""
    has_no_new_data: Callable[[], bool]
    """Whether its latest trigger found no new data in any source."""
    has_just_found_nothing: Callable[[], bool]
    """Whether no trigger runs now, and the latest one found no new data."""
    failed: Callable[[], bool]
    """Whether it has ended with an error."""
    has_control_sources: bool = True
    """Whether it has control sources; if so, the feed detects when its input is drained."""


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
        self._clock = clock
        self._inbox: queue.SimpleQueue[CommittedBatch | Signal] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_thread, name=f"tidegauge-{assignment.query}", daemon=True
        )
        self._step_done = threading.Condition()
        self._failing = False
        self._uncommitted: CommittedBatch | None = None
        self._committed_epoch = -1
        self._latest_epoch = -1
        self._committed_input_ms: int | None = None
        self._emitted_all: Mapping[str, int] = {}
        self._pending_reports: dict[str, dict[str, RangeReport]] = {}
        self._pending_inputs: dict[str, StageProgress] = {}
        self._drained = False
        self._not_final: dict[str, set[str]] = {
            stage.name: set(stage.shards) for stage in assignment.sources
        }
        self._stop_requested = False
        self._rereads = False
        self._last_error_type: type[AggregatorError] | None = None
        self._shutdown_deadline_ms: int | None = None
        self._watched = [stage.name for stage in assignment.sources if stage.has_idle_policy]
        self._told_backlogs = set(self._watched)  # perhaps by the driver before this one
        self._in_flight = in_flight
        self._repeat_in_flight_ms: int | None = None
        self._watch_leases: dict[str, Lease] = {}
        self._progressed: Mapping[str, StageProgress] = {}
        self._look_again_ms: int | None = None
        self._looked_ms: int | None = None
        self._watch_again_ms: int | None = None
        self._waits_because: str | None = None
        self._renew_leases_ms: int | None = None
        self.counts: Counter[str] = Counter()

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

    def wait_because(self, reason: str | None) -> None:
        """Keep the sources' leases while the query waits for this reason; None: it does not wait.

        A paused shard is not a dead one. Its tasks' leases would run out while no batch runs.
        """
        self._waits_because = reason

    @property
    def waits_because(self) -> str | None:
        """Why the query's next batch has to wait; None: it does not."""
        return self._waits_because if self.alive else None

    def notify(self, event: CommittedBatch | Signal) -> None:
        """Queue an event. Never blocks: it is called from Spark's listener bus."""
        self._inbox.put(event)

    def commit_epoch(self, batch: CommittedBatch, timeout_ms: int) -> bool:
        """Commit a batch's epoch and wait for it; return whether it was committed in time.

        Returns at once while the service does not answer: the batches must go on.
        """
        self.notify(batch)
        return self._wait(lambda: self._committed_epoch >= batch.epoch, timeout_ms)

    def finalise_sources(self, timeout_ms: int) -> bool:
        """Make the sources of a drained query final and wait; return whether they became so in time."""
        self.notify(Signal.DRAINED)
        return self._wait(
            lambda: not any(self._not_final.values()), timeout_ms, even_if_failing=True
        )

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
        """Whether it still supervises its query."""
        return self._thread.is_alive()

    @property
    def stages(self) -> list[str]:
        """The stages that its query executes."""
        return self._assignment.stages

    @property
    def sources(self) -> Sequence[StageSpec]:
        """The source stages that its query executes."""
        return self._assignment.sources

    def _run_thread(self) -> None:
        try:
            if self._follow():
                self._log_if_unfinished()
                self._release_leases()
        finally:
            for stage in self._assignment.stages:
                pop_tallies(self._tallies, self._assignment.query, stage, _LAST_EPOCH)
            self._notify_step(failing=True)

    def _follow(self) -> bool:
        """Supervise the query to its end; return False if another run took its stages over."""
        pause_ms = _TICK_MS
        while not self._finished():
            self._receive(pause_ms)
            try:
                self._step()
            except StaleRun as error:
                self._on_fenced(error)
                return False
            except UnknownJob:
                # The service has a new ledger. Opening a run declares the job again.
                self._run = None
            except AggregatorError as error:
                self._log_once(error)
                self._notify_step(failing=True)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
            else:
                self._last_error_type = None
                self._notify_step(failing=False)
                pause_ms = _TICK_MS
        return True

    def _release_leases(self) -> None:
        """Give back the leases of a query that has ended well, so that nobody takes it for dead.

        The tasks hold them, whose tokens are not known here. The driver's claim takes them over.
        """
        if self._run is None or self._query is None or self._query.failed():
            return
        try:
            leases = [self._claim(self._run, stage, None) for stage in self._assignment.stages]
            self._client.release(
                self._assignment.job, [each for each in leases if each is not None]
            )
        except AggregatorError as error:
            _log.debug("query %s: leases are not given back: %s", self._assignment.query, error)

    def _log_if_unfinished(self) -> None:
        """Log why stages of a query that has ended are unfinished, if that is unexpected.

        If the query failed, Spark's own error says why.
        """
        if self._query is not None and self._query.failed():
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

    def _log_once(self, error: AggregatorError) -> None:
        """Log an error once, not on every retry."""
        if type(error) is not self._last_error_type:
            self._last_error_type = type(error)
            _log.warning("query %s: %s; retrying", self._assignment.query, error)

    def _on_fenced(self, error: StaleRun) -> None:
        stages = ", ".join(self._assignment.stages)
        holder = error.problem.get("holder")
        by = f" by {holder}" if holder else ""
        message = (
            f"tidegauge: query {self._assignment.query} is fenced: its stages ({stages}) were taken "
            f"over{by}. {error.problem.get('detail', error)}. The job would not know "
            f"of anything it wrote from now on. If two drivers run this pipeline, stop one of "
            f"them; with on_fenced='continue' the query would go on regardless"
        )
        if self._assignment.stops_when_fenced:
            self.fail_query(message)
        else:
            _log.warning("%s", message)

    def _finished(self) -> bool:
        if self._shutdown_deadline_ms is None:
            return False
        pending = self._pending_reports or self._pending_inputs
        ending = self._drained and any(self._not_final.values())
        done = self._uncommitted is None and not pending and not ending
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
                self._drained = True
            case Signal.ENDED | Signal.STOP:
                self._check_drained()
                self._shutdown_deadline_ms = self._clock.steady_ms() + _SHUTDOWN_GRACE_MS

    def _on_batch(self, batch: CommittedBatch) -> None:
        """Handle a committed batch once: both the feed and Spark's listener bus report it."""
        if batch.epoch <= self._latest_epoch:
            return
        self._latest_epoch = batch.epoch
        # Only the latest matters: watermarks rise from epoch to epoch.
        self._uncommitted = batch
        for stage in self._assignment.keyed[:1]:
            self._count(stage.name, {Count.DROPPED_ROWS: batch.dropped_rows})

    def _check_drained(self) -> None:
        """Detect whether a query without control sources has drained its input."""
        query = self._query
        if (
            self._assignment.bounded
            and not self._drained
            and query is not None
            and not query.has_control_sources
        ):
            self._drained = self._committed_epoch >= 0 and query.has_no_new_data()

    def _step(self) -> None:
        if self._run is None:
            self._run = self._open_run(self._assignment.stages)
        if self._uncommitted is not None:
            # Before the commit, which would be one more proof that the run finds nothing in them.
            self._report_backlogs(self._run, self._uncommitted)
            self._commit(self._run, self._uncommitted)
            self._uncommitted = None
        self._report_pending(self._run)
        self._report_in_flight(self._run)
        self._watch(self._run)
        self._keep_leases(self._run)
        if self._assignment.bounded and self.failure is None:
            self._check_drained()
            self._finish_bounded(self._run)

    def _commit(self, run: int, batch: CommittedBatch) -> None:
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
        except StaleEpoch as error:
            self._warn_of_old_checkpoint(batch, error)
        except InputAhead as error:
            # The checkpoint is newer than the job. Nothing of this epoch was applied: it is pending.
            _log.info("query %s, epoch %d: %s", self._assignment.query, batch.epoch, error)
        self._committed_epoch = batch.epoch
        reached = {
            stage: each.input_ms for stage, each in promised.items() if each.input_ms is not None
        }
        self._committed_input_ms = max(reached.values(), default=None)
        self._progressed = promised
        self._emitted_all = {
            stage: input_ms
            for stage, input_ms in reached.items()
            if batch.keeps_nothing and self._assignment.promises[stage].is_of_windows
        }
        self._reconcile(batch, promised, applied)

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
        if self._rereads:
            return
        self._rereads = True
        latest = error.problem.get("last_epoch", "a later one")
        message = (
            f"tidegauge: query {self._assignment.query} ran batch {batch.epoch}, but the job already "
            f"has batches of its stages up to {latest}: the query's checkpoint is new, was lost, or is "
            f"an older copy. Rows that it rereads are late, and windows that were closed come out "
            f"again. Either restore the old checkpoint, or call Pipeline.reset() and start over with an "
            f"empty output and a new checkpoint"
        )
        if not self._assignment.stops_when_rereading:
            _log.warning("%s", message)
        else:
            self.fail_query(
                f"{message}. With on_lost_checkpoint='continue' it would go on regardless"
            )

    def _reconcile(
        self,
        batch: CommittedBatch,
        promised: Mapping[str, StageProgress],
        applied: Mapping[str, int],
    ) -> None:
        """Compare what was applied with what the batch had to report; keep the rest as pending."""
        for stage in self._assignment.sources:
            tallies = pop_tallies(self._tallies, self._assignment.query, stage.name, batch.epoch)
            self._record_tallies(stage.name, tallies)
            newest: dict[str, RangeReport] = {}
            for tally in tallies:
                _add(newest, tally.promises)
                self._add_in_flight(stage, tally)
            # If several epochs were committed at once, only the last one's reports were applied.
            if applied.get(stage.name, 0) < len(newest) or len(tallies) > 1:
                # Which of them were applied is not known, so some rows are counted twice. To leave
                # out their count would be worse: the shard would look as if it had none.
                _add(self._pending_reports.setdefault(stage.name, {}), newest)
        for stage in self._assignment.keyed:
            tallies = pop_tallies(self._tallies, self._assignment.query, stage.name, batch.epoch)
            self._record_tallies(stage.name, tallies)
            if stage.name not in promised or applied.get(stage.name, 0) >= len(stage.ranges):
                self._pending_inputs.pop(stage.name, None)
            else:
                self._pending_inputs[stage.name] = promised[stage.name]

    def _record_tallies(self, stage: str, tallies: Sequence[Tally]) -> None:
        for tally in tallies:
            split = sum(len(partitions) > 1 for partitions in tally.partitions.values())
            self._count(stage, {**tally.total, Count.SPLIT_SHARDS: split})
            if tally.early is not None and not self._rereads:
                _log.warning(
                    "stage %s: %d rows left it older than it had promised: its published watermark "
                    "was %s, the oldest row is dated %s. To readers they are late. Stamp rows with "
                    "the end of their window, or declare how far behind the watermark they may be: "
                    "report(…, delay=…)",
                    stage,
                    tally.total.get(Count.EARLY_ROWS, 0),
                    instant_text(tally.early.watermark_ms),
                    instant_text(tally.early.row_ms),
                )

    def _count(self, stage: str, counts: Mapping[str, int]) -> None:
        for what, count in counts.items():
            if not count:
                continue
            before = self.counts[what]
            self.counts[what] += count
            count_rows(self._assignment.job, stage, what, count)
            # Logged at the first, then each time the count gains a digit: it may be every row.
            if what in _COUNT_MESSAGES and (
                before == 0 or len(str(before + count)) > len(str(before))
            ):
                again = what == Count.LATE_ROWS and self._rereads
                meaning = _REREAD_MESSAGE if again else _COUNT_MESSAGES[what]
                _log.warning("stage %s: %d %s", stage, before + count, meaning)

    def _report_pending(self, run: int) -> None:
        """Report what is pending. It still holds: Spark has committed the epochs it belongs to.

        A range that a task of the next batch already holds is denied and stays pending: that batch's
        commit covers it, or the driver's next claim outranks that task's.
        """
        for stage, reports in list(self._pending_reports.items()):
            for shard in self._report_shards(run, stage, reports):
                del reports[shard]
            if not reports:
                del self._pending_reports[stage]
        for stage, progress in list(self._pending_inputs.items()):
            lease = self._claim(run, stage, None)
            if lease is None:
                continue
            if self._report_progress(stage, lease, progress) and not lease.denied:
                del self._pending_inputs[stage]

    def _report_shards(
        self,
        run: int,
        stage: str,
        reports: Mapping[str, RangeReport],
        *,
        ttl_ms: int | None = None,
    ) -> list[str]:
        """Report for shards of a source; return those that nobody else held."""
        lease = self._claim(run, stage, sorted(reports), ttl_ms=ttl_ms) if reports else None
        if lease is None:
            return []
        granted = [shard for shard in lease.granted if shard in reports]
        if granted:
            some = {shard: reports[shard] for shard in granted}
            try:
                self._client.report(self._assignment.job, stage, lease, some)
            except LeaseLost:  # to the next batch's tasks, which have begun meanwhile
                return []
        return granted

    def _report_progress(
        self, stage: str, lease: Lease, progress: StageProgress, *, idle: bool = False
    ) -> bool:
        report = RangeReport(idle=idle, holds=progress.holds)
        reports = dict.fromkeys(lease.granted, report)
        job = self._assignment.job
        try:
            self._client.report(job, stage, lease, reports, input_ms=progress.input_ms)
        except (InputAhead, LeaseLost):
            return False
        return True

    def _claim(
        self, run: int, stage: str, ranges: Sequence[str] | None, *, ttl_ms: int | None = None
    ) -> Lease | None:
        try:
            return self._client.claim(
                self._assignment.job,
                stage,
                ranges,
                holder=f"{self._assignment.query}.driver",
                ttl_ms=ttl_ms or self._assignment.ttl_ms,
                rank=Rank(run, max(self._committed_epoch, 0), DRIVER_ATTEMPT),
            )
        except LeaseConflict:
            return None

    def _report_backlogs(self, run: int, batch: CommittedBatch) -> None:
        """Report that shards without rows in a batch may have some that it has not read.

        Either their source is rate limited, or nobody knows how it reads. How many they are, nobody
        knows either. A shard that is denied is being read by a task.
        """
        if self._assignment.reads_all or (batch.read_nothing and self._assignment.looks_often):
            return
        query = self._assignment.query
        for stage in self._watched:
            seen = shards_with_rows(self._tallies, query, stage, batch.epoch)
            unread = {shard: RangeReport(backlog=1) for shard in self._not_final[stage] - seen}
            self._told_backlogs.add(stage)
            self._report_shards(run, stage, unread, ttl_ms=_WATCH_MS)

    def _add_in_flight(self, stage: StageSpec, tally: Tally) -> None:
        here = self._in_flight.get(stage.name)
        if here is None:
            return
        for shard, packed in tally.in_flight.items():
            promise_ms = tally.promises[shard].watermark_ms
            if promise_ms is not None:
                here.add(shard, packed, promise_ms)
        if stage.has_idle_policy:
            # The service takes no shard for idle that has something in flight.
            here.forget_all_but(tally.promises)

    def _report_in_flight(self, run: int) -> None:
        """Report what shards have in flight after the last epoch.

        The tasks cannot: they do not know of the batches before. A shard that a task of the next batch
        already holds is denied, and is reported after that.
        """
        now_ms = self._clock.steady_ms()
        is_due = self._repeat_in_flight_ms is None or now_ms >= self._repeat_in_flight_ms
        if is_due:
            self._repeat_in_flight_ms = now_ms + _REPEAT_MS
        for stage, in_flight in self._in_flight.items():
            if is_due:
                in_flight.repeat()
            ttl_ms = _WATCH_MS if stage in self._watched else None
            # Without rows: those were reported by the tasks.
            reports = {
                shard: RangeReport(records=0, pending=each)
                for shard, each in in_flight.unreported(_SKETCHES_PER_REPORT).items()
            }
            in_flight.told(self._report_shards(run, stage, reports, ttl_ms=ttl_ms))

    def _watch(self, run: int) -> None:
        """Tell the service that the query looks and finds nothing, while that is so."""
        now_ms = self._clock.steady_ms()
        if not self._has_nothing_to_read(now_ms):
            self._end_watch()
            self._look_again_ms = None
            return
        if self._watch_again_ms is None or now_ms >= self._watch_again_ms:
            self._hold_watched(run)
            self._watch_again_ms = now_ms + _WATCH_MS // _RENEWALS_PER_LEASE
        self._report_looks(run, now_ms)

    def _hold_watched(self, run: int) -> None:
        """Hold the leases of what the service may take for idle.

        The lease proves that somebody looks. When a batch finds something to read, nobody renews it.
        """
        self._watch_leases.clear()
        for stage in self._watched:
            if stage in self._in_flight:
                self._in_flight[stage].forget_all_but(())
            shards = sorted(self._not_final[stage])
            if stage in self._told_backlogs:
                nothing = {shard: RangeReport(records=0, backlog=0) for shard in shards}
                if len(self._report_shards(run, stage, nothing, ttl_ms=_WATCH_MS)) == len(shards):
                    self._told_backlogs.discard(stage)
            elif shards and (lease := self._claim(run, stage, shards, ttl_ms=_WATCH_MS)):
                self._watch_leases[stage] = lease
        for stage, input_ms in self._emitted_all.items():
            if stage in self._assignment.may_idle and input_ms != MAX_MS:
                self._report_emitted(run, stage, input_ms)

    def _report_looks(self, run: int, now_ms: int) -> None:
        """Report every now and then that nothing is left to do, while that is so.

        Else the processing watermark would stand at the last batch, as if work were waiting since then.
        """
        if self._look_again_ms is None:
            self._look_again_ms = now_ms + _LOOK_MS
        if now_ms < self._look_again_ms or self._committed_epoch < 0 or self._drained:
            return
        self._look_again_ms = now_ms + _LOOK_MS
        job, nothing = self._assignment.job, RangeReport(records=0, backlog=0)
        for stage, shards in self._not_final.items():
            if stage not in self._watched:
                self._report_shards(run, stage, dict.fromkeys(shards, nothing))
            elif stage in self._watch_leases:
                lease = self._watch_leases[stage]
                with suppress(LeaseLost):  # to the next batch's tasks
                    self._client.report(job, stage, lease, dict.fromkeys(lease.granted, nothing))
        for stage, progress in self._progressed.items():
            # A report that does not say it would end a range's idleness, which is reported on its own.
            if stage not in self._emitted_all or stage not in self._assignment.may_idle:
                lease = self._claim(run, stage, None)
                if lease is not None:
                    self._report_progress(stage, lease, progress)

    def _end_watch(self) -> None:
        """Give the leases back: they neither prove anything now, nor shall they look like lost ones."""
        self._watch_again_ms = None
        leases, self._watch_leases = self._watch_leases, {}
        if leases:
            self._client.release(self._assignment.job, list(leases.values()))

    def _has_nothing_to_read(self, now_ms: int) -> bool:
        """Return whether the query has looked just now, and found nothing.

        What its last trigger found is known once that has ended. One that hangs, since its storage does
        not answer, proves nothing. A batch that has ended meanwhile is still in the inbox.
        """
        if not self._assignment.looks_often:
            return False
        if self._query is None or self._waits_because is not None:
            return False
        if self._query.has_just_found_nothing():
            self._looked_ms = now_ms
        found_nothing = self._looked_ms is not None and now_ms - self._looked_ms <= _WATCH_MS
        has_new = not self._query.has_no_new_data()
        return found_nothing and not has_new and self._inbox.empty() and self._uncommitted is None

    def _report_emitted(self, run: int, stage: str, input_ms: int) -> None:
        """Report a keyed stage's ranges as idle: they keep nothing that has not come out."""
        lease = self._claim(run, stage, None, ttl_ms=_WATCH_MS)
        if lease is not None:
            self._report_progress(stage, lease, StageProgress(input_ms), idle=True)

    def _keep_leases(self, run: int) -> None:
        """Hold the leases of what this query executes while no task does: nobody is gone.

        A query that has nothing to read, or waits for its next trigger or its throttle, runs no task
        for longer than a lease lasts. The next batch's tasks outrank this claim. Before the first
        batch is committed there is none, since it would outrank that batch's own tasks.
        """
        now_ms = self._clock.steady_ms()
        if self._committed_epoch < 0 or self._drained:
            return
        if self._renew_leases_ms is None:
            self._renew_leases_ms = now_ms + self._assignment.ttl_ms // _RENEWALS_PER_LEASE
        elif now_ms >= self._renew_leases_ms:
            for stage in self._assignment.stages:
                # For one that may be idle, the lease would prove that somebody looks.
                if stage not in self._watched:
                    self._claim(run, stage, None)
            self._renew_leases_ms = now_ms + self._assignment.ttl_ms // _RENEWALS_PER_LEASE

    def _finish_bounded(self, run: int) -> None:
        """Make a drained query's sources final; once all its stages are final, stop the query."""
        if self._assignment.sources and not self._drained:
            return
        for stage, shards in self._not_final.items():
            self._report_final(run, stage, shards)
        if any(self._not_final.values()) or self._stop_requested or self._query is None:
            return
        if self._assignment.keyed and self._committed_input_ms != MAX_MS:
            return
        watermarks = self._client.watermarks(self._assignment.job)
        if all(watermarks[stage].final for stage in self._assignment.stages):
            self._stop_requested = True
            self._query.stop()

    def _report_final(self, run: int, stage: str, shards: set[str]) -> None:
        """Report a source's shards as final. Those that are denied are retried later.

        This is safe even if the last epoch is not committed yet: a source promises only about rows
        that it has still to emit. The stage that reads it accounts for those already emitted.
        """
        final = self._report_shards(
            run, stage, {shard: RangeReport(final=True) for shard in shards}
        )
        shards.difference_update(final)
        for shard in final:
            self._pending_reports.get(stage, {}).pop(shard, None)


def _add(reports: dict[str, RangeReport], later: Mapping[str, RangeReport]) -> None:
    for shard, report in later.items():
        reports[shard] = reports[shard] + report if shard in reports else report
