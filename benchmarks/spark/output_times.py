"""Overhead of each output time for a query with windows or sessions, by turns with their ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.spark.data import GAP_S
from benchmarks.spark.overhead import RANGES
from benchmarks.spark.turns import ClickBench
from spark_agent import Pipeline

END: Final = "the end"
DATES: Final[Mapping[str, Mapping[str, Any]]] = {
    END: {},
    "earliest": {"output_time": "earliest"},
    "latest": {"output_time": "latest"},
}
"""By name: the options of `report`. The earliest row of a session is read from Spark's state."""
WITH_LONGEST: Final = "earliest, with longest="
WINDOWS: Final[Mapping[str, tuple[str, Mapping[str, Mapping[str, Any]]]]] = {
    "windows": ("window", DATES),
    "sessions": (
        "session_window",
        {**DATES, WITH_LONGEST: {"output_time": "earliest", "longest": "1 hour"}},
    ),
}
"""By name: the column with the window, and the output times."""


def batch_ms(bench: ClickBench, name: str, *, kind: str) -> float:
    """Return the median duration of a batch (ms) of the same windows or sessions, by output time."""
    window, dates = WINDOWS[kind]

    def start(pipeline: Pipeline, rows: DataFrame, folder: Path) -> StreamingQuery:
        rows = pipeline.watermarked(rows, stage=kind, event_time="at")
        # The same columns for each: the output times alone differ.
        found = rows.groupBy(_grouping(kind), "person").agg(
            F.sum("amount"), F.min("at").alias("earliest"), F.max("at").alias("latest")
        )
        dated_by = dates[name].get("output_time", window)
        frame = pipeline.report(found, stage=kind, event_time=dated_by, **dates[name])
        writer = frame.writeStream.format("noop").trigger(availableNow=True)
        return pipeline.start(writer.option("checkpointLocation", str(folder / "checkpoint")))

    return bench.batch_ms(start, stages={kind: RANGES})


def _grouping(kind: str) -> Column:
    if kind == "windows":
        return F.window("at", "1 minute")
    return F.session_window("at", f"{GAP_S} seconds")
