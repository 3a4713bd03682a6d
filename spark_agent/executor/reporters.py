"""Functions that pass rows unchanged on an executor, while their task claims and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from spark_agent.arrow import (
    Array,
    ShardRows,
    SourceRows,
    all_true,
    count_older_than,
    rows_by_shard,
)
from spark_agent.client.reports import RangeReport
from spark_agent.client.spec import is_name
from spark_agent.exceptions import EarlyRowsError
from spark_agent.executor.digests import TaskDigests
from spark_agent.executor.in_flight import TaskInFlight
from spark_agent.executor.tally import Count, EarlyRow
from spark_agent.executor.task import ReportTarget, TaskAttempt, current_task, freeze_imports
from spark_agent.strategies.resolved import Summary, TaskPromise, promised_ms
from spark_agent.times import instant_text


class SourceReporter:
    """Tracks the event times of each shard as a source's rows pass through.

    Upstream, Spark has brought all rows of a shard into one task. A task claims a shard at the shard's
    first rows. The task cannot derive its shards beforehand, because a union downstream shifts the
    partition id. A shard without rows is not reported and keeps its promise.

    Where the driver makes the promises, the task reports without one: its claim still fences every
    older attempt, and its rows are counted.
    """

    def __init__(
        self,
        target: ReportTarget,
        *,
        shards: frozenset[str],
        is_dynamic: bool = False,
        promise: TaskPromise,
        summary: Summary | None = None,
        tolerance_ms: int,
        tracks_in_flight: bool = False,
    ) -> None:
        """`is_dynamic`: True if other shards join the stage when they are claimed. `promise` derives a
        shard's promise from its newest mark, `summary` what a strategy with state needs of its rows.
        `tracks_in_flight`: True if the stage has percentile watermarks.
        """
        self._tracks_in_flight = tracks_in_flight
        self._target = target
        self._shards = shards
        self._is_dynamic = is_dynamic
        self._promise = promise
        self._summary = summary
        self._tolerance_ms = tolerance_ms

    def __call__(self, batches: Iterable[tuple[Array, ...]]) -> Iterator[Array]:
        """Take batches of shards, event times and perhaps marks; return True for every row."""
        task = current_task(self._target.stage)
        if task is None:
            yield from (all_true(times) for _, times, *_ in batches)
            return
        attempt = TaskAttempt(self._target, task)
        rows: dict[str, ShardRows] = {}
        in_flight = TaskInFlight(self._promise) if self._tracks_in_flight else None
        digests = None if self._summary is None else TaskDigests(self._summary)
        late_before_ms: int | None = None
        for number, (names, times, *marks) in enumerate(batches):
            if number == 0:
                late_before_ms = attempt.promised_ms()
            # One row dated 9999 would close every window. A date far in the future is an error in
            # the data and must not raise its shard's promise.
            found = rows_by_shard(
                names,
                times,
                *marks,
                is_declared=self._is_declared,
                late_before_ms=late_before_ms,
                horizon_ms=self._target.clock.wall_ms() + self._tolerance_ms,
            )
            attempt.counts.update(_counts(found))
            for shard, some in found.by_shard.items():
                rows[shard] = rows[shard] + some if shard in rows else some
            if in_flight is not None:
                in_flight.add(names, times, rows)
            if digests is not None:
                digests.add(names, times, found.by_shard)
            yield all_true(times)
        reports = {
            shard: RangeReport(
                promised_ms(self._promise, some.mark_ms), records=some.rows, late=some.late_rows
            )
            for shard, some in rows.items()
        }
        attempt.report_shards(reports)
        attempt.report_to_driver(
            reports,
            in_flight=in_flight and in_flight.packed(),
            rows=digests and digests.rows(rows),
        )
        freeze_imports()

    def _is_declared(self, shard: str) -> bool:
        return shard in self._shards or (self._is_dynamic and is_name(shard))


def _counts(found: SourceRows) -> dict[str, int]:
    return {
        Count.LATE_ROWS: found.late_rows,
        Count.ROWS_BEFORE_1970: found.rows_before_1970,
        Count.UNDATED_ROWS: found.undated_rows,
        Count.FAR_FUTURE_ROWS: found.far_future_rows,
        Count.UNKNOWN_SHARD_ROWS: found.unknown_shard_rows,
    }


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
        attempt.report_ranges(self._ranges[task.partition : task.partition + 1])
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
