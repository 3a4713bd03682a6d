"""Output times: results of windows are dated by their end, their earliest row, or their latest one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from docs import drawings
from spark_agent import Ascending, OutputTime, Pipeline, UnsoundPlanError
from spark_agent.columns import with_output_time
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
    SHARDS,
    SOURCE,
    SPEC,
    START_S,
    Flow,
    Reading,
    ended,
    spark_watermark,
    steady,
    until,
)

GAP_S, LONGEST_S, SIZE_S, SLIDE_S = 4, 12, 15, 5


def tumbling() -> Column:
    return F.window("at", f"{SLIDE_S} seconds")


def sliding() -> Column:
    return F.window("at", f"{SIZE_S} seconds", f"{SLIDE_S} seconds")


def sessions() -> Column:
    return F.session_window("at", f"{GAP_S} seconds")


def extreme(output_time: OutputTime) -> Column:
    return F.min("at") if output_time is OutputTime.EARLIEST else F.max("at")


def instants(spark: SparkSession, times: Iterable[int]) -> DataFrame:
    rows = [(datetime.fromtimestamp(ms / 1_000, UTC),) for ms in times]
    return spark.createDataFrame(rows, "at timestamp")


def dated(windowed: DataFrame, window: str, reach_ms: int) -> list[tuple[int, int]]:
    """Return the end and the output time of each window, in order."""
    rows = with_output_time(windowed, "at", window, reach_ms * 1_000)
    end, at = F.unix_millis(F.col(window)["end"]), F.unix_millis("at")
    return sorted((row[0], row[1]) for row in rows.select(end, at).collect())


@pytest.mark.parametrize(("output_time", "at"), [(OutputTime.EARLIEST, 0), (OutputTime.LATEST, 10)])
def test_beam_fixed_windows(spark: SparkSession, output_time: OutputTime, at: int) -> None:
    """Beam's GroupByKeyTest, testTimestampCombinerEarliest and testTimestampCombinerLatest."""
    rows = instants(spark, [0, 10]).groupBy(F.window("at", "10 minutes"))
    found = dated(rows.agg(extreme(output_time).alias("at")), "window", 600_000)
    assert found == [(600_000, at)]


@pytest.mark.parametrize("ms", [200, 800, 499, 500, 501, 700, 1000])
def test_beam_sliding_windows(spark: SparkSession, ms: int) -> None:
    """Beam's SlidingWindowsTest, testValidOutputTimes and testOutputTimesNonInterference.

    A time is in its window, not before the row's, and not before the end of the window before.
    """
    rows = instants(spark, [ms]).groupBy(F.window("at", "1000 milliseconds", "500 milliseconds"))
    found = dated(rows.agg(F.min("at").alias("at")), "window", 500)
    assert len(found) == 2
    before = 0
    for end, at in found:
        assert max(ms, before) <= at < end
        before = end


def test_element_of_two_overlapping_windows(spark: SparkSession) -> None:
    """Size 10, period 5, element 7: 7 in [0, 10), and 10 in [5, 15)."""
    rows = instants(spark, [7]).groupBy(F.window("at", "10 milliseconds", "5 milliseconds"))
    assert dated(rows.agg(F.min("at").alias("at")), "window", 5) == [(10, 7), (15, 10)]


@pytest.mark.parametrize(
    ("output_time", "reach_ms", "times"),
    [
        (OutputTime.EARLIEST, 100, [(13, 1), (30, 0)]),
        (OutputTime.EARLIEST, 20, [(13, 1), (30, 10)]),
        (OutputTime.LATEST, 10, [(13, 3), (30, 20)]),
    ],
)
def test_beam_sessions(
    spark: SparkSession, output_time: OutputTime, reach_ms: int, times: list[tuple[int, int]]
) -> None:
    """Beam's SessionsTest, testInvalidOutputAtEarliest: the sessions of two users, with a gap of 10."""
    first = instants(spark, [1, 3]).withColumn("user", F.lit(1))
    both = first.union(instants(spark, [0, 5, 10, 15, 20]).withColumn("user", F.lit(2)))
    grouped = both.groupBy(F.session_window("at", "10 milliseconds"), "user")
    found = dated(grouped.agg(extreme(output_time).alias("at")), "session_window", reach_ms)
    assert found == times


