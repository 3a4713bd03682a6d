"""Shards of a dynamic source join when their first rows come, and are waited for from then on."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_agent import Pipeline
from spark_agent.tally import Count
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    DEADLINE_S,
    JOB,
    RANGES,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    ended,
    steady,
    windows,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark

DYNAMIC = {**SPEC, SOURCE: {"shards": ["left"], "dynamic": True}}


def pipeline(flow: Flow) -> Pipeline:
    return Pipeline(flow.url, JOB, DYNAMIC, spark=flow.spark, poll="50 ms")


def test_shards_join_with_their_first_rows_and_the_last_windows_come_out(flow: Flow) -> None:
    readings = [
        *steady(range(30)),
        *(Reading("late-comer", "a", second) for second in range(25, 40)),
    ]
    flow.write(readings)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
        assert running.counts[Count.UNKNOWN_SHARD_ROWS] == 0
    assert flow.counted() == windows(readings)
    assert flow.watermark(COUNTS).final


def test_a_shard_that_has_joined_is_waited_for_the_next_day_and_ends_with_its_source(
    flow: Flow,
) -> None:
    """The second day's driver knows it from the service alone: its files have no rows of it."""
    first_day = steady(range(30))
    flow.write(first_day)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW))
    stood_ms = flow.output_of(SOURCE)
    assert stood_ms <= START_MS + 26_000, "where the one that has joined stands"

    second_day = [Reading("left", "a", second) for second in range(30, 90)]
    flow.write(second_day)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW))
    assert flow.output_of(SOURCE) == stood_ms

    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows([*first_day, *second_day])
    assert flow.watermark(SOURCE).final


def test_a_shard_whose_name_cannot_be_one_is_counted(flow: Flow) -> None:
    readings = [*steady(range(30)), Reading("été", "a", 12)]
    flow.write(readings)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
        assert running.counts[Count.UNKNOWN_SHARD_ROWS] == 1
    assert flow.counted() == windows(readings)


@pytest.mark.parametrize("with_windows", [False, True])
def test_a_bounded_query_whose_shards_cannot_join_fails_and_can_be_continued(
    spark: SparkSession, tmp_path: Path, with_windows: bool
) -> None:
    """The service has room for the declared shard alone. A query without windows never ended."""
    folder = tmp_path / "small"
    folder.mkdir()
    readings = steady(range(30))
    small = {"TIDEGAUGE_MAX_RANGES_PER_JOB": str(1 + RANGES)}
    with Service(folder, environment=small) as service:
        flow = Flow(spark, service.url, tmp_path)
        flow.write(readings)
        with pipeline(flow) as running:
            frame = flow.counts(running) if with_windows else flow.source(running)
            query = flow.start(running, frame, bounded=True)
            with pytest.raises(Exception, match="TIDEGAUGE_MAX_RANGES_PER_JOB"):
                query.awaitTermination(DEADLINE_S)
        assert not flow.watermark(SOURCE).final
    with Service(folder) as service:
        flow = Flow(spark, service.url, tmp_path)
        with pipeline(flow) as running:
            frame = flow.counts(running) if with_windows else flow.source(running)
            ended(flow.start(running, frame, bounded=True))
        assert flow.watermark(SOURCE).final
        assert not with_windows or flow.counted() == windows(readings)
