"""Misuse is refused on the driver, before anything starts, with the right usage."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Ascending, BoundedOutOfOrderness, Pipeline
from spark_agent.client.errors import DeclaredOtherwise
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.plan import PlanReader
from spark_agent.soundness.second_readings import may_share_rows
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    SHARDS,
    SOURCE,
    SPEC,
    Flow,
    ended,
    steady,
    windows,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark


@pytest.fixture
def alone(spark: SparkSession, tmp_path: Path) -> Flow:
    """A flow without a service."""
    return Flow(spark, "http://127.0.0.1:1", tmp_path)


@pytest.fixture
def pipeline(alone: Flow) -> Iterator[Pipeline]:
    with alone.pipeline(patience="100 ms") as pipeline:
        yield pipeline


def test_a_stage_that_is_not_there(alone: Flow, pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"'sensor' is not in .* it has counts, sensors"):
        pipeline.source(
            alone.readings(), stage="sensor", shard="sensor", event_time="at", strategy=BOUND
        )


def test_a_stage_of_another_kind(alone: Flow, pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"'sensors' is a source .*, not a keyed stage"):
        pipeline.watermarked(alone.readings(), stage=SOURCE, event_time="at")


def test_a_column_that_is_not_there(alone: Flow, pipeline: Pipeline) -> None:
    with pytest.raises(
        ValueError, match="unknown column 'time'; the data frame has sensor, key, at"
    ):
        pipeline.watermarked(alone.readings(), stage=COUNTS, event_time="time")


def test_an_event_time_that_is_none(alone: Flow, pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="event time 'key' is of type string; it must be a time"):
        pipeline.watermarked(alone.readings(), stage=COUNTS, event_time="key")


def test_a_watermark_of_its_own(alone: Flow, pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="withWatermark of its own"):
        pipeline.watermarked(
            alone.readings().withWatermark("at", "1 second"), stage=COUNTS, event_time="at"
        )


def test_ranges_that_are_not_spark_s_partitions(alone: Flow, pipeline: Pipeline) -> None:
    alone.spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        with pytest.raises(ValueError, match=r"shuffle.partitions is 3.*\"ranges\": 3"):
            alone.counts(pipeline)
    finally:
        alone.spark.conf.set("spark.sql.shuffle.partitions", "2")


def test_a_query_through_no_stage(alone: Flow, pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="does not execute a stage"):
        alone.start(pipeline, alone.readings())


@pytest.mark.parametrize(
    ("trigger", "mode", "message"),
    [
        ({"continuous": "1 second"}, "append", "continuous processing has no micro-batches"),
        ({"realTime": "5 minutes"}, "append", "real-time mode does not finish"),
        ({"processingTime": "1 second"}, "complete", "complete mode rewrites every window"),
    ],
)
def test_triggers_and_modes_that_cannot_keep_a_promise(
    trigger: dict[str, str], mode: str, message: str, alone: Flow, pipeline: Pipeline
) -> None:
    writer = alone.counts(pipeline).writeStream.format("noop").outputMode(mode)
    with pytest.raises(ValueError, match=message):
        pipeline.start(writer.trigger(**trigger))  # type: ignore[arg-type]


def test_a_bounded_query_of_one_batch(alone: Flow, pipeline: Pipeline) -> None:
    writer = alone.counts(pipeline).writeStream.format("noop").trigger(once=True)
    with pytest.raises(ValueError, match=r"more than one batch.*availableNow=True"):
        pipeline.start(writer, bounded=True)


def test_a_last_run_of_a_source_that_may_wait_for_more(alone: Flow, pipeline: Pipeline) -> None:
    """A trigger that finds nothing does not show that nothing is left."""
    reader = alone.spark.readStream.schema("sensor string, key string, at timestamp")
    rows = reader.option("minOffsetsPerTrigger", 5).json(str(alone.inbox))
    frame = pipeline.source(
        rows, stage=SOURCE, shard="sensor", event_time="at", strategy=Ascending()
    )
    writer = frame.writeStream.format("noop").trigger(availableNow=True)
    with pytest.raises(ValueError, match="minOffsetsPerTrigger rows may be unread then"):
        pipeline.start(writer, bounded=True)


def test_progress_that_is_tracked_later(alone: Flow, pipeline: Pipeline) -> None:
    writer = alone.counts(pipeline).writeStream.option("asyncProgressTrackingEnabled", "true")
    with pytest.raises(
        ValueError, match="asyncProgressTrackingEnabled commits batches some time after"
    ):
        pipeline.start(writer.format("noop"))


def test_a_limited_source_of_another_query(alone: Flow, pipeline: Pipeline) -> None:
    rows = pipeline.watermarked(alone.readings(), stage=COUNTS, event_time="at")
    with pytest.raises(ValueError, match=r"limited by maxfilespertrigger.*source\(\)"):
        alone.start(pipeline, pipeline.report(rows, stage=COUNTS))


def test_a_format_with_limits_of_its_own(alone: Flow, pipeline: Pipeline) -> None:
    """Below another query's stage: nothing shows that a batch has read all that is covered."""
    rate = alone.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    rows = pipeline.watermarked(rate, stage=COUNTS, event_time="timestamp")
    with pytest.raises(ValueError, match=r"the format 'rate-micro-batch'.*source\(\)"):
        alone.start(pipeline, pipeline.report(rows, stage=COUNTS))


