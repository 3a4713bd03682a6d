# pyright: basic
"""A driver in a process of its own: flights by hour of departure, and those that landed too late."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Final

from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.demo.flights import LOG_SCHEMA, NEW_YORK, load_flights
from tests.spark.cluster.data import Shape
from tests.spark.cluster.driver import RANGES, Order, end_with_parent, session

JOB: Final = "late-flights"
HOURLY: Final = "hourly"
_FILES_A_BATCH: Final = 12


def run(url: str, folder: Path, days: int) -> None:
    spark = session(Order(Shape.TUMBLING, url, str(folder)))
    shards = load_flights(days).carriers(NEW_YORK)
    spec = {NEW_YORK: {"shards": shards}, HOURLY: {"inputs": [NEW_YORK], "ranges": RANGES}}
    with Pipeline(url, JOB, spec, spark=spark, poll="50 ms", patience="5 s") as pipeline:
        logs = spark.readStream.option("maxFilesPerTrigger", _FILES_A_BATCH).schema(LOG_SCHEMA)
        flights = pipeline.source(
            logs.json(str(folder / "logs")),
            stage=NEW_YORK,
            shard="log",
            event_time="departed_at",
            strategy=BoundedOutOfOrderness("2 hours"),
        )
        on_time, late = pipeline.split_late(flights, stage=HOURLY, event_time="departed_at")
        hourly = on_time.groupBy(F.window("departed_at", "1 hour"), "origin").agg(
            F.count("*").alias("flights")
        )
        results = pipeline.report(hourly, stage=HOURLY).writeStream.format("parquet")
        query = pipeline.start(
            results.option("path", str(folder / "hourly")).option(
                "checkpointLocation", str(folder / "checkpoint")
            ),
            late=late.writeStream.format("parquet").option("path", str(folder / "late")),
            bounded=True,
        )
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
