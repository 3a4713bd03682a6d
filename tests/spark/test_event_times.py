"""Event times without a time zone, in sessions of Spark that are not in UTC; names as Spark reads them.

A watermark that is off by the session's distance from UTC would close each window hours too early, or
none at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Ascending, IngressTime, Pipeline, WallClock
from spark_agent.columns import with_output_time
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.firing_frames import end_us
from spark_agent.jvm.plan import PlanReader
from spark_agent.late_frames import is_late
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    SHARDS,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    ended,
    steady,
    windows,
)

ZONES = ["America/New_York", "Asia/Kolkata"]
"""The one is behind UTC, the other ahead."""


@pytest.fixture(params=ZONES)
def zone(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[str]:
    yield from _in_zone(spark, request.param)


@pytest.fixture
def new_york(spark: SparkSession) -> Iterator[str]:
    yield from _in_zone(spark, "America/New_York")


@pytest.fixture
def kolkata(spark: SparkSession) -> Iterator[str]:
    yield from _in_zone(spark, "Asia/Kolkata")


def _in_zone(spark: SparkSession, zone: str) -> Iterator[str]:
    spark.conf.set("spark.sql.session.timeZone", zone)
    yield zone
    spark.conf.set("spark.sql.session.timeZone", "UTC")


def wall_clocks(flow: Flow, name: str = "at") -> DataFrame:
    """Return the readings as a stream, with the times of UTC's clock and without its zone."""
    reader = flow.spark.readStream.schema("sensor string, key string, at string")
    rows = reader.option("maxFilesPerTrigger", 1).json(str(flow.inbox))
    return rows.select("sensor", "key", F.substring("at", 1, 19).cast("timestamp_ntz").alias(name))


def source(flow: Flow, pipeline: Pipeline, **given: Any) -> DataFrame:
    arguments: dict[str, Any] = {"shard": "sensor", "event_time": "at", "strategy": BOUND} | given
    return pipeline.source(wall_clocks(flow), stage=SOURCE, **arguments)


def counted(rows: DataFrame) -> DataFrame:
    grouped = rows.groupBy(F.window("at", "10 seconds"), "key")
    return grouped.agg(F.count("*").alias("rows"))


def total(flow: Flow) -> int:
    rows = flow.spark.read.schema("rows long").json(str(flow.output))
    return rows.agg(F.sum("rows")).collect()[0][0]


def seconds(value: datetime) -> int:
    """Return a wall clock in seconds since the start, by UTC."""
    return int(value.replace(tzinfo=UTC).timestamp()) - START_MS // 1_000


def read(flow: Flow, frame: DataFrame) -> Counter[tuple[Any, ...]]:
    rows = flow.spark.read.schema(frame.schema).parquet(str(flow.output))
    return Counter(
        tuple(seconds(each) if isinstance(each, datetime) else each for each in row)
        for row in rows.collect()
    )


def run(flow: Flow, pipeline: Pipeline, frame: DataFrame, *, bounded: bool = False) -> None:
    """Run a query to its end, of whose rows not one may be late."""
    writer = frame.writeStream.format("parquet").option("path", str(flow.output))
    writer = writer.option("checkpointLocation", str(flow.checkpoint)).trigger(availableNow=True)
    query = pipeline.start(writer, bounded=bounded)
    ended(query)
    operators = [op for each in query.recentProgress for op in each["stateOperators"]]
    assert operators
    assert not any(each["numRowsDroppedByWatermark"] for each in operators)
    assert not pipeline.counts["late_rows"]
    assert not pipeline.counts["early_rows"]