def test_an_event_time_that_could_be_either(alone: Flow, pipeline: Pipeline) -> None:
    rows = pipeline.watermarked(alone.source(pipeline), stage=COUNTS, event_time="at")
    both = rows.withColumn("seen_at", F.current_timestamp())
    with pytest.raises(ValueError, match=r"at, seen_at could each be the event time .*name one"):
        pipeline.report(both, stage=COUNTS)


def test_a_column_that_no_control_row_can_have(alone: Flow, pipeline: Pipeline) -> None:
    odd = alone.readings().withColumn("pause", F.expr("make_interval(0, 1)"))
    with pytest.raises(ValueError, match="column 'pause' is of type interval, which cannot pass"):
        pipeline.watermarked(odd, stage=COUNTS, event_time="at")


@pytest.mark.parametrize("ttl", ["500 ms", "0 s", "11 minutes"])
def test_a_lease_that_no_service_grants(alone: Flow, ttl: str) -> None:
    with pytest.raises(ValueError, match=f"lease_ttl '{ttl}' is not between 1 s and 600 s"):
        alone.pipeline(lease_ttl=ttl)


def test_a_session_of_spark_connect() -> None:
    session: Any = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(RuntimeError, match=r"Spark Connect is not supported.*spark-submit"):
        Pipeline("http://127.0.0.1:1", JOB, SPEC, spark=session)


def test_a_stage_that_is_never_reported(alone: Flow, pipeline: Pipeline) -> None:
    frame = pipeline.watermarked(alone.source(pipeline), stage=COUNTS, event_time="at")
    with pytest.raises(ValueError, match=r"'counts' lacks report\(\)"):
        alone.start(pipeline, frame)


def test_a_union_behind_the_report(alone: Flow, pipeline: Pipeline) -> None:
    others = alone.readings().select("key", F.lit(0).cast("long"), F.lit(0).cast("long"))
    frame = alone.counts(pipeline).union(others)
    with pytest.raises(ValueError, match=r"'counts': its rows are unioned"):
        alone.start(pipeline, frame)


def test_a_source_that_is_read_twice(alone: Flow, pipeline: Pipeline) -> None:
    """Two scans have offsets of their own: the promise of one would be early for the other."""
    once = alone.source(pipeline)
    with pytest.raises(ValueError, match="'sensors' is in this query more than once"):
        alone.start(pipeline, once.union(once))


def self_join(flow: Flow, pipeline: Pipeline, *, source_first: bool) -> DataFrame:
    """Pairs of readings of a key within a minute, of which one side is read with `source()`."""
    sides = [flow.source(pipeline), flow.readings()]
    one, other = sides if source_first else reversed(sides)
    left = pipeline.watermarked(one, stage=COUNTS, event_time="at").alias("l")
    right = pipeline.watermarked(other, stage=COUNTS, event_time="at").alias("r")
    near = "l.key = r.key AND r.at BETWEEN l.at - INTERVAL 1 MINUTE AND l.at + INTERVAL 1 MINUTE"
    joined = left.join(right, F.expr(near)).select("l.key", F.col("l.at").alias("at"))
    return pipeline.report(joined, stage=COUNTS, event_time="at")


