"""What runs in the executors: rows pass unchanged, and the task claims and reports beside them.

A task never fails because of the aggregator. What it cannot report in time is dropped and counted;
the driver, which hears from the tasks through Spark as well, makes good for it after the batch.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark import Accumulator, TaskContext

from spark_agent.arrow import Array, all_true, count_older_than, newest_times
from spark_agent.client import AggregatorError, Lease, RangeReport, Rank, Unavailable, shared_client
from spark_agent.clock import Clock
from spark_agent.link import NotStartedError
from spark_agent.strategies import Strategy
from spark_agent.tally import Count, EarlyRow, Tallies, Tally
from spark_agent.times import instant_text

_log: Final = logging.getLogger("spark_agent")

QUERY_PROPERTY: Final = "tidegauge.query"
"""Local property of the thread that starts a query, and so of its tasks: which start this is."""
RUN_PROPERTY: Final = "tidegauge.run"
"""Likewise: the run number; empty if the aggregator was away at the start."""
_BATCH_PROPERTY: Final = "streaming.sql.batchId"

BACKOFF_MS: Final = 5_000
"""After a call that found no aggregator, tasks of this process leave it alone for so long: else an
aggregator that hangs would cost every task of every batch its whole patience."""
_backoff_until_ms: Final[dict[tuple[int, str], int]] = {}


def freeze_imports() -> None:
    """Take what this process has imported out of the garbage collector's sight, once.

    Spark's workers collect all garbage after every task. To look through the modules of a worker takes
    some 30 ms each time, more than all that is done here; and modules are no garbage.
    """
    if not gc.get_freeze_count():
        gc.freeze()


class EarlyRowsError(Exception):
    """Rows left a stage older than what it had already promised."""


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """Where to report, and how much time it may take. Travels to the executors."""

    url: str
    job: str
    stage: str
    ttl_ms: int
    patience_ms: int
    clock: Clock
    tallies: Accumulator[Tallies]
    partitioned_by_shard: bool = False
    """Whether somebody said that all of a shard's rows are in one task; it is checked."""


@dataclass(frozen=True, slots=True)
class Task:
    """Who is speaking: one attempt at one task of one batch of one started query."""

    query: str
    rank: Rank | None
    """None: the query has no run, so the task leaves reporting to the driver."""
    epoch: int
    partition: int
    holder: str


def current_task(stage: str) -> Task | None:
    """Say who this task is; None if it is not one of a query's own, but of an action beside it.

    Raises `NotStartedError` if its query was not started with `Pipeline.start`.

    The attempt in the rank is Spark's task attempt id, not its attempt number: that one starts over
    when Spark repeats a whole stage, while the id rises over all tasks of the application, so the
    attempt that was started last always outranks the others.
    """
    context = TaskContext.get()
    batch = context and context.getLocalProperty(_BATCH_PROPERTY)
    if context is None or not batch:
        return None
    query = context.getLocalProperty(QUERY_PROPERTY)
    if not query:
        raise NotStartedError(stage)
    epoch, attempt = int(batch), context.taskAttemptId()
    run = context.getLocalProperty(RUN_PROPERTY)
    return Task(
        query=query,
        rank=Rank(int(run), epoch, attempt) if run else None,
        epoch=epoch,
        partition=context.partitionId(),
        holder=f"{query}.task-{attempt}",
    )


