"""Alignment of topics: a query whose topic is ahead of another query's waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_agent import Pipeline
from tests.spark.flow import (
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    RANGES,
    SOURCE,
    START_MS,
    WINDOW_S,
    Flow,
    until,
    windows,
)
from tests.spark.test_kafka import counts, steady
from tests.spark.test_throttle import waited
from tests.support.kafka_server import KafkaServer
from tests.support.kafka_topic import Topic

pytestmark = pytest.mark.spark

OTHER = "other"
DRIFT_S = 30
END_S = 120
ROWS = 60
"""Rows of a batch: ten seconds of three partitions."""
LIMITED: dict[str, Any] = {"strategy": BOUND, "options": {"maxOffsetsPerTrigger": ROWS}}


@pytest.fixture
def slow(broker: KafkaServer) -> Topic:
    return Topic(broker, 1)


@pytest.fixture
def fast(broker: KafkaServer) -> Topic:
    return Topic(broker, 3)


def highest(flow: Flow) -> int:
    """Return the highest promise of the fast topic's partitions, in seconds since the start."""
    ranges: list[dict[str, Any]] = flow.client.ranges(JOB, SOURCE, limit=10)["ranges"]  # type: ignore[assignment]
    return (max(each["promise"] or 0 for each in ranges) - START_MS) // 1_000


def test_a_topic_that_is_ahead_waits_for_the_slower_one(
    flow: Flow, fast: Topic, slow: Topic, tmp_path: Path
) -> None:
    """The slow topic is at 20 s: the fast one has two minutes unread, and reads to 50 s of them."""
    spec = {
        SOURCE: {"shards": [fast.shard(0)], "dynamic": True},
        OTHER: {"shards": [slow.shard(0)], "dynamic": True},
        COUNTS: {"inputs": [SOURCE], "ranges": RANGES},
    }
    throttle = {"groups": [{"stages": [SOURCE, OTHER], "max_drift_ms": DRIFT_S * 1_000}]}
    slow.write(each for each in steady(range(26)) if each.sensor == "0")
    fast.write(steady(range(END_S)))
    with Pipeline(
        flow.url, JOB, spec, spark=flow.spark, throttle=throttle, poll="50 ms"
    ) as pipeline:
        other = pipeline.read_kafka(
            slow.broker.servers, slow.name, stage=OTHER, value="letter string", **LIMITED
        ).writeStream.format("noop")
        other = other.option("checkpointLocation", str(tmp_path / "other"))
        held_by = pipeline.start(other)
        until(lambda: flow.output_of(OTHER) == START_MS + 20_000, "the slow topic is read")
        query = flow.start(pipeline, counts(pipeline, fast, **LIMITED))
        until(lambda: SOURCE in pipeline.waits, "the query waits")
        assert f"ahead of shard {slow.shard(0)} of other" in pipeline.waits[SOURCE]
        assert highest(flow) <= 20 + DRIFT_S
        assert OTHER not in pipeline.waits

        slow.write(each for each in steady(range(26, END_S)) if each.sensor == "0")
        done = START_MS + (END_S - 20) * 1_000
        until(lambda: flow.output_of(COUNTS) >= done, "all is read")
        assert any(slow.shard(0) in why["because"] for why in waited(query))
        for each in (query, held_by):
            each.stop()
            assert each.awaitTermination(DEADLINE_S)
    found = flow.counted()
    expected = windows(fast.written)
    assert found == {each: expected[each] for each in found}
    assert len(found) >= 2 * (END_S - 20) / WINDOW_S
