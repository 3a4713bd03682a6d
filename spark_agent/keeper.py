"""The driver's part: one keeper for each started query.

It commits an epoch once Spark has committed the batch, in order, on a thread of its own. It makes
good for what the tasks could not report: the service was away, or was killed with reports that
waited for their commit. Spark has done the batch, so the driver itself may say what is true from
then on. And when a bounded query's input is drained, it makes the sources final and ends the
query once its stages are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from spark_agent.client import (
    MAX_MS,
    AggregatorError,
    Client,
    InputAhead,
    Lease,
    LeaseConflict,
    RangeReport,
    Rank,
    StaleEpoch,
    StaleRun,
    UnknownJob,
)
from spark_agent.clock import Clock
from spark_agent.spec import StageSpec
from spark_agent.tally import Count, Tallies, Tally, take

_log: Final = logging.getLogger("spark_agent")

DRIVER_ATTEMPT: Final = 2**31 - 1
"""The driver's attempt in a claim: above those of all tasks of its epoch, which are done by then.
It is below those of the next epoch's tasks, since the epoch decides first."""

_LAST_EPOCH: Final = 2**63 - 1
_TICK_MS: Final = 200
_LONGEST_PAUSE_MS: Final = 5_000
_FAREWELL_MS: Final = 2_000

_MEANING: Final[Mapping[str, str]] = {
    Count.REPORTS_DROPPED: "reports were dropped by their tasks; the driver makes good for them",
    Count.LATE_ROWS: "rows are older than what their source had promised: does its strategy fit?",
    Count.FAR_FUTURE_ROWS: "rows are dated further ahead of the clock than tolerated",
    Count.UNKNOWN_SHARD_ROWS: "rows are of a shard that the specification does not have",
}


@dataclass(frozen=True, slots=True)
class Progressed:
    """Spark has committed a batch, which ran with this watermark (ms); None: with none."""

    epoch: int
    watermark_ms: int | None


class Signal(Enum):
    """What else a keeper is told."""

    DRAINED = auto()
    """The query has read all that its sources had."""
    ENDED = auto()
    """The query has terminated."""
    STOP = auto()
    """The pipeline is being stopped."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a keeper keeps: a started query, and the stages that it executes."""

    job: str
    query: str
    """This start of the query, by the name that its tasks know it by."""
    sources: Sequence[StageSpec]
    keyed: Sequence[StageSpec]
    bounded: bool
    ttl_ms: int

    @property
    def stages(self) -> list[str]:
        """The names of all its stages."""
        return [stage.name for stage in (*self.sources, *self.keyed)]