@dataclass(frozen=True)
class Case:
    """Windows, and the reach of their output times before their end, in seconds."""

    windows: Callable[[], Column]
    name: str
    reach_s: int
    output_time: OutputTime
    longest_s: int | None = None

    @property
    def arguments(self) -> Mapping[str, str]:
        longest = {} if self.longest_s is None else {"longest": f"{self.longest_s} s"}
        return {"output_time": self.output_time.value} | longest

    def aggregated(self, rows: DataFrame) -> DataFrame:
        at = extreme(self.output_time).alias("at")
        return rows.groupBy(self.windows(), "key").agg(F.count("*").alias("rows"), at)

    def expected(self, rows: DataFrame) -> DataFrame:
        reach = F.expr(f"INTERVAL {self.reach_s} SECONDS")
        bounded = F.greatest("at", F.col(self.name)["end"] - reach)
        return self.aggregated(rows).withColumn("at", bounded)


CASES = [
    Case(tumbling, "window", SLIDE_S, OutputTime.EARLIEST),
    Case(tumbling, "window", SLIDE_S, OutputTime.LATEST),
    Case(sliding, "window", SLIDE_S, OutputTime.EARLIEST),
    Case(sliding, "window", SLIDE_S, OutputTime.LATEST),
    Case(sessions, "session_window", LONGEST_S, OutputTime.EARLIEST, LONGEST_S),
    Case(sessions, "session_window", GAP_S, OutputTime.LATEST),
]


def readings() -> list[list[Reading]]:
    """Return batches with pauses, so that there are sessions, one of them longer than is declared."""
    seconds = [second for second in range(60) if second < 20 or second % 10 < 5]
    return [steady(seconds[at : at + 8]) for at in range(0, len(seconds), 8)]


def watermarked(flow: Flow, pipeline: Pipeline) -> DataFrame:
    return pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")


def alike(frame: DataFrame) -> Counter[tuple[object, ...]]:
    return Counter(tuple(row) for row in frame.collect())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.output_time}")
def test_windows_are_dated_and_none_is_early(flow: Flow, pipeline: Pipeline, case: Case) -> None:
    for batch in readings():
        flow.write(batch)
    frame = case.aggregated(watermarked(flow, pipeline))
    frame = pipeline.report(frame, stage=COUNTS, on_early="fail", **case.arguments)  # type: ignore[arg-type]
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    found = flow.spark.read.schema(frame.schema).json(str(flow.output))
    rows = flow.spark.read.schema("sensor string, key string, at timestamp").json(str(flow.inbox))
    assert alike(found) == alike(case.expected(rows)) != Counter()
    assert pipeline.counts["early_rows"] == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.output_time}")
def test_the_promise_waits_for_open_windows(flow: Flow, pipeline: Pipeline, case: Case) -> None:
    """W is at 17 s. The last end that tumbling and sliding windows have passed is at 15 s."""
    flow.write([Reading(sensor, "a", second) for sensor in ("left", "right") for second in (3, 17)])
    rows = pipeline.watermarked(flow.source(pipeline, Ascending()), stage=COUNTS, event_time="at")
    frame = pipeline.report(case.aggregated(rows), stage=COUNTS, **case.arguments)  # type: ignore[arg-type]
    query = flow.start(pipeline, frame, trigger={"processingTime": "100 milliseconds"})
    # Spark is given a millisecond less where a row dated W would be split from its session.
    promise_ms = 15_000 if case.name == "window" else (17 - case.reach_s) * 1_000 - 1
    until(lambda: flow.output_of(COUNTS) == START_S * 1_000 + promise_ms, "the promise is made")
    assert input_of(flow) == (START_S + 17) * 1_000
    assert "'output_time'" in str(flow.client.explain(JOB, COUNTS))
    query.stop()


# Three windows that overlap, of the book's section on output timestamps: one element at second 7 in
# windows of 15 seconds that begin every 5.

THREE: Mapping[str, Mapping[str, object]] = {
    **SPEC,
    "second": {"inputs": [COUNTS], "ranges": 2},
}


