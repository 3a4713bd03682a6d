"""Rows that leave a stage too old are seen, whatever was declared of them."""

from __future__ import annotations

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline
from spark_agent.executor.tally import Count
from tests.spark.flow import (
    COUNTS,
    DEADLINE_S,
    SOURCE,
    START_MS,
    WINDOW_S,
    Flow,
    Reading,
    batches,
    ended,
    steady,
    until,
)

pytestmark = pytest.mark.spark


def stamped_with_the_start(flow: Flow, pipeline: Pipeline, delay: str, on_early: str) -> DataFrame:
    rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
    started = (
        rows.groupBy(F.window("at", f"{WINDOW_S} seconds"), "key")
        .count()
        .select("key", F.col("window.start").alias("started_at"), "count")
    )
    return pipeline.report(
        started,
        stage=COUNTS,
        event_time="started_at",
        delay=delay,
        on_early=on_early,  # type: ignore[arg-type]
    )


def write_minutes(flow: Flow) -> None:
    for second in range(0, 90, 15):
        flow.write(steady(range(second, second + 15)))


def test_rows_stamped_against_the_rule_are_counted_and_told(
    flow: Flow, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    write_minutes(flow)
    frame = stamped_with_the_start(flow, pipeline, "0 s", "count")
    ended(flow.start(pipeline, frame, bounded=True))
    assert pipeline.counts[Count.EARLY_ROWS] > 0
    assert "stage counts: 3 rows left it older than it had promised" in caplog.text
    assert "the oldest row is dated 2023-11-14T22:13:" in caplog.text


def test_they_stop_the_query_where_that_is_wanted(flow: Flow, pipeline: Pipeline) -> None:
    write_minutes(flow)
    frame = stamped_with_the_start(flow, pipeline, "0 s", "fail")
    query = flow.start(pipeline, frame, bounded=True)
    with pytest.raises(StreamingQueryException, match="older than its published watermark"):
        query.awaitTermination(DEADLINE_S)


def test_a_delay_that_is_true_holds_the_promise_back(flow: Flow, pipeline: Pipeline) -> None:
    write_minutes(flow)
    query = flow.start(
        pipeline, stamped_with_the_start(flow, pipeline, f"{WINDOW_S} s", "fail"), bounded=False
    )
    until(lambda: flow.output_of(SOURCE) == START_MS + 81_000, "the source has promised")
    until(lambda: flow.output_of(COUNTS) == START_MS + 71_000, "ten seconds less")
    assert query.isActive
    assert pipeline.counts[Count.EARLY_ROWS] == 0


def test_rows_that_spark_drops_are_counted_by_reason(flow: Flow, pipeline: Pipeline) -> None:
    flow.write(steady(range(30)))
    query = flow.start(pipeline, flow.counts(pipeline))
    until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "windows to 20 s have closed")
    before_1970 = Reading("left", "a", -START_MS // 1_000 - 60)
    flow.write([before_1970, Reading("left", "b", 3), *steady(range(30, 32))])
    done = batches(query)
    until(lambda: batches(query) > done, "they have been read")
    until(lambda: pipeline.counts[Count.DROPPED_ROWS] == 2, "Spark has dropped them")
    until(lambda: pipeline.counts[Count.ROWS_BEFORE_1970] == 1, "one of them is of before 1970")
    assert pipeline.counts[Count.LATE_ROWS] == 2
    assert pipeline.counts[Count.UNDATED_ROWS] == 0
    (flow.inbox / "undated.json").write_text('{"sensor": "left", "key": "a", "at": "yesterday"}')
    until(lambda: pipeline.counts[Count.UNDATED_ROWS] == 1, "a time that Spark cannot parse")


def test_rows_that_are_read_several_times_count_once(flow: Flow, pipeline: Pipeline) -> None:
    """`foreachBatch` may use its rows as often as it likes, and each use reads them anew."""

    def write_twice(batch: DataFrame, _: int) -> None:
        for _ in range(2):
            batch.write.format("noop").mode("append").save()

    flow.write(steady(range(30)))
    flow.write([Reading("left", "a", 3), Reading("left", "b", 4)])
    writer = flow.source(pipeline).writeStream.foreachBatch(write_twice)
    ended(
        pipeline.start(
            writer.option("checkpointLocation", str(flow.checkpoint)).trigger(availableNow=True)
        )
    )
    pipeline.stop()
    assert pipeline.counts[Count.LATE_ROWS] == 2


def test_a_row_at_the_watermark_is_on_time(flow: Flow, pipeline: Pipeline) -> None:
    """W promises rows at or after W, and Spark's deduplication would drop those at W."""
    rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
    frame = pipeline.report(rows.dropDuplicates(["sensor", "key", "at"]), stage=COUNTS)
    flow.write(steady(range(30)))
    flow.start(pipeline, frame)
    until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the watermark is at 21 s")
    flow.write([Reading("left", "new", 21), Reading("left", "new", 21), Reading("left", "new", 20)])

    def new() -> list[int]:
        rows = flow.spark.read.schema("key string, at timestamp").json(str(flow.output))
        return [int(row["at"].timestamp()) for row in rows.where("key = 'new'").collect()]

    until(new, "the row is out")
    flow.write(steady(range(30, 35)))
    until(lambda: flow.output_of(COUNTS) == START_MS + 26_000, "and nothing else of it")
    assert new() == [START_MS // 1_000 + 21]