def test_a_self_join_whose_second_reading_ends_before_the_source(flow: Flow) -> None:
    """Rows that arrive between the two ends would be late in the next run."""
    flow.files_per_batch = None
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        frame = self_join(flow, pipeline, source_first=False)
        with pytest.raises(
            ValueError, match=r"'counts' reads data without source\(\).* Put it first"
        ):
            flow.start(pipeline, frame, trigger=AVAILABLE_NOW)
        frame = self_join(flow, pipeline, source_first=True)
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))


def test_the_paths_of_a_plan_s_files(alone: Flow) -> None:
    """A relative path, a table, and a pattern are the same data as the folder's qualified path."""
    alone.write(steady(range(3)))
    reader = alone.spark.readStream.schema("sensor string, key string, at timestamp").format("json")
    alone.spark.sql(f"CREATE TABLE in_place (key string) USING json LOCATION '{alone.inbox}'")
    try:
        frames = [
            reader.load(str(alone.inbox)),
            reader.load(os.path.relpath(alone.inbox)),
            alone.spark.readStream.table("in_place"),
            reader.load(f"{alone.inbox.parent}/inb*"),
            reader.load(str(alone.output)),
        ]
        plans = PlanReader(alone.spark)
        own, *same, other = [
            next(node for node in plans.read(each).walk() if node.is_source) for each in frames
        ]
        assert own.paths == {f"file:{alone.inbox}"}
        assert [may_share_rows(own, each) for each in same] == [True, True, True]
        assert not may_share_rows(own, other)
    finally:
        alone.spark.sql("DROP TABLE in_place")