def outcomes(flow: Flow, arguments: Mapping[str, str], seconds: Iterable[int]) -> dict[int, int]:
    """Return, by window of the second stage, the watermark (s) at which the second stage wrote it."""
    found: dict[int, int] = {}
    with Pipeline(flow.url, "three", THREE, spark=flow.spark, poll="50 ms") as pipeline:
        for second in seconds:
            key = "a" if second == 7 else "tick"
            flow.write([Reading(sensor, key, second) for sensor in ("left", "right")])
            ended(_first_stage(flow, pipeline, arguments))
            ended(_second_stage(flow, pipeline))
            written = flow.spark.read.schema("start long").json(str(flow.output.parent / "second"))
            for row in written.collect():
                found.setdefault(row["start"] - START_S, second)
    return found


def _first_stage(flow: Flow, pipeline: Pipeline, arguments: Mapping[str, str]) -> StreamingQuery:
    rows = pipeline.watermarked(flow.source(pipeline, Ascending()), stage=COUNTS, event_time="at")
    first = rows.groupBy(sliding(), "key").agg(F.min("at").alias("at"))
    frame = pipeline.report(first, stage=COUNTS, event_time="at", **arguments)  # type: ignore[arg-type]
    return flow.start(pipeline, frame, trigger=AVAILABLE_NOW)


def _second_stage(flow: Flow, pipeline: Pipeline) -> StreamingQuery:
    schema = "window struct<start: timestamp, end: timestamp>, key string, at timestamp"
    rows = flow.spark.readStream.schema(schema).json(str(flow.output)).filter("key = 'a'")
    rows = pipeline.watermarked(rows, stage="second", event_time="at")
    second = rows.groupBy(tumbling()).agg(F.count("*").alias("rows"))
    second = second.select(F.unix_seconds("window.start").alias("start"), "window", "rows")
    frame = pipeline.report(second, stage="second", event_time="window")
    writer = frame.writeStream.format("json").option("path", str(flow.output.parent / "second"))
    writer = writer.option("checkpointLocation", str(flow.output.parent / "second-checkpoint"))
    return pipeline.start(writer.trigger(availableNow=True))


def test_overlapping_windows_do_not_stall_the_stage_below(flow: Flow) -> None:
    """Each window comes out of the second stage as soon as it has come out of the first one."""
    found = outcomes(flow, {"output_time": "earliest"}, (7, 10, 15, 20))
    assert found == {5: 10, 10: 15, 15: 20}


def test_overlapping_windows_stall_the_stage_below_without_the_rule(flow: Flow) -> None:
    """All three are dated 7, and the one window with them waits for the last of them."""
    found = outcomes(flow, {"delay": f"{SIZE_S} s"}, (7, 20, 24, 25))
    assert found == {5: 25}


REFUSED = [
    ({"output_time": "first"}, "write one of 'end_of_window', 'earliest', 'latest'"),
    ({"output_time": "earliest", "delay": "1 s"}, "leave delay='1 s' out"),
    ({"longest": "1 s"}, "add output_time='earliest'"),
    ({"output_time": "earliest", "longest": "1 s"}, "leave longest= out"),
    ({"output_time": "latest"}, "none of the columns is max() of the event time"),
    ({"output_time": "earliest", "event_time": "window"}, "'window' is not min() of the event"),
    ({"output_time": "end_of_window", "event_time": "at"}, "'at' is not the end of a window"),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED)
def test_refused_arguments(
    flow: Flow, pipeline: Pipeline, arguments: Mapping[str, str], reason: str
) -> None:
    frame = CASES[0].aggregated(watermarked(flow, pipeline))
    with pytest.raises(ValueError, match="stage 'counts'") as error:
        pipeline.report(frame, stage=COUNTS, **arguments)  # type: ignore[arg-type]
    assert reason in str(error.value)


def test_an_output_time_of_a_column_that_is_not_there(flow: Flow, pipeline: Pipeline) -> None:
    frame = CASES[0].aggregated(watermarked(flow, pipeline))
    with pytest.raises(ValueError, match="unknown column 'x'; the data frame has"):
        pipeline.report(frame, stage=COUNTS, output_time="earliest", event_time="x")