class TaskAttempt:
    """One task's dealings with the service for a stage. No method raises for the service's sake."""

    def __init__(self, target: ReportTarget, task: Task) -> None:
        self._target = target
        self._task = task
        self._leases: list[Lease] = []
        self.counts: Counter[str] = Counter()

    def promised_ms(self) -> int | None:
        """Ask what the stage has promised so far: rows before that are late. None: not known."""
        if self._task.rank is None or self._backing_off():
            return None
        target = self._target
        try:
            found = shared_client(target.url, target.patience_ms).watermark(
                target.job, target.stage
            )
        except AggregatorError as error:
            self._drop(error, "look", 0)
            return None
        return found and found.output_ms

    def claim(self, ranges: Sequence[str]) -> None:
        """Claim ranges, and so fence every older attempt at this task from here on.

        Ranges that were claimed before are to be among them: one lease then covers them all.
        """
        rank, target = self._task.rank, self._target
        if rank is None or not ranges or self._backing_off():
            return
        try:
            lease = shared_client(target.url, target.patience_ms).claim(
                target.job,
                target.stage,
                ranges,
                holder=self._task.holder,
                ttl_ms=target.ttl_ms,
                rank=rank,
            )
        except AggregatorError as error:
            self._drop(error, "claim", len(ranges))
        else:
            self._leases = [lease]

    def report(self, promises: Mapping[str, int] | None = None) -> None:
        """Report the claimed ranges for this epoch.

        `promises` (ms) by shard for a source. Without it: key ranges, whose promise is the input
        watermark that Spark ran the batch with, which the driver adds at the commit.
        """
        for lease in self._leases:
            ranges = {
                name: RangeReport(None if promises is None else promises[name])
                for name in lease.granted
                if promises is None or name in promises
            }
            if ranges:
                self._send(lease, ranges)

    def report_to_driver(
        self, promises: Mapping[str, int] | None = None, early: EarlyRow | None = None
    ) -> None:
        """Let the driver know too, through Spark; it counts if the task succeeds."""
        key = (self._task.query, self._target.stage, self._task.epoch)
        here = frozenset({self._task.partition})
        shard_promises = dict(promises or {})
        partitions = (
            dict.fromkeys(shard_promises, here) if self._target.partitioned_by_shard else {}
        )
        self._target.tallies.add(
            {
                key: Tally(
                    shard_promises, {self._task.partition: dict(self.counts)}, partitions, early
                )
            }
        )

    def _send(self, lease: Lease, ranges: Mapping[str, RangeReport]) -> None:
        target = self._target
        if self._backing_off():
            self.counts[Count.REPORTS_DROPPED] += len(ranges)
            return
        try:
            accepted = shared_client(target.url, target.patience_ms).report(
                target.job, target.stage, lease.token, ranges, epoch=self._task.epoch
            )
        except AggregatorError as error:
            self._drop(error, "report", len(ranges))
        else:
            self.counts[Count.REPORTS_DROPPED] += len(ranges) - accepted

    def _backing_off(self) -> bool:
        until_ms = _backoff_until_ms.get((os.getpid(), self._target.url), 0)
        return self._target.clock.steady_ms() < until_ms

    def _drop(self, error: AggregatorError, what: str, ranges: int) -> None:
        if isinstance(error, Unavailable):
            now_ms = self._target.clock.steady_ms()
            _backoff_until_ms[os.getpid(), self._target.url] = now_ms + BACKOFF_MS
        self.counts[Count.REPORTS_DROPPED] += ranges
        _log.info(
            "stage %s, epoch %d: %s of %d ranges dropped: %s",
            self._target.stage,
            self._task.epoch,
            what,
            ranges,
            error,
        )


