# pyright: basic
# ruff: noqa: SLF001
"""The sessions that a query keeps, read from Spark's state by Spark's own reader."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent.columns import micros_of
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm import JavaObject

_US_PER_MS: Final = 1_000
_OPERATOR: Final = "sessionWindow"
"""The beginning of the name of Spark's operator with the sessions."""
_MERGES: Final = "spark.sql.streaming.sessionWindow.merge.sessions.in.local.partition"

ReadSessions = Callable[[int], int | None]
"""Return the start (ms) of the earliest session that is open after a batch; None: not one is open."""


def reader_of(spark: SparkSession, stage: str, checkpoint: str | None) -> ReadSessions:
    """Return the reader of a query's sessions. The query has one operator with sessions.

    The reader waits for a job of Spark's, with a task for each partition of the state. A batch can be
    read once Spark has committed it. Raises `UnsoundPlanError` if a reading would not show all.
    """
    _check(spark, stage, checkpoint)

    @cache
    def operator_id() -> int:
        operators = spark.read.format("state-metadata").load(checkpoint)
        [operator] = operators.filter(F.col("operatorName").startswith(_OPERATOR)).collect()
        return operator["operatorId"]

    def read(batch: int) -> int | None:
        state = spark.read.format("statestore").option("batchId", batch)
        rows = state.option("operatorId", operator_id()).load(checkpoint)
        starts = rows.select(F.col("key.sessionStartTime").alias("start"))
        [earliest] = starts.agg(F.min(micros_of(starts, "start")).alias("us")).collect()
        return None if earliest["us"] is None else earliest["us"] // _US_PER_MS

    return read


def _check(spark: SparkSession, stage: str, checkpoint: str | None) -> None:
    longest = (
        "or declare the length of the longest session, "
        "report(…, output_time='earliest', longest='2 hours')"
    )
    if checkpoint is None:
        raise UnsoundPlanError(
            f"stage {stage!r}: with output_time='earliest', the open sessions are read from the "
            f"checkpoint: writer.option('checkpointLocation', …), {longest}"
        )
    jvm: JavaObject = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(checkpoint)
    if path.toUri().toString() != path.toString():
        raise UnsoundPlanError(
            f"stage {stage!r}: with output_time='earliest', the open sessions are read from the "
            f"checkpoint, and Spark's reader does not find a folder whose name has spaces or other "
            f"characters that addresses escape: rename {checkpoint!r}, {longest}"
        )
    if str(spark.conf.get(_MERGES, "false")).lower() == "true":
        # Late rows are merged before Spark finds them late, so one session may be as long as they are.
        raise UnsoundPlanError(
            f"stage {stage!r}: with output_time='earliest', {_MERGES} dates sessions by late rows: "
            f"leave it at false, {longest}"
        )
