# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""Topics of flights, which grow while they are written, and topics that an observer watches."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from spark_agent.demo.flights import START, load_flights
from tests.spark.matrix.observer import stamp_ms
from tests.support.kafka_server import KafkaServer

SLICE: Final = timedelta(hours=6)
_PATIENCE_S: Final = 60
_LOOK_S: Final = 2


class FlightTopic:
    """One airport's flights, in slices of the day by landing. A carrier keeps to a partition.

    Each slice ends with a heartbeat in each partition.
    """

    def __init__(self, broker: KafkaServer, source: str, partitions: int, days: int) -> None:
        self.source = source
        self.partitions = partitions
        self.values: list[str] = []
        """All that was written."""
        self._broker = broker
        broker.create(source, partitions)
        table = load_flights(days).table
        table = table[table["source"] == source].sort_values("landed_at", kind="stable")
        carriers = sorted(table["log"].unique())
        assert len(carriers) >= partitions, "each partition has rows"
        self._numbers = {carrier: number for number, carrier in enumerate(carriers)}
        slices = ((table["landed_at"] - START) // SLICE).clip(lower=0)
        self._slices = {int(number): rows for number, rows in table.groupby(slices)}
        self._written = 0

    @property
    def is_written(self) -> bool:
        """True if there are no more slices."""
        return self._written > max(self._slices)

    def write(self, count: int = 1) -> None:
        """Write so many more slices, and return once the broker has them."""
        # One that lists the partitions anew, and that no failure of the broker has met.
        producer = self._broker.producer()

        def put(partition: int, tailnum: str | None, departed_at: datetime) -> None:
            value = json.dumps({"departed_at": departed_at.isoformat(), "tailnum": tailnum})
            producer.produce(self.source, value=value.encode(), partition=partition)
            self.values.append(value)

        for number in range(self._written, self._written + count):
            # At night nothing lands.
            for row in self._slices[number].itertuples() if number in self._slices else ():
                put(self._numbers[row.log] % self.partitions, row.tailnum, row.departed_at)
            self._written = number + 1
            for partition in range(self.partitions):
                put(partition, None, START + self._written * SLICE)
        assert producer.flush(_PATIENCE_S) == 0

    def grow(self) -> str:
        """Add a partition, and return its shard. It has no rows until the next slice."""
        self.partitions += 1
        self._broker.grow(self.source, self.partitions)
        return f"{self.source}-{self.partitions - 1}"


@dataclass(frozen=True, order=True)
class Place:
    """A row of a topic."""

    topic: str
    partition: int
    offset: int

    @property
    def name(self) -> str:
        """Its name, for people."""
        return f"{self.topic}-{self.partition} at offset {self.offset}"


class TopicOutput:
    """The rows of a topic, and the member of their values that carries event time downstream."""

    def __init__(self, broker: KafkaServer, topic: str, stamp: str) -> None:
        self._broker = broker
        self._topic = topic
        self._stamp = stamp
        self._values: dict[Place, str] = {}
        self._next: dict[int, int] = {}
        # It never joins the group, whose name it has to have.
        self._consumer = Consumer(
            {
                "bootstrap.servers": broker.servers,
                "group.id": "observer",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )

    def committed(self) -> set[Place]:
        """Every row that a reader may read now. Raises `ConnectionError` while the broker is away."""
        try:
            ends = self._ends()
        except (KafkaException, TimeoutError) as error:
            raise ConnectionError(str(error)) from error
        new = {each: end for each, end in ends.items() if end > self._next.get(each, 0)}
        if new:
            self._read(new)
        return set(self._values)

    def stamps_ms(self, place: Place) -> list[int]:
        """The time of a row."""
        found = stamp_ms(self._values[place], self._stamp)
        return [] if found is None else [found]

    def values(self) -> Counter[str]:
        """All values, each as often as it was written."""
        return Counter(self._values[place] for place in self.committed())

    def _ends(self) -> dict[int, int]:
        """The offset of the next row to be written, by partition."""
        found = self._broker.admin.list_topics(self._topic, timeout=_LOOK_S).topics[self._topic]
        if found.error is not None:
            raise ConnectionError(str(found.error))
        asked: dict[TopicPartition, OffsetSpec] = {}
        for each in found.partitions:
            asked[TopicPartition(self._topic, each)] = OffsetSpec.latest()
        answers = self._broker.admin.list_offsets(asked, request_timeout=_LOOK_S)
        return {at.partition: answer.result(_LOOK_S).offset for at, answer in answers.items()}

    def _read(self, ends: dict[int, int]) -> None:
        """Read up to these ends, unless the broker goes away."""
        self._consumer.assign(
            [TopicPartition(self._topic, each, self._next.get(each, 0)) for each in ends]
        )
        while any(self._next.get(each, 0) < end for each, end in ends.items()):
            message = self._consumer.poll(_LOOK_S)
            if message is None or message.error() is not None:
                raise ConnectionError("the broker does not answer")
            value = message.value()
            partition, offset = message.partition(), message.offset()
            assert value is not None
            assert partition is not None
            assert offset is not None
            place = Place(self._topic, partition, offset)
            self._values[place] = value.decode()
            self._next[place.partition] = place.offset + 1
