# pyright: basic
"""Flights through two topics and three stages with topics between, while everything fails in turn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_agent.client.client import Client
from spark_agent.kafka_jars import KafkaJars
from tests.spark.cluster import kafka_flights
from tests.spark.cluster.cluster import RUN_S, Drivers, batches, end
from tests.spark.cluster.kafka_flights import (
    JOB,
    PARTITIONS,
    ROTATIONS,
    SCHEMAS,
    SOURCES,
    STAGES,
    STAMPS,
    THE_END,
    as_json,
    checkpoint,
)
from tests.spark.cluster.topics import FlightTopic, TopicOutput
from tests.spark.flow import until
from tests.spark.matrix.observer import Observer
from tests.support.kafka_server import KafkaServer
from tests.support.server import Service

pytestmark = [pytest.mark.spark, pytest.mark.matrix, pytest.mark.timeout(1_800)]

_WARM_UP: Final = 7
"""Slices after which each stage has closed windows."""
_TOO_SLOW: Final = "Python worker failed to connect back"
_BETWEEN: Final = 4
"""Partitions of each topic between stages."""


class Campaign:
    """A chain that runs, and what can happen to it."""

    def __init__(
        self, broker: KafkaServer, drivers: Drivers, sources: list[FlightTopic], client: Client
    ) -> None:
        self._broker = broker
        self._drivers = drivers
        self._sources = sources
        self._client = client
        self._between = _BETWEEN
        self._victims = 0

    def step(self, stage: str, fault: Callable[[], None]) -> None:
        """Write a slice of each source, and let a fault meet the batch that a stage plans next."""
        folder = checkpoint(self._drivers.folder, stage) / "offsets"
        before = batches(folder)
        for source in self._sources:
            source.write()

        def come() -> bool:
            assert self._runs(), "the queries have ended too soon"
            return batches(folder) > before

        until(come, f"a batch of {stage} is planned", RUN_S)
        fault()

    def kill_broker(self) -> None:
        self._broker.kill()
        self._broker.start()

    def kill_executor(self) -> None:
        victims = until(self._drivers.executors, "an executor runs")
        self._victims += 1
        assert end(victims[self._victims % len(victims)])

    def restart_driver(self) -> None:
        """Kill the driver with all that it has started, and start another."""
        for pid in self._drivers.kill_driver():
            end(pid)
        self._drivers.start()

    def grow_source(self) -> None:
        """Add a partition to a source. Rows come to it once it holds the watermark."""
        source = self._sources[self._victims % len(self._sources)]
        shard = source.grow()

        def joined() -> bool:
            assert self._runs(), "the queries have ended too soon"
            found = self._client.ranges(JOB, source.source, limit=100)["ranges"]
            return shard in {each["range"] for each in found}

        # Spark finds the partition with the next batch, which a row elsewhere brings about.
        source.write()
        until(joined, f"{shard} has joined", RUN_S)

    def grow_between(self) -> None:
        self._between += 1
        self._broker.grow(ROTATIONS, self._between)

    def finish(self) -> None:
        """Write all that is left, and let the queries run to their end."""
        for source in self._sources:
            while not source.is_written:
                source.write()
        (self._drivers.folder / THE_END).touch()
        self.restart_driver()
        until(lambda: not self._runs(), f"the queries end\n{self._drivers.log()}", RUN_S)

    def _runs(self) -> bool:
        """Return whether the driver still runs. One that was too slow to start is started again.

        Spark gives a worker of Python ten seconds. On a busy machine that is not enough for all of them.
        """
        if self._drivers.driver.poll() and _TOO_SLOW in self._drivers.log():
            self._drivers.start()
        return self._drivers.runs()


@pytest.fixture
def kafka(broker_jars: KafkaJars, tmp_path: Path) -> Iterator[tuple[KafkaServer, str]]:
    """A broker of its own, and the jars of Spark's connector."""
    with KafkaServer(broker_jars, tmp_path / "kafka") as broker:
        yield broker, broker_jars.connector_files


EACH_ONCE: Final = (1, 1, 1, 1, 1)
MANY: Final = (5, 10, 3, 2, 1)


def _faults(campaign: Campaign, times: Sequence[int]) -> list[Callable[[], None]]:
    kinds = (
        campaign.kill_broker,
        campaign.kill_executor,
        campaign.restart_driver,
        campaign.grow_source,
        campaign.grow_between,
    )
    return [kind for kind, count in zip(kinds, times, strict=True) for _ in range(count)]


def _batch_answer(
    spark: SparkSession, topics: list[FlightTopic], folder: Path
) -> dict[str, DataFrame]:
    """Return the rows of each stage, by a batch job."""
    lines = folder / "flights.json"
    lines.write_text("\n".join(value for topic in topics for value in topic.values))
    found = spark.read.schema(SCHEMAS[SOURCES[0]]).json(str(lines)).where("tailnum IS NOT NULL")
    answer: dict[str, DataFrame] = {}
    for stage in STAGES:
        found = answer[stage] = getattr(kafka_flights, stage)(found)
    return answer


@pytest.mark.parametrize(
    ("days", "faults", "seed"),
    [
        *((8, MANY, seed) for seed in range(3)),
        (4, EACH_ONCE, 0),
    ],
)
def test_flights_through_topics_while_everything_fails(
    spark: SparkSession,
    service: Service,
    tmp_path: Path,
    kafka: tuple[KafkaServer, str],
    days: int,
    faults: Sequence[int],
    seed: int,
) -> None:
    """Each stage's rows are those of a batch job, and none is behind a watermark that was seen."""
    broker, jars = kafka
    topics = [FlightTopic(broker, source, PARTITIONS, days) for source in SOURCES]
    for stage in STAGES:
        broker.create(stage, _BETWEEN)
    outputs = {stage: TopicOutput(broker, stage, STAMPS[stage]) for stage in STAGES}
    program = "tests.spark.cluster.kafka_flights"
    with (
        Observer(service.url, JOB, outputs) as observer,
        Drivers(tmp_path, program, service.url, str(tmp_path), broker.servers, jars) as drivers,
    ):
        campaign = Campaign(broker, drivers, topics, Client(service.url))
        for topic in topics:
            topic.write(_WARM_UP)
        order = _faults(campaign, faults)
        random.Random(seed).shuffle(order)
        for number, fault in enumerate(order):
            campaign.step(STAGES[number % len(STAGES)], fault)
        campaign.finish()
    observer.check()
    for stage, expected in _batch_answer(spark, topics, tmp_path).items():
        found = outputs[stage].values()
        lines = {row["value"] for row in as_json(expected).collect()}
        assert found.keys() == lines, f"{stage}: {_difference(found, lines)}"
        assert observer.judged[stage], f"rows of {stage} came after a watermark"


def _difference(found: Counter[str], expected: set[str]) -> str:
    return (
        f"missing {sorted(expected - found.keys())[:5]}, more {sorted(found.keys() - expected)[:5]}"
    )
