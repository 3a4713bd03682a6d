"""Operators behind several topics, also of two clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.kafka_jars import KafkaJars
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    JOB,
    RANGES,
    SOURCE,
    START_MS,
    START_S,
    Flow,
    Reading,
    ended,
    until,
)
from tests.spark.test_kafka import VALUE, started, steady
from tests.support.kafka_server import KafkaServer
from tests.support.kafka_topic import Topic

pytestmark = [pytest.mark.spark, pytest.mark.slow]

OTHER = "others"
REACH_S = 3
GAP_S = 5


@pytest.fixture(scope="module")
def other_cluster(
    broker_jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaServer]:
    """A second broker, which does not know of the first."""
    with KafkaServer(broker_jars, tmp_path_factory.mktemp("kafka") / "files") as running:
        yield running


def read(pipeline: Pipeline, topic: Topic, stage: str) -> DataFrame:
    rows = pipeline.read_kafka(
        topic.broker.servers, topic.name, stage=stage, value=VALUE, strategy=BOUND
    )
    return rows.select("letter", "timestamp", "partition")


def joined(pipeline: Pipeline, left: Topic, right: Topic, kind: str) -> DataFrame:
    """Join each reading with those of the other topic which come up to three seconds later."""
    sides = [
        pipeline.watermarked(read(pipeline, topic, stage), stage=COUNTS, event_time="timestamp")
        for topic, stage in ((left, SOURCE), (right, OTHER))
    ]
    one, other = (
        side.select(*(F.col(name).alias(f"{prefix}_{name}") for name in side.columns))
        for prefix, side in zip(("l", "r"), sides, strict=True)
    )
    later = F.col("l_timestamp") + F.expr(f"INTERVAL {REACH_S} SECONDS")
    within = F.col("r_timestamp").between(F.col("l_timestamp"), later)
    pairs = one.join(other, (F.col("l_letter") == F.col("r_letter")) & within, kind)
    shown = pairs.select(
        "l_letter",
        "l_partition",
        "r_partition",
        *(F.unix_seconds(name).alias(name[0]) for name in ("l_timestamp", "r_timestamp")),
        "l_timestamp",
    )
    return pipeline.report(shown, stage=COUNTS, event_time="l_timestamp")


Pair = tuple[Any, ...]


def pairs(left: Iterable[Reading], right: Iterable[Reading], kind: str) -> Counter[Pair]:
    """Return the answer of a batch job."""
    found: Counter[Pair] = Counter()
    others = list(right)
    for one in left:
        matches = [
            other
            for other in others
            if other.key == one.key and 0 <= other.second - one.second <= REACH_S
        ]
        begin = (one.key, int(one.sensor))
        for other in matches:
            found[(*begin, int(other.sensor), START_S + one.second, START_S + other.second)] += 1
        if not matches and kind == "left_outer":
            found[(*begin, None, START_S + one.second, None)] += 1
    return found


def both(flow: Flow, left: Topic, right: Topic) -> Pipeline:
    spec = {
        SOURCE: {"shards": [left.shard(0)], "dynamic": True},
        OTHER: {"shards": [right.shard(0)], "dynamic": True},
        COUNTS: {"inputs": [SOURCE, OTHER], "ranges": RANGES},
    }
    return Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms")


def test_topics_of_one_name_in_two_clusters_are_refused(
    flow: Flow, broker: KafkaServer, other_cluster: KafkaServer
) -> None:
    """Partitions that only one of them has would hold the other's stage for ever."""
    left = Topic(broker, 3)
    right = Topic(other_cluster, 2, name=left.name)
    with both(flow, left, right) as pipeline:
        frame = joined(pipeline, left, right, "inner")
        with pytest.raises(UnsoundPlanError, match=f"'{left.name}' is read from two clusters"):
            flow.start(pipeline, frame)


