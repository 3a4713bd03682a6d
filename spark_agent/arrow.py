# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""The agent's few uses of Arrow, kept together because Arrow has no type hints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame
from pyspark.sql.functions import arrow_udf, spark_partition_id, when
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

Batch: TypeAlias = Any
"""A `pyarrow.RecordBatch`."""
Array: TypeAlias = Any
"""A `pyarrow.Array`."""

_WATCHED: Final = "__tidegauge_watched"
_LAST_US: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows of one shard in a batch."""

    oldest_ms: int
    """The oldest event time, rounded down."""
    newest_ms: int
    """The newest event time, rounded down."""
    rows: int
    late_rows: int = 0
    mark_ms: int | None = None
    """The newest mark, rounded down; without marks, the newest event time. None: not one is marked."""

    def __add__(self, other: ShardRows) -> ShardRows:
        """Return the rows of two batches as one."""
        marks = [mark for mark in (self.mark_ms, other.mark_ms) if mark is not None]
        return ShardRows(
            min(self.oldest_ms, other.oldest_ms),
            max(self.newest_ms, other.newest_ms),
            self.rows + other.rows,
            self.late_rows + other.late_rows,
            max(marks, default=None),
        )


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of a batch by declared shard, and counts of irregular rows."""

    by_shard: dict[str, ShardRows]
    late_rows: int = 0
    rows_before_1970: int = 0
    undated_rows: int = 0
    far_future_rows: int = 0
    unknown_shard_rows: int = 0


def rows_by_shard(
    names: Array,
    times: Array,
    marks: Array | None = None,
    *,
    is_declared: Callable[[str], bool],
    late_before_ms: int | None,
    horizon_ms: int,
) -> SourceRows:
    """Find the oldest and newest event time of each shard among rows that are not after `horizon_ms`.

    `names` are the rows' shards, `times` their event times, `marks` the times that move the promise,
    null for a row that does not; None: the event times. `is_declared` returns whether the source has a
    shard. Rows without an event time are only counted. Rows before `late_before_ms` are late.
    """
    times_us = pc.cast(times, pa.int64())
    table = pa.table({"shard": names, "time": times_us})
    aggregates = [("time", "min"), ("time", "max"), ("time", "count")]
    newest_us = times_us
    if marks is not None:
        marks_us = pc.cast(marks, pa.int64())
        # A mark too far ahead is as wrong as an event time, and would raise the promise alike.
        newest_us = pc.max_element_wise(times_us, marks_us)
        table = table.append_column("mark", marks_us).filter(pc.is_valid(times_us))
        newest_us = newest_us.filter(pc.is_valid(times_us))
        aggregates.append(("mark", "max"))
    is_near = pc.less_equal(newest_us, horizon_ms * 1_000)
    beyond = _count(pc.invert(is_near))
    if beyond:
        table = table.filter(is_near)
    groups = table.group_by("shard").aggregate(aggregates).to_pylist()
    late = 0 if late_before_ms is None else count_older_than(times_us, late_before_ms)[0]
    late_of = _late_by_shard(table, late_before_ms) if late else {}
    dated = [each for each in groups if each["time_count"]]
    by_shard = {
        each["shard"]: _shard_rows(each, late_of.get(each["shard"], 0))
        for each in dated
        if is_declared(each["shard"])
    }
    unknown = sum(each["time_count"] for each in dated if each["shard"] not in by_shard)
    return SourceRows(
        by_shard, late, count_older_than(times_us, 0)[0], times.null_count, beyond, unknown
    )


def _shard_rows(group: dict[str, Any], late_rows: int) -> ShardRows:
    mark_us = group.get("mark_max", group["time_max"])
    return ShardRows(
        group["time_min"] // 1_000,
        group["time_max"] // 1_000,
        group["time_count"],
        late_rows,
        None if mark_us is None else mark_us // 1_000,
    )


def times_by_shard(names: Array, times: Array) -> dict[str, Any]:
    """Return the event times of each shard's rows, as NumPy arrays of ms, rounded down."""
    import numpy as np  # noqa: PLC0415  (only where it is needed: tasks start faster without)

    table = pa.table({"shard": names, "time": pc.cast(times, pa.int64())}).drop_null()
    shards = table["shard"].combine_chunks().dictionary_encode()
    codes = shards.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    times_ms = table["time"].to_numpy()[order] // 1_000
    ends = np.searchsorted(codes[order], np.arange(1, len(shards.dictionary)))
    return dict(zip(shards.dictionary.to_pylist(), np.split(times_ms, ends), strict=True))


def _late_by_shard(table: Batch, before_ms: int | None) -> dict[str, int]:
    bound_us = min((before_ms or 0) * 1_000, _LAST_US)
    late = table.filter(pc.less(table["time"], bound_us))
    counted = late.group_by("shard").aggregate([("time", "count")]).to_pylist()
    return {each["shard"]: each["time_count"] for each in counted}


def count_older_than(times: Array, than_ms: int) -> tuple[int, int | None]:
    """Return how many times are before an instant, and the oldest of them (ms, rounded down).

    `than_ms` may be the end of time.
    """
    times_us = pc.cast(times, pa.int64())
    oldest_us = pc.min(times_us).as_py()
    bound_us = min(than_ms * 1_000, _LAST_US)
    if oldest_us is None or oldest_us >= bound_us:
        return 0, None
    return _count(pc.less(times_us, bound_us)), oldest_us // 1_000


def _count(mask: Array) -> int:
    return pc.sum(mask).as_py() or 0


def all_true(rows: Array) -> Array:
    """Return True for every row."""
    return pa.repeat(pa.scalar(True), len(rows))


def watch_column(
    frame: DataFrame, tag: str, watcher: Callable[[Iterable[Array]], Iterator[Array]], of: Column
) -> DataFrame:
    """Pass one column of the rows through a watcher, which returns True for every row.

    Only this column goes through Python. The function is declared non-deterministic, so that Spark
    neither removes it, nor runs it twice, nor moves a filter below it. `tag` is its name in the plan.
    """

    # Spark derives the type of UDF from the annotations.
    def watch(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        yield from watcher(batches)

    watch.__name__ = tag
    # Some operators (applyInPandasWithState) emit rows in a format that Spark's Python evaluation
    # cannot read. A projection converts them. It must be one that no filter is moved through.
    projected = frame.withColumn(_WATCHED, when(spark_partition_id() >= 0, of))
    watched = arrow_udf(watch, "boolean").asNondeterministic()(_WATCHED)
    return projected.filter(watched).drop(_WATCHED)


def watch_columns(
    frame: DataFrame,
    tag: str,
    watcher: Callable[[Iterable[tuple[Array, ...]]], Iterator[Array]],
    *of: Column,
) -> DataFrame:
    """Pass several columns of the rows through a watcher; see `watch_column`."""

    def watch(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        yield from watcher(batches)

    watch.__name__ = tag
    return frame.filter(arrow_udf(watch, "boolean").asNondeterministic()(*of))


def has_type(field: StructField) -> bool:
    """Return whether Arrow supports the type of a column."""
    try:
        to_arrow_schema(StructType([field]), timezone="UTC")
    except PySparkTypeError:
        return False
    return True
