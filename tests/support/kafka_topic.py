"""Topics of readings, for the tests of Spark on Kafka."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import uuid4

from confluent_kafka import Producer

from tests.spark.flow import START_MS, Reading
from tests.support.kafka_server import KafkaServer

_PATIENCE_S = 60


class Topic:
    """A topic of readings; the sensor of a reading is the number of its partition."""

    def __init__(
        self, broker: KafkaServer, partitions: int, *, name: str | None = None, **config: str
    ) -> None:
        self.broker = broker
        self.name = name or f"readings-{uuid4().hex[:8]}"
        self.written: list[Reading] = []
        self.config = config
        broker.create(self.name, partitions, config)
        self._producer = broker.producer()

    def write(self, readings: Iterable[Reading], key: bytes | None = None) -> None:
        """Write readings, and return once the broker has them."""
        for each in readings:
            self._produce(self._producer, each, key)
            self.written.append(each)
        assert self._producer.flush(_PATIENCE_S) == 0

    def begin_transaction(self, readings: Iterable[Reading]) -> Producer:
        """Write readings in a transaction of a producer, and return once the broker has them."""
        producer = self.broker.producer({"transactional.id": uuid4().hex})
        producer.init_transactions(_PATIENCE_S)
        producer.begin_transaction()
        for each in readings:
            self._produce(producer, each)
        assert producer.flush(_PATIENCE_S) == 0
        return producer

    def _produce(self, producer: Producer, reading: Reading, key: bytes | None = None) -> None:
        at = START_MS + reading.second * 1_000
        when = datetime.fromtimestamp(at / 1_000, UTC).isoformat()
        value = json.dumps({"letter": reading.key, "at": when}).encode()
        producer.produce(
            self.name, value=value, key=key, partition=int(reading.sensor), timestamp=at
        )

    def grow(self, partitions: int) -> None:
        """Add partitions, up to this number."""
        self.broker.grow(self.name, partitions)
        # One that lists the topic anew.
        self._producer = self.broker.producer()

    def make_again(self, partitions: int) -> None:
        """Delete the topic, and make one of the same name."""
        self.broker.delete(self.name)
        self.broker.create(self.name, partitions, self.config)
        self._producer = self.broker.producer()
        self.written.clear()

    def write_value(self, partition: int, value: bytes | None) -> None:
        """Write one value, dated by the clock."""
        self._producer.produce(self.name, value=value, partition=partition)
        assert self._producer.flush(_PATIENCE_S) == 0

    def shard(self, partition: int) -> str:
        """Return the shard of a partition."""
        return f"{self.name}-{partition}"