@pytest.mark.usefixtures("zone")
def test_windows_close_exactly_by_the_watermark(flow: Flow, pipeline: Pipeline) -> None:
    readings = steady(range(0, 60, 2))
    for each in range(0, 60, 20):
        flow.write(steady(range(each, each + 20, 2)))
    rows = source(flow, pipeline, shard="SENSOR", event_time="At")
    rows = pipeline.watermarked(rows, stage=COUNTS, event_time="AT")
    frame = pipeline.report(counted(rows), stage=COUNTS, event_time="WINDOW", on_early="fail")
    frame = frame.select(F.col("window.start").alias("start"), "key", "rows")
    run(flow, pipeline, frame)
    # The right sensor is at 55 s, and may be five seconds older. The left one is further.
    assert flow.output_of(SOURCE) == flow.output_of(COUNTS) == START_MS + 50_000
    expected = {(start, key, rows) for (key, start), rows in windows(readings).items()}
    assert set(read(flow, frame)) == {each for each in expected if each[0] + 10 <= 50}
    run(flow, pipeline, frame, bounded=True)
    assert read(flow, frame) == Counter(expected)


TWO: Mapping[str, Any] = {**SPEC, "second": {"inputs": [COUNTS], "ranges": 2}}


@pytest.mark.usefixtures("new_york")
def test_a_second_stage_reads_wall_clocks(flow: Flow) -> None:
    """Windows of 10 s, and windows of 30 s of their ends."""
    readings = steady(range(0, 60, 2))
    flow.write(readings)
    with Pipeline(flow.url, "two", TWO, spark=flow.spark, poll="50 ms") as pipeline:
        rows = pipeline.watermarked(source(flow, pipeline), stage=COUNTS, event_time="at")
        first = counted(rows).select(F.window_time("window").alias("at"), "key", "rows")
        run(flow, pipeline, pipeline.report(first, stage=COUNTS, event_time="at"), bounded=True)
        second = Flow(flow.spark, flow.url, flow.output.parent / "second")
        rows = flow.spark.readStream.schema(first.schema).parquet(str(flow.output))
        rows = pipeline.watermarked(rows, stage="second", event_time="at")
        grouped = rows.groupBy(F.window("at", "30 seconds"), "key").agg(F.sum("rows").alias("rows"))
        frame = pipeline.report(grouped, stage="second", on_early="fail")
        frame = frame.select(F.col("window.start").alias("start"), "key", "rows")
        run(second, pipeline, frame, bounded=True)
    expected: Counter[tuple[int, str]] = Counter()
    for each in readings:
        # START_S is 20 s after a multiple of 30 s.
        expected[(each.second + 20) // 30 * 30 - 20, each.key] += 1
    assert read(second, frame) == Counter((*key, rows) for key, rows in expected.items())


@pytest.mark.usefixtures("new_york")
def test_sessions_dated_by_their_start(flow: Flow, pipeline: Pipeline) -> None:
    """The promise reads the start of the open session from Spark's state."""
    burst = [each for start in (0, 30, 60) for each in range(start, start + 10, 2)]
    readings = [Reading(sensor, "a", second) for second in burst for sensor in SHARDS]
    flow.write(readings[:20])
    flow.write(readings[20:])
    rows = source(flow, pipeline, strategy=Ascending())
    rows = pipeline.watermarked(rows, stage=COUNTS, event_time="at")
    sessions = rows.groupBy(F.session_window("at", "5 seconds"), "key")
    frame = sessions.agg(F.count("*").alias("rows"), F.min("at").alias("at"))
    frame = pipeline.report(frame, stage=COUNTS, output_time="earliest", on_early="fail")
    frame = frame.select("at", "rows")
    run(flow, pipeline, frame)
    assert read(flow, frame) == Counter([(0, 10), (30, 10)])
    assert flow.output_of(COUNTS) == START_MS + 60_000
    run(flow, pipeline, frame, bounded=True)
    assert read(flow, frame) == Counter([(0, 10), (30, 10), (60, 10)])


@pytest.mark.usefixtures("kolkata")
def test_late_rows_are_put_aside(flow: Flow, pipeline: Pipeline) -> None:
    late = [Reading("left", "a", second) for second in (3, 14, 25)]
    parts = [steady(range(0, 60, 2)), steady(range(90, 110, 2)), [], [], [], late]
    for part in [*parts, steady(range(150, 160, 2))]:
        flow.write(part)
    rows, aside = pipeline.split_late(source(flow, pipeline), stage=COUNTS, event_time="AT")
    frame = pipeline.report(counted(rows), stage=COUNTS)
    writer = frame.writeStream.format("json").option("path", str(flow.output))
    writer = writer.option("checkpointLocation", str(flow.checkpoint)).trigger(**AVAILABLE_NOW)  # type: ignore[arg-type]
    folder = str(flow.output.parent / "late")
    ended(
        pipeline.start(
            writer, late=aside.writeStream.format("parquet").option("path", folder), bounded=True
        )
    )
    found = flow.spark.read.schema(aside.schema).parquet(folder).collect()
    assert sorted(seconds(row["at"]) for row in found) == [3, 14, 25]
    assert total(flow) == sum(map(len, parts)) - len(late) + len(steady(range(150, 160, 2)))


@pytest.mark.usefixtures("kolkata")
def test_a_join_of_wall_clocks(flow: Flow, pipeline: Pipeline) -> None:
    seconds_ = range(0, 40, 4)
    for start in (0, 20):
        flow.write(Reading(sensor, "a", s + start) for s in seconds_[:5] for sensor in SHARDS)
    condition = F.expr("l.key = r.key AND l_at BETWEEN r_at - INTERVAL 6 SECONDS AND r_at")
    left, right = (
        pipeline.watermarked(rows, stage=COUNTS, event_time="at")
        .filter(F.col("sensor") == sensor)
        .select("key", F.col("at").alias(f"{sensor[0]}_at"))
        for sensor, rows in (("left", source(flow, pipeline)), ("right", wall_clocks_now(flow)))
    )
    frame = left.alias("l").join(right.alias("r"), condition).select("l_at", "r_at")
    frame = pipeline.report(frame, stage=COUNTS, event_time="l_at", on_early="fail")
    run(flow, pipeline, frame, bounded=True)
    pairs = [(s, other) for s in seconds_ for other in seconds_ if other - 6 <= s <= other]
    assert read(flow, frame) == Counter(pairs)


def wall_clocks_now(flow: Flow) -> DataFrame:
    """Return the readings as another stream, without a limit."""
    reader = flow.spark.readStream.schema("sensor string, key string, at string")
    times = F.substring("at", 1, 19).cast("timestamp_ntz").alias("at")
    return reader.json(str(flow.inbox)).select("sensor", "key", times)


@pytest.mark.usefixtures("zone")
def test_microseconds_are_those_of_utc(spark: SparkSession) -> None:
    """The filter of late rows, firings, and output times compare them with the watermark."""
    rows = spark.sql("SELECT TIMESTAMP_NTZ'2026-03-08 02:30:00.000001' AS at")
    first_us = 1_772_937_000_000_001  # 2026-03-08T02:30:00.000001Z: New York's clocks skip it
    late = [is_late(rows, "at", F.lit(us)) for us in (first_us, first_us + 1)]
    assert rows.select(*late).collect() == [(False, True)]
    windows_ = rows.groupBy(F.window("at", "1 hour")).agg(F.min("at").alias("at"))
    assert windows_.select(end_us(windows_, "window")).collect() == [(1_772_938_800_000_000,)]
    dated = with_output_time(windows_, "at", "window", 1_500_000)
    assert dated.schema["at"].dataType.simpleString() == "timestamp_ntz"
    assert str(dated.collect()[0]["at"]) == "2026-03-08 02:59:58.500000"


@pytest.fixture
def alone(spark: SparkSession, tmp_path: Any) -> Flow:
    """A flow without a service."""
    return Flow(spark, "http://127.0.0.1:1", tmp_path)


@pytest.fixture
def unserved(alone: Flow) -> Iterator[Pipeline]:
    with alone.pipeline(patience="100 ms") as pipeline:
        yield pipeline


Sides = Callable[[DataFrame, DataFrame], DataFrame]


@pytest.mark.parametrize(
    ("combined", "message"),
    [
        (
            lambda left, right: left.join(right, F.expr("a BETWEEN b - INTERVAL 1 HOUR AND b")),
            "the join compares a timestamp_ntz, 'a', with a timestamp",
        ),
        (
            lambda left, right: right.union(left).groupBy(F.window("b", "1 hour")).count(),
            "a union has a timestamp and a timestamp_ntz as event time 'b'",
        ),
        (
            lambda left, _: left.alias("l").join(
                left.withColumnRenamed("a", "c"),
                F.expr("a BETWEEN c - INTERVAL 1 HOUR AND c - INTERVAL 1 MINUTE"),
                "left",
            ),
            "an outer or semi join of two streams has a timestamp_ntz",
        ),
    ],
    ids=["join", "union", "outer join"],
)
def test_wall_clocks_do_not_meet_instants(
    alone: Flow, unserved: Pipeline, combined: Sides, message: str
) -> None:
    alone.files_per_batch = None
    left = unserved.watermarked(wall_clocks_now(alone), stage=COUNTS, event_time="at")
    right = unserved.watermarked(alone.readings(), stage=COUNTS, event_time="at")
    frame = combined(left.select(F.col("at").alias("a")), right.select(F.col("at").alias("b")))
    frame = unserved.report(frame, stage=COUNTS, event_time=frame.columns[0])
    with pytest.raises(UnsoundPlanError, match=f"{message}.*cast the timestamp_ntz before source"):
        alone.start(unserved, frame)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (WallClock("5 seconds"), r"WallClock\(.*promises by the clock.*cast it before source"),
        ("CAST(at AS TIMESTAMP)", "SQL gives timestamp; it must give a timestamp_ntz, as"),
    ],
)
def test_strategies_that_mix_wall_clocks_and_instants(
    alone: Flow, unserved: Pipeline, strategy: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        source(alone, unserved, strategy=strategy)


def named(frame: DataFrame, names: Iterable[str]) -> DataFrame:
    return frame.toDF(*names)


def test_names_that_may_be_several_columns(
    alone: Flow, unserved: Pipeline, spark: SparkSession
) -> None:
    readings = alone.readings()
    several = named(readings.withColumn("other", F.col("at")), ["sensor", "key", "at", "AT"])
    with pytest.raises(ValueError, match="'At' may be each of the columns at, AT"):
        unserved.watermarked(several, stage=COUNTS, event_time="At")
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        unserved.watermarked(several, stage=COUNTS, event_time="AT")
        with pytest.raises(ValueError, match=r"unknown column 'At'.*case-sensitive here"):
            unserved.watermarked(several, stage=COUNTS, event_time="At")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    with pytest.raises(
        ValueError, match="IngressTime adds the column 'AT', and the data frame has"
    ):
        unserved.source(
            readings, stage=SOURCE, shard="sensor", event_time="AT", strategy=IngressTime()
        )


def test_a_field_is_not_a_column(alone: Flow, unserved: Pipeline) -> None:
    meta = alone.readings().withColumn("meta", F.struct("at"))
    with pytest.raises(ValueError, match=r"withColumn\('meta_at', F.expr\('meta.at'\)\)"):
        unserved.watermarked(meta, stage=COUNTS, event_time="meta.at")
    both = meta.withColumn("meta.at", F.col("at"))
    with pytest.raises(ValueError, match="may be the column of this name, or a field"):
        unserved.watermarked(both, stage=COUNTS, event_time="meta.at")
    rows = unserved.watermarked(both, stage=COUNTS, event_time="`meta.at`")
    columns = PlanReader(alone.spark).read(rows).output
    assert [each.name for each in columns if each.stamp] == ["meta.at"]
