"""Late rows: put aside or dropped before Spark's operators, each once, also by a repeated batch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from urllib.request import urlopen

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import Pipeline
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    JOB,
    RANGES,
    SHARDS,
    START_S,
    Flow,
    Reading,
    ended,
    steady,
)

ON_TIME = steady(range(0, 60, 2))
LATE = [Reading("left", key, second) for second in (3, 14, 25, 26) for key in ("a", "b")]
"""Rows that come when the watermark is at 100 s: their windows have ended."""


def fill(flow: Flow, late: Iterable[Reading] = LATE) -> list[Reading]:
    """Write rows in order, and late ones. A bounded query closes all windows."""
    parts: list[list[Reading]] = [
        [*ON_TIME, *steady(range(90, 110, 2))],
        # A batch drops by the watermark of the batch before, which had that of two batches before.
        [],
        [],
        [*late, *steady(range(110, 112))],
    ]
    for part in parts:
        flow.write(part)
    return [reading for part in parts for reading in part]


def split(flow: Flow, pipeline: Pipeline) -> tuple[DataFrame, DataFrame]:
    return pipeline.split_late(flow.source(pipeline), stage=COUNTS, event_time="at")


def counted(rows: DataFrame) -> DataFrame:
    return (
        rows.groupBy(F.window("at", "10 seconds"), "key")
        .agg(F.count("*").alias("rows"))
        .select("key", F.unix_seconds("window.start").alias("start"), "rows")
    )


def files(flow: Flow, frame: DataFrame, name: str) -> DataStreamWriter:
    return frame.writeStream.format("json").option("path", str(flow.output / name))


def start(
    flow: Flow, pipeline: Pipeline, results: DataFrame, late: DataFrame, *, bounded: bool = True
) -> StreamingQuery:
    writer = files(flow, pipeline.report(results, stage=COUNTS), "results")
    writer = writer.option("checkpointLocation", str(flow.checkpoint))
    return pipeline.start(
        writer.trigger(availableNow=True), late=files(flow, late, "late"), bounded=bounded
    )


def aside(flow: Flow) -> Counter[tuple[str, str, int]]:
    """Return the rows that were put aside."""
    rows = flow.spark.read.schema("sensor string, key string, at timestamp")
    return Counter(
        (row["sensor"], row["key"], int(row["at"].timestamp()) - START_S)
        for row in rows.json(str(flow.output / "late")).collect()
    )


def asides(readings: Iterable[Reading]) -> Counter[tuple[str, str, int]]:
    return Counter((each.sensor, each.key, each.second) for each in readings)


def counted_late(flow: Flow) -> int:
    """Return the number of late rows that the service has for the stage."""
    with urlopen(f"{flow.url}/v1/jobs/{JOB}/stages/{COUNTS}/watermark") as answer:
        return json.load(answer)["late"]


def total(flow: Flow) -> int:
    """Return the number of rows in the results."""
    results = flow.spark.read.schema("rows long").json(str(flow.output / "results"))
    return results.agg(F.sum("rows")).collect()[0][0]


def dropped(query: StreamingQuery) -> int:
    """Return the number of rows that Spark's operators dropped."""
    return sum(
        operator["numRowsDroppedByWatermark"]
        for each in query.recentProgress
        for operator in each["stateOperators"]
    )


