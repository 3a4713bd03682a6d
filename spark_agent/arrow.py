# pyright: basic, reportAttributeAccessIssue=false
"""The few things that the agent does with Arrow, which has no types to check against."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

Batch: TypeAlias = Any
"""A `pyarrow.RecordBatch`."""


@dataclass(frozen=True, slots=True)
class Newest:
    """What a batch of rows shows: the newest event time (ms, rounded down) of each known shard."""

    by_shard_ms: dict[str, int]
    late_rows: int
    far_future_rows: int
    unknown_shard_rows: int


def newest(
    batch: Batch,
    *,
    shard: str,
    event_time: str,
    shards: Collection[str],
    late_before_ms: int | None,
    horizon_ms: int,
) -> Newest:
    """Find the newest event time of each shard among rows that are not after `horizon_ms`.

    Rows without an event time are passed over. Those before `late_before_ms` are late.
    """
    names = pc.cast(batch.column(shard), pa.string())
    times_us = pc.cast(batch.column(event_time), pa.int64())
    beyond = pc.greater(times_us, horizon_ms * 1_000)
    table = pa.table({"shard": names, "time": times_us}).filter(pc.invert(beyond))
    groups = table.group_by("shard").aggregate([("time", "max"), ("time", "count")]).to_pylist()
    known = {each["shard"]: each["time_max"] // 1_000 for each in groups if each["shard"] in shards}
    unknown = sum(each["time_count"] for each in groups if each["shard"] not in known)
    late = 0
    if late_before_ms is not None:
        late = pc.sum(pc.less(times_us, late_before_ms * 1_000)).as_py() or 0
    return Newest(known, late, pc.sum(beyond).as_py() or 0, unknown)


def instant(column: str, time_ms: int) -> Batch:
    """Make one row that holds one instant."""
    values = pa.array([time_ms * 1_000], pa.timestamp("us", "UTC"))
    return pa.RecordBatch.from_arrays([values], names=[column])
