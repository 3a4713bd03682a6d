"""Stages written in SQL, over columns with any name."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any
from urllib.request import urlopen

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    RANGES,
    SHARDS,
    SOURCE,
    SPEC,
    START_S,
    Flow,
    ended,
    steady,
    windows,
)

pytestmark = pytest.mark.spark


def test_a_window_in_sql_over_a_column_with_an_odd_name(flow: Flow, pipeline: Pipeline) -> None:
    readings = steady(range(60))
    flow.write(readings)
    odd = flow.readings().withColumnRenamed("at", "when `it` was")
    rows = pipeline.source(
        odd, stage=SOURCE, shard="sensor", event_time="when `it` was", strategy=BOUND
    )
    watermarked = pipeline.watermarked(rows, stage=COUNTS, event_time="when `it` was")
    watermarked.createOrReplaceTempView("readings")
    counted = flow.spark.sql(
        "SELECT window.end AS ended_at, key, count(*) AS rows FROM readings "
        "WHERE key <> 'b' GROUP BY window(`when ``it`` was`, '10 seconds'), key HAVING rows > 1"
    )
    frame = pipeline.report(counted, stage=COUNTS)
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    written = flow.spark.read.schema("key string, rows long").json(str(flow.output)).collect()
    expected = {w: n for w, n in windows(readings).items() if w[0] != "b" and n > 1}
    assert Counter((row["key"], row["rows"]) for row in written) == Counter(
        (key, count) for (key, _), count in expected.items()
    )


WATERMARK = "WATERMARK at DELAY OF INTERVAL 5 SECONDS"


def unpromised(flow: Flow, pipeline: Pipeline, view: str = "readings", stage: str = SOURCE) -> None:
    """Make a view of a source that has not a strategy."""
    rows = pipeline.source(flow.readings(), stage=stage, shard="sensor", event_time="at")
    rows.createOrReplaceTempView(view)


TEXTS = {
    "windows": f"""
        SELECT key, unix_seconds(window.start) AS start, count(*) AS rows
        FROM readings {WATERMARK} -- FROM readings WATERMARK at DELAY OF INTERVAL 1 HOUR
        WHERE '😀 FROM readings {WATERMARK}' <> key GROUP BY window(at, '10 seconds'), key
    """,
    "alias": f"""
        SELECT r.key, unix_seconds(window.start) AS start, count(*) AS rows
        FROM STREAM readings {WATERMARK} AS r GROUP BY window(r.at, '10 seconds'), r.key
    """,
    "subquery": f"""
        SELECT key, unix_seconds(window.start) AS start, count(*) AS rows
        FROM (SELECT upper(sensor), * FROM `readings` {WATERMARK}) GROUP BY window(at, '10 seconds'), key
    """,
    "pipes": f"""
        FROM readings {WATERMARK}
        |> AGGREGATE count(*) AS rows GROUP BY window(at, '10 seconds') AS window, key
        |> SELECT key, unix_seconds(window.start) AS start, rows
    """,
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_stage_in_sql_gives_its_source_the_bound(
    flow: Flow, pipeline: Pipeline, text: str
) -> None:
    readings = steady(range(60))
    flow.write(readings)
    unpromised(flow, pipeline)
    before = {each.name for each in flow.spark.catalog.listTables()}
    frame = pipeline.sql(TEXTS[text], stage=COUNTS)
    assert {each.name for each in flow.spark.catalog.listTables()} == before
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
    # The right sensor's newest row is at 56 s, and the bound is 5 s.
    assert flow.output_of(SOURCE) == (START_S + 51) * 1_000
    unpromised(flow, pipeline)
    frame = pipeline.sql(TEXTS[text], stage=COUNTS)
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(readings)


PAIRS = {
    "here": {"shards": SHARDS},
    "there": {"shards": SHARDS},
    "pairs": {"inputs": ["here", "there"], "ranges": RANGES},
}


def test_a_join_in_sql_of_two_sources(flow: Flow) -> None:
    readings = steady(range(30))
    flow.write(readings)
    with Pipeline(flow.url, "pairs", PAIRS, spark=flow.spark, poll="50 ms") as pipeline:
        unpromised(flow, pipeline, "here", "here")
        unpromised(flow, pipeline, "there", "there")
        frame = pipeline.sql(
            f"""
            SELECT a.key, a.at AS at FROM here {WATERMARK} AS a
            JOIN there WATERMARK at DELAY OF INTERVAL '0 00:00:09' DAY TO SECOND b
            ON a.key = b.key AND a.sensor = b.sensor AND b.at BETWEEN a.at AND a.at + INTERVAL 1 SECOND
            """,
            stage="pairs",
            event_time="at",
        )
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        promised = [pipeline_ms(flow, stage) for stage in ("here", "there")]
        assert promised == [(START_S + 26 - bound) * 1_000 for bound in (5, 9)]
    times = Counter((each.sensor, each.key, each.second) for each in readings)
    expected = sum(
        count * times[sensor, key, other]
        for (sensor, key, second), count in times.items()
        for other in (second, second + 1)
        if second < 16
    )
    rows = flow.spark.read.schema("at timestamp").json(str(flow.output))
    assert rows.filter(F.unix_seconds("at") < START_S + 16).count() == expected


def pipeline_ms(flow: Flow, stage: str) -> int | None:
    return flow.client.watermark("pairs", stage).output_ms


def test_the_specification_has_the_watermark_of_a_source(flow: Flow) -> None:
    readings = steady(range(60))
    flow.write(readings)
    text = "at - INTERVAL 7 SECONDS"
    spec = {
        SOURCE: {"shards": SHARDS, "watermark": text},
        COUNTS: {"inputs": [SOURCE], "ranges": RANGES},
    }
    with Pipeline(flow.url, "specified", spec, spark=flow.spark, poll="50 ms") as pipeline:
        unpromised(flow, pipeline)
        with pytest.raises(
            ValueError, match="5,000 ms, would be a second one, since source 'sensors'"
        ):
            pipeline.sql(TEXTS["windows"], stage=COUNTS)
        none = TEXTS["windows"].replace("5 SECONDS", "0 SECONDS")
        ended(flow.start(pipeline, pipeline.sql(none, stage=COUNTS), trigger=AVAILABLE_NOW))
        assert flow.client.watermark("specified", SOURCE).output_ms == (START_S + 49) * 1_000
        with pytest.raises(ValueError, match="has its watermark in the specification, 'at - INT"):
            pipeline.source(
                flow.readings(), stage=SOURCE, shard="sensor", event_time="at", strategy=BOUND
            )
    with urlopen(f"{flow.url}/v1/jobs/specified") as answer:
        assert json.load(answer)["stages"][SOURCE]["watermark"] == text


REFUSED = {
    "SELECT key FROM readings": "has not a WATERMARK",
    "SELECT key FROM readings WATERMARK at - INTERVAL 1 HOUR AS w DELAY OF INTERVAL 1 HOUR": (
        "an expression as event time"
    ),
    "SELECT key FROM readings WATERMARK readings.at DELAY OF INTERVAL 1 HOUR": "2 parts as event",
    "SELECT key FROM readings WATERMARK at DELAY OF INTERVAL 1 MONTH": "has years or months",
    "SELECT key FROM readings WATERMARK at DELAY OF INTERVAL -1 HOUR": "cannot be parsed",
    "SELECT key FROM readings WATERMARK at DELAY OF INTERVAL 2147483647 DAYS": "cannot be parsed",
    "SELECT key FROM readings WATERMARK at DELAY OF INTERVAL 5 MICROSECONDS": "whole milliseconds",
    "SELECT key FROM readings WATERMARK sensor DELAY OF INTERVAL 1 HOUR": (
        "is not the event time of source 'sensors': write WATERMARK at"
    ),
    f"SELECT key FROM (SELECT * FROM readings) {WATERMARK}": "follows a subquery",
    f"SELECT key FROM readings TABLESAMPLE (10 PERCENT) {WATERMARK}": "a sample, a function",
    f"SELECT a FROM readings {WATERMARK} AS r(a, b, c)": "an alias with columns",
    f"SELECT key FROM readings WITH (a = 1) {WATERMARK}": "is more than the name of a view",
    f"CREATE VIEW v AS SELECT key FROM readings {WATERMARK}": "CreateView is not a query",
    f"INSERT INTO v SELECT key FROM readings {WATERMARK}": "InsertIntoStatement is not a query",
    f"FROM readings {WATERMARK} INSERT INTO v SELECT key INSERT INTO v SELECT sensor": (
        "InsertIntoStatement is not a query"
    ),
    f"WITH r AS (SELECT * FROM readings) SELECT key FROM r {WATERMARK}": "the query has WITH",
    f"SELECT '${{at}}' FROM readings {WATERMARK}": "which Spark replaces before it reads",
    f"SELECT key FROM filtered {WATERMARK}": "source 'sensors' has not a strategy",
    f"SELECT key FROM plain {WATERMARK}": "since it is not a view of source.., and the service has",
    f"SELECT DISTINCT key, at FROM readings {WATERMARK}": "for SELECT DISTINCT a GROUP BY",
    f"SELECT key FROM readings {WATERMARK} UNION SELECT 'a'": "write UNION ALL for UNION",
    f"SELECT window.end FROM (SELECT at + INTERVAL 1 HOUR AS at FROM readings {WATERMARK}) "
    "GROUP BY window(at, '1 hour')": "a cast or a shift makes another column",
    f"SELECT key FROM still {WATERMARK}": "`still` is not a stream",
    f"SELECT key FROM missing {WATERMARK}": "the query cannot be run: .*TABLE_OR_VIEW_NOT_FOUND",
    f"SELECT none FROM readings {WATERMARK}": "the query cannot be run: .*UNRESOLVED_COLUMN",
    f"SELECT key FROM readings {WATERMARK} |> WHERE key > 'a'": "without |>",
    f"SELECT key FROM readings {WATERMARK} NATURAL JOIN readings {WATERMARK}": "more than once",
    "SELEC": "the query cannot be parsed",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_sql_cannot_say_is_refused(flow: Flow, pipeline: Pipeline, text: str) -> None:
    flow.write(steady(range(3)))
    unpromised(flow, pipeline)
    flow.spark.table("readings").filter("key = 'a'").createOrReplaceTempView("filtered")
    flow.readings().createOrReplaceTempView("plain")
    flow.spark.sql("SELECT 'a' AS key, now() AS at").createOrReplaceTempView("still")
    with pytest.raises(ValueError, match=REFUSED[text].replace("|>", re.escape("|>"))):
        flow.start(pipeline, pipeline.sql(text, stage=COUNTS))


def test_a_source_without_a_strategy_is_refused(flow: Flow, pipeline: Pipeline) -> None:
    rows = pipeline.source(flow.readings(), stage=SOURCE, shard="sensor", event_time="at")
    with pytest.raises(
        ValueError, match="source 'sensors' has not a strategy, so it would promise"
    ):
        pipeline.watermarked(rows, stage=COUNTS, event_time="at")
    with pytest.raises(
        ValueError, match="source 'sensors' has not a strategy, so it would promise"
    ):
        flow.start(pipeline, rows)


def test_other_arguments_are_checked_before_the_text(pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="takes the text of a query, not None"):
        pipeline.sql(None, stage=COUNTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="invalid late 'split'"):
        pipeline.sql("SELECT 1", stage=COUNTS, late="split")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'nope' is not in the specification"):
        pipeline.sql("SELECT 1", stage="nope")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tolerance": "-1 day"}, "invalid tolerance '-1 day'"),
        ({"tasks": 0}, "invalid tasks 0"),
        ({"partitioned_by_shard": "no"}, "invalid partitioned_by_shard 'no': write True or False"),
    ],
)
def test_arguments_of_a_source_without_a_strategy(
    flow: Flow, pipeline: Pipeline, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline.source(flow.readings(), stage=SOURCE, shard="sensor", event_time="at", **option)


def test_a_view_of_another_pipeline_is_refused(flow: Flow, pipeline: Pipeline) -> None:
    """Each pipeline reports for its own sources, whatever it finds in the session."""
    unpromised(flow, pipeline)
    with Pipeline(flow.url, "another", SPEC, spark=flow.spark, poll="50 ms") as another:
        unpromised(flow, another, "other")
        with pytest.raises(ValueError, match="of a source of another Pipeline"):
            another.sql(TEXTS["windows"], stage=COUNTS)
        rows = flow.spark.table("readings")
        with pytest.raises(ValueError, match="of a source of another Pipeline"):
            another.watermarked(rows, stage=COUNTS, event_time="at")


def test_the_event_time_in_another_case(flow: Flow, pipeline: Pipeline) -> None:
    readings = steady(range(60))
    flow.write(readings)
    unpromised(flow, pipeline)
    text = TEXTS["windows"].replace(
        "WATERMARK at DELAY OF INTERVAL 5 SECONDS --", "WATERMARK AT DELAY OF INTERVAL 5 SECONDS --"
    )
    assert "WATERMARK AT" in text
    ended(
        flow.start(pipeline, pipeline.sql(text, stage=COUNTS), trigger=AVAILABLE_NOW, bounded=True)
    )
    assert flow.counted() == windows(readings)


def test_late_rows_of_a_stage_in_sql(flow: Flow, pipeline: Pipeline) -> None:
    readings = steady(range(60))
    flow.write(readings)
    unpromised(flow, pipeline)
    text = f"""
        SELECT key, window, count(*) AS rows FROM readings {WATERMARK}
        GROUP BY window(at, '10 seconds'), key
    """
    frame = pipeline.sql(text, stage=COUNTS, late="drop", allowed_lateness="1 minute")
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    rows = flow.spark.read.schema("rows long, on_time boolean").json(str(flow.output))
    assert rows.agg(F.sum("rows")).collect()[0][0] == len(readings)