def test_open_sessions_that_cannot_be_read(flow: Flow, pipeline: Pipeline) -> None:
    rows = watermarked(flow, pipeline)
    named = rows.withColumnRenamed("key", "sessionStartTime")
    grouped = named.groupBy(sessions(), "sessionStartTime").agg(F.min("at").alias("at"))
    with pytest.raises(UnsoundPlanError, match="rename the key"):
        pipeline.report(grouped, stage=COUNTS, output_time="earliest")
    frame = pipeline.report(starts(rows), stage=COUNTS, output_time="earliest")
    writer = frame.writeStream.format("noop")
    with pytest.raises(UnsoundPlanError, match="longest='2 hours'"):
        pipeline.start(writer)
    with pytest.raises(UnsoundPlanError, match="spaces or other characters"):
        pipeline.start(writer.option("checkpointLocation", f"{flow.checkpoint} of taps"))
    merges = "spark.sql.streaming.sessionWindow.merge.sessions.in.local.partition"
    with (
        setting(flow.spark, merges, "true"),
        pytest.raises(UnsoundPlanError, match="leave it at false"),
    ):
        pipeline.start(writer.option("checkpointLocation", str(flow.checkpoint)))


def test_refused_plans(flow: Flow, pipeline: Pipeline) -> None:
    rows = watermarked(flow, pipeline)
    grouped = rows.groupBy(tumbling(), "key")
    of_some = F.expr("min(at) FILTER (WHERE key = 'a')").alias("at")
    months = rows.groupBy(F.session_window("at", "1 month"), "key").agg(F.max("at").alias("at"))
    by_row = F.session_window(
        "at", F.expr("CASE WHEN key = 'a' THEN '1 second' ELSE '9 second' END")
    )
    for frame, output_time, reason in [
        (rows, "earliest", "is of windows"),
        (rows.dropDuplicates(["key", "at"]), "earliest", "is of windows"),
        (rows.groupBy("at").count(), "earliest", "is of windows"),
        (grouped.agg(F.min("at").alias("at")).drop("window"), "earliest", "keep the window"),
        (grouped.agg(of_some), "earliest", "over all rows of the window"),
        (grouped.agg(F.avg("at").cast("timestamp").alias("at")), "earliest", "none of the columns"),
        (
            grouped.agg(F.min(F.col("at") + F.expr("INTERVAL 1 DAY")).alias("at")),
            "earliest",
            "none",
        ),
        (months, "latest", "cannot be read"),
        (rows.groupBy(by_row, "key").agg(F.max("at").alias("at")), "latest", "cannot be read"),
    ]:
        with pytest.raises(UnsoundPlanError) as error:
            pipeline.report(frame, stage=COUNTS, output_time=output_time)
        assert reason in str(error.value)


def test_end_of_window_is_the_default(flow: Flow, pipeline: Pipeline) -> None:
    flow.write(steady(range(30)))
    rows = watermarked(flow, pipeline).groupBy(tumbling(), "key").agg(F.min("at").alias("at"))
    frame = pipeline.report(rows, stage=COUNTS, output_time=OutputTime.END_OF_WINDOW)
    query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW)
    ended(query)
    answer = flow.watermark(COUNTS)
    assert answer.output_ms == answer.input_ms
    assert flow.watermark(SOURCE).output_ms == answer.input_ms


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Generator[None]:
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


def test_days_differ_where_clocks_are_changed(flow: Flow, pipeline: Pipeline) -> None:
    """A day has 26 hours in Antarctica/Troll, and a session's gap of a day is as long."""
    with setting(flow.spark, "spark.sql.session.timeZone", "Antarctica/Troll"):
        grouped = watermarked(flow, pipeline).groupBy(F.session_window("at", "1 day"), "key")
        with pytest.raises(UnsoundPlanError, match="in hours where clocks are changed"):
            pipeline.report(
                grouped.agg(F.max("at").alias("at")), stage=COUNTS, output_time="latest"
            )


