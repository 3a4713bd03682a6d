"""The driver's part: one keeper for each started query.

It commits an epoch once Spark has committed the batch, in order, on a thread of its own. It makes
good for what the tasks could not report: the service was away, or was killed with reports that
waited for their commit. Spark has done the batch, so the driver itself may say what is true from
then on. It says of quiet shards that they are idle. And when a bounded query's input is drained, it
makes the sources final and ends the query once its stages are.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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
    RangeReport,
    Rank,
    StaleEpoch,
    StaleRun,
    UnknownJob,
)
from spark_agent.clock import Clock
from spark_agent.control_source import END_MS
from spark_agent.idle import QuietShards
from spark_agent.metrics import count_rows
from spark_agent.operators import Promise
from spark_agent.plan import Progressed
from spark_agent.spec import StageSpec
from spark_agent.tally import Count, Tallies, Tally, take
from spark_agent.times import instant_text
from spark_agent.waiting import tell_of_missing_inputs, tell_of_unfinished

_log: Final = logging.getLogger("spark_agent")

DRIVER_ATTEMPT: Final = 2**31 - 1
"""The driver's attempt in a claim: above those of all tasks of its epoch, which are done by then.
It is below those of the next epoch's tasks, since the epoch decides first."""

_LAST_EPOCH: Final = 2**63 - 1
_TICK_MS: Final = 200
_LONGEST_PAUSE_MS: Final = 5_000
_FAREWELL_MS: Final = 2_000
_RENEWALS: Final = 3
"""Leases of idle shards are renewed so many times in their length."""