@pytest.mark.parametrize("bound", ["later", None, 1.5, True])
def test_a_bound_that_is_none(bound: Any) -> None:
    with pytest.raises(ValueError, match=f"invalid bound {bound!r}: write it like '12 h"):
        BoundedOutOfOrderness(bound)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (7, r"invalid strategy 7: write BoundedOutOfOrderness\('10 minutes'\)"),
        (Ascending, r"invalid strategy <class .*>: write BoundedOutOfOrderness\('10 minutes'\)"),
        ("ascending", r"the strategy's SQL cannot be read: .*ascending"),
    ],
)
def test_a_strategy_that_is_none(
    alone: Flow, pipeline: Pipeline, strategy: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        alone.source(pipeline, strategy)


def test_arguments_of_another_kind(alone: Flow, pipeline: Pipeline, spark: SparkSession) -> None:
    nothing: Any = None
    with pytest.raises(
        ValueError, match=r"start\(\) takes the writer that frame.writeStream… returns"
    ):
        pipeline.start(nothing)
    no: Any = "no"
    writer = alone.source(pipeline).writeStream.format("noop")
    with pytest.raises(ValueError, match="invalid bounded 'no': write True or False"):
        pipeline.start(writer, bounded=no)
    with pytest.raises(ValueError, match="invalid replace 'no': write True or False"):
        alone.pipeline(replace=no)
    column: Any = F.col("at")
    with pytest.raises(ValueError, match="give a column's name, a string"):
        pipeline.watermarked(alone.source(pipeline), stage=COUNTS, event_time=column)
    with pytest.raises(ValueError, match="invalid url None"):
        Pipeline(nothing, JOB, SPEC, spark=spark)
    with pytest.raises(ValueError, match="job 'Bad job/1' is not a valid name: use up to 128"):
        Pipeline("http://127.0.0.1:1", "Bad job/1", SPEC, spark=spark)
    with pytest.raises(ValueError, match="invalid tasks 'x'"):
        alone.source(pipeline, tasks="x")
    for spec in ([], {SOURCE: ["left"]}, {SOURCE: {"shards": ["été"]}}):
        with pytest.raises(ValueError, match="spec: "):
            Pipeline("http://127.0.0.1:1", JOB, spec, spark=spark)  # type: ignore[arg-type]


def test_a_setting_by_which_operators_have_no_watermark_of_their_own(
    alone: Flow, pipeline: Pipeline, spark: SparkSession
) -> None:
    setting = "spark.sql.streaming.statefulOperator.allowMultiple"
    spark.conf.set(setting, "false")
    try:
        with pytest.raises(ValueError, match=r"allowMultiple is off.*leave it at true"):
            alone.start(pipeline, alone.counts(pipeline))
    finally:
        spark.conf.unset(setting)


def test_a_union_with_what_has_not_come_through_watermarked(
    alone: Flow, pipeline: Pipeline
) -> None:
    """Spark makes one union of unions that meet: the other stream must not pass for watermarked."""
    others = alone.spark.readStream.schema("sensor string, key string, at timestamp").json(
        str(alone.inbox)
    )
    rows = pipeline.watermarked(alone.source(pipeline), stage=COUNTS, event_time="at")
    for both in (rows.union(others), others.union(rows), rows.unionByName(others)):
        with pytest.raises(ValueError, match=r"did not come through watermarked\(\)"):
            alone.start(pipeline, pipeline.report(both, stage=COUNTS))


Shifts = Callable[[DataFrame, DataFrame], DataFrame]


@pytest.mark.parametrize(
    ("combined", "message"),
    [
        (lambda rows, shifted: rows.unionByName(shifted), "Spark takes 'window' for event time by"),
        (lambda rows, shifted: shifted.unionByName(rows), "does not group by an event time"),
        (lambda rows, shifted: shifted.to(rows.schema), "Spark takes 'window' for event time by"),
    ],
    ids=["first", "second", "schema"],
)
def test_a_column_that_is_event_time_in_part(
    alone: Flow, pipeline: Pipeline, combined: Shifts, message: str
) -> None:
    """Spark marks a union's columns as its first branch's, and `to` a frame's as the schema's.

    Spark dropped the shifted rows, which were on time.
    """
    alone.files_per_batch = None
    rows, again = (
        pipeline.watermarked(each, stage=COUNTS, event_time="at").select("key", "at")
        for each in (alone.source(pipeline), alone.readings())
    )
    both = combined(rows, again.withColumn("at", F.expr("at - INTERVAL 40 SECONDS")))
    both = both.groupBy(F.window("at", "1 minute"), "key").count()
    with pytest.raises(UnsoundPlanError, match=message):
        alone.start(pipeline, pipeline.report(both, stage=COUNTS, event_time="window"))


def test_a_union_with_a_source_that_is_not_an_input(spark: SparkSession, tmp_path: Path) -> None:
    flow = Flow(spark, "http://127.0.0.1:1", tmp_path)
    spec = SPEC | {"strangers": {"shards": SHARDS}}
    with Pipeline(flow.url, JOB, spec, spark=spark, patience="100 ms") as pipeline:
        rows, others = (
            pipeline.watermarked(
                pipeline.source(
                    flow.readings(),
                    stage=source,
                    shard="sensor",
                    event_time="at",
                    strategy=Ascending(),
                ),
                stage=COUNTS,
                event_time="at",
            )
            for source in (SOURCE, "strangers")
        )
        with pytest.raises(ValueError, match="'strangers', which is not among its inputs"):
            flow.start(pipeline, pipeline.report(rows.union(others), stage=COUNTS))


def test_an_event_time_that_is_computed_behind_the_source(alone: Flow, pipeline: Pipeline) -> None:
    earlier = alone.source(pipeline).withColumn("at", F.expr("at - INTERVAL 1 HOUR"))
    rows = pipeline.watermarked(earlier, stage=COUNTS, event_time="at")
    with pytest.raises(ValueError, match=r"compute it .*before source\(\)"):
        alone.start(pipeline, pipeline.report(rows, stage=COUNTS))


def test_a_join_before_the_watermark(spark: SparkSession, tmp_path: Path) -> None:
    flow = Flow(spark, "http://127.0.0.1:1", tmp_path)
    with flow.pipeline(patience="100 ms") as pipeline:
        rows = flow.source(pipeline).join(
            flow.readings().select("key", F.col("at").alias("other_at")), "key"
        )
        frame = pipeline.watermarked(rows, stage=COUNTS, event_time="at")
        with pytest.raises(ValueError, match=r"a join of two streams needs watermarked\(\)"):
            flow.start(pipeline, pipeline.report(frame, stage=COUNTS, event_time="at"))


@pytest.mark.parametrize("keyed", [True, False])
def test_a_query_that_is_started_without_the_pipeline(
    service: Service, spark: SparkSession, tmp_path: Path, *, keyed: bool
) -> None:
    """Its batches would never be committed, and the watermark would stand without a word."""
    flow = Flow(spark, service.url, tmp_path)
    flow.write(steady(range(3)))
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline) if keyed else flow.source(pipeline)
        query = frame.writeStream.format("noop").trigger(availableNow=True).start()
        with pytest.raises(StreamingQueryException, match=r"not started with Pipeline.start\(\)"):
            query.awaitTermination(DEADLINE_S)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_start_that_fails_leaves_its_sources_disconnected(flow: Flow, *, is_early: bool) -> None:
    """A later start without the pipeline would be served by the feed of a query that never was."""
    flow.write(steady(range(3)))
    spec = SPEC | {SOURCE: {**SPEC[SOURCE], "percentiles": [50]}}
    with Pipeline(flow.url, JOB, spec, spark=flow.spark, replace=True) as pipeline:
        if is_early:
            rows = pipeline.watermarked(
                flow.readings(), stage=COUNTS, event_time="at", percentile=50
            )
            frame = rows.groupBy(F.window("at", "10 seconds")).count()
        else:
            frame = flow.counts(pipeline)
        writer = frame.writeStream.outputMode("append").option(
            "checkpointLocation", str(flow.checkpoint)
        )
        with pytest.raises(Exception, match="no-such-sink"):
            pipeline.start(writer.format("no-such-sink"))
        query = frame.writeStream.format("noop").trigger(availableNow=True).start()
        with pytest.raises(StreamingQueryException, match=r"not started with Pipeline.start\(\)"):
            query.awaitTermination(DEADLINE_S)
        if not is_early:
            [run] = flow.client.runs(JOB)["runs"]
            assert run["outcome"] == "failed"
            assert "no-such-sink" in (run["because"] or "")


