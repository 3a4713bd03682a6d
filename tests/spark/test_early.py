"""Percentile watermarks from Spark, and a query that writes early results by one of them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.soundness.query_stages import UnsoundPlanError
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
    RANGES,
    SHARDS,
    SOURCE,
    START_MS,
    WINDOW_S,
    Flow,
    Reading,
    ended,
    steady,
    until,
    windows,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark

MINUTE = BoundedOutOfOrderness("60 s")
SPEC = {
    SOURCE: {"shards": SHARDS, "percentiles": [33, 66]},
    COUNTS: {"inputs": [SOURCE], "ranges": RANGES},
}


@pytest.fixture
def pipeline(flow: Flow) -> Iterator[Pipeline]:
    with Pipeline(flow.url, JOB, SPEC, spark=flow.spark, poll="50 ms") as running:
        yield running


def body(flow: Flow) -> Any:
    with urllib.request.urlopen(f"{flow.url}/v1/jobs/{JOB}/stages/{SOURCE}/watermark") as answer:
        return json.load(answer)


def percentiles(flow: Flow) -> tuple[int, int, int] | None:
    """33, 66 and the output watermark, in seconds from the start; None: not known yet."""
    found = body(flow)
    values = [*found["percentiles"].values(), found["output_watermark"]]
    if None in values:
        return None
    p33, p66, output = ((value - START_MS) // 1_000 for value in values)
    return p33, p66, output


class Early:
    """The query that writes early results, to a folder of its own."""

    def __init__(self, flow: Flow, pipeline: Pipeline, folder: Path) -> None:
        self.flow, self.pipeline = flow, pipeline
        self.output, self.checkpoint = folder / "early", folder / "early-checkpoint"

    def frame(self, data: DataFrame | None = None, percentile: int = 66) -> DataFrame:
        rows = self.pipeline.watermarked(
            self.flow.readings() if data is None else data,
            stage=COUNTS,
            event_time="at",
            percentile=percentile,
        )
        counted = rows.groupBy(F.window("at", f"{WINDOW_S} seconds"), "key").count()
        return counted.select("window", "key", F.col("count").alias("rows"))

    def start(self, frame: DataFrame | None = None, **options: Any) -> StreamingQuery:
        found = self.frame() if frame is None else frame
        trigger = options.pop("trigger", {"processingTime": "0 seconds"})
        writer = found.writeStream.format("json").option("path", str(self.output))
        writer = writer.option("checkpointLocation", str(self.checkpoint)).trigger(**trigger)
        return self.pipeline.start(writer, **options)

    def counted(self) -> dict[tuple[str, int], int]:
        if not self.output.exists():
            return {}
        schema = "window struct<start timestamp, end timestamp>, key string, rows long"
        rows = self.flow.spark.read.schema(schema).json(str(self.output))
        return {
            (row["key"], row["start"] - START_MS // 1_000): row["rows"]
            for row in rows.select(
                "key", F.unix_seconds("window.start").alias("start"), "rows"
            ).collect()
        }


@pytest.fixture
def early(flow: Flow, pipeline: Pipeline, tmp_path: Path) -> Early:
    flow.files_per_batch = None
    return Early(flow, pipeline, tmp_path)


def test_early_results_come_before_the_watermark_which_corrects_them(
    flow: Flow, pipeline: Pipeline, early: Early
) -> None:
    readings = [*steady(range(60)), *steady(range(60, 121))]
    flow.write(steady(range(60)))
    query = flow.start(pipeline, flow.counts(pipeline, MINUTE))
    until(lambda: percentiles(flow) is not None, "percentiles of the first batch")
    flow.write(steady(range(60, 121)))
    until(lambda: flow.output_of(SOURCE) == START_MS + 57_000, "the second batch")

    def settled() -> tuple[int, int, int] | None:
        found = percentiles(flow)
        return found if found is not None and found[1] > 70 else None

    # In flight are 60 seconds of each shard, behind which the promise is: from 60, and from 57 on.
    p33, p66, output = until(settled, "percentiles of the second batch")
    assert abs(p33 - 98) <= 3, "a third of what is in flight is at or after it"
    assert abs(p66 - 78) <= 3
    assert output == 57

    premature = early.start()
    until(lambda: ("a", 60) in early.counted(), "the window behind the percentile")
    assert ("a", 60) not in flow.counted()
    straggler = Reading("right", "a", 62)
    flow.write([straggler])
    until(lambda: body(flow)["records"] == len(readings) + 1, "the straggler is read")
    query.stop()
    ended(flow.start(pipeline, flow.counts(pipeline, MINUTE), bounded=True))
    assert flow.counted() == windows([*readings, straggler])
    # All that was final closes the rest of the early windows, too.
    until(lambda: ("c", 120) in early.counted(), "the last window")
    premature.stop()
    assert early.counted() == windows(readings), "the straggler was late for early results"


def test_a_query_of_sources_alone_has_percentiles(
    flow: Flow, pipeline: Pipeline, early: Early
) -> None:
    flow.write(steady(range(121)))
    query = flow.start(pipeline, flow.source(pipeline, MINUTE))
    until(lambda: percentiles(flow), "percentiles")
    flow.write(steady(range(121, 150)))

    def advanced() -> bool:
        found = percentiles(flow)
        return found is not None and found[2] == 86 and found[1] > 95

    until(advanced, "percentiles of the second batch")
    assert query.isActive
    assert early.checkpoint.exists() is False


@pytest.mark.slow
def test_what_is_in_flight_outlives_a_query_and_the_live_store(
    flow: Flow, pipeline: Pipeline, service: Service
) -> None:
    """Half a minute in each of two runs, while the promise is a minute behind."""
    flow.files_per_batch = None
    for first in (60, 90):
        flow.write(steady(range(first, first + 30)))
        query = flow.start(pipeline, flow.source(pipeline, MINUTE))
        until(
            lambda end=first + 26: flow.output_of(SOURCE) == START_MS + (end - 60) * 1_000,
            "it is read",
        )
        if first == 60:
            query.stop()
    exact = 119 - 60 // 3 - 2

    def both_are_known() -> bool:
        found = percentiles(flow)
        return found is not None and abs(found[0] - exact) <= 3

    until(both_are_known, "percentiles of both")
    service.kill()
    service.start()
    until(lambda: percentiles(flow), "the driver says it again")


def test_nothing_is_reset_under_early_results(flow: Flow, pipeline: Pipeline, early: Early) -> None:
    query = early.start()
    with pytest.raises(RuntimeError, match=f"early results of {COUNTS}: stop it"):
        pipeline.reset()
    query.stop()
    pipeline.reset()


@pytest.mark.slow
def test_early_results_of_what_is_there(flow: Flow, pipeline: Pipeline, early: Early) -> None:
    flow.write(steady(range(121)))
    plain = flow.counts(pipeline, MINUTE)
    ended(flow.start(pipeline, plain, trigger=AVAILABLE_NOW))
    found = until(lambda: percentiles(flow), "percentiles of a query that has ended")
    ended(early.start(trigger=AVAILABLE_NOW))
    closed = {start for _, start in early.counted()}
    assert closed == set(range(0, found[1] // WINDOW_S * WINDOW_S, WINDOW_S))
    assert max(closed) > max(start for _, start in flow.counted())


def test_nothing_is_promised_by_early_results(flow: Flow, pipeline: Pipeline, early: Early) -> None:
    flow.write(steady(range(10)))
    reported = pipeline.report(early.frame(), stage=COUNTS)
    with pytest.raises(UnsoundPlanError, match=r"calls report\(\).*has no percentile"):
        early.start(reported)
    with pytest.raises(UnsoundPlanError, match=r"calls source\(\)"):
        early.start(early.frame(flow.source(pipeline, MINUTE)))
    plain = pipeline.watermarked(flow.readings(), stage=COUNTS, event_time="at")
    both = early.frame().select("key").union(plain.select("key"))
    with pytest.raises(UnsoundPlanError, match="differ in stage or percentile"):
        early.start(both)
    with pytest.raises(ValueError, match="leave out bounded=True"):
        early.start(bounded=True)


@pytest.mark.parametrize("percentile", [50, 0, 100, "66", True])
def test_a_percentile_has_to_be_declared(early: Early, percentile: Any) -> None:
    with pytest.raises(ValueError, match=r'"percentiles": \[50\] to .sensors.|write 1 to 99'):
        early.frame(percentile=percentile)
