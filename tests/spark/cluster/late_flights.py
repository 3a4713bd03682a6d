# pyright: basic
"""A driver in a process of its own: flights by departure, whose late rows are put aside, or correct."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.demo.flights import LOG_SCHEMA, NEW_YORK, load_flights
from tests.spark.cluster.data import Shape
from tests.spark.cluster.driver import RANGES, Order, end_with_parent, session

JOB: Final = "late-flights"
COUNTS: Final = "counts"
LATENESS: Final = "12 hours"
_FILES_A_BATCH: Final = 12


def averages(flights: DataFrame, window: str) -> DataFrame:
    """Return the flights of each airport in each window, and their mean time in the air."""
    return flights.groupBy(F.window("departed_at", window), "origin").agg(
        F.count("*").alias("flights"),
        F.avg(F.unix_seconds("landed_at") - F.unix_seconds("departed_at")).alias("in_air_s"),
    )


def run(url: str, folder: Path, days: int, window: str, *, corrects: bool) -> None:
    """`corrects`: late rows correct their windows for some hours; else they are put aside."""
    spark = session(Order(Shape.TUMBLING, url, str(folder)))
    # The test reads the watermarks of all batches from the checkpoint.
    spark.conf.set("spark.sql.streaming.minBatchesToRetain", 100_000)
    shards = load_flights(days).carriers(NEW_YORK)
    spec = {NEW_YORK: {"shards": shards}, COUNTS: {"inputs": [NEW_YORK], "ranges": RANGES}}
    with Pipeline(url, JOB, spec, spark=spark, poll="50 ms", patience="5 s") as pipeline:
        logs = spark.readStream.option("maxFilesPerTrigger", _FILES_A_BATCH).schema(LOG_SCHEMA)
        flights = pipeline.source(
            logs.json(str(folder / "logs")),
            stage=NEW_YORK,
            shard="log",
            event_time="departed_at",
            strategy=BoundedOutOfOrderness("2 hours"),
        )
        on_time, late = pipeline.split_late(
            flights,
            stage=COUNTS,
            event_time="departed_at",
            allowed_lateness=LATENESS if corrects else None,
        )
        results = pipeline.report(averages(on_time, window), stage=COUNTS)
        writer = results.writeStream.format("parquet").option("path", str(folder / "results"))
        query = pipeline.start(
            writer.option("checkpointLocation", str(folder / "checkpoint")),
            late=late.writeStream.format("parquet").option("path", str(folder / "late")),
            bounded=True,
        )
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    _, url, folder, days, window, corrects = sys.argv
    run(url, Path(folder), int(days), window, corrects=corrects == "corrects")