def test_the_column_is_of_the_time_that_the_window_is_computed_from(
    flow: Flow, pipeline: Pipeline
) -> None:
    """Another event time of the rows, of a join, or of another branch, may be anywhere."""
    rows = watermarked(flow, pipeline)
    other = rows.select(F.col("key").alias("other_key"), F.col("at").alias("other_at"))
    joined = rows.join(
        other, F.expr("key = other_key AND other_at BETWEEN at - INTERVAL 1 MINUTE AND at")
    )
    both = rows.select("key", "at", F.col("at").alias("copied")).union(
        rows.select("key", "at", F.lit(START_S).cast("timestamp").alias("copied"))
    )
    for frame, column in ((joined, "other_at"), (both, "copied")):
        for windows in (tumbling(), sliding(), sessions()):
            grouped = frame.groupBy(windows, "key").agg(F.min(column).alias("first_at"))
            with pytest.raises(UnsoundPlanError, match="by which window"):
                pipeline.report(grouped, stage=COUNTS, output_time="earliest")
    named = rows.withColumn("hour", sliding()).groupBy("hour", "key")
    pipeline.report(named.agg(F.min("at").alias("at")), stage=COUNTS, output_time="earliest")


def test_names_and_groups_that_are_not_one(flow: Flow, pipeline: Pipeline) -> None:
    rows = watermarked(flow, pipeline).groupBy(tumbling(), "key")
    for frame, reason in [
        (
            rows.agg(F.min("at").alias("at"), F.count("*").alias("AT")),
            "rename those that are alike",
        ),
        (rows.agg(F.min("at").alias("at"), F.count("*").alias("Window")), "rename those"),
        (rows.agg(F.min("at").alias("at"), F.max("at").alias("at")), "rename those"),
    ]:
        with pytest.raises(UnsoundPlanError, match=reason):
            pipeline.report(frame, stage=COUNTS, output_time="earliest")
    with pytest.raises(ValueError, match="3,650 days at most"):
        pipeline.report(
            CASES[4].aggregated(watermarked(flow, pipeline)),
            stage=COUNTS,
            output_time="earliest",
            longest="4000000000000000 s",
        )


def test_a_checkpoint_goes_on_with_its_output_times(flow: Flow, pipeline: Pipeline) -> None:
    """A window that was begun under other rules has a date that the stage has promised not to write."""

    def start(windows: str = "15 seconds", output_time: str = "earliest") -> StreamingQuery:
        grouped = watermarked(flow, pipeline).groupBy(F.window("at", windows), "key")
        frame = grouped.agg(F.min("at").alias("at"))
        frame = pipeline.report(frame, stage=COUNTS, output_time=output_time)
        return flow.start(pipeline, frame, trigger=AVAILABLE_NOW)

    flow.write(steady(range(20)))
    ended(start())
    ended(start())
    for again in ({"output_time": "end_of_window"}, {"windows": "10 seconds"}):
        with pytest.raises(ValueError, match="the checkpoint has other output times"):
            start(**again)


# Sessions by their earliest row, without a declared length: their starts are read from Spark's state.


def starts(rows: DataFrame) -> DataFrame:
    grouped = rows.groupBy(sessions(), "key")
    return grouped.agg(F.count("*").alias("rows"), F.min("at").alias("at"))


def test_an_open_session_holds_its_start(flow: Flow, pipeline: Pipeline) -> None:
    """Key a has a row every three seconds, so its session goes on; that of b ends."""
    spoken = [Reading(sensor, "a", second) for sensor in SHARDS for second in range(3, 40, 3)]
    ending = [Reading(sensor, "b", 9) for sensor in SHARDS]
    flow.write([*ending, *[reading for reading in spoken if reading.second < 20]])
    rows = pipeline.watermarked(flow.source(pipeline, Ascending()), stage=COUNTS, event_time="at")
    frame = pipeline.report(starts(rows), stage=COUNTS, output_time="earliest")
    query = flow.start(pipeline, frame, trigger={"processingTime": "100 milliseconds"})
    until(lambda: flow.output_of(COUNTS) == (START_S + 3) * 1_000, "the session's start is read")
    assert "'open_session'" in str(flow.client.explain(JOB, COUNTS))
    flow.write([reading for reading in spoken if reading.second >= 20])
    until(lambda: input_of(flow) == (START_S + 39) * 1_000, "the second file is read")
    assert flow.output_of(COUNTS) == (START_S + 3) * 1_000
    # The session of a ends, and those of c begin.
    flow.write([Reading(sensor, "c", 60) for sensor in SHARDS])
    begins_ms = (START_S + 60 - GAP_S) * 1_000 - 1
    until(lambda: flow.output_of(COUNTS) == begins_ms, "the session has ended")
    query.stop()
    assert pipeline.counts["early_rows"] == 0


