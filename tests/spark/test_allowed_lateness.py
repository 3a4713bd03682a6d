"""Allowed lateness: windows that have fired fire again, corrected, in each batch that brings rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from urllib.request import urlopen

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Pipeline
from spark_agent.jvm.progress import parse_watermark_ms
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
    SPEC,
    START_S,
    WINDOW_S,
    Flow,
    Reading,
    Windows,
    ended,
    steady,
    until,
    windows,
)

LATENESS_S = 95
ON_TIME = steady(range(0, 90, 2))
LATE = [Reading("left", key, second) for second in (63, 74, 85) for key in ("a", "b")]
"""Rows that come when the watermark is at 150 s: their windows have ended, less than 95 s ago."""
TOO_LATE = [Reading("left", "c", second) for second in (4, 5)]
"""Rows that come with them: their window ended more than 95 s ago."""


@dataclass(frozen=True)
class Fired:
    """A value of a window, as it was written."""

    key: str
    start: int
    rows: int
    on_time: bool
    version: int


def fill(flow: Flow, parts: Sequence[Iterable[Reading]] | None = None) -> list[Reading]:
    """Write the parts, each a batch. By default: on time, late and too late, and late once more."""
    # A batch drops by the watermark of the batch before, which had that of two batches before.
    pause: list[list[Reading]] = [[], []]
    parts = parts or [
        ON_TIME,
        steady(range(90, 160, 2)),
        *pause,
        [*LATE, *TOO_LATE, *steady(range(160, 162))],
        [LATE[0]],
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


SCHEMA = """
    window struct<start: timestamp, end: timestamp>, key string, rows long,
    on_time boolean, version long
"""


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


def test_a_window_fires_again_for_each_batch_of_late_rows_and_first_without_them(
    flow: Flow, pipeline: Pipeline, tmp_path: Path
) -> None:
    """Its first value is that of a query without lateness."""
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
    with urlopen(f"{flow.url}/v1/jobs/{JOB}/stages/{COUNTS}/watermark") as answer:
        assert json.load(answer)["corrections"] == corrections.total()
    assert pipeline.counts["early_rows"] == 0
    plain = Flow(flow.spark, flow.url, tmp_path / "plain")
    plain.inbox = flow.inbox
    with Pipeline(flow.url, "plain", SPEC, spark=flow.spark, poll="50 ms") as other:
        ended(plain.start(other, plain.counts(other), trigger=AVAILABLE_NOW, bounded=True))
    assert first(found) == plain.counted()


def test_rows_beyond_the_lateness_are_put_aside(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    rows, late = pipeline.split_late(
        flow.source(pipeline), stage=COUNTS, event_time="at", allowed_lateness=f"{LATENESS_S} s"
    )
    writer = pipeline.report(counted(rows), stage=COUNTS).writeStream.format("json")
    writer = writer.option("path", str(flow.output / "results")).trigger(availableNow=True)
    query = pipeline.start(
        writer.option("checkpointLocation", str(flow.checkpoint)),
        late=late.writeStream.format("json").option("path", str(flow.output / "late")),
        bounded=True,
    )
    ended(query)
    found = fired(flow, flow.output / "results")
    check_times(found, query)
    assert newest(found) == windows(readings) - windows(TOO_LATE)
    assert flow.spark.read.json(str(flow.output / "late")).count() == len(TOO_LATE)
    assert pipeline.counts["rows_aside"] == len(TOO_LATE)
    assert pipeline.counts["corrections"] == len([each for each in found if not each.on_time])


def test_rows_beyond_the_lateness_are_dropped_and_counted(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    ended(start(flow, pipeline, counted(watermarked(flow, pipeline, late="drop"))))
    assert newest(fired(flow)) == windows(readings) - windows(TOO_LATE)
    assert pipeline.counts["dropped_rows"] == len(TOO_LATE)


def test_windows_of_an_earlier_night_are_corrected(flow: Flow) -> None:
    """A window that is open, one that has fired, and one that fires at the end, over three starts."""
    nights = [
        [*ON_TIME, *steady(range(90, 110, 2))],
        [*LATE, *steady(range(110, 130))],
        [LATE[0], *steady(range(130, 140))],
    ]
    queries: list[StreamingQuery] = []
    for night in nights:
        flow.write(night)
        with flow.pipeline() as pipeline:
            bounded = night is nights[-1]
            rows = watermarked(flow, pipeline, 300)
            query = start(flow, pipeline, counted(rows), bounded=bounded)
            ended(query)
            queries.append(query)
    found = fired(flow)
    check_times(found, *queries, lateness_s=300)
    readings = [reading for night in nights for reading in night]
    assert newest(found) == windows(readings)
    assert first(found) == windows(readings) - windows([*LATE, LATE[0]])


def test_sliding_windows_fire_again(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    rows = watermarked(flow, pipeline, 300)
    sliding = rows.groupBy(F.window("at", "10 seconds", "5 seconds"), "key").agg(
        F.count("*").alias("rows")
    )
    query = start(flow, pipeline, sliding)
    ended(query)
    found = fired(flow)
    check_times(found, query, lateness_s=300)
    expected: Windows = Counter()
    for reading in readings:
        for begin in (reading.second // 5 * 5, reading.second // 5 * 5 - 5):
            expected[reading.key, begin] += 1
    assert newest(found) == expected


def test_a_continuous_query_fires_as_the_watermark_passes(flow: Flow, pipeline: Pipeline) -> None:
    """The watermark passes a window's end in a batch without rows, long after its last row."""
    flow.files_per_batch = None
    query = start(
        flow,
        pipeline,
        counted(watermarked(flow, pipeline)),
        bounded=False,
        trigger={"processingTime": "0 seconds"},
    )
    readings = steady(range(21))
    flow.write(readings)
    until(lambda: ("a", 0) in first(fired(flow)), "the first window fires")
    assert ("a", 10) not in newest(fired(flow))
    readings.append(Reading("left", "a", 5))
    flow.write(readings[-1:])
    expected = windows(readings)["a", 0]
    until(lambda: newest(fired(flow))["a", 0] == expected, "it is corrected")
    # A window that has only late rows has no first value.
    flow.write([Reading("left", "z", 5)])
    until(lambda: newest(fired(flow))["z", 0] == 1, "a window of late rows alone")
    query.stop()
    found = fired(flow)
    check_times(found, query)
    assert ("z", 0) not in first(found)
    assert flow.output_of(COUNTS) < (START_S + 20) * 1_000


