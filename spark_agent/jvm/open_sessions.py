# pyright: basic
"""The sessions that a query keeps, read from Spark's state by Spark's own reader."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

_US_PER_MS = 1_000
_OPERATOR = "sessionWindow"
"""The beginning of the name of Spark's operator with the sessions."""

ReadSessions = Callable[[int], int | None]
"""Return the start (ms) of the earliest session that is open after a batch; None: not one is open."""


def reader_of(spark: SparkSession, checkpoint: str) -> ReadSessions:
    """Return the reader of a query's sessions. The query has one operator with sessions.

    The reader waits for a job of Spark's, with a task for each partition of the state. A batch can be
    read once Spark has committed it.
    """

    def read(batch: int) -> int | None:
        operators = spark.read.format("state-metadata").load(checkpoint)
        [operator] = operators.filter(F.col("operatorName").startswith(_OPERATOR)).collect()
        state = spark.read.format("statestore").option("batchId", batch)
        rows = state.option("operatorId", operator["operatorId"]).load(checkpoint)
        [earliest] = rows.agg(F.min(F.unix_micros("key.sessionStartTime")).alias("us")).collect()
        return None if earliest["us"] is None else earliest["us"] // _US_PER_MS

    return read
