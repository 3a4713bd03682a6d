"""Functions that pass rows unchanged on an executor, while their task claims and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from spark_agent.arrow import Array, ShardRows, all_true, count_older_than, rows_by_shard
from spark_agent.client.reports import RangeReport
from spark_agent.client.spec import is_name
from spark_agent.exceptions import (
    EarlyRowsError,
)
from spark_agent.executor.in_flight import TaskInFlight
from spark_agent.executor.tally import Count, EarlyRow
from spark_agent.executor.task import ReportTarget, TaskAttempt, current_task, freeze_imports
from spark_agent.strategies import Strategy
from spark_agent.times import instant_text


class SourceReporter:
    """Tracks the newest event time of each shard as a source's rows pass through.

    Upstream, Spark has brought all rows of a shard into one task. A task claims a shard at the shard's
    first rows. The task cannot derive its shards beforehand, because a union downstream shifts the
    partition id. A shard without rows is not reported and keeps its promise.
    """

    def __init__(
        self,
        target: ReportTarget,
        *,
        shards: frozenset[str],
        is_dynamic: bool = False,
        strategy: Strategy,
        tolerance_ms: int,
        tracks_in_flight: bool = False,
    ) -> None:
        """`is_dynamic`: True if other shards join the stage when they are claimed.
        `tracks_in_flight`: True if the stage has percentile watermarks.
        """
        self._tracks_in_flight = tracks_in_flight
        self._target = target
        self._shards = shards
        self._is_dynamic = is_dynamic
        self._strategy = strategy
        self._tolerance_ms = tolerance_ms

    def __call__(self, batches: Iterable[tuple[Array, Array]]) -> Iterator[Array]:
        """Take batches of shards and event times; return True for every row."""
        task = current_task(self._target.stage)
        if task is None:
            yield from (all_true(times) for _, times in batches)
            return
        attempt = TaskAttempt(self._target, task)
        rows: dict[str, ShardRows] = {}
        in_flight = TaskInFlight(self._strategy) if self._tracks_in_flight else None
        late_before_ms: int | None = None
        for number, (names, times) in enumerate(batches):
            if number == 0:
                late_before_ms = attempt.promised_ms()
            seen = self._rows(names, times, late_before_ms, attempt.counts)
            if not seen.keys() <= rows.keys():
                attempt.claim(sorted(seen.keys() | rows.keys()))
            for shard, some in seen.items():
                rows[shard] = some + rows[shard] if shard in rows else some
            if in_flight is not None:
                in_flight.add(names, times, {name: each.newest_ms for name, each in rows.items()})
            yield all_true(times)
        reports = {
            shard: RangeReport(
                self._strategy.promise_ms(some.newest_ms), records=some.rows, late=some.late_rows
            )
            for shard, some in rows.items()
        }
        attempt.report(reports)
        attempt.report_to_driver(reports, in_flight=in_flight and in_flight.packed())
        freeze_imports()

    def _rows(
        self, names: Array, times: Array, late_before_ms: int | None, counts: Counter[str]
    ) -> dict[str, ShardRows]:
        # One row dated 9999 would close every window. A date far in the future is an error in the data
        # and must not raise its shard's promise.
        found = rows_by_shard(
            names,
            times,
            is_declared=self._is_declared,
            late_before_ms=late_before_ms,
            horizon_ms=self._target.clock.wall_ms() + self._tolerance_ms,
        )
        counts[Count.LATE_ROWS] += found.late_rows
        counts[Count.ROWS_BEFORE_1970] += found.rows_before_1970
        counts[Count.UNDATED_ROWS] += found.undated_rows
        counts[Count.FAR_FUTURE_ROWS] += found.far_future_rows
        counts[Count.UNKNOWN_SHARD_ROWS] += found.unknown_shard_rows
        return found.by_shard

    def _is_declared(self, shard: str) -> bool:
        return shard in self._shards or (self._is_dynamic and is_name(shard))


class RangeReporter:
    """Reports a keyed stage's ranges: task i of n reports for key range i of n.

    The reports need no holds. The stage's promise follows from its operators
    (`spark_agent.soundness.operators`) and from the watermark that Spark ran the batch with, and is the
    same for all ranges. The driver adds it at the commit. With more or fewer tasks than ranges, as after
    a `repartition` or a `limit`, the driver reports for the ranges without a task.

    The reporter also guards the promise: rows that leave older than the promise are counted, or fail the
    task.
    """

    def __init__(
        self,
        target: ReportTarget,
        ranges: Sequence[str],
        *,
        has_event_time: bool,
        on_early: Literal["count", "fail"],
    ) -> None:
        self._target = target
        self._ranges = tuple(ranges)
        self._has_event_time = has_event_time
        self._on_early = on_early

    def __call__(self, batches: Iterable[Array]) -> Iterator[Array]:
        """Take batches of event times; return True for every row."""
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
            if self._has_event_time:
                attempt.counts[Count.UNDATED_RESULTS] += times.null_count
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
        if self._on_early == "fail":
            raise EarlyRowsError(
                f"stage {self._target.stage}: a row dated {instant_text(oldest_ms)} leaves it, older "
                f"than its published watermark {instant_text(promised_ms)}: stamp rows with the end "
                f"of their window, or declare how far behind the watermark they may be: "
                f"report(…, delay=…). on_early='count' lets such rows pass"
            )
        return found if early is None else min(early, found)
