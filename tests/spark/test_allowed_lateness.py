"""Allowed lateness: windows that have fired fire again, corrected, in each batch that brings rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import Pipeline
from spark_agent.jvm.progress import parse_watermark_ms
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    START_S,
    WINDOW_S,
    Flow,
    Reading,
    Windows,
    ended,
    steady,
    windows,
)

LATENESS_S = 95
ON_TIME = steady(range(0, 60, 2))
LATE = [Reading("left", key, second) for second in (3, 14, 25) for key in ("a", "b")]
"""Rows that come when the watermark is at 100 s."""
TOO_LATE = [Reading("left", "c", second) for second in (4, 5)]
"""Rows that come when the watermark is at 150 s: their window ended more than 95 s ago."""


@dataclass(frozen=True)
class Fired:
    """A value of a window, as it was written."""

    key: str
    start: int
    rows: int
    on_time: bool
    version: int


def fill(flow: Flow, parts: Sequence[Iterable[Reading]] | None = None) -> list[Reading]:
    """Write the parts, each a batch. By default: on time, late, too late, and all that closes them."""
    # A batch drops by the watermark of the batch before, which had that of two batches before.
    pause: list[list[Reading]] = [[], [], [], []]
    parts = parts or [
        ON_TIME,
        steady(range(90, 110, 2)),
        *pause,
        [*LATE, *steady(range(110, 112))],
        [LATE[0]],
        steady(range(150, 160, 2)),
        *pause,
        TOO_LATE,
        steady(range(160, 170, 2)),
    ]
    written: list[Reading] = []
    for part in parts:
        flow.write(part)
        written += part
    return written


def counted(rows: DataFrame) -> DataFrame:
    return rows.groupBy(F.window("at", f"{WINDOW_S} seconds"), "key").agg(
        F.count("*").alias("rows")
    )


def watermarked(
    flow: Flow, pipeline: Pipeline, lateness_s: int | None = LATENESS_S, **options: object
) -> DataFrame:
    lateness = {} if lateness_s is None else {"allowed_lateness": f"{lateness_s} s"}
    rows = flow.source(pipeline)
    return pipeline.watermarked(rows, stage=COUNTS, event_time="at", **lateness, **options)  # type: ignore[arg-type]


def start(
    flow: Flow,
    pipeline: Pipeline,
    frame: DataFrame,
    *,
    bounded: bool = True,
    trigger: Mapping[str, object] = AVAILABLE_NOW,
) -> StreamingQuery:
    return flow.start(
        pipeline, pipeline.report(frame, stage=COUNTS), bounded=bounded, trigger=trigger
    )


SCHEMA = "window struct<start: timestamp, end: timestamp>, key string, rows long, on_time boolean, version long"


def fired(flow: Flow, folder: Path | None = None) -> list[Fired]:
    """Return what was written, in the order of its versions."""
    rows = flow.spark.read.schema(SCHEMA).json(str(folder or flow.output)).collect()
    found = [
        Fired(
            row["key"],
            int(row["window"]["start"].timestamp()) - START_S,
            row["rows"],
            row["on_time"],
            row["version"],
        )
        for row in rows
    ]
    return sorted(found, key=lambda each: (each.version, each.start, each.key))


def newest(found: Iterable[Fired]) -> Windows:
    """Return the newest value of each window."""
    return Counter({(each.key, each.start): each.rows for each in found})


def first(found: Iterable[Fired]) -> Windows:
    """Return the first value of each window; a second one on time is an error."""
    on_time = [each for each in found if each.on_time]
    values = newest(on_time)
    assert len(values) == len(on_time), "a window fires on time once"
    return values


def check_times(
    found: Iterable[Fired], *queries: StreamingQuery, lateness_s: int = LATENESS_S
) -> None:
    """Check each firing against the watermark of its batch, and of the batch before."""
    watermarks = {-1: 0}
    for query in queries:
        for each in query.recentProgress:
            ms = parse_watermark_ms(each["eventTime"].get("watermark"))
            watermarks[each["batchId"]] = ms + lateness_s * 1_000 if ms else 0
    for each in found:
        end_ms = (START_S + each.start + WINDOW_S) * 1_000
        assert end_ms <= watermarks[each.version], f"{each} is early"
        assert each.on_time == (end_ms > watermarks[each.version - 1]), each


def test_a_window_fires_again_for_each_batch_of_late_rows(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    query = start(flow, pipeline, counted(watermarked(flow, pipeline)))
    ended(query)
    found = fired(flow)
    check_times(found, query)
    assert newest(found) == windows(readings) - windows(TOO_LATE)
    assert first(found) == windows(readings) - windows([*LATE, LATE[0], *TOO_LATE])
    corrections = Counter((each.key, each.start) for each in found if not each.on_time)
    assert corrections == Counter(
        {(each.key, each.second // 10 * 10): 1 + (each == LATE[0]) for each in LATE}
    )
    assert pipeline.counts["corrections"] == corrections.total()
    assert pipeline.counts["early_rows"] == 0


def test_first_values_are_those_of_a_query_without_lateness(flow: Flow, tmp_path: Path) -> None:
    fill(flow)
    plain = Flow(flow.spark, flow.url, tmp_path / "plain")
    plain.inbox = flow.inbox
    with Pipeline(
        flow.url,
        "plain",
        {"sensors": {"shards": ["left", "right"]}, COUNTS: {"inputs": ["sensors"], "ranges": 2}},
        spark=flow.spark,
        poll="50 ms",
    ) as pipeline:
        ended(plain.start(pipeline, plain.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    with flow.pipeline() as pipeline:
        ended(start(flow, pipeline, counted(watermarked(flow, pipeline))))
    assert first(fired(flow)) == plain.counted()