_MEANING: Final[Mapping[str, str]] = {
    Count.REPORTS_DROPPED: "reports were dropped by their tasks; the driver makes good for them",
    Count.LATE_ROWS: "rows are older than what their source had promised: does its strategy fit?",
    Count.DROPPED_ROWS: "rows were dropped by Spark as late",
    Count.ROWS_BEFORE_1970: (
        "rows are dated before 1970, where Spark's watermark begins: its operators drop them"
    ),
    Count.FAR_FUTURE_ROWS: "rows are dated further ahead of the clock than tolerated",
    Count.UNKNOWN_SHARD_ROWS: "rows are of a shard that the specification does not have",
    Count.SPLIT_SHARDS: (
        "times a shard's rows were in several tasks of a batch: partitioned_by_shard=True is not "
        "true of this source, leave it out"
    ),
}
_READ_AGAIN: Final = (
    "rows are older than what their source had promised: this query reads again what the job "
    "already has, since its checkpoint is new or older than the job"
)


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
    promises: Mapping[str, Promise]
    """How each keyed stage's promise follows from Spark's watermark."""
    bounded: bool
    ttl_ms: int
    reads_all: bool = True
    """Whether each batch takes all there is: no source is rate limited."""
    idle_after_ms: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of sources whose quiet shards are to be idle."""
    inputs: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    """By keyed stage: every stage that its input watermark depends on."""

    @property
    def stages(self) -> list[str]:
        """The names of all its stages."""
        return [stage.name for stage in (*self.sources, *self.keyed)]


@dataclass(frozen=True, slots=True)
class Query:
    """What a keeper may do to its query, and ask of it."""

    stop: Callable[[], None]
    """End it, once its stages are final."""
    fail: Callable[[str], None]
    """Let it end with this error."""
    found_nothing_new: Callable[[], bool]
    """Whether its newest trigger has found nothing new in any source."""
    failed: Callable[[], bool]
    """Whether it has ended with an error."""
    stops_when_fenced: bool = True
    fed: bool = True
    """Whether it has control sources, through which it is known when its input is drained."""


class Keeper:
    """Follows one query until it ends. Only its own thread touches its state; the rest is safe."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        client: Client,
        run: int | None,
        open_run: Callable[[Sequence[str]], int],
        tallies: Tallies,
        clock: Clock,
    ) -> None:
        self._assignment = assignment
        self._client = client
        self._run = run
        self._open_run = open_run
        self._tallies = tallies
        self._query: Query | None = None
        self._refusal: str | None = None
        self._clock = clock
        self._inbox: queue.SimpleQueue[Progressed | Signal] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_thread, name=f"tidegauge-{assignment.query}", daemon=True
        )
        self._stepped = threading.Condition()
        self._troubled = False
        self._uncommitted: Progressed | None = None
        self._epoch = -1
        self._noted_epoch = -1
        self._committed_ms: int | None = None
        self._owed_promises: dict[str, dict[str, int]] = {}
        self._owed_inputs: dict[str, int] = {}
        self._drained = False
        self._not_final: dict[str, set[str]] = {
            stage.name: set(stage.shards) for stage in assignment.sources
        }
        self._told_final = False
        self._reads_again = False
        self._last_complaint: type[AggregatorError] | None = None
        self._farewell_by_ms: int | None = None
        now_ms = clock.steady_ms()
        self._quiet = {
            stage.name: QuietShards(
                stage.shards, after_ms=assignment.idle_after_ms[stage.name], now_ms=now_ms
            )
            for stage in assignment.sources
            if stage.name in assignment.idle_after_ms
        }
        self._idle_until_ms: dict[tuple[str, str], int] = {}
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin. Batches that Spark has done before `attach` are committed meanwhile."""
        self._thread.start()

    def attach(self, query: Query) -> None:
        """Give it its query, which exists only once Spark has started it."""
        with self._stepped:
            self._query = query
            refusal = self._refusal
        if refusal is not None:
            query.fail(refusal)

    def refuse(self, message: str) -> None:
        """Let the query end with this error, as soon as there is one to end."""
        _log.error("%s", message)
        with self._stepped:
            self._refusal = message
            query = self._query
        if query is not None:
            query.fail(message)

    def tell(self, event: Progressed | Signal) -> None:
        """Pass an event on. Never blocks: it is called from Spark's listener bus."""
        self._inbox.put(event)

    def settle(self, done: Progressed, timeout_ms: int) -> bool:
        """Commit a batch's epoch, and wait for that within the time; say whether it is done.

        While the service gives no answers, nobody waits for it here: the batches must go on.
        """
        self.tell(done)
        return self._wait(lambda: self._epoch >= done.epoch, timeout_ms)

    def drain(self, timeout_ms: int) -> bool:
        """Note that the query's input is drained, and wait until its sources are final; say whether
        they are within the time.
        """
        self.tell(Signal.DRAINED)
        return self._wait(
            lambda: not any(self._not_final.values()), timeout_ms, although_troubled=True
        )

    def _wait(
        self, done: Callable[[], bool], timeout_ms: int, *, although_troubled: bool = False
    ) -> bool:
        with self._stepped:
            self._stepped.wait_for(
                lambda: done() or (self._troubled and not although_troubled) or not self.alive,
                timeout_ms / 1_000,
            )
            return done()

    def join(self, timeout_ms: int) -> None:
        """Wait until it is done."""
        self._thread.join(timeout_ms / 1_000)

    @property
    def alive(self) -> bool:
        """Whether it still follows its query."""
        return self._thread.is_alive()

    @property
    def stages(self) -> list[str]:
        """The stages that its query executes."""
        return self._assignment.stages

    def _run_thread(self) -> None:
        try:
            if self._keep():
                self._tell_what_is_open()
        finally:
            for stage in self._assignment.stages:
                take(self._tallies, self._assignment.query, stage, _LAST_EPOCH)
            self._note_step(troubled=True)

    def _keep(self) -> bool:
        """Follow the query to its end; say whether its stages were its own until then."""
        pause_ms = _TICK_MS
        while not self._finished():
            self._listen(pause_ms)
            try:
                self._step()
            except StaleRun as error:
                self._fenced(error)
                return False
            except UnknownJob:
                # A service with a new ledger: what it does not know, the driver still does.
                self._run = None
            except AggregatorError as error:
                self._complain(error)
                self._note_step(troubled=True)
                pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)
            else:
                self._last_complaint = None
                self._note_step(troubled=False)
                pause_ms = _TICK_MS
        return True

    def _tell_what_is_open(self) -> None:
        """Say what a query that has ended leaves open, if that is not what was to be expected.

        Of one that has failed, Spark's own error says why.
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
                tell_of_unfinished(stage, inputs, watermarks)
            elif here is not None and here.input_ms is None:
                tell_of_missing_inputs(stage, inputs, watermarks)

    def _note_step(self, *, troubled: bool) -> None:
        with self._stepped:
            self._troubled = troubled
            self._stepped.notify_all()

    def _complain(self, error: AggregatorError) -> None:
        """Log what goes wrong once, not at each try."""
        if type(error) is not self._last_complaint:
            self._last_complaint = type(error)
            _log.warning("query %s: %s; trying again", self._assignment.query, error)

    def _fenced(self, error: StaleRun) -> None:
        stages = ", ".join(self._assignment.stages)
        message = (
            f"tidegauge: query {self._assignment.query} is fenced: its stages ({stages}) were taken "
            f"over{self._by_whom()}. {error.problem.get('detail', error)}. Whatever it wrote from "
            f"now on would be unknown to the job. If two drivers run this pipeline, stop one of "
            f"them; on_fenced='continue' lets the query go on all the same"
        )
        _log.warning("%s", message)
        if self._query is not None and self._query.stops_when_fenced:
            self._query.fail(message)

    def _by_whom(self) -> str:
        """Name who holds a lease of the stages now, if the service says."""
        for stage in self._assignment.stages:
            try:
                holder = (self._client.lowest_range(self._assignment.job, stage) or {}).get(
                    "holder"
                )
            except AggregatorError:
                return ""
            if holder and not str(holder).startswith(self._assignment.query):
                return f" by {holder}"
        return ""

    def _finished(self) -> bool:
        if self._farewell_by_ms is None:
            return False
        owed = self._owed_promises or self._owed_inputs
        ending = self._drained and any(self._not_final.values())
        done = self._uncommitted is None and not owed and not ending
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
                self._note(event)
            case Signal.DRAINED:
                self._drained = True
            case Signal.ENDED | Signal.STOP:
                self._look_whether_drained()
                self._farewell_by_ms = self._clock.steady_ms() + _FAREWELL_MS

    def _note(self, done: Progressed) -> None:
        """Take a batch in once: both the feed and Spark's listener bus tell of it."""
        if done.epoch <= self._noted_epoch:
            return
        self._noted_epoch = done.epoch
        # The newest says it all: watermarks rise from epoch to epoch.
        self._uncommitted = done
        for stage in self._assignment.keyed[:1]:
            self._count(stage.name, {Count.DROPPED_ROWS: done.dropped_rows})

    def _look_whether_drained(self) -> None:
        """Find out, of a query without control sources, whether it has read all there is."""
        query = self._query
        if self._assignment.bounded and not self._drained and query is not None and not query.fed:
            self._drained = self._epoch >= 0 and query.found_nothing_new()

    def _step(self) -> None:
        if self._run is None:
            self._run = self._open_run(self._assignment.stages)
        if self._uncommitted is not None:
            self._commit(self._run, self._uncommitted)
            self._uncommitted = None
        self._pay(self._run)
        self._tell_idle(self._run)
        if self._assignment.bounded:
            self._look_whether_drained()
            self._end(self._run)

    def _commit(self, run: int, done: Progressed) -> None:
        promised = self._promised_ms(done)
        stages: dict[str, int | None] = {stage.name: None for stage in self._assignment.sources}
        stages |= promised
        applied: Mapping[str, int] = {}
        try:
            if stages:  # else: a keyed stage alone, without a watermark: it has nothing to promise
                applied = self._client.commit(self._assignment.job, run, done.epoch, stages)
        except StaleEpoch as error:
            self._tell_of_lost_checkpoint(done, error)
        except InputAhead as error:
            # The checkpoint is newer than the job. Nothing of this epoch was applied; it is owed.
            _log.info("query %s, epoch %d: %s", self._assignment.query, done.epoch, error)
        self._epoch = done.epoch
        self._committed_ms = max(promised.values(), default=None)
        self._book(done, promised, applied)

    def _promised_ms(self, done: Progressed) -> dict[str, int]:
        """Say what each keyed stage promises after a batch, from Spark's own watermark in it."""
        if done.watermark_ms <= 0:  # Spark has none yet, which it writes as 1970
            return {}
        if done.watermark_ms >= END_MS - 1:
            return dict.fromkeys(self._assignment.promises, MAX_MS)
        return {
            stage: promise.promise_ms(done.watermark_ms)
            for stage, promise in self._assignment.promises.items()
        }

    def _tell_of_lost_checkpoint(self, done: Progressed, error: StaleEpoch) -> None:
        """Say once what an epoch below the job's means. What the batch had to say is owed."""
        if self._reads_again:
            return
        self._reads_again = True
        _log.warning(
            "query %s ran batch %d, but of its stages the job has batches up to %s: the query's "
            "checkpoint is new, was lost, or is an older copy. What it reads again is late to the "
            "job, and windows that were closed come out again. Either stop it and put the old "
            "checkpoint back; or stop it, call Pipeline.reset(), and start over with an empty "
            "output and a new checkpoint",
            self._assignment.query,
            done.epoch,
            error.problem.get("last_epoch", "a later one"),
        )

    def _book(
        self, done: Progressed, promised: Mapping[str, int], applied: Mapping[str, int]
    ) -> None:
        """Compare what was applied with what the batch had to say, and note what is owed."""
        now_ms = self._clock.steady_ms()
        for stage in self._assignment.sources:
            said = take(self._tallies, self._assignment.query, stage.name, done.epoch)
            self._hear(stage.name, said)
            newest: dict[str, int] = {}
            for tally in said:
                for shard, promise in tally.promises.items():
                    newest[shard] = max(promise, newest.get(shard, promise))
            if stage.name in self._quiet:
                self._quiet[stage.name].saw(newest, now_ms)
                if self._assignment.reads_all:
                    self._quiet[stage.name].caught_up(now_ms)
            # With more than one epoch at once, only the last one's reports were committed.
            if applied.get(stage.name, 0) < len(newest) or len(said) > 1:
                owed = self._owed_promises.setdefault(stage.name, {})
                owed |= {s: max(p, owed.get(s, p)) for s, p in newest.items()}
        for stage in self._assignment.keyed:
            said = take(self._tallies, self._assignment.query, stage.name, done.epoch)
            self._hear(stage.name, said)
            if stage.name not in promised or applied.get(stage.name, 0) >= len(stage.ranges):
                self._owed_inputs.pop(stage.name, None)
            else:
                self._owed_inputs[stage.name] = promised[stage.name]

    def _hear(self, stage: str, said: Sequence[Tally]) -> None:
        for tally in said:
            split = sum(len(partitions) > 1 for partitions in tally.partitions.values())
            self._count(stage, {**tally.total, Count.SPLIT_SHARDS: split})
            if tally.early is not None:
                _log.warning(
                    "stage %s: %d rows left it older than what it had promised: its published "
                    "watermark was %s, the oldest row is dated %s. Readers have them as late. Stamp "
                    "rows with the end of their window, or declare how far behind the watermark "
                    "they may be: report(…, delay=…)",
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
            # Said at the first, then each time there is a digit more: it may be every row.
            if what in _MEANING and (before == 0 or len(str(before + count)) > len(str(before))):
                again = what == Count.LATE_ROWS and self._reads_again
                meaning = _READ_AGAIN if again else _MEANING[what]
                _log.warning("stage %s: %d %s", stage, before + count, meaning)

    def _pay(self, run: int) -> None:
        """Report what is owed. True as it stands: Spark has committed every epoch it is of.

        A range that a task of the next batch holds already is denied, and remains owed: that
        batch's commit pays it, or else is followed by a claim that outranks that task's.
        """
        for stage, promises in list(self._owed_promises.items()):
            reports = {shard: RangeReport(promise) for shard, promise in promises.items()}
            for shard in self._say(run, stage, reports):
                del promises[shard]
            if not promises:
                del self._owed_promises[stage]
        for stage, input_ms in list(self._owed_inputs.items()):
            lease = self._claim(run, stage, None)
            if lease is None:
                continue
            if self._report_input(stage, lease, input_ms) and not lease.denied:
                del self._owed_inputs[stage]

    def _say(self, run: int, stage: str, reports: Mapping[str, RangeReport]) -> list[str]:
        """Report for shards of a source, and return those that were not held by somebody else."""
        lease = self._claim(run, stage, sorted(reports)) if reports else None
        if lease is None:
            return []
        granted = [shard for shard in lease.granted if shard in reports]
        if granted:
            some = {shard: reports[shard] for shard in granted}
            self._client.report(self._assignment.job, stage, lease.token, some)
        return granted

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

    def _tell_idle(self, run: int) -> None:
        """Say of quiet shards that they are idle, and again before the lease of that word ends.

        A task that has rows of such a shard outranks this claim, and its report ends the idleness.
        """
        now_ms = self._clock.steady_ms()
        if self._quiet and self._query is not None and self._query.found_nothing_new():
            for shards in self._quiet.values():
                shards.caught_up(now_ms)
        for stage, shards in self._quiet.items():
            quiet = set(shards.quiet()) & self._not_final[stage]
            for key in [k for k in self._idle_until_ms if k[0] == stage and k[1] not in quiet]:
                del self._idle_until_ms[key]
            due = [s for s in quiet if now_ms >= self._idle_until_ms.get((stage, s), now_ms)]
            said = self._say(run, stage, {shard: RangeReport(idle=True) for shard in due})
            for shard in said:
                self._idle_until_ms[stage, shard] = now_ms + self._assignment.ttl_ms // _RENEWALS

    def _end(self, run: int) -> None:
        """End a bounded query: once drained, its sources; once all its stages are final, itself."""
        if self._assignment.sources and not self._drained:
            return
        for stage, shards in self._not_final.items():
            self._finalise(run, stage, shards)
        if any(self._not_final.values()) or self._told_final or self._query is None:
            return
        if self._assignment.keyed and self._committed_ms != MAX_MS:
            return
        watermarks = self._client.watermarks(self._assignment.job)
        if all(watermarks[stage].final for stage in self._assignment.stages):
            self._told_final = True
            self._query.stop()

    def _finalise(self, run: int, stage: str, shards: set[str]) -> None:
        """Say of a source's shards that nothing more will come. Denied ones are left for later.

        Safe although the last epoch may not be committed yet: a source's promise speaks of what it
        will still emit. What it has emitted, the stage that reads it answers for.
        """
        final = self._say(run, stage, {shard: RangeReport(final=True) for shard in shards})
        shards.difference_update(final)
        if final:
            self._owed_promises.pop(stage, None)
