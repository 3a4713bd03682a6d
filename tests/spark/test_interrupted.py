"""Queries that are interrupted, changed or reset from outside end, or say why they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.executor.tally import Count
from spark_agent.supervision import finalisation as finishing
from spark_agent.times import MAX_MS
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    RANGES,
    SHARDS,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    batches,
    ended,
    steady,
    until,
    windows,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark


def test_a_pipeline_that_was_stopped_starts_nothing(flow: Flow) -> None:
    """Nobody would report: a bounded query ended well, and had closed no window."""
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline)
    with pytest.raises(RuntimeError, match="was stopped, at the end of its with block"):
        flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True)


def test_a_shard_that_is_taken_out_keeps_no_bounded_query_from_its_end(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=True)
        fewer = SPEC | {SOURCE: {"shards": SHARDS[:1]}}
        flow.client.declare(JOB, fewer, replace=True)
        ended(query)
    assert flow.watermark(COUNTS).final


@pytest.mark.slow
def test_more_joined_shards_than_one_look_up_returns_become_final(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic = {**SPEC, SOURCE: {"shards": ["left"], "dynamic": True}}
    flow.write([Reading(name, "a", 1) for name in ("left", *(f"s{k}" for k in range(9)))])
    with Pipeline(flow.url, JOB, dynamic, spark=flow.spark, poll="50 ms") as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    monkeypatch.setattr(finishing, "_MOST_LOOKED_UP", 2)
    with Pipeline(flow.url, JOB, dynamic, spark=flow.spark, poll="50 ms") as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), bounded=True))
    assert flow.watermark(COUNTS).final


def test_a_bounded_query_of_which_one_source_is_final_can_be_continued(
    flow: Flow, tmp_path: Path
) -> None:
    """Its driver died between two requests, each of which makes one source final."""
    spec = {"a": {"shards": ["left"]}, "b": {"shards": ["right"]}}
    other = Flow(flow.spark, flow.url, tmp_path / "other")
    flow.write([Reading("left", "k", 1)])
    other.write([Reading("right", "k", 1)])
    with Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as pipeline:
        both = [
            pipeline.source(
                each.readings(), stage=stage, shard="sensor", event_time="at", strategy=BOUND
            )
            for stage, each in (("a", flow), ("b", other))
        ]
        frame = both[0].union(both[1])
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        run = flow.client.open_run(JOB, ["a", "b"], "dead")
        lease = flow.client.claim(JOB, "a", None, holder="dead", ttl_ms=5_000, rank=Rank(run, 0, 0))
        flow.client.report(JOB, "a", lease, {"left": RangeReport(final=True)})
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.watermark("b").final


def test_a_query_that_waits_below_a_job_that_is_reset_says_so(flow: Flow, tmp_path: Path) -> None:
    """No batch of it ran that could have been refused, so it waited for ever."""
    spec = SPEC | {"below": {"inputs": [COUNTS], "ranges": RANGES}}
    flow.write(steady(range(30)))
    with (
        Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as above,
        Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as below,
    ):
        ended(flow.start(above, flow.counts(above), trigger=AVAILABLE_NOW))
        reading = Flow(flow.spark, flow.url, tmp_path / "below")
        rows = flow.spark.readStream.schema("key string, at timestamp").json(str(flow.output))
        grouped = below.watermarked(rows, stage="below", event_time="at").groupBy(
            F.window("at", "20 seconds"), "key"
        )
        query = reading.start(below, below.report(grouped.count(), stage="below"), bounded=True)
        until(lambda: batches(query) >= 1, "it runs")
        flow.client.reset(JOB)
        with pytest.raises(StreamingQueryException, match="was reset, or declared anew"):
            query.awaitTermination(DEADLINE_S)


def test_an_idle_query_of_a_source_alone_says_that_its_job_was_reset(flow: Flow) -> None:
    """It asks for no watermark: the driver's next claim of its shards is refused."""
    flow.write(steady(range(30)))
    with flow.pipeline(lease_ttl="2 s") as pipeline:
        query = flow.start(pipeline, flow.source(pipeline))
        until(lambda: flow.watermark(SOURCE).output_ms is not None, "it is reported")
        flow.client.reset(JOB)
        with pytest.raises(StreamingQueryException, match="was reset, or declared anew"):
            query.awaitTermination(DEADLINE_S)


