"""Topics that a query may not read: an error in words, and not a row is lost once it may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.errors import StreamingQueryException

from spark_agent.kafka_jars import KafkaJars
from tests.spark.flow import (
    AVAILABLE_NOW,
    DEADLINE_S,
    SOURCE,
    START_MS,
    Flow,
    ended,
    until,
    windows,
)
from tests.spark.test_kafka import counts, started, steady
from tests.support.kafka_server import RIGHTS, KafkaServer
from tests.support.kafka_topic import Topic

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_REFUSED = "Not authorized to access topics|Topic authorization failed"


@pytest.fixture(scope="module")
def guarded(
    broker_jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaServer]:
    """A broker that checks rights."""
    with KafkaServer(broker_jars, tmp_path_factory.mktemp("kafka") / "files", RIGHTS) as running:
        yield running


@pytest.mark.parametrize("operation", ["READ", "DESCRIBE"])
def test_a_topic_that_may_not_be_read_from_the_start(
    flow: Flow, guarded: KafkaServer, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Kafka's own error for a topic that may not be described does not name it."""
    topic = Topic(guarded, 3)
    topic.write(steady(range(60)))
    guarded.deny(topic.name, operation)
    with started(flow, topic) as pipeline:
        query = flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW)
        with pytest.raises(StreamingQueryException, match=_REFUSED):
            query.awaitTermination(DEADLINE_S)
        if operation == "DESCRIBE":
            assert f"Kafka at {guarded.servers} does not describe {topic.name}: " in caplog.text
        assert flow.output_of(SOURCE) == -1
        guarded.allow(topic.name)
        ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    assert flow.counted() == windows(topic.written)


@pytest.mark.parametrize("operation", ["READ", "DESCRIBE"])
def test_a_right_that_is_taken_away_and_given_back(
    flow: Flow, guarded: KafkaServer, operation: str
) -> None:
    topic = Topic(guarded, 3)
    with started(flow, topic) as pipeline:
        query = flow.start(pipeline, counts(pipeline, topic))
        topic.write(steady(range(60)))
        until(lambda: flow.output_of(SOURCE) == START_MS + 54_000, "all is read")
        guarded.deny(topic.name, operation)
        topic.write(steady(range(60, 120)))
        with pytest.raises(StreamingQueryException, match=_REFUSED):
            query.awaitTermination(DEADLINE_S)
        assert flow.output_of(SOURCE) == START_MS + 54_000
        guarded.allow(topic.name)
        ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    assert flow.counted() == windows(topic.written)