class SourceReporter:
    """Watches a source's rows pass by: the newest event time of each shard.

    Upstream, Spark has brought all rows of a shard into one task. A shard is claimed when its
    first rows are seen, so that the task need not know which shards are its own (its partition id
    does not tell: a union further down shifts it). A shard without rows says nothing, and keeps
    its promise.
    """

    def __init__(
        self, target: ReportTarget, *, shards: frozenset[str], strategy: Strategy, tolerance_ms: int
    ) -> None:
        self._target = target
        self._shards = shards
        self._strategy = strategy
        self._tolerance_ms = tolerance_ms

    def __call__(self, batches: Iterable[tuple[Array, Array]]) -> Iterator[Array]:
        """Take batches of shards and event times; say of every row that it passes."""
        task = current_task(self._target.stage)
        if task is None:
            yield from (all_true(times) for _, times in batches)
            return
        attempt = TaskAttempt(self._target, task)
        newest_ms: dict[str, int] = {}
        late_before_ms: int | None = None
        for number, (names, times) in enumerate(batches):
            if number == 0:
                late_before_ms = attempt.promised_ms()
            seen = self._newest_ms(names, times, late_before_ms, attempt.counts)
            if not seen.keys() <= newest_ms.keys():
                attempt.claim(sorted(seen.keys() | newest_ms.keys()))
            for shard, time_ms in seen.items():
                newest_ms[shard] = max(time_ms, newest_ms.get(shard, time_ms))
            yield all_true(times)
        promises = {
            shard: self._strategy.promise_ms(time_ms) for shard, time_ms in newest_ms.items()
        }
        attempt.report(promises)
        attempt.report_to_driver(promises)
        freeze_imports()

    def _newest_ms(
        self, names: Array, times: Array, late_before_ms: int | None, counts: Counter[str]
    ) -> dict[str, int]:
        # One row dated 9999 would close every window there is: a date so far ahead is an error in
        # the data and must not speak for its shard.
        found = newest_times(
            names,
            times,
            shards=self._shards,
            late_before_ms=late_before_ms,
            horizon_ms=self._target.clock.wall_ms() + self._tolerance_ms,
        )
        counts[Count.LATE_ROWS] += found.late_rows
        counts[Count.ROWS_BEFORE_1970] += found.rows_before_1970
        counts[Count.FAR_FUTURE_ROWS] += found.far_future_rows
        counts[Count.UNKNOWN_SHARD_ROWS] += found.unknown_shard_rows
        return found.by_shard_ms


class RangeReporter:
    """Reports a keyed stage's ranges: task i of n stands for key range i of n.

    It needs no holds: what the stage promises follows from the watermark that Spark ran the batch
    with and from the operators (`spark_agent.operators`), and is the same for all ranges. The
    driver adds it at the commit. Where there are more or fewer tasks than ranges, as behind a
    `repartition` or a `limit`, the driver speaks for the ranges that no task stood for.

    Beside that it is the guard: rows that leave older than what was already promised are counted,
    or fail the task.
    """

    def __init__(
        self,
        target: ReportTarget,
        ranges: Sequence[str],
        *,
        has_event_time: bool,
        fail_on_early: bool,
    ) -> None:
        self._target = target
        self._ranges = tuple(ranges)
        self._has_event_time = has_event_time
        self._fail_on_early = fail_on_early

    def __call__(self, batches: Iterable[Array]) -> Iterator[Array]:
        """Take batches of event times; say of every row that it passes."""
        task = current_task(self._target.stage)
        if task is None:
            yield from (all_true(times) for times in batches)
            return
        attempt = TaskAttempt(self._target, task)
        attempt.claim(self._ranges[task.partition : task.partition + 1])
        promised_ms: int | None = None
        early: EarlyRow | None = None
        for number, times in enumerate(batches):
            if self._has_event_time and number == 0:
                promised_ms = attempt.promised_ms()
            if promised_ms is not None:
                early = self._guard(times, promised_ms, early, attempt.counts)
            yield all_true(times)
        attempt.report()
        attempt.report_to_driver(early=early)
        freeze_imports()

    def _guard(
        self, times: Array, promised_ms: int, early: EarlyRow | None, counts: Counter[str]
    ) -> EarlyRow | None:
        count, oldest_ms = count_older_than(times, promised_ms)
        if oldest_ms is None:
            return early
        counts[Count.EARLY_ROWS] += count
        found = EarlyRow(oldest_ms, promised_ms)
        if self._fail_on_early:
            raise EarlyRowsError(
                f"stage {self._target.stage}: a row dated {instant_text(oldest_ms)} leaves it, older "
                f"than its published watermark {instant_text(promised_ms)}: stamp rows with the end "
                f"of their window, or declare how far behind the watermark they may be: "
                f"report(…, delay=…). on_early='count' lets such rows pass"
            )
        return found if early is None else min(early, found)
