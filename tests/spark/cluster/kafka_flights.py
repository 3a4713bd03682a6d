# pyright: basic
"""A driver in a process of its own: flights of two topics, through three stages with topics between.

Run by `tests.spark.cluster.test_kafka_flights`, which may kill it, its executors, and the broker.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.demo.flights import NEW_YORK, NEWARK
from tests.spark.cluster.data import Shape
from tests.spark.cluster.driver import RANGES, Order, end_with_parent, session

JOB: Final = "kafka-flights"
SOURCES: Final = (NEWARK, NEW_YORK)
ROTATIONS: Final = "rotations"
QUARTERS: Final = "quarters"
DAYS: Final = "days"
STAGES: Final = (ROTATIONS, QUARTERS, DAYS)
"""Each writes to a topic of its name."""
STAMPS: Final = {ROTATIONS: "ended_at", QUARTERS: "until", DAYS: "until"}
"""The column that carries event time downstream."""
PARTITIONS: Final = 8
BOUND: Final = "12 hours"
SCHEMAS: Final = {
    **dict.fromkeys(SOURCES, "departed_at timestamp, tailnum string"),
    ROTATIONS: "tailnum string, ended_at timestamp, flights long",
    QUARTERS: "until timestamp, rotations long, flights long",
}
LIMITS: Final = {ROTATIONS: 300, QUARTERS: 60, DAYS: 2}
"""Rows of a batch, so that the topics have backlogs."""
THE_END: Final = "all-is-written"
"""A file by which a driver learns that its queries are to end."""


def rotations(flights: DataFrame) -> DataFrame:
    """Return the rotations of each aircraft: flights less than six hours apart."""
    windowed = flights.groupBy(F.session_window("departed_at", "6 hours").alias("s"), "tailnum")
    counted = windowed.agg(F.count("*").alias("flights"))
    return counted.select("tailnum", F.col("s.end").alias("ended_at"), "flights")


def quarters(each: DataFrame) -> DataFrame:
    """Return the rotations that ended in each quarter of a day. A repeated batch adds nothing."""
    once = each.dropDuplicates(["tailnum", "ended_at"])
    counted = once.groupBy(F.window("ended_at", "6 hours")).agg(
        F.count("*").alias("rotations"), F.sum("flights").alias("flights")
    )
    return counted.select(F.window_time("window").alias("until"), "rotations", "flights")


def days(each: DataFrame) -> DataFrame:
    """Return the sums of each day."""
    summed = (
        each.dropDuplicates(["until"])
        .groupBy(F.window("until", "1 day"))
        .agg(F.sum("rotations").alias("rotations"), F.sum("flights").alias("flights"))
    )
    return summed.select(F.window_time("window").alias("until"), "rotations", "flights")


def as_json(frame: DataFrame) -> DataFrame:
    """Return rows as the value of a topic."""
    return frame.select(F.to_json(F.struct("*")).alias("value"))


class Chain:
    """The queries of the three stages."""

    def __init__(
        self, spark: SparkSession, pipeline: Pipeline, servers: str, folder: Path, *, bounded: bool
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._servers = servers
        self._folder = folder
        self._bounded = bounded

    def start(self) -> list[StreamingQuery]:
        """Start them."""
        pipeline = self._pipeline
        sources = [
            pipeline.read_kafka(
                self._servers,
                source,
                stage=source,
                value=SCHEMAS[source],
                event_time="departed_at",
                strategy=BoundedOutOfOrderness(BOUND),
                options={"maxOffsetsPerTrigger": LIMITS[ROTATIONS]},
                tasks=1,
            )
            for source in SOURCES
        ]
        rows = [
            each.where("tailnum IS NOT NULL").select("departed_at", "tailnum") for each in sources
        ]
        flights = rows[0].union(rows[1])
        windowed = pipeline.watermarked(flights, stage=ROTATIONS, event_time="departed_at")
        return [
            self._start(rotations(windowed), ROTATIONS),
            self._start(quarters(self._read(ROTATIONS, by=QUARTERS)), QUARTERS),
            self._start(days(self._read(QUARTERS, by=DAYS)), DAYS),
        ]

    def _read(self, topic: str, by: str) -> DataFrame:
        raw = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self._servers)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", LIMITS[by])
            .load()
        )
        value = F.from_json(F.col("value").cast("string"), SCHEMAS[topic]).alias("value")
        rows = raw.select(value).select("value.*")
        return self._pipeline.watermarked(rows, stage=by, event_time=STAMPS[topic])

    def _start(self, frame: DataFrame, stage: str) -> StreamingQuery:
        reported = self._pipeline.report(frame, stage=stage, event_time=STAMPS[stage])
        key = F.col("tailnum" if stage == ROTATIONS else STAMPS[stage]).cast("string").alias("key")
        writer = (
            reported.select(key, F.to_json(F.struct("*")).alias("value"))
            .writeStream.format("kafka")
            .option("kafka.bootstrap.servers", self._servers)
            .option("topic", stage)
            .option("checkpointLocation", str(checkpoint(self._folder, stage)))
        )
        return self._pipeline.start(writer, bounded=self._bounded)


def checkpoint(folder: Path, stage: str) -> Path:
    """Return the checkpoint of a stage's query."""
    return folder / f"{stage}-checkpoint"


def run(url: str, folder: Path, servers: str, jars: str) -> None:
    """Run the chain: on and on, or to its end once all is written."""
    bounded = (folder / THE_END).exists()
    spark = session(Order(Shape.TUMBLING, url, str(folder), jars=jars))
    spec = {
        **{source: {"shards": [f"{source}-0"], "dynamic": True} for source in SOURCES},
        ROTATIONS: {"inputs": list(SOURCES), "ranges": RANGES},
        QUARTERS: {"inputs": [ROTATIONS], "ranges": RANGES},
        DAYS: {"inputs": [QUARTERS], "ranges": RANGES},
    }
    with Pipeline(url, JOB, spec, spark=spark, poll="50 ms", patience="5 s") as pipeline:
        queries = Chain(spark, pipeline, servers, folder, bounded=bounded).start()
        while any(query.isActive for query in queries):
            spark.streams.awaitAnyTermination()
            spark.streams.resetTerminated()
    spark.stop()


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    _, url, folder, servers, jars = sys.argv
    run(url, Path(folder), servers, jars)
