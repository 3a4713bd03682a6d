# pyright: basic
# ruff: noqa: SLF001
"""The demonstration's logs and output in topics of Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.demo.files import LOG_OF_ROW, Files, schema_of
from spark_agent.demo.queries import (
    DEPARTURES_WEATHER,
    LOGS_OF,
    SOURCES,
    STATIONS,
    WEATHER,
    WEEKLY,
    rotations,
)
from spark_agent.jvm import JavaObject
from spark_agent.pipeline import Pipeline
from spark_agent.strategies import Strategy

PARTITIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(SOURCES, 8),
    WEATHER: len(STATIONS),
    **dict.fromkeys((rotations(source) for source in SOURCES), 2),
    WEEKLY: 1,
    DEPARTURES_WEATHER: 2,
}
"""The topics, and the number of their partitions."""
_WRITTEN_AT: Final[Mapping[str, str]] = {WEATHER: "observed_at"}
"""The column by which the rows of a log are in order, where it is not `landed_at`."""


@dataclass(frozen=True)
class Topics:
    """Logs in topics, of which a batch reads so many rows; output in topics. See `Medium`."""

    files: Files
    servers: str
    batches: int
    """The number of batches in which each source is read."""

    @property
    def repeats(self) -> bool:
        """See `Medium`."""
        return True

    def shards(self, stage: str) -> Mapping[str, Any]:
        """See `Medium`."""
        return {"shards": [f"{LOGS_OF[stage]}-0"], "dynamic": True}

    def create(self) -> None:
        """Create all topics."""
        jvm: JavaObject = self.files.spark._jvm
        clients = jvm.org.apache.kafka.clients.admin
        properties = jvm.java.util.HashMap()
        properties.put("bootstrap.servers", self.servers)
        admin = clients.AdminClient.create(properties)
        try:
            topics, optional = jvm.java.util.ArrayList(), jvm.java.util.Optional
            for topic, partitions in PARTITIONS.items():
                topics.add(clients.NewTopic(topic, optional.of(partitions), optional.empty()))
            admin.createTopics(topics).all().get()
        finally:
            admin.close()

    def fill(self) -> None:
        """Write each log to a partition, in the order of its lines."""
        for source in (*SOURCES, WEATHER):
            log = LOG_OF_ROW.get(source, "log")
            partition_of = F.create_map(
                *chain.from_iterable(
                    (F.lit(name), F.lit(number % PARTITIONS[source]))
                    for number, name in enumerate(self.files.logs(source))
                )
            )
            lines = (
                self.files.spark.read.schema(schema_of(source))
                .json(str(self.files.folders.logs(source)))
                .withColumn("partition", partition_of[F.col(log)])
                .repartition(PARTITIONS[source], "partition")
                .sortWithinPartitions("partition", _WRITTEN_AT.get(source, "landed_at"))
            )
            value = F.to_json(F.struct(*(name for name in lines.columns if name != "partition")))
            self._to_topic(
                lines.select("partition", value.alias("value")).write.format("kafka"), source
            ).save()

    def source(
        self, pipeline: Pipeline, stage: str, event_time: str, strategy: Strategy
    ) -> DataFrame:
        """See `Medium`."""
        topic = LOGS_OF[stage]
        return pipeline.read_kafka(
            self.servers,
            topic,
            stage=stage,
            value=schema_of(topic),
            event_time=event_time,
            strategy=strategy,
            options={"maxOffsetsPerTrigger": -(-self._rows(topic) // self.batches)},
        )

    def _rows(self, topic: str) -> int:
        return self._from_topic(self.files.spark.read, topic).count()

    def output(self, stage: str, schema: str) -> DataFrame:
        """See `Medium`."""
        return _values(self._from_topic(self.files.spark.readStream, stage), schema)

    def writer(self, frame: DataFrame, stage: str) -> DataStreamWriter:
        """See `Medium`."""
        writer = frame.select(F.to_json(F.struct("*")).alias("value")).writeStream.format("kafka")
        checkpoint = str(self.files.folders.checkpoint(stage))
        return self._to_topic(writer, stage).option("checkpointLocation", checkpoint)

    def result(self, stage: str, schema: str) -> DataFrame:
        """See `Medium`."""
        return _values(self._from_topic(self.files.spark.read, stage), schema)

    def _to_topic(self, writer: Any, topic: str) -> Any:  # noqa: ANN401  (of a batch or a stream)
        return writer.option("kafka.bootstrap.servers", self.servers).option("topic", topic)

    def _from_topic(self, reader: Any, topic: str) -> DataFrame:  # noqa: ANN401  (likewise)
        return (
            reader.format("kafka")
            .option("kafka.bootstrap.servers", self.servers)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
        )


def _values(rows: DataFrame, schema: str) -> DataFrame:
    """Return the columns of rows whose values are JSON."""
    return rows.select(F.from_json(F.col("value").cast("string"), schema).alias("v")).select("v.*")
