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
from spark_agent.jvm.catalyst import is_a, items
from spark_agent.jvm.progress import cause_line

_SOURCE: Final = "KafkaMicroBatchStream"
_READER: Final = "KafkaOffsetReaderAdmin"
_SUBSCRIBE: Final = "SubscribeStrategy"
_PATIENCE_MS: Final = 2_000
_CLOSED: Final = (
    "Cannot accept new calls when AdminClient is closing",
    "The AdminClient thread has exited",
)
"""Spark closes its connection a moment before the query counts as ended."""
_WITHOUT_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"
"""The id, by a broker that is too old to have ids."""


class TopicsNotDescribedError(Exception):
    """Kafka at SERVERS does not describe TOPICS, with the reason. Kafka's own may not name them."""


class TopicIdReader:
    """Reads the ids of the topics that a running query reads. For use by one thread.

    The ids are read before each commit, so the objects of Java are kept: each look at one is a request.
    """

    def __init__(self, spark: SparkSession, execution: JavaObject) -> None:
        self._spark = spark
        self._execution = execution
        self._sources: list[_TopicsSource] = []

    def ids(self) -> dict[str, str]:
        """Return the ids of the topics now, by `INDEX-TOPIC`.

        The index is that of the source in the query: two sources may be of two clusters. A topic that is
        deleted and made again has another id. Raises `TopicsNotDescribedError`, for example if a broker
        does not answer in time.
        """
        described = "Kafka does not describe the topics of the query"
        found: dict[str, str] = {}
        try:
            # A query has its sources a moment after its start, and keeps them to its end.
            self._sources = self._sources or self._found()
            for source in self._sources:
                described = f"Kafka at {source.servers} does not describe {source.topics}"
                ids = source.ids(self._execution)
                found |= {f"{source.index}-{topic}": id_ for topic, id_ in ids.items()}
        except Py4JError as error:
            raise TopicsNotDescribedError(f"{described}: {cause_line(str(error))}") from None
        return found

    def _found(self) -> list[_TopicsSource]:
        readers = [
            (index, source.kafkaOffsetReader())
            for index, source in enumerate(items(self._execution.sources()))
            if is_a(source, _SOURCE)
        ]
        return [
            _TopicsSource(self._spark, index, reader)
            for index, reader in readers
            if is_a(reader, _READER)
        ]


class _TopicsSource:
    """A source of a running query, with the connection of Spark's own source."""

    def __init__(self, spark: SparkSession, index: int, reader: JavaObject) -> None:
        jvm: JavaObject = spark._jvm
        self.index = index
        self._reader = reader
        self._strategy = _field(reader, "consumerStrategy")
        self.servers = str(reader.driverKafkaParams().get("bootstrap.servers"))
        self._names = jvm.java.util.HashSet()
        self._by_name = is_a(self._strategy, _SUBSCRIBE)
        # Its topics are in its text, and no broker needs to list them: `Subscribe[taps, pumps]`.
        text = str(self._strategy.toString())
        self.topics = text.removeprefix("Subscribe[").removesuffix("]") if self._by_name else text
        if self._by_name:
            for topic in self.topics.split(", "):
                self._names.add(topic)
        self._unit = jvm.java.util.concurrent.TimeUnit.MILLISECONDS
        self._at_once = jvm.java.time.Duration.ZERO
        self._admin: JavaObject | None = None

    def ids(self, execution: JavaObject) -> dict[str, str]:
        """Return the ids by topic. Raises `Py4JError`."""
        # Spark makes a connection anew after an error, and closes it at the end.
        while self._admin is not None or execution.isActive():
            is_kept = self._admin is not None
            # A reader that lists its topics holds its lock until the broker answers. The field needs
            # none.
            admin = self._admin or _field(self._reader, "_admin") or self._reader.admin()
            try:
                found = self._described(admin)
            except Py4JError as error:
                self._admin = None
                if not any(each in str(error) for each in _CLOSED):
                    raise
                if not is_kept:
                    break
            else:
                self._admin = admin
                return found
        # The last batch of a query that has ended may still be to commit.
        admin = self._strategy.createAdmin(self._reader.driverKafkaParams())
        try:
            return self._described(admin)
        finally:
            admin.close(self._at_once)

    def _described(self, admin: JavaObject) -> dict[str, str]:
        if not self._by_name:
            self._names.clear()
            for partition in items(self._strategy.assignedTopicPartitions(admin).toSeq()):
                self._names.add(partition.topic())
        # Without a bound of its own, a request to a broker that hangs takes a minute.
        answer = admin.describeTopics(self._names).allTopicNames()
        described = answer.get(_PATIENCE_MS, self._unit)
        pairs = ((each.name(), each.topicId().toString()) for each in described.values())
        return {str(name): str(id_) for name, id_ in pairs if str(id_) != _WITHOUT_ID}


def _field(owner: JavaObject, name: str) -> JavaObject:
    found = owner.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(owner)