def test_workers_of_another_python(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "python-of-another-world")
    with pytest.raises(RuntimeError, match=r"'python-of-another-world'.*set .* PYSPARK_PYTHON"):
        Pipeline("http://127.0.0.1:1", JOB, SPEC, spark=spark, patience="100 ms")


def test_a_job_that_is_declared_otherwise(spark: SparkSession, service: Service) -> None:
    with Pipeline(service.url, JOB, SPEC, spark=spark):
        pass
    other = SPEC | {SOURCE: {"shards": ["left"]}}
    with pytest.raises(DeclaredOtherwise, match="replace=True"):
        Pipeline(service.url, JOB, other, spark=spark)
    with Pipeline(service.url, JOB, other, spark=spark, replace=True):
        pass


def test_a_job_that_is_declared_with_a_throttle(spark: SparkSession, service: Service) -> None:
    throttle = {"groups": [{"stages": [SOURCE], "max_drift_ms": 60_000}]}
    with Pipeline(service.url, JOB, SPEC, spark=spark, throttle=throttle):
        pass
    with Pipeline(service.url, JOB, SPEC, spark=spark, throttle=throttle):
        pass
    with pytest.raises(DeclaredOtherwise, match="another throttle"):
        Pipeline(service.url, JOB, SPEC, spark=spark)


@pytest.mark.slow
def test_an_aggregator_that_hangs_holds_no_batch_for_long(
    spark: SparkSession, tmp_path: Path
) -> None:
    readings = steady(range(30))
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # takes connections, answers none
        flow = Flow(spark, f"http://127.0.0.1:{hanging.getsockname()[1]}", tmp_path)
        flow.write(readings)
        with flow.pipeline(patience="200 ms") as pipeline:
            query = flow.start(pipeline, flow.counts(pipeline), bounded=False)
            query.processAllAvailable()
            state = query.recentProgress[0]["stateOperators"][0]
            assert state["numRowsTotal"] == len(windows(readings))


