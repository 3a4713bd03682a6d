"""Brokers that are killed, restarted or hang, and topics that lose rows: equal, or an error in words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import WallClock
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.kafka_jars import KafkaJars
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    SOURCE,
    START_MS,
    WINDOW_S,
    Flow,
    ended,
    until,
    windows,
)
from tests.spark.test_kafka import VALUE, counts, started, steady
from tests.support.kafka_server import KafkaServer
from tests.support.kafka_topic import Topic

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def topic(broker: KafkaServer) -> Topic:
    return Topic(broker, 3)


@pytest.fixture
def weak(broker_jars: KafkaJars, tmp_path: Path) -> Iterator[KafkaServer]:
    """A broker of its own, to mistreat."""
    settings = {"log.retention.check.interval.ms": "200", "log.cleaner.backoff.ms": "200"}
    with KafkaServer(broker_jars, tmp_path / "kafka", settings) as running:
        yield running


def kill(broker: KafkaServer) -> None:
    broker.kill()
    broker.start()


def restart(broker: KafkaServer) -> None:
    broker.stop()
    broker.start()


def hang(broker: KafkaServer) -> None:
    broker.pause()
    broker.resume_after(5)


@pytest.mark.parametrize("fault", [kill, restart, hang])
def test_a_broker_that_comes_back(flow: Flow, weak: KafkaServer, fault: Any) -> None:
    topic = Topic(weak, 3)
    with started(flow, topic) as pipeline:
        query = flow.start(pipeline, counts(pipeline, topic))
        for step in range(3):
            topic.write(steady(range(30 * step, 30 * step + 30)))
            written_ms = START_MS + 30_000 * (step + 1)
            fault(weak)
            # Spark's own connections come back as late as they like.
            until(
                lambda ms=written_ms: flow.output_of(SOURCE) == ms - 6_000, "the watermark goes on"
            )
        query.stop()
        ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    assert flow.counted() == windows(topic.written)


def test_rows_that_retention_has_removed_unread(flow: Flow, weak: KafkaServer) -> None:
    topic = Topic(weak, 3)
    with started(flow, topic) as pipeline:
        topic.write(steady(range(60)))
        ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW))
        before = flow.counted()
        topic.write(steady(range(60, 120)))
        weak.delete_rows(topic.name, 1, before=200)
        again = flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True)
        with pytest.raises(StreamingQueryException) as failure:
            again.awaitTermination(DEADLINE_S)
        assert re.search("data may have been (missed|lost)", str(failure.value))
        assert flow.output_of(SOURCE) == START_MS + 54_000
    assert flow.counted() == before


@pytest.mark.parametrize("limit", [{}, {"maxOffsetsPerTrigger": 20}], ids=["at once", "limited"])
def test_rows_of_transactions(flow: Flow, topic: Topic, limit: dict[str, Any]) -> None:
    """Offsets have gaps: markers, and rows of transactions that were given up."""
    with started(flow, topic) as pipeline:
        kept = steady(range(40))
        topic.begin_transaction(kept).commit_transaction(DEADLINE_S)
        topic.begin_transaction(steady(range(40, 80))).abort_transaction(DEADLINE_S)
        topic.begin_transaction(steady(range(80, 90))).commit_transaction(DEADLINE_S)
        options = {"kafka.isolation.level": "read_committed", **limit}
        frame = counts(pipeline, topic, options=options)
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    assert flow.counted() == windows([*kept, *steady(range(80, 90))])


def test_an_open_transaction_is_waited_for(flow: Flow, topic: Topic) -> None:
    """Its rows are not readable, and neither are those behind it."""
    with started(flow, topic) as pipeline:
        topic.write(steady(range(30)))
        held = topic.begin_transaction(steady(range(30, 40)))
        topic.write(steady(range(40, 90)))
        frame = counts(pipeline, topic, options={"kafka.isolation.level": "read_committed"})
        query = flow.start(pipeline, frame)
        until(lambda: flow.output_of(SOURCE) == START_MS + 24_000, "the watermark waits")
        held.commit_transaction(DEADLINE_S)
        until(lambda: flow.output_of(SOURCE) == START_MS + 84_000, "it goes on")
        query.stop()
        assert not +pipeline.counts


def test_a_second_reading_that_waits_for_open_transactions_alone_is_refused(
    flow: Flow, topic: Topic
) -> None:
    """The source would promise past the rows of an open transaction, which came to it late."""
    with started(flow, topic) as pipeline:
        read = pipeline.read_kafka(
            topic.broker.servers, topic.name, stage=SOURCE, value=VALUE, strategy=BOUND
        )
        isolated = (
            flow.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", topic.broker.servers)
            .option("Kafka.Isolation.Level", "read_committed")
            .option("subscribe", topic.name)
            .load()
        )
        both = read.select("timestamp").union(isolated.select("timestamp"))
        rows = pipeline.watermarked(both, stage=COUNTS, event_time="timestamp")
        windows_of_both = rows.groupBy(F.window("timestamp", "10 seconds")).count()
        with pytest.raises(UnsoundPlanError, match=f"'{topic.name}' is read with two isolation"):
            flow.start(pipeline, pipeline.report(windows_of_both, stage=COUNTS))


def test_a_compacted_topic(flow: Flow, weak: KafkaServer) -> None:
    """Offsets have gaps, where a newer row with the same key has replaced an older one."""
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "200",
    }
    topic = Topic(weak, 3, **config)
    with started(flow, topic) as pipeline:
        for second in range(60):
            topic.write(steady([second]), key=b"k")
        # A segment is compacted once the next one has begun.
        left = until(lambda: _compacted(flow, topic), "most rows are replaced")
        ended(
            flow.start(
                pipeline,
                counts(pipeline, topic, options={"maxOffsetsPerTrigger": 10}),
                trigger=AVAILABLE_NOW,
                bounded=True,
            )
        )
        assert not +pipeline.counts
    assert flow.counted().total() == left


def _compacted(flow: Flow, topic: Topic) -> int:
    """Return the number of rows that are left; 0: not compacted yet."""
    topic.write(steady([59], [0]), key=b"k")
    reader = flow.spark.read.format("kafka")
    options = {"kafka.bootstrap.servers": topic.broker.servers, "subscribe": topic.name}
    rows = reader.options(**options).load().count()
    return rows if rows < 100 else 0


def test_the_clock_does_not_pass_a_backlog(flow: Flow, topic: Topic) -> None:
    """All rows are from years ago, and most wait for a later batch."""
    strategy = WallClock("1 s")
    with started(flow, topic) as pipeline:
        topic.write(steady(range(60)))
        options = {"maxOffsetsPerTrigger": 30}
        frame = counts(pipeline, topic, strategy=strategy, options=options)
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    assert flow.counted() == windows(topic.written)


def test_a_partition_without_rows_for_an_hour(flow: Flow, topic: Topic) -> None:
    """Without a policy it holds all windows, and is named. With one, they close, unless it has rows."""
    hour_s = 3_600
    topic.write(steady(range(0, hour_s, 5), [0, 1]))
    with started(flow, topic) as pipeline:
        query = flow.start(pipeline, counts(pipeline, topic))
        until(lambda: _promise(flow, topic, 1) == START_MS + (hour_s - 10) * 1_000, "all is read")
        found = flow.client.explain(JOB, COUNTS)
        assert [each["range"] for each in found["holders"]] == [topic.shard(2)]
        assert found["holders"][0]["reason"] in {"never_reported", "behind"}
        query.stop()
    assert flow.counted() == {}

    seconds = itertools.count(hour_s)
    policy = {"after_ms": 1_000, "then": "exclude"}
    with started(flow, topic, idle=policy, replace=True) as pipeline:
        query = flow.start(pipeline, counts(pipeline, topic))

        def closes() -> bool:
            # All shards idle at once would end the exclusion.
            topic.write(steady([next(seconds)], [0, 1]))
            return flow.output_of(COUNTS) >= START_MS + (hour_s - WINDOW_S) * 1_000

        until(closes, "the windows of the hour close")
        query.stop()
        first = flow.counted()
        assert first == {each: windows(topic.written)[each] for each in first}
        assert len(first) >= 2 * (hour_s // WINDOW_S - 1)

        # All rows of the next hour are there. Batches are small, and rarer than what makes a shard idle.
        begin = next(seconds) + WINDOW_S
        topic.write(steady(range(begin, begin + hour_s, 60), [0, 1]))
        topic.write(steady(range(begin, begin + hour_s, 10), [2]))
        options = {"maxOffsetsPerTrigger": 100}
        query = flow.start(
            pipeline,
            counts(pipeline, topic, options=options),
            trigger={"processingTime": "2 seconds"},
        )
        until(lambda: _promise(flow, topic, 2) >= START_MS + (begin + hour_s - 15) * 1_000, "read")
        query.stop()
        ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    assert flow.counted() == windows(topic.written)


def _promise(flow: Flow, topic: Topic, partition: int) -> int:
    found = flow.client.ranges(JOB, SOURCE, limit=100)["ranges"]
    promises = {each["range"]: each["promise"] for each in found}
    return promises.get(topic.shard(partition)) or 0
