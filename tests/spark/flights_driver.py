# pyright: basic
"""A driver in a process of its own: the rotations of one airport's aircraft, until it is killed."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.demo.flights import LOG_SCHEMA, load_flights
from spark_agent.demo.queries import (
    JOB,
    RANGES,
    Folders,
    rotations,
    sessions,
    specification,
    start,
)
from spark_agent.demo.session import spark_session

DAYS: Final = 4
BOUND: Final = timedelta(hours=12)


def logs(spark: SparkSession, folders: Folders, source: str) -> DataFrame:
    """One day of all carriers in each batch."""
    carriers = len(load_flights(DAYS).carriers(source))
    reader = spark.readStream.option("maxFilesPerTrigger", carriers).schema(LOG_SCHEMA)
    return reader.json(str(folders.logs(source)))


def start_rotations(
    spark: SparkSession, pipeline: Pipeline, folders: Folders, source: str
) -> StreamingQuery:
    """Start an airport's query, which does not end."""
    frame = sessions(pipeline, logs(spark, folders, source), source, BoundedOutOfOrderness(BOUND))
    return start(pipeline, frame, rotations(source), folders, bounded=False)


def run(url: str, folders: Folders, source: str, own: Path) -> None:
    spec = specification(load_flights(DAYS))
    with (
        spark_session(own, RANGES) as spark,
        Pipeline(url, JOB, spec, spark=spark, lease_ttl="3 s") as pipeline,
    ):
        start_rotations(spark, pipeline, folders, source).awaitTermination()


def _end_with_parent() -> None:
    """Never outlive the tests, whatever becomes of them: their end closes this pipe."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run(sys.argv[1], Folders(Path(sys.argv[2])), sys.argv[3], Path(sys.argv[4]))
