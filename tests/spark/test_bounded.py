"""A query that ends brings its last windows out, which plain Spark never does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline
from spark_agent.executor.tally import Count
from spark_agent.times import MAX_MS
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
    RANGES,
    SHARDS,
    SOURCE,
    START_MS,
    Flow,
    Reading,
    batches,
    ended,
    steady,
    until,
    windows,
)

pytestmark = pytest.mark.spark


def test_the_last_windows_come_out_of_an_available_now_query(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    readings = steady(range(30))
    flow.write(readings[:90])
    flow.write(readings[90:])
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True)
        ended(query)
        assert pipeline.counts.total() == 0
    assert caplog.messages == [], "all is well, so nothing is said"
    assert flow.counted() == windows(readings)
    assert flow.watermark(SOURCE).output_ms == MAX_MS
    assert flow.watermark(COUNTS).final


@pytest.mark.parametrize("bounded", [True, False])
def test_an_input_that_nobody_executes_is_named(
    flow: Flow, caplog: pytest.LogCaptureFixture, *, bounded: bool
) -> None:
    spec = {
        SOURCE: {"shards": SHARDS},
        "others": {"shards": ["one"]},
        COUNTS: {"inputs": [SOURCE, "others"], "ranges": RANGES},
    }
    flow.write(steady(range(30)))
    with Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as pipeline:
        frame = flow.counts(pipeline)
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=bounded))
    if bounded:
        [told] = [each for each in caplog.messages if "the stage is not final" in each]
        assert "it waits for others, not final yet" in told
    else:
        [told] = [each for each in caplog.messages if "has no input watermark" in each]
        assert "others has promised nothing yet" in told


def test_of_a_query_that_failed_spark_says_why(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline).withColumn("fails", F.raise_error(F.lit("broken")))
        query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True)
        with pytest.raises(StreamingQueryException, match="broken"):
            query.awaitTermination()
    assert "the stage is not final" not in caplog.text


@pytest.mark.parametrize("trigger", [None, AVAILABLE_NOW])
@pytest.mark.parametrize("readings", [steady(range(30)), []], ids=["read before", "nothing"])
def test_a_source_of_which_nothing_is_left_to_read_becomes_final(
    flow: Flow, readings: list[Reading], trigger: Mapping[str, object] | None
) -> None:
    """A query without windows runs no batch then. Without a trigger it never ended; with one its source
    stayed open for ever.
    """
    if readings:
        flow.write(readings)
        with flow.pipeline() as pipeline:
            ended(flow.start(pipeline, flow.source(pipeline), trigger=AVAILABLE_NOW))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.source(pipeline), trigger=trigger, bounded=True))
    assert flow.watermark(SOURCE).final


def test_available_now_leaves_the_source_open(flow: Flow) -> None:
    readings = steady(range(30))
    flow.write(readings)
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
        # Seen by the left sensor: second 29; by the right one: 26. Five seconds may be missing.
        until(lambda: flow.output_of(SOURCE) == START_MS + 21_000, "the source has promised")
    more = steady(range(30, 40))
    flow.write(more)
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), bounded=True))
    assert flow.counted() == windows(readings + more)


def test_a_query_that_is_stopped_leaves_its_sources_open(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=False)
        until(lambda: batches(query) >= 1, "a batch")
    assert not query.isActive
    assert flow.watermark(SOURCE).status != "final"


def test_late_rows_are_dropped_by_the_authoritative_watermark(flow: Flow) -> None:
    flow.write(steady(range(30)))
    late = Reading("left", "a", 3)
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "windows to 20 s have closed")
        flow.write([late, *steady(range(30, 32))])
        done = batches(query)
        until(lambda: batches(query) > done, "the late row has been read")
        query.stop()
        dropped = sum(
            p["stateOperators"][0]["numRowsDroppedByWatermark"] for p in query.recentProgress
        )
        until(lambda: pipeline.counts[Count.LATE_ROWS] == 1, "it was counted at the source too")
    assert dropped == 1
    on_time = windows(steady(range(30)))
    assert flow.counted() == {w: n for w, n in on_time.items() if w[1] < 20}


def test_a_last_run_that_would_not_see_the_end_of_its_input_is_refused(
    flow: Flow, pipeline: Pipeline, tmp_path: Path
) -> None:
    """It reads what is there at its start, and the stage above it goes on."""
    flow.files_per_batch = None
    flow.write(steady(range(30)))
    frame = pipeline.report(
        pipeline.watermarked(flow.readings(), stage=COUNTS, event_time="at"), stage=COUNTS
    )
    with pytest.raises(ValueError, match=f"upstream stage '{SOURCE}' is not final yet"):
        flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True)
    query = flow.start(pipeline, frame, bounded=True)
    source = flow.source(pipeline).writeStream.format("noop").trigger(availableNow=True)
    source = source.option("checkpointLocation", str(tmp_path / "source"))
    ended(pipeline.start(source, bounded=True))
    ended(query)
    assert flow.watermark(COUNTS).final
