# pyright: basic
"""A driver in a process of its own: the rotations of one airport's aircraft, until it is killed."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.demo.files import Files, Folders
from spark_agent.demo.flights import load_flights
from spark_agent.demo.queries import JOB, RANGES, rotations, sessions, specification, start
from spark_agent.demo.session import spark_session

DAYS: Final = 4
BOUND: Final = timedelta(hours=12)


def files_of(spark: SparkSession, folders: Folders) -> Files:
    """One day of all carriers in each batch."""
    return Files(spark, folders, load_flights(DAYS))


def start_rotations(pipeline: Pipeline, files: Files, source: str) -> StreamingQuery:
    """Start an airport's query, which does not end."""
    lines = files.source(pipeline, source, "departed_at", BoundedOutOfOrderness(BOUND))
    frame = sessions(pipeline, lines, source)
    return start(pipeline, files, frame, rotations(source), bounded=False)


def run(url: str, folders: Folders, source: str, own: Path) -> None:
    with spark_session(own, RANGES) as spark:
        files = files_of(spark, folders)
        spec = specification(files)
        with Pipeline(url, JOB, spec, spark=spark, lease_ttl="3 s") as pipeline:
            start_rotations(pipeline, files, source).awaitTermination()


def _end_with_parent() -> None:
    """Never outlive the tests, whatever becomes of them: their end closes this pipe."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run(sys.argv[1], Folders(Path(sys.argv[2])), sys.argv[3], Path(sys.argv[4]))