def is_well(query: StreamingQuery) -> bool:
    """Return whether a query has ended well, and not by its sink."""
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        if "broken sink" not in str(error):
            raise
        return False
    return True


def test_a_batch_that_fails_fires_the_same_again(flow: Flow, pipeline: Pipeline) -> None:
    """The function of the user gets the firings of a batch again, and has their version."""
    readings = fill(flow)
    attempts: dict[int, list[list[tuple[object, ...]]]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        rows = sorted(batch.select("key", "until", "rows", "on_time", "version").collect())
        attempts.setdefault(number, []).append([tuple(row) for row in rows])
        if rows and len(attempts[number]) == 1:
            raise RuntimeError("broken sink")

    def run() -> StreamingQuery:
        rows = counted(watermarked(flow, pipeline)).select(
            "rows", F.col("window.end").alias("until"), F.upper("key").alias("shown"), "key"
        )
        writer = pipeline.report(rows, stage=COUNTS, event_time="until").writeStream
        writer = writer.foreachBatch(keep).option("checkpointLocation", str(flow.checkpoint))
        return pipeline.start(writer.trigger(availableNow=True), bounded=True)

    while not is_well(run()):
        assert len(attempts) < 40
    values: Windows = Counter()
    for number, several in sorted(attempts.items()):
        assert all(each == several[0] for each in several)
        for key, until_, rows, _, version in several[0]:
            assert version == number
            values[key, int(until_.timestamp()) - START_S - WINDOW_S] = rows  # type: ignore[attr-defined]
    assert values == windows(readings) - windows(TOO_LATE)
    assert max(len(several) for several in attempts.values()) == 2


REFUSED: dict[str, tuple[Callable[[DataFrame], DataFrame], str]] = {
    "sessions": (
        lambda rows: rows.groupBy(F.session_window("at", "5 seconds"), "key").agg(
            F.count("*").alias("rows")
        ),
        "Spark's operator Aggregate is not supported here",
    ),
    "deduplication": (lambda rows: rows.dropDuplicates(["key", "at"]), "Deduplicate is not"),
    "stateless": (lambda rows: rows, "the query has none"),
    "having": (lambda rows: counted(rows).filter("rows > 1"), "a filter follows its windows"),
    "before": (
        lambda rows: counted(rows.dropDuplicates(["key", "at"])),
        "is the only operator with state",
    ),
    "no key": (lambda rows: counted(rows).drop("key"), "key is not among the columns"),
    "no window": (
        lambda rows: counted(rows).select("key", "rows"),
        "window is not among the columns",
    ),
    "start alone": (
        lambda rows: counted(rows).select("key", "rows", "window.start"),
        "'start' is the start of a window",
    ),
    "column": (
        lambda rows: counted(rows).withColumn("Version", F.lit(1)),
        "adds a column 'version', and the rows have one: rename 'Version'",
    ),
    "interval": (
        lambda rows: counted(rows).withColumn("x", F.expr("make_interval(1)")),
        "'x' is of type interval, which Parquet cannot keep",
    ),
    "no computed key": (
        lambda rows: (
            rows.groupBy(F.window("at", "10 seconds"), F.upper("key").alias("k"))
            .agg(F.count("*").alias("rows"))
            .drop("k")
        ),
        "k is not among the columns",
    ),
    "part of a key": (
        lambda rows: (
            rows.groupBy(F.window("at", "10 seconds"), F.struct("key").alias("k"))
            .agg(F.count("*").alias("rows"))
            .select("window", "k.key", "rows")
        ),
        "k is not among the columns",
    ),
    "nested names": (
        lambda rows: counted(rows).withColumn("x", F.expr("named_struct('a', 1, 'A', 2)")),
        "'x' is of type struct<a:int,A:int>, which Parquet cannot keep",
    ),
    "an empty structure": (
        lambda rows: counted(rows).withColumn("x", F.expr("array(struct())")),
        "'x' is of type array<struct<>>, which Parquet cannot keep",
    ),
    "explode": (
        lambda rows: counted(rows).withColumn("x", F.explode(F.array(F.lit(1), F.lit(2)))),
        "Generate is not supported here",
    ),
    "repartition": (
        lambda rows: counted(rows).repartition(1),
        "Repartition is not supported here",
    ),
}


@pytest.mark.parametrize("shape", REFUSED)
def test_what_could_not_be_corrected_is_refused(flow: Flow, pipeline: Pipeline, shape: str) -> None:
    flow.write(ON_TIME)
    change, match = REFUSED[shape]
    rows = change(watermarked(flow, pipeline))
    times = [name for name, kind in rows.dtypes if kind.startswith(("timestamp", "struct<start"))]
    reported = pipeline.report(rows, stage=COUNTS, event_time=times[0] if times else None)
    with pytest.raises(ValueError, match=match):
        flow.start(pipeline, reported)
    assert not list(flow.checkpoint.glob("*"))


def test_other_modes_and_results_that_are_not_kept_are_refused(
    flow: Flow, pipeline: Pipeline
) -> None:
    flow.write(ON_TIME)
    reported = pipeline.report(counted(watermarked(flow, pipeline)), stage=COUNTS)
    writer = reported.writeStream.format("noop")
    with pytest.raises(ValueError, match=r"has 'update': leave outputMode\(\) out"):
        pipeline.start(writer.outputMode("update").option("checkpointLocation", "c"))
    with pytest.raises(ValueError, match="needs a checkpoint"):
        pipeline.start(reported.writeStream.format("json").option("path", str(flow.output)))
    with pytest.raises(ValueError, match="on_lost_checkpoint='continue' is not supported: a new"):
        pipeline.start(writer, on_lost_checkpoint="continue")
    writer = reported.writeStream.format("noop")
    with pytest.raises(ValueError, match=r"format 'noop' cannot be written: .* write files, or"):
        pipeline.start(writer.option("checkpointLocation", str(flow.checkpoint)))
    with pytest.raises(ValueError, match="on_early='fail' would fail each query"):
        pipeline.report(counted(watermarked(flow, pipeline)), stage=COUNTS, on_early="fail")
    with pytest.raises(ValueError, match="leave out allowed_lateness here"):
        pipeline.watermarked(
            flow.readings(), stage=COUNTS, event_time="at", percentile=66, allowed_lateness="1 s"
        )


@pytest.mark.parametrize("lateness", ["", False, timedelta(microseconds=1), "-1 s", "3651 days"])
def test_a_lateness_that_cannot_be_kept_is_refused(
    flow: Flow, pipeline: Pipeline, lateness: object
) -> None:
    with pytest.raises(ValueError, match="invalid allowed_lateness"):
        pipeline.watermarked(
            flow.readings(),
            stage=COUNTS,
            event_time="at",
            allowed_lateness=lateness,  # type: ignore[arg-type]
        )


def test_a_watermark_that_is_not_a_lateness_after_1970_is_logged(
    flow: Flow, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    readings = steady(range(60))
    flow.write([replace(each, second=each.second - START_S + 1_000) for each in readings])
    query = start(flow, pipeline, counted(watermarked(flow, pipeline, 2_000)), bounded=False)
    ended(query)
    assert "its windows wait until it is after 1970" in caplog.text
    assert not fired(flow)
    ended(start(flow, pipeline, counted(watermarked(flow, pipeline, 2_000))))
    assert sum(each.rows for each in fired(flow)) == len(readings), "the end of time is after 1970"


KEYS: dict[str, Callable[[], Column]] = {
    "computed": lambda: F.upper("key"),
    "structure": lambda: F.struct("key", F.lower("sensor")),
    "null": lambda: F.when(F.col("key") > "a", F.col("key")),
    "array": lambda: F.array("key"),
    "floats": lambda: (
        F.when(F.col("key") == "a", F.lit(float("nan")))
        .when(F.col("key") == "b", -0.0)
        .otherwise(0.0)
    ),
    "hour": lambda: F.to_date("at"),
}


@pytest.mark.parametrize(
    "keys",
    # The zeros of two signs are one key, which another key must not divide.
    [["computed", "structure", "null", "array"], ["floats", "hour"]],
    ids=" and ".join,
)
def test_keys_of_any_kind_fire_each(flow: Flow, pipeline: Pipeline, keys: list[str]) -> None:
    fill(flow, [steady(range(30)), steady(range(30, 40))])

    def by_key(rows: DataFrame) -> DataFrame:
        grouped = rows.groupBy(F.window("at", "10 seconds"), *[KEYS[k]().alias(k) for k in keys])
        # Names that the agent uses itself.
        return grouped.agg(F.count("*").alias("batch")).select(
            "window.end", F.col(keys[0]).alias("Row"), *keys[1:], "batch"
        )

    found: list[str] = []

    def keep(batch: DataFrame, number: int) -> None:
        del number
        assert not batch.filter("NOT on_time").count()
        found.extend(as_json(batch.drop("on_time", "version")))

    reported = pipeline.report(by_key(watermarked(flow, pipeline)), stage=COUNTS, event_time="end")
    writer = reported.writeStream.foreachBatch(keep).trigger(availableNow=True)
    # A place with characters that have a meaning in a pattern of paths.
    checkpoint = f"{flow.checkpoint}[1] {{a}}, *"
    ended(pipeline.start(writer.option("checkpointLocation", checkpoint), bounded=True))
    batch = flow.spark.read.schema("sensor string, key string, at timestamp").json(str(flow.inbox))
    assert sorted(found) == sorted(as_json(by_key(batch)))


def test_results_in_folders_by_their_firing(flow: Flow, pipeline: Pipeline) -> None:
    readings = fill(flow)
    reported = pipeline.report(counted(watermarked(flow, pipeline)), stage=COUNTS)
    writer = reported.writeStream.format("parquet").partitionBy("on_time", "key")
    writer = writer.option("path", str(flow.output)).trigger(availableNow=True)
    ended(pipeline.start(writer.option("checkpointLocation", str(flow.checkpoint)), bounded=True))
    rows = flow.spark.read.parquet(str(flow.output)).filter("on_time = 'true'")
    late = [*LATE, LATE[0], *TOO_LATE]
    assert rows.agg(F.sum("rows")).collect()[0][0] == len(readings) - len(late)


@pytest.mark.parametrize(("before", "others"), [(95, [96, None]), (None, [95])])
def test_another_lateness_needs_another_checkpoint(
    flow: Flow, before: int | None, others: list[int | None]
) -> None:
    """Spark's own watermark in the checkpoint is behind the stage's by the lateness."""
    flow.write(ON_TIME)
    with flow.pipeline() as pipeline:
        ended(start(flow, pipeline, counted(watermarked(flow, pipeline, before)), bounded=False))
    for after in others:
        with flow.pipeline() as pipeline:
            match = (
                f"has an allowed_lateness of {(before or 0) * 1_000:,} ms, and this query one of"
            )
            with pytest.raises(ValueError, match=match):
                start(flow, pipeline, counted(watermarked(flow, pipeline, after)))
    with flow.pipeline() as pipeline:
        ended(start(flow, pipeline, counted(watermarked(flow, pipeline, before))))


def test_other_windows_need_another_checkpoint(flow: Flow) -> None:
    flow.write(ON_TIME)
    for slide, match in (("10 seconds", ""), ("5 seconds", "has other windows: their size")):
        with flow.pipeline() as pipeline:
            rows = watermarked(flow, pipeline).groupBy(F.window("at", "10 seconds", slide), "key")
            frame = rows.agg(F.count("*").alias("rows"))
            if match:
                with pytest.raises(ValueError, match=match):
                    start(flow, pipeline, frame)
            else:
                ended(start(flow, pipeline, frame, bounded=False))


def test_other_columns_need_another_checkpoint(flow: Flow) -> None:
    flow.write(ON_TIME)
    with flow.pipeline() as pipeline:
        ended(start(flow, pipeline, counted(watermarked(flow, pipeline)), bounded=False))
    with flow.pipeline() as pipeline:
        renamed = counted(watermarked(flow, pipeline)).withColumnRenamed("rows", "n")
        with pytest.raises(
            ValueError, match=r"keeps windows with struct<.*, and this query writes"
        ):
            start(flow, pipeline, renamed)


TYPES = [
    "TIMESTAMP'0001-01-01 00:00:00.123456Z' AS ancient",
    "TIMESTAMP'9999-12-31 23:59:59.999999Z' AS last",
    "DATE'0001-01-01' AS day",
    "TIMESTAMP_NTZ'1500-01-01 00:00:00.000001' AS local",
    "X'00FF' AS bytes",
    "CAST(1.25 AS DECIMAL(38, 10)) AS decimal",
    "DOUBLE('NaN') AS nan",
    "map('a', array(named_struct('b.c', 1, 'B d', CAST(NULL AS STRING)))) AS nested",
    """parse_json('{"a": [1, 2.5]}') AS variant""",
    "INTERVAL '1 02:03' DAY TO MINUTE AS days",
    "INTERVAL '2' MONTH AS months",
    "'' AS `a.b c`",
    "CAST(NULL AS INT) AS `Ö`",
]


def as_json(rows: DataFrame) -> list[str]:
    return [row[0] for row in rows.select(F.to_json(F.struct("*"))).collect()]


def test_values_of_every_type_are_kept_until_they_fire(flow: Flow, pipeline: Pipeline) -> None:
    fill(flow, [steady(range(30)), steady(range(30, 40))])
    written: list[str] = []

    def keep(batch: DataFrame, number: int) -> None:
        del number
        written.extend(as_json(batch.drop("window", "key", "rows", "on_time", "version")))

    rows = counted(watermarked(flow, pipeline)).select("*", *map(F.expr, TYPES))
    writer = pipeline.report(rows, stage=COUNTS, event_time="window").writeStream
    writer = writer.foreachBatch(keep).option("checkpointLocation", str(flow.checkpoint))
    # For the files of the user, not for those in the checkpoint.
    settings = {
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS",
        "spark.sql.parquet.compression.codec": "brotli",
        "spark.sql.files.ignoreMissingFiles": "true",
    }
    for name, value in settings.items():
        flow.spark.conf.set(name, value)
    try:
        ended(pipeline.start(writer.trigger(availableNow=True), bounded=True))
    finally:
        for name in settings:
            flow.spark.conf.unset(name)
    assert len(written) == 12
    assert set(written) == set(as_json(flow.spark.range(1).select(*map(F.expr, TYPES))))