class Keeper:
    """Follows one query until it ends. Only its own thread touches its state; `tell` is safe."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        client: Client,
        run: int | None,
        open_run: Callable[[Sequence[str]], int],
        tallies: Tallies,
        on_final: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._assignment = assignment
        self._client = client
        self._run = run
        self._open_run = open_run
        self._tallies = tallies
        self._on_final = on_final
        self._clock = clock
        self._inbox: queue.SimpleQueue[Progressed | Signal] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_thread, name=f"tidegauge-{assignment.query}", daemon=True
        )
        self._uncommitted: Progressed | None = None
        self._epoch = -1
        self._committed_ms: int | None = None
        self._owed_promises: dict[str, dict[str, int]] = {}
        self._owed_inputs: dict[str, int] = {}
        self._drained = False
        self._not_final: dict[str, set[str]] = {
            stage.name: set(stage.shards) for stage in assignment.sources
        }
        self._told_final = False
        self._last_complaint: type[AggregatorError] | None = None
        self._farewell_by_ms: int | None = None
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell(self, event: Progressed | Signal) -> None:
        """Pass an event on. Never blocks: it is called from Spark's listener bus."""
        self._inbox.put(event)

    def join(self, timeout_ms: int) -> None:
        """Wait until it is done."""
        self._thread.join(timeout_ms / 1_000)

    @property
    def alive(self) -> bool:
        """Whether it still follows its query."""
        return self._thread.is_alive()

    def _run_thread(self) -> None:
        try:
            self._keep()
        finally:
            for stage in self._assignment.stages:
                take(self._tallies, self._assignment.query, stage, _LAST_EPOCH)

    def _keep(self) -> None:
        pause_ms = _TICK_MS
        while not self._finished():
            self._listen(pause_ms)
            try:
                self._step()
            except StaleRun as error:
                _log.warning(
                    "query %s is fenced: another run has taken over its stages (%s)",
                    self._assignment.query,
                    error,
                )
                return
            except UnknownJob:
                # A service with a new ledger: what it does not know, the driver still does.
                self._run = None
            except AggregatorError as error:
                self._complain(error)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
            else:
                self._last_complaint = None
                pause_ms = _TICK_MS

    def _complain(self, error: AggregatorError) -> None:
        """Log what goes wrong once, not at each try."""
        if type(error) is not self._last_complaint:
            self._last_complaint = type(error)
            _log.warning("query %s: %s; trying again", self._assignment.query, error)

    def _finished(self) -> bool:
        if self._farewell_by_ms is None:
            return False
        done = self._uncommitted is None and not self._owed_promises and not self._owed_inputs
        return done or self._clock.steady_ms() >= self._farewell_by_ms

    def _listen(self, timeout_ms: int) -> None:
        """Take in all events that are there; wait for the first."""
        try:
            self._take_in(self._inbox.get(timeout=timeout_ms / 1_000))
            while True:
                self._take_in(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _take_in(self, event: Progressed | Signal) -> None:
        match event:
            case Progressed():
                # The newest says it all: watermarks rise from epoch to epoch.
                self._uncommitted = event
            case Signal.DRAINED:
                self._drained = True
            case Signal.ENDED | Signal.STOP:
                self._farewell_by_ms = self._clock.steady_ms() + _FAREWELL_MS

    def _step(self) -> None:
        if self._run is None:
            self._run = self._open_run(self._assignment.stages)
        if self._uncommitted is not None:
            self._commit(self._run, self._uncommitted)
            self._uncommitted = None
        self._pay(self._run)
        if self._assignment.bounded:
            self._end(self._run)

    def _commit(self, run: int, done: Progressed) -> None:
        stages: dict[str, int | None] = {stage.name: None for stage in self._assignment.sources}
        if done.watermark_ms is not None:
            stages |= {stage.name: done.watermark_ms for stage in self._assignment.keyed}
        applied: Mapping[str, int] = {}
        try:
            if stages:  # else: a keyed stage alone, without a watermark: it has nothing to promise
                applied = self._client.commit(self._assignment.job, run, done.epoch, stages)
        except (StaleEpoch, InputAhead) as error:
            # Stale: the checkpoint is older than what was committed of the job, or another one.
            # Ahead: the checkpoint is newer than the job. Either way nothing of this epoch was
            # applied, and all of it is owed.
            _log.info("query %s, epoch %d: %s", self._assignment.query, done.epoch, error)
        self._epoch = done.epoch
        self._committed_ms = done.watermark_ms
        self._book(done, applied)

    def _book(self, done: Progressed, applied: Mapping[str, int]) -> None:
        """Compare what was applied with what the batch had to say, and note what is owed."""
        for stage in self._assignment.sources:
            said = take(self._tallies, self._assignment.query, stage.name, done.epoch)
            self._count(stage.name, said)
            newest: dict[str, int] = {}
            for tally in said:
                for shard, promise in tally.promises.items():
                    newest[shard] = max(promise, newest.get(shard, promise))
            # With more than one epoch at once, only the last one's reports were committed.
            if applied.get(stage.name, 0) < len(newest) or len(said) > 1:
                owed = self._owed_promises.setdefault(stage.name, {})
                owed |= {s: max(p, owed.get(s, p)) for s, p in newest.items()}
        for stage in self._assignment.keyed:
            said = take(self._tallies, self._assignment.query, stage.name, done.epoch)
            self._count(stage.name, said)
            if done.watermark_ms is None or applied.get(stage.name, 0) >= len(stage.ranges):
                self._owed_inputs.pop(stage.name, None)
            else:
                self._owed_inputs[stage.name] = done.watermark_ms

    def _count(self, stage: str, said: Sequence[Tally]) -> None:
        for tally in said:
            for what, count in tally.counts.items():
                before = self.counts[what]
                self.counts[what] += count
                # Said at the first, then each time there is a digit more: it may be every row.
                if len(str(before + count)) > len(str(before)) or (before == 0 < count):
                    total = self.counts[what]
                    _log.warning("stage %s: %d %s", stage, total, _MEANING.get(what, what))

    def _pay(self, run: int) -> None:
        """Report what is owed. True as it stands: Spark has committed every epoch it is of.

        A range that a task of the next batch holds already is denied, and remains owed: that
        batch's commit pays it, or else is followed by a claim that outranks that task's.
        """
        for stage, promises in list(self._owed_promises.items()):
            lease = self._claim(run, stage, list(promises))
            granted = [] if lease is None else [s for s in lease.granted if s in promises]
            if lease is not None and granted:
                reports = {shard: RangeReport(promises[shard]) for shard in granted}
                self._client.report(self._assignment.job, stage, lease.token, reports)
            for shard in granted:
                del promises[shard]
            if not promises:
                del self._owed_promises[stage]
        for stage, input_ms in list(self._owed_inputs.items()):
            lease = self._claim(run, stage, None)
            if lease is None:
                continue
            if self._report_input(stage, lease, input_ms) and not lease.denied:
                del self._owed_inputs[stage]

    def _report_input(self, stage: str, lease: Lease, input_ms: int) -> bool:
        reports = {name: RangeReport() for name in lease.granted}
        try:
            self._client.report(
                self._assignment.job, stage, lease.token, reports, input_ms=input_ms
            )
        except InputAhead:
            return False
        return True

    def _claim(self, run: int, stage: str, ranges: Sequence[str] | None) -> Lease | None:
        try:
            return self._client.claim(
                self._assignment.job,
                stage,
                ranges,
                holder=f"{self._assignment.query}.driver",
                ttl_ms=self._assignment.ttl_ms,
                rank=Rank(run, max(self._epoch, 0), DRIVER_ATTEMPT),
            )
        except LeaseConflict:
            return None

    def _end(self, run: int) -> None:
        """End a bounded query: once drained, its sources; once all its stages are final, itself."""
        if self._assignment.sources and not self._drained:
            return
        for stage, shards in self._not_final.items():
            self._finalise(run, stage, shards)
        if any(self._not_final.values()) or self._told_final:
            return
        if self._assignment.keyed and self._committed_ms != MAX_MS:
            return
        watermarks = self._client.watermarks(self._assignment.job)
        if all(watermarks[stage].final for stage in self._assignment.stages):
            self._told_final = True
            self._on_final()

    def _finalise(self, run: int, stage: str, shards: set[str]) -> None:
        """Say of a source's shards that nothing more will come. Denied ones are left for later.

        Safe although the last epoch may not be committed yet: a source's promise speaks of what it
        will still emit. What it has emitted, the stage that reads it answers for.
        """
        lease = self._claim(run, stage, sorted(shards)) if shards else None
        if lease is None:
            return
        reports = {shard: RangeReport(final=True) for shard in lease.granted}
        self._client.report(self._assignment.job, stage, lease.token, reports)
        shards.difference_update(lease.granted)
        self._owed_promises.pop(stage, None)
