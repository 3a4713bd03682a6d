"""Overhead of each treatment of late rows for a query with windows, by turns with `late="pass"`."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from benchmarks.spark.data import BOUND_S, SHARDS, Files
from benchmarks.spark.overhead import RANGES
from benchmarks.spark.turns import batch_ms
from spark_agent import BoundedOutOfOrderness, Pipeline

PASS: Final = "late='pass'"
DROP: Final = "late='drop'"
ASIDE: Final = "split_late()"
AGAIN: Final = "allowed_lateness='1 hour'"
FATES: Final = (PASS, DROP, ASIDE, AGAIN)


class LateBench:
    """Runs the same windows with each treatment of late rows."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, files: Files) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._files = files
        self._numbers = itertools.count()

    def batch_ms(self, fate: str) -> float:
        """Return the median duration of a batch (ms)."""
        folder = self._folder / f"late-{next(self._numbers)}"
        clicks = (
            self._spark.readStream.schema("person long, shard string, at timestamp, amount double")
            .option("maxFilesPerTrigger", self._files.per_batch)
            .parquet(str(self._files.folder))
        )
        spec = {
            "clicks": {"shards": [str(shard) for shard in range(SHARDS)]},
            "minutes": {"inputs": ["clicks"], "ranges": RANGES},
        }
        with Pipeline(self._url, folder.name, spec, spark=self._spark) as pipeline:
            rows = pipeline.source(
                clicks,
                stage="clicks",
                shard="shard",
                event_time="at",
                strategy=BoundedOutOfOrderness(f"{BOUND_S} s"),
            )
            late = ()
            if fate == ASIDE:
                rows, aside = pipeline.split_late(rows, stage="minutes", event_time="at")
                late = aside.writeStream.format("parquet").option("path", str(folder / "late"))
            else:
                rows = pipeline.watermarked(
                    rows,
                    stage="minutes",
                    event_time="at",
                    late="drop" if fate == DROP else "pass",
                    allowed_lateness="1 hour" if fate == AGAIN else None,
                )
            minutes = rows.groupBy(F.window("at", "1 minute"), "shard").agg(F.sum("amount"))
            writer = pipeline.report(minutes, stage="minutes").writeStream.foreachBatch(_ignore)
            writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
            query = pipeline.start(writer.trigger(availableNow=True), late=late)
            query.awaitTermination()
            found = batch_ms(query)
        shutil.rmtree(folder)
        return found


def _ignore(batch: DataFrame, number: int) -> None:
    """Compute the results, and write nothing."""
    del number
    batch.write.format("noop").mode("append").save()
