# pyright: basic
# ruff: noqa: SLF001
"""Topics of Kafka that a running query reads, by the connection of Spark's own source.

Spark's objects are not public API.
"""

from __future__ import annotations

from typing import Final

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import items
from spark_agent.jvm.progress import cause_line

_SOURCE: Final = "KafkaMicroBatchStream"
_READER: Final = "KafkaOffsetReaderAdmin"
_SUBSCRIBE: Final = "SubscribeStrategy"
_PATIENCE_MS: Final = 2_000
_CLOSED: Final = "Cannot accept new calls when AdminClient is closing"
"""Spark closes its connection a moment before the query counts as ended."""
_WITHOUT_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id, by a broker that is too old to have ids."""


class TopicsNotDescribedError(Exception):
    """Kafka at SERVERS does not describe the topics of the query, with the reason."""


def topic_ids(spark: SparkSession, execution: JavaObject) -> dict[str, str]:
    """Return the ids of the topics that a query reads now, by `INDEX-TOPIC`.

    The index is that of the source in the query: two sources may be of two clusters. A topic that is
    deleted and made again has another id. Raises `TopicsNotDescribedError`, for example if no broker
    answers in time.
    """
    found: dict[str, str] = {}
    servers = ""
    try:
        for index, source in enumerate(items(execution.sources())):
            if source.getClass().getSimpleName() != _SOURCE:
                continue
            reader = source.kafkaOffsetReader()
            if reader.getClass().getSimpleName() == _READER:
                servers = f" at {reader.driverKafkaParams().get('bootstrap.servers')}"
                ids = _ids(spark, reader, is_active=bool(execution.isActive()))
                found |= {f"{index}-{topic}": id_ for topic, id_ in ids.items()}
    except Py4JError as error:
        raise TopicsNotDescribedError(
            f"Kafka{servers} does not describe the topics of the query: {cause_line(str(error))}"
        ) from None
    return found


def _ids(spark: SparkSession, reader: JavaObject, *, is_active: bool) -> dict[str, str]:
    jvm: JavaObject = spark._jvm
    strategy = _field(reader, "consumerStrategy")
    if is_active:
        # A reader that lists its topics holds its lock until the broker answers. The field needs none.
        try:
            return _described(spark, strategy, _field(reader, "_admin") or reader.admin())
        except Py4JError as error:
            if _CLOSED not in str(error):
                raise
    # Spark closes the reader's connection at the end. Its last batch may still be to commit.
    admin = strategy.createAdmin(reader.driverKafkaParams())
    try:
        return _described(spark, strategy, admin)
    finally:
        admin.close(jvm.java.time.Duration.ZERO)


def _described(spark: SparkSession, strategy: JavaObject, admin: JavaObject) -> dict[str, str]:
    jvm: JavaObject = spark._jvm
    topics = jvm.java.util.HashSet()
    for topic in _topics(strategy, admin):
        topics.add(topic)
    # Without a bound of its own, a request to a broker that hangs takes a minute.
    answer = admin.describeTopics(topics).allTopicNames()
    described = answer.get(_PATIENCE_MS, jvm.java.util.concurrent.TimeUnit.MILLISECONDS)
    pairs = ((each.name(), each.topicId().toString()) for each in described.values())
    return {str(name): str(id_) for name, id_ in pairs if str(id_) != _WITHOUT_ID}


def _topics(strategy: JavaObject, admin: JavaObject) -> set[str]:
    if strategy.getClass().getSimpleName() == _SUBSCRIBE:
        # Its topics are in its text, and no broker needs to list them: `Subscribe[taps, pumps]`.
        return set(
            str(strategy.toString()).removeprefix("Subscribe[").removesuffix("]").split(", ")
        )
    partitions = strategy.assignedTopicPartitions(admin).toSeq()
    return {str(each.topic()) for each in items(partitions)}


def _field(owner: JavaObject, name: str) -> JavaObject:
    found = owner.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(owner)
