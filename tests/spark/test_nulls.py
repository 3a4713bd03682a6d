"""Null keys and null event times: refused, right, or counted; never a silent difference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import BoundedOutOfOrderness, Pipeline, UnsoundPlanError
from spark_agent.executor.tally import Count
from tests.spark.flow import ended
from tests.support.server import ROOT, Service

pytestmark = pytest.mark.spark

CASES: Mapping[str, Any] = json.loads((ROOT / "tests/data/nulls.json").read_text())
SPEC = {
    "lefts": {"shards": ["l"]},
    "rights": {"shards": ["r"]},
    "joined": {"inputs": ["lefts", "rights"], "ranges": 2},
}
NEAR = "key = key2 AND at2 BETWEEN at - INTERVAL 1 HOUR AND at + INTERVAL 1 HOUR"
Rows = Sequence[Mapping[str, Any]]


class Sides:
    """Two streams that are joined, each of one file."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.pipeline = Pipeline(url, "nulls", SPEC, spark=spark, poll="50 ms")

    def side(self, stage: str, rows: Rows, schema: str, at: str) -> DataFrame:
        inbox = self.folder / stage
        inbox.mkdir()
        lines = [json.dumps({**row, at: row["at"], "shard": stage[0]}) for row in rows]
        (inbox / "0.json").write_text("\n".join(lines))
        read = self.spark.readStream.schema(f"{schema}, {at} timestamp, shard string")
        source = self.pipeline.source(
            read.json(str(inbox)),
            stage=stage,
            shard="shard",
            event_time=at,
            strategy=BoundedOutOfOrderness("5 s"),
        )
        return self.pipeline.watermarked(source.drop("shard"), stage="joined", event_time=at)

    def left(self, rows: Rows) -> DataFrame:
        return self.side("lefts", rows, "key string, n long", "at")

    def right(self, rows: Rows) -> DataFrame:
        renamed = [{**row, "key2": row["key"]} for row in rows]
        return self.side("rights", renamed, "key2 string, n2 long", "at2")

    def results(self, frame: DataFrame, columns: str, **report: Any) -> list[dict[str, Any]]:
        output = self.folder / "output"
        reported = self.pipeline.report(frame, stage="joined", **report)
        writer = reported.writeStream.format("json").option("path", str(output))
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
        ended(self.pipeline.start(writer.trigger(availableNow=True), bounded=True))
        rows = self.spark.read.schema(columns).json(str(output)).collect()
        return sorted((row.asDict() for row in rows), key=str)


@pytest.fixture
def sides(spark: SparkSession, service: Service, tmp_path: Path) -> Sides:
    return Sides(spark, service.url, tmp_path)


def joined(sides: Sides, case: Mapping[str, Any], how: str, where: str = "true") -> DataFrame:
    return sides.left(case["left"]).join(sides.right(case["right"]).where(where), F.expr(NEAR), how)


def test_a_full_outer_join_whose_keys_may_be_null_on_both_sides_is_refused(sides: Sides) -> None:
    """Spark's state joins null with null."""
    frame = joined(sides, CASES["full_outer_join_null_keys"], "full")
    with (
        sides.pipeline,
        pytest.raises(UnsoundPlanError, match=r"key2?\).* filter nulls out of one"),
    ):
        sides.results(frame, "n long, n2 long", event_time="at")


@pytest.mark.slow
def test_with_nulls_filtered_out_of_one_side_it_is_as_in_a_batch(sides: Sides) -> None:
    case = CASES["full_outer_join_null_keys"]
    with sides.pipeline:
        frame = joined(sides, case, "full", "key2 IS NOT NULL")
        found = sides.results(frame, "n long, n2 long", event_time="at")
    filtered = [row for row in case["right_value"] if row != {"n": None, "n2": 1}]
    assert found == sorted(filtered, key=str)
    assert sides.pipeline.counts[Count.UNDATED_RESULTS] == 0


def test_a_left_outer_join_counts_a_row_without_event_time(sides: Sides) -> None:
    case = CASES["null_event_time_left_outer"]
    with sides.pipeline:
        found = sides.results(joined(sides, case, "left"), "n long", event_time="at")
    assert (
        sides.pipeline.counts[Count.UNDATED_ROWS]
        == case["right_value"]["or_counted"]["undated_rows"]
    )
    assert found == [{"n": 2}]


@pytest.mark.slow
def test_results_that_are_stamped_by_the_side_that_is_missing_are_counted(sides: Sides) -> None:
    case = {"left": [{"key": "b", "at": "2026-01-01T00:00:10Z", "n": 2}], "right": []}
    with sides.pipeline:
        found = sides.results(joined(sides, case, "left"), "n long", event_time="at2")
    assert (found, sides.pipeline.counts[Count.UNDATED_RESULTS]) == ([{"n": 2}], 1)


def test_a_group_by_time_counts_a_row_without_one(
    spark: SparkSession, service: Service, tmp_path: Path
) -> None:
    case = CASES["null_event_time_grouped"]
    spec = {"lefts": {"shards": ["l"]}, "joined": {"inputs": ["lefts"], "ranges": 2}}
    sides = Sides(spark, service.url, tmp_path)
    sides.pipeline = Pipeline(service.url, "grouped", spec, spark=spark, poll="50 ms")
    with sides.pipeline:
        grouped = sides.left(case["rows"]).groupBy("at").count()
        found = sides.results(grouped, "at string, count long", event_time="at")
    assert (
        sides.pipeline.counts[Count.UNDATED_ROWS]
        == case["right_value"]["or_counted"]["undated_rows"]
    )
    assert [row["count"] for row in found] == [1]