@pytest.mark.parametrize("own_thread", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_that_are_written_from_a_thread_of_ones_own_are_missed(
    spark: SparkSession,
    service: Service,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    own_thread: bool,
) -> None:
    """Spark does not tell their tasks the query that they are of."""

    def write(batch: DataFrame, _: int) -> None:
        noop = batch.write.format("noop").mode("overwrite").save
        if own_thread:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(noop).result()
        else:
            noop()

    flow = Flow(spark, service.url, tmp_path)
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        writer = flow.counts(pipeline).writeStream.foreachBatch(write)
        writer = writer.option("checkpointLocation", str(flow.checkpoint))
        ended(pipeline.start(writer.trigger(availableNow=True)))
    said = [each for each in caplog.messages if "180 rows, but no task has reported" in each]
    assert len(said) == own_thread
    assert all("Stages: sensors, counts. In foreachBatch" in each for each in said)
    assert (flow.watermark(SOURCE).output_ms is None) == own_thread


def joined_by_window(flow: Flow, pipeline: Pipeline) -> tuple[DataFrame, DataFrame]:
    """The readings, each row with its event time and its window; and these joined with themselves."""

    def side(frame: DataFrame, name: str) -> DataFrame:
        read = pipeline.watermarked(frame, stage=COUNTS, event_time="at")
        return read.withColumn("window", F.window("at", "10 seconds")).alias(name)

    left = side(flow.source(pipeline), "l")
    equal = F.expr("l.window = r.window AND l.key = r.key")
    return left, left.join(side(flow.readings(), "r"), equal)


def test_several_event_times_before_an_operator_that_takes_one(
    alone: Flow, pipeline: Pipeline
) -> None:
    """Spark fails on them in its first batch."""
    alone.files_per_batch = None
    alone.write(steady(range(3)))
    left, joined = joined_by_window(alone, pipeline)
    for frame in (
        joined.select("l.key", "l.at", F.col("l.window.end").alias("end")),
        left.dropDuplicates(["key", "at"]),
    ):
        reported = pipeline.report(frame, stage=COUNTS, event_time="at", delay="10 seconds")
        with pytest.raises(
            UnsoundPlanError, match=r"several event times \(at, window\).*drop the others before it"
        ):
            alone.start(pipeline, reported)


def test_event_times_that_nothing_needs_do_not_count(alone: Flow, pipeline: Pipeline) -> None:
    """Spark removes them before its operators run."""
    _, joined = joined_by_window(alone, pipeline)
    plans = PlanReader(alone.spark)
    assert plans.several_event_times(joined.select("l.key", "l.window")) == []
    assert plans.several_event_times(joined) == ["at", "window"]


@pytest.mark.parametrize(
    ("columns", "warnings"), [(["key"], 1), (["key", "at"], 0), (None, 0)], ids=str
)
def test_a_deduplication_that_never_forgets(
    alone: Flow,
    pipeline: Pipeline,
    caplog: pytest.LogCaptureFixture,
    columns: list[str] | None,
    warnings: int,
) -> None:
    rows = pipeline.watermarked(alone.source(pipeline), stage=COUNTS, event_time="at")
    frame = pipeline.report(rows.dropDuplicates(columns), stage=COUNTS, event_time="at")
    writer = frame.writeStream.option("checkpointLocation", str(alone.checkpoint))
    for bounded in (False, True):
        with pytest.raises(Exception, match="no-such-sink"):
            pipeline.start(writer.format("no-such-sink"), bounded=bounded)
        found = [each for each in caplog.messages if "dropDuplicates by key keeps each key" in each]
        assert len(found) == warnings, "a bounded query does not warn"


def test_ranges_that_are_not_the_checkpoint_s_partitions(flow: Flow) -> None:
    """Spark keeps the number of a checkpoint, whatever its setting is."""
    flow.write(steady(range(12)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger={"availableNow": True}))
    partitions = "spark.sql.shuffle.partitions"
    spec = SPEC | {COUNTS: {"inputs": [SOURCE], "ranges": 3}}
    flow.spark.conf.set(partitions, "3")
    try:
        with Pipeline(flow.url, JOB, spec, spark=flow.spark, replace=True) as pipeline:
            message = (
                r"'counts' has 3 ranges, and the checkpoint .* 2 partitions.*\"ranges\": 2 again"
            )
            with pytest.raises(ValueError, match=message):
                flow.start(pipeline, flow.counts(pipeline))
    finally:
        flow.spark.conf.set(partitions, "2")
    flow.write(steady(range(12, 24)))
    with flow.pipeline(replace=True) as pipeline:
        query = flow.start(
            pipeline, flow.counts(pipeline), trigger={"availableNow": True}, bounded=True
        )
        ended(query)
    assert flow.counted() == windows(steady(range(24)))
