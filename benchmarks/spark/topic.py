"""Clicks in a topic of Kafka, on a broker of the benchmark's own."""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from benchmarks.spark.data import BOUND_S, SHARDS, Clicks, Table
from spark_agent import BoundedOutOfOrderness, Pipeline
from tests.support.kafka_server import KafkaServer

_VALUE: Final = "person long, at timestamp, amount double"
_PATIENCE_S: Final = 60


@dataclass(frozen=True)
class Topic:
    """A topic with a partition for each shard, and JSON in the values."""

    broker: KafkaServer
    clicks: Clicks
    tasks: int | None = None
    """Number of tasks that read all partitions, also with plain Spark; None: one for each."""
    name: str = "clicks"

    @property
    def source(self) -> Mapping[str, Any]:
        return {"shards": [f"{self.name}-0"], "dynamic": True}

    @property
    def per_batch(self) -> int:
        """Return the rows of one batch: one slice of time.

        Spark divides them between the partitions by the rows left in each, and all have equally many.
        """
        return self.clicks.rows // self.clicks.slices

    def write(self) -> None:
        self.broker.create(self.name, SHARDS)
        # Idempotence keeps the order of the rows, also where the producer retries.
        room = {"queue.buffering.max.messages": "1000000", "linger.ms": "50"}
        producer = self.broker.producer({"enable.idempotence": "true", **room})
        for table in self.clicks.tables():
            shards = table["shard"].to_pylist()
            for shard, value in zip(shards, _values(table), strict=True):
                producer.produce(self.name, value=value, partition=int(shard))
            if producer.flush(_PATIENCE_S):
                raise RuntimeError(f"the broker has not taken all rows within {_PATIENCE_S} s")

    def read(self, spark: SparkSession) -> DataFrame:
        rows = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.broker.servers)
            .option("subscribe", self.name)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self.per_batch)
            .load()
        )
        if self.tasks is not None:
            rows = rows.coalesce(self.tasks)
        parsed = F.from_json(F.col("value").cast("string"), _VALUE)
        return rows.select(parsed.alias("click")).select("click.*")

    def read_by(self, pipeline: Pipeline, spark: SparkSession, stage: str) -> DataFrame:
        del spark
        return pipeline.read_kafka(
            self.broker.servers,
            self.name,
            stage=stage,
            value=_VALUE,
            event_time="at",
            strategy=BoundedOutOfOrderness(f"{BOUND_S} s"),
            options={"maxOffsetsPerTrigger": self.per_batch},
            tasks=self.tasks,
        )


def _values(table: Table) -> list[bytes]:
    """Return the rows as JSON."""
    at = pc.replace_substring(table["at"].cast(pa.string()), " ", "T")
    person, amount = (table[name].cast(pa.string()) for name in ("person", "amount"))
    parts = ('{"person":', person, ',"at":"', at, '","amount":', amount, "}", "")
    return pc.binary_join_element_wise(*parts).cast(pa.binary()).to_pylist()