@pytest.mark.parametrize("kind", [pytest.param("inner", marks=pytest.mark.matrix), "left_outer"])
def test_a_join_of_topics_in_two_clusters(
    flow: Flow, broker: KafkaServer, other_cluster: KafkaServer, kind: str
) -> None:
    """A partition without rows in the other cluster holds the join, and not the topic here."""
    left = Topic(broker, 3)
    right = Topic(other_cluster, 2)
    with both(flow, left, right) as pipeline:
        query = flow.start(pipeline, joined(pipeline, left, right, kind))
        left.write(steady(range(60)))
        right.write(steady(range(0, 60, 10), [0]))
        until(lambda: flow.output_of(SOURCE) == START_MS + 54_000, "the topic here is read")
        assert flow.output_of(COUNTS) == -1
        right.write(steady(range(5, 60, 10), [1]))
        held_ms = START_MS + (50 - 6) * 1_000
        until(lambda: flow.output_of(OTHER) >= held_ms, "the other one is read")
        left.grow(4)
        left.write(steady(range(60, 80)))
        until(lambda: left.shard(3) in _shards(flow, SOURCE), "the new partition joins")
        left.write(steady(range(70, 90), [3]))
        query.stop()
        right.write(steady(range(60, 90, 5), [0, 1]))
        ended(
            flow.start(
                pipeline,
                joined(pipeline, left, right, kind),
                trigger=AVAILABLE_NOW,
                bounded=True,
            )
        )
        assert not +pipeline.counts
    schema = "l_letter string, l_partition int, r_partition int, l long, r long"
    found = Counter(
        tuple(row) for row in flow.spark.read.schema(schema).json(str(flow.output)).collect()
    )
    assert found == pairs(left.written, right.written, kind)


def _shards(flow: Flow, stage: str) -> set[str]:
    return {each["range"] for each in flow.client.ranges(JOB, stage, limit=100)["ranges"]}


def test_sessions_over_two_topics_of_one_read(flow: Flow, broker: KafkaServer) -> None:
    """Each row becomes two, of different keys, before the sessions."""
    one, other = Topic(broker, 2), Topic(broker, 1)
    with started(flow, one) as pipeline:
        query = flow.start(pipeline, _sessions(pipeline, one, other))
        one.write(steady([*range(10), *range(30, 40)], [0, 1]))
        until(lambda: one.shard(1) in _shards(flow, SOURCE), "the first topic is read")
        other.write(steady([*range(8, 20, 4), 50], [0]))
        until(lambda: flow.output_of(SOURCE) == START_MS + 34_000, "both are read")
        query.stop()
        one.write(steady(range(60, 80), [0, 1]))
        other.write(steady([70, 90], [0]))
        again = _sessions(pipeline, one, other)
        ended(flow.start(pipeline, again, trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    rows = flow.spark.read.schema("key string, start long, end long, rows long")
    found = Counter(tuple(row) for row in rows.json(str(flow.output)).collect())
    assert found == _expected([*one.written, *other.written])


def _sessions(pipeline: Pipeline, one: Topic, other: Topic) -> DataFrame:
    rows = pipeline.read_kafka(
        one.broker.servers, [one.name, other.name], stage=SOURCE, value=VALUE, strategy=BOUND
    )
    rows = rows.withColumn("key", F.explode(F.array("letter", F.upper("letter"))))
    rows = pipeline.watermarked(rows, stage=COUNTS, event_time="timestamp")
    grouped = rows.groupBy(F.session_window("timestamp", f"{GAP_S} seconds").alias("s"), "key")
    counted = grouped.agg(F.count("*").alias("rows"))
    bounds = (F.unix_seconds(f"s.{name}").alias(name) for name in ("start", "end"))
    return pipeline.report(counted.select("key", *bounds, "rows"), stage=COUNTS)


def _expected(readings: list[Reading]) -> Counter[Pair]:
    found: Counter[Pair] = Counter()
    for key in {each.key for each in readings}:
        seconds = sorted(each.second for each in readings if each.key == key)
        begin, rows = seconds[0], 1
        for before, second in [*pairwise(seconds), (seconds[-1], seconds[-1] + GAP_S)]:
            if second - before >= GAP_S:
                for name in (key, key.upper()):
                    found[(name, START_S + begin, START_S + before + GAP_S, rows)] += 1
                begin, rows = second, 0
            rows += 1
    return found