def test_a_query_that_fails_within_a_batch_leaves_the_promise_of_the_batch_before(
    flow: Flow, pipeline: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tasks of the failed batch hold the leases. The last reading comes once the query has ended."""
    at_8 = (START_S + 8) * 1_000

    def write(frame: DataFrame, epoch: int) -> None:
        frame.collect()
        if epoch > 0 and spark_watermark(query) >= at_8 - 1:
            raise ValueError("the sink is full")

    rows = pipeline.watermarked(flow.source(pipeline, Ascending()), stage=COUNTS, event_time="at")
    frame = pipeline.report(starts(rows), stage=COUNTS, output_time="earliest")
    flow.write([Reading(sensor, "a", second) for sensor in SHARDS for second in (3, 5)])
    writer = frame.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "c"))
    query = pipeline.start(writer.trigger(processingTime="100 milliseconds"))
    until(lambda: flow.output_of(COUNTS) == (START_S + 5 - GAP_S) * 1_000 - 1, "the reading")

    def has_failed() -> bool:
        """Each file makes one more batch, at the latest the one that fails."""
        flow.write([Reading(sensor, "b", 8) for sensor in SHARDS])
        return not query.isActive

    until(has_failed, "a batch has failed")
    pipeline.stop()
    assert "last reports" not in caplog.text
    assert flow.output_of(COUNTS) == (START_S + 3) * 1_000


def input_of(flow: Flow) -> int | None:
    return flow.watermark(COUNTS).input_ms


def test_the_end_of_a_run_waits_for_the_reading(flow: Flow) -> None:
    """A job that runs each night ends with the promise of its last batch."""
    flow.write([Reading(sensor, "a", second) for sensor in SHARDS for second in (3, 5, 17)])
    with flow.pipeline() as pipeline:
        rows = pipeline.watermarked(
            flow.source(pipeline, Ascending()), stage=COUNTS, event_time="at"
        )
        frame = pipeline.report(starts(rows), stage=COUNTS, output_time="earliest")
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
    assert flow.output_of(COUNTS) == (START_S + 17 - GAP_S) * 1_000 - 1


def test_sessions_are_dated_and_none_is_early(flow: Flow, pipeline: Pipeline) -> None:
    for batch in readings():
        flow.write(batch)
    frame = starts(watermarked(flow, pipeline))
    frame = pipeline.report(frame, stage=COUNTS, output_time="earliest", on_early="fail")
    ended(flow.start(pipeline, frame, trigger={"processingTime": "200 milliseconds"}, bounded=True))
    found = flow.spark.read.schema(frame.schema).json(str(flow.output))
    rows = flow.spark.read.schema("sensor string, key string, at timestamp").json(str(flow.inbox))
    assert alike(found) == alike(starts(rows)) != Counter()
    assert flow.watermark(COUNTS).final


# The book's figures 3-5 to 3-8, as the documentation draws them: sessions, and their mean lengths.

ARCADE: Mapping[str, Mapping[str, object]] = {
    "plays": {"shards": ["console", "mobile"]},
    "sessions": {"inputs": ["plays"], "ranges": 2},
    "averages": {"inputs": ["sessions"], "ranges": 2},
}
DATED_BY = {"end_of_window": "ended_at", "earliest": "began_at"}
MINUTE_MS = 60_000
NOON_MS = 1_767_268_800_000


def play(folder: Path, before: int, step: int) -> None:
    """Write the plays of some minutes, and a row of each shard that has its clock."""
    rows = [
        {"device": device, "player": player, "at": f"2026-01-01T12:{minute:02}:00Z"}
        for device, player, minutes in drawings.PLAYS
        for minute in minutes
        if before < minute <= step
    ]
    clocks = [
        {"device": device, "at": f"2026-01-01T12:{step:02}:00Z"} for device in ("console", "mobile")
    ]
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{step}"
    hidden.write_text("\n".join(map(json.dumps, [*rows, *clocks])))
    hidden.rename(folder / f"{step}.json")


@dataclass(frozen=True)
class Arcade:
    """The two stages of the drawing, by one output time."""

    flow: Flow
    pipeline: Pipeline
    output_time: str

    @property
    def folder(self) -> Path:
        return self.flow.output.parent / self.output_time

    def run(self, stage: str, frame: DataFrame) -> None:
        writer = frame.writeStream.format("json").option("path", str(self.folder / stage))
        writer = writer.option("checkpointLocation", str(self.folder / f"{stage}-checkpoint"))
        ended(self.pipeline.start(writer.trigger(availableNow=True)))

    def sessions(self) -> None:
        schema = "device string, player string, at timestamp"
        rows = self.flow.spark.readStream.schema(schema).json(str(self.folder / "plays"))
        rows = self.pipeline.source(
            rows, stage="plays", shard="device", event_time="at", strategy=Ascending()
        )
        rows = self.pipeline.watermarked(rows, stage="sessions", event_time="at")
        grouped = rows.where("player IS NOT NULL").groupBy(
            F.session_window("at", f"{drawings.GAP} minutes"), "player"
        )
        frame = grouped.agg(
            F.min("at").alias("began_at"),
            F.timestamp_diff("MINUTE", F.min("at"), F.max("at")).alias("minutes"),
        ).withColumn("ended_at", F.col("session_window.end"))
        at, output_time = DATED_BY[self.output_time], self.output_time
        frame = self.pipeline.report(
            frame, stage="sessions", event_time=at, output_time=output_time, on_early="fail"
        )
        self.run("sessions", frame)

    def averages(self) -> None:
        at = DATED_BY[self.output_time]
        rows = self.flow.spark.readStream.schema(f"{at} timestamp, minutes long")
        frame = self.pipeline.watermarked(
            rows.json(str(self.folder / "sessions")), stage="averages", event_time=at
        )
        frame = frame.groupBy(F.window(at, f"{drawings.WINDOW} minutes"))
        frame = frame.agg(F.avg("minutes").alias("minutes"))
        self.run("averages", self.pipeline.report(frame, stage="averages"))

    def written(self) -> dict[int, float]:
        schema = "window struct<start: timestamp, end: timestamp>, minutes double"
        rows = self.flow.spark.read.schema(schema).json(str(self.folder / "averages"))
        start = F.unix_millis("window.start")
        found = rows.select(start.alias("start"), "minutes").collect()
        return {(row["start"] - NOON_MS) // MINUTE_MS: row["minutes"] for row in found}


@pytest.mark.parametrize("output_time", list(DATED_BY))
def test_figures_of_the_book(flow: Flow, output_time: str) -> None:
    """The watermarks, the averages, and the moments at which they come out, are those of the drawing."""
    job = f"arcade-{output_time}"
    came_out: dict[int, int] = {}
    with Pipeline(flow.url, job, ARCADE, spark=flow.spark, poll="50 ms") as pipeline:
        arcade = Arcade(flow, pipeline, output_time)
        arcade.folder.mkdir()
        before = -1
        for step in drawings.STEPS:
            play(arcade.folder / "plays", before, step)
            before = step
            arcade.sessions()
            expected_ms = NOON_MS + drawings.output_watermark(output_time, step) * MINUTE_MS
            # A session that is not open yet begins after W less a millisecond, and the gap.
            assert flow.client.watermark(job, "sessions").output_ms in {
                expected_ms,
                expected_ms - 1,
            }
            arcade.averages()
            for window in arcade.written():
                came_out.setdefault(window, step)
        assert arcade.written() == drawings.averages(output_time)
    assert came_out == {each: drawings.fires_at(output_time, each) for each in came_out}