def test_a_query_whose_stage_was_taken_out_says_so(flow: Flow) -> None:
    """It retried for ever, and wrote what nobody knew of."""
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.watermark(COUNTS).output_ms is not None, "it is reported")
        flow.client.declare(JOB, {SOURCE: {"shards": SHARDS}}, replace=True)
        flow.write(steady(range(30, 60)))
        with pytest.raises(StreamingQueryException, match="a stage that the job has no more"):
            query.awaitTermination(DEADLINE_S)
        until(lambda: flow.client.runs(JOB)["runs"][0]["outcome"], "its run has ended")
    because = flow.client.runs(JOB)["runs"][0]["because"]
    assert because is not None
    assert because.startswith("tidegauge: "), "a refusal, without the traceback that Spark adds"
    assert "a stage that the job has no more" in because


def test_a_job_that_was_replaced_is_declared_again_at_the_start(flow: Flow) -> None:
    with flow.pipeline(replace=True) as pipeline:
        flow.client.declare(JOB, {"old": {"shards": ["x"]}}, replace=True)
        flow.files_per_batch = None
        flow.write(steady(range(30)))
        rows = pipeline.watermarked(flow.readings(), stage=COUNTS, event_time="at")
        counted = rows.groupBy(F.window("at", "10 seconds"), "key").count()
        ended(flow.start(pipeline, pipeline.report(counted, stage=COUNTS), trigger=AVAILABLE_NOW))
    assert flow.client.watermarks(JOB).keys() == SPEC.keys()


@pytest.mark.slow
def test_a_service_that_is_away_for_a_whole_run_is_counted_and_told(
    flow: Flow, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    readings = steady(range(30))
    flow.write(readings[:30])
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    service.kill()
    flow.write(readings[30:])
    with flow.pipeline(patience="300 ms", finish_timeout="1 s") as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
        pipeline.stop()
        assert pipeline.counts[Count.REPORTS_DROPPED] == len(SHARDS)
    assert "has ended, and the service has not taken its last reports" in caplog.text
    service.start()
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(readings)


def test_a_promise_that_the_driver_made_outlives_a_service_that_had_not_saved_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """`left` has no row any more by which a task could make it again."""
    folder = tmp_path / "service"
    folder.mkdir()
    never_saves = {"TIDEGAUGE_CHECKPOINT_INTERVAL_MS": "60000"}
    with Service(folder, environment=never_saves) as service:
        flow = Flow(spark, service.url, tmp_path)
        flow.files_per_batch = None
        service.kill()
        flow.write([Reading("left", "a", 100), Reading("right", "a", 50)])
        with flow.pipeline(patience="300 ms") as pipeline:
            query = flow.start(pipeline, flow.counts(pipeline))
            until(lambda: batches(query) >= 1, "a batch while the service is away")
            service.start()
            until(lambda: flow.output_of(SOURCE) == START_MS + 45_000, "the driver has promised")
            service.kill()
            service.start()
            flow.write([Reading("right", "a", 200)])
            until(lambda: flow.output_of(SOURCE) == START_MS + 95_000, "what left has promised")


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_no_control_row_comes_out_however_old_the_data(flow: Flow, zone: str) -> None:
    """The earliest event time is the control row's, too."""
    before = flow.spark.conf.get("spark.sql.session.timeZone") or "UTC"
    flow.spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        lines = [
            json.dumps({"sensor": name, "key": "a", "at": "0001-01-01T00:00:00Z"})
            for name in SHARDS
        ]
        (flow.inbox / "0.json").write_text("\n".join(lines))
        with flow.pipeline() as pipeline:
            rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
            ended(flow.start(pipeline, pipeline.report(rows, stage=COUNTS), bounded=True))
        assert flow.watermark(COUNTS).output_ms == MAX_MS
        found = flow.spark.read.schema("sensor string").json(str(flow.output)).collect()
        assert sorted(row.sensor for row in found) == SHARDS
    finally:
        flow.spark.conf.set("spark.sql.session.timeZone", before)


def test_a_shard_that_is_added_below_a_bounded_query_is_named(flow: Flow) -> None:
    """Nothing of the query reports for it, so the query had no end, and only `explain` said why."""
    flow.write(steady(range(30)))
    more = SPEC | {SOURCE: {"shards": [*SHARDS, "added"]}}
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=True)
        flow.client.declare(JOB, more, replace=True)
        with pytest.raises(StreamingQueryException, match=r"shards were added .* \(added\)"):
            query.awaitTermination(DEADLINE_S)
    with Pipeline(flow.url, JOB, more, spark=flow.spark, poll="50 ms") as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), bounded=True))
    assert flow.counted() == windows(steady(range(30)))
