"""Overhead of each output time for a query with windows or sessions, by turns with their ends."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from benchmarks.spark.data import BOUND_S, GAP_S, SHARDS, Files
from benchmarks.spark.overhead import RANGES
from benchmarks.spark.turns import batch_ms
from spark_agent import BoundedOutOfOrderness, Pipeline

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


class OutputTimeBench:
    """Runs the same windows or sessions with each output time."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, files: Files) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._files = files
        self._numbers = itertools.count()

    def batch_ms(self, kind: str, name: str) -> float:
        """Return the median duration of a batch (ms)."""
        window, dates = WINDOWS[kind]
        folder = self._folder / f"{kind}-{next(self._numbers)}"
        clicks = (
            self._spark.readStream.schema("person long, shard string, at timestamp, amount double")
            .option("maxFilesPerTrigger", self._files.per_batch)
            .parquet(str(self._files.folder))
        )
        spec = {
            "clicks": {"shards": [str(shard) for shard in range(SHARDS)]},
            kind: {"inputs": ["clicks"], "ranges": RANGES},
        }
        with Pipeline(self._url, folder.name, spec, spark=self._spark) as pipeline:
            rows = pipeline.source(
                clicks,
                stage="clicks",
                shard="shard",
                event_time="at",
                strategy=BoundedOutOfOrderness(f"{BOUND_S} s"),
            )
            rows = pipeline.watermarked(rows, stage=kind, event_time="at")
            # The same columns for each: the output times alone differ.
            found = rows.groupBy(_grouping(kind), "person").agg(
                F.sum("amount"), F.min("at").alias("earliest"), F.max("at").alias("latest")
            )
            dated_by = dates[name].get("output_time", window)
            frame = pipeline.report(found, stage=kind, event_time=dated_by, **dates[name])
            writer = frame.writeStream.format("noop").trigger(availableNow=True)
            writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
            query = pipeline.start(writer)
            query.awaitTermination()
            duration_ms = batch_ms(query)
        shutil.rmtree(folder)
        return duration_ms


def _grouping(kind: str) -> Column:
    if kind == "windows":
        return F.window("at", "1 minute")
    return F.session_window("at", f"{GAP_S} seconds")