def test_each_row_is_in_a_result_or_aside(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    rows, late = split(flow, pipeline)
    query = start(flow, pipeline, counted(rows), late)
    ended(query)
    assert aside(flow) == asides(LATE)
    assert total(flow) + len(LATE) == len(readings)
    assert dropped(query) == 0
    assert pipeline.counts["rows_aside"] == len(LATE)
    assert counted_late(flow) == len(LATE)
    read = sum(
        source["numInputRows"]
        for each in query.recentProgress
        for source in each["sources"]
        if "FileStreamSource" in source["description"]
    )
    assert read == len(readings), "the source is read once"


SHAPES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "renamed and shifted": lambda rows: (
        rows.withColumn("w", F.window("at", "10 seconds", "10 seconds", "3 seconds"))
        .withColumnRenamed("w", "span")
        .groupBy("span", "key")
        .agg(F.count("*").alias("rows"))
    ),
    "sessions": lambda rows: rows.groupBy(F.session_window("at", "5 seconds"), "key").agg(
        F.count("*").alias("rows")
    ),
    "by_time": lambda rows: rows.groupBy("at").agg(F.count("*").alias("rows")),
    "deduplicated": lambda rows: counted(rows.dropDuplicates(["sensor", "key", "at"])),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_the_rows_that_are_not_aside(
    flow: Flow, pipeline: Pipeline, shape: str
) -> None:
    readings = fill(flow)
    rows, late = split(flow, pipeline)
    query = start(flow, pipeline, SHAPES[shape](rows), late)
    ended(query)
    put_aside = aside(flow)
    assert put_aside == asides(LATE)
    if shape != "deduplicated":
        assert total(flow) + len(LATE) == len(readings)
    assert dropped(query) == 0


def test_a_row_in_sliding_windows_is_late_once_the_last_has_ended(
    flow: Flow, pipeline: Pipeline
) -> None:
    partly = Reading("left", "a", 97)  # [85, 100) has ended at 100 s, [90, 105) has not
    readings = fill(flow, [partly, Reading("left", "a", 84)])
    rows, late = split(flow, pipeline)
    sliding = rows.groupBy(F.window("at", "15 seconds", "5 seconds")).agg(
        F.count("*").alias("rows")
    )
    query = start(flow, pipeline, sliding, late)
    ended(query)
    assert aside(flow) == asides([Reading("left", "a", 84)])
    assert total(flow) == 3 * (len(readings) - 1) - 1, "the row is in two of its three windows"


def test_a_join_with_a_table_before_windows_makes_nothing_late(
    flow: Flow, pipeline: Pipeline
) -> None:
    """A row before the watermark is on time while its window is open, whatever passes it on."""
    behind = Reading("left", "a", 97)  # The watermark is at 100 s, and [95, 105) is open.
    readings = fill(flow, [behind, *LATE])
    rows, late = split(flow, pipeline)
    table = flow.spark.createDataFrame([(key,) for key in "abc"], "key string")
    windows = F.window("at", "10 seconds", "10 seconds", "5 seconds")
    query = start(
        flow,
        pipeline,
        rows.join(table, "key").groupBy(windows).agg(F.count("*").alias("rows")),
        late,
    )
    ended(query)
    assert aside(flow) == asides(LATE)
    assert total(flow) + len(LATE) == len(readings)
    assert dropped(query) == 0


def test_dropped_rows_are_counted_each(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at", late="drop")
    writer = files(flow, pipeline.report(counted(rows), stage=COUNTS), "results")
    writer = writer.option("checkpointLocation", str(flow.checkpoint)).trigger(availableNow=True)
    query = pipeline.start(writer, bounded=True)
    ended(query)
    assert pipeline.counts["dropped_rows"] == len(LATE)
    assert counted_late(flow) == len(LATE)
    assert total(flow) + len(LATE) == len(readings)
    assert dropped(query) == 0


def test_a_batch_that_fails_between_two_outputs_is_in_both_once(
    flow: Flow, pipeline: Pipeline
) -> None:
    readings = fill(flow)
    broken: list[int] = []
    batches: dict[int, list[tuple[str, str, int]]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        rows = batch.select("sensor", "key", F.unix_seconds("at").alias("at")).collect()
        batches[number] = [(row["sensor"], row["key"], row["at"] - START_S) for row in rows]
        if rows and number not in broken:
            broken.append(number)
            raise RuntimeError("broken sink")

    def run() -> StreamingQuery:
        rows, late = split(flow, pipeline)
        writer = files(flow, pipeline.report(counted(rows), stage=COUNTS), "results")
        writer = writer.option("checkpointLocation", str(flow.checkpoint))
        return pipeline.start(
            writer.trigger(availableNow=True),
            late=late.writeStream.foreachBatch(keep),
            bounded=True,
        )

    with pytest.raises(StreamingQueryException, match="broken sink"):
        run().awaitTermination()
    ended(run())
    found = Counter(row for rows in batches.values() for row in rows)
    assert found == asides(LATE)
    assert total(flow) + len(LATE) == len(readings)
    assert broken


def test_results_by_a_function_and_late_rows_in_files(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    sums: dict[int, int] = {}

    def keep(batch: DataFrame, number: int) -> None:
        sums[number] = batch.agg(F.coalesce(F.sum("rows"), F.lit(0))).collect()[0][0]

    rows, late = split(flow, pipeline)
    writer = pipeline.report(counted(rows), stage=COUNTS).writeStream.foreachBatch(keep)
    writer = writer.option("checkpointLocation", str(flow.checkpoint)).trigger(availableNow=True)
    ended(pipeline.start(writer, late=files(flow, late, "late"), bounded=True))
    assert aside(flow) == asides(LATE)
    assert sum(sums.values()) + len(LATE) == len(readings)


def test_another_start_goes_on_where_the_last_one_ended(flow: Flow) -> None:
    """Late rows come on the second night: the watermark that decides is in the checkpoint."""
    first = [*ON_TIME, *steady(range(90, 110, 2))]
    flow.write(first)
    with flow.pipeline() as pipeline:
        rows, late = split(flow, pipeline)
        ended(start(flow, pipeline, counted(rows), late, bounded=False))
    assert not aside(flow)
    second = [*LATE, *steady(range(110, 130))]
    flow.write(second)
    with flow.pipeline() as pipeline:
        rows, late = split(flow, pipeline)
        query = start(flow, pipeline, counted(rows), late)
        ended(query)
        assert dropped(query) == 0
    assert aside(flow) == asides(LATE)
    assert total(flow) + len(LATE) == len(first) + len(second)


def test_rows_before_1970_are_late_from_the_first_batch_on(flow: Flow, pipeline: Pipeline) -> None:
    old = Reading("left", "a", -START_S - 20)
    flow.write([old, *ON_TIME])
    rows, late = split(flow, pipeline)
    query = start(flow, pipeline, counted(rows), late)
    ended(query)
    assert aside(flow) == asides([old])
    assert total(flow) == len(ON_TIME)


PAIRS = {
    "here": {"shards": SHARDS},
    "there": {"shards": SHARDS},
    "pairs": {"inputs": ["here", "there"], "ranges": RANGES},
}


def test_both_sides_of_a_join_put_their_late_rows_aside(flow: Flow) -> None:
    """Pairs of rows on time come out, all of them."""
    readings = fill(flow)
    with Pipeline(flow.url, "pairs", PAIRS, spark=flow.spark, poll="50 ms") as pipeline:
        sides: list[DataFrame] = []
        writers: list[DataStreamWriter] = []
        for stage in ("here", "there"):
            rows = pipeline.source(
                flow.readings(), stage=stage, shard="sensor", event_time="at", strategy=BOUND
            )
            on_time, late = pipeline.split_late(rows, stage="pairs", event_time="at")
            sides.append(
                on_time.select(*[F.col(each).alias(f"{stage}_{each}") for each in rows.columns])
            )
            writers.append(files(flow, late, "late" if stage == "here" else "late_there"))
        condition = """
            here_key = there_key AND here_sensor = there_sensor
            AND there_at BETWEEN here_at AND here_at + INTERVAL 1 SECOND
        """
        pairs = sides[0].join(sides[1], F.expr(condition))
        reported = pipeline.report(pairs, stage="pairs", event_time="here_at")
        writer = files(flow, reported, "results").option("checkpointLocation", str(flow.checkpoint))
        query = pipeline.start(writer.trigger(availableNow=True), late=writers, bounded=True)
        ended(query)
        assert dropped(query) == 0
        assert pipeline.counts["rows_aside"] == 2 * len(LATE)
    assert aside(flow) == asides(LATE)
    there = flow.spark.read.schema("sensor string").json(str(flow.output / "late_there"))
    assert there.count() == len(LATE)
    on_time_rows = asides(readings) - asides(LATE)
    expected = sum(
        count * on_time_rows[sensor, key, other]
        for (sensor, key, second), count in on_time_rows.items()
        for other in (second, second + 1)
    )
    assert (
        flow.spark.read.schema("here_key string").json(str(flow.output / "results")).count()
        == expected
    )


def refused(pipeline: Pipeline, writer: DataStreamWriter, late: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pipeline.start(writer, late=late)  # type: ignore[arg-type]


def test_what_would_lose_late_rows_is_refused(flow: Flow, pipeline: Pipeline) -> None:
    flow.write(ON_TIME)
    rows, late = split(flow, pipeline)
    reported = pipeline.report(counted(rows), stage=COUNTS)
    writer = files(flow, reported, "results").option("checkpointLocation", str(flow.checkpoint))
    refused(pipeline, writer, (), "would be lost")
    refused(pipeline, writer, [files(flow, late, "a"), files(flow, late, "b")], "written 2 times")
    refused(pipeline, writer, files(flow, flow.readings(), "late"), "does not write late rows")
    refused(pipeline, writer, files(flow, late.distinct(), "late"), "Deduplicate")
    refused(pipeline, writer, files(flow, late.limit(1), "late"), "Limit")
    refused(
        pipeline,
        writer,
        files(flow, late.unionByName(flow.readings()), "late"),
        "unioned with other rows",
    )
    refused(pipeline, writer, late, "takes the writer")
    refused(
        pipeline,
        writer,
        files(flow, late, "late").option("checkpointLocation", str(flow.checkpoint)),
        "leave it out",
    )
    refused(pipeline, writer, files(flow, late, "late").trigger(availableNow=True), "has trigger")
    refused(pipeline, writer, late.writeStream.format("console"), "use foreachBatch")
    refused(
        pipeline, files(flow, reported, "results"), files(flow, late, "late"), "needs a checkpoint"
    )
    others, _ = split(flow, pipeline)
    other = files(flow, pipeline.report(counted(others), stage=COUNTS), "results")
    refused(pipeline, other, files(flow, late, "late"), "late rows of another query")
    twice = rows.union(rows)
    again = files(flow, pipeline.report(counted(twice), stage=COUNTS), "results")
    refused(pipeline, again, files(flow, late, "late"), "more than once")


def test_without_reuse_of_shuffles_nothing_is_put_aside(flow: Flow, pipeline: Pipeline) -> None:
    flow.write(ON_TIME)
    rows, late = split(flow, pipeline)
    writer = files(flow, pipeline.report(counted(rows), stage=COUNTS), "results")
    writer = writer.option("checkpointLocation", str(flow.checkpoint))
    flow.spark.conf.set("spark.sql.exchange.reuse", "false")
    try:
        refused(pipeline, writer, files(flow, late, "late"), "exchange.reuse is off")
    finally:
        flow.spark.conf.unset("spark.sql.exchange.reuse")


@pytest.mark.parametrize("random", ["rand(7)", "uuid()", "shuffle(array(1, 2))"])
def test_random_values_before_a_split_are_refused(
    flow: Flow, pipeline: Pipeline, random: str
) -> None:
    """Spark gives each occurrence in a plan another seed, so both branches would read the source."""
    rows = flow.readings().withColumn("x", F.expr(random))
    with pytest.raises(ValueError, match=r"a random expression comes before split_late\(\)"):
        pipeline.split_late(rows, stage=COUNTS, event_time="at")


def test_a_column_with_the_name_of_the_flag_is_refused(flow: Flow, pipeline: Pipeline) -> None:
    rows = flow.readings().withColumn("tidegauge_is_late", F.lit(1))
    with pytest.raises(ValueError, match="adds a column 'tidegauge_is_late': rename yours"):
        pipeline.split_late(rows, stage=COUNTS, event_time="at")


def test_another_query_needs_another_checkpoint(flow: Flow) -> None:
    """A query that is split reads each source twice in its plan, and Spark's log has both."""
    flow.write(ON_TIME)
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    with flow.pipeline() as pipeline:
        rows, late = split(flow, pipeline)
        with pytest.raises(ValueError, match="is of a query with 2 sources, and this one has 3"):
            start(flow, pipeline, counted(rows), late)
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))


def test_a_batch_that_does_not_share_its_shuffle_is_not_written(
    flow: Flow, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is checked, too: no check at the start foresees every rule of an optimiser."""
    fill(flow)
    rows, late = split(flow, pipeline)
    monkeypatch.setattr("spark_agent.pipeline.check_reuses_shuffles", lambda spark: None)
    flow.spark.conf.set("spark.sql.exchange.reuse", "false")
    try:
        query = start(flow, pipeline, counted(rows), late)
    finally:
        flow.spark.conf.unset("spark.sql.exchange.reuse")
    with pytest.raises(StreamingQueryException, match="does not read one shuffle"):
        query.awaitTermination()
    assert not list(flow.output.glob("*/part-*"))


def test_another_treatment_of_late_rows_is_refused(flow: Flow, pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="invalid late 'aside': write 'pass' or 'drop'"):
        pipeline.watermarked(flow.readings(), stage=COUNTS, event_time="at", late="aside")  # type: ignore[arg-type]


def test_early_results_drop_nothing_by_themselves(flow: Flow) -> None:
    spec = {
        "sensed": {"shards": SHARDS, "percentiles": [66]},
        "sums": {"inputs": ["sensed"], "ranges": RANGES},
    }
    with (
        Pipeline(flow.url, "early-late", spec, spark=flow.spark) as pipeline,
        pytest.raises(ValueError, match="rows that are late for early results are not late for"),
    ):
        pipeline.watermarked(
            flow.readings(), stage="sums", event_time="at", percentile=66, late="drop"
        )
