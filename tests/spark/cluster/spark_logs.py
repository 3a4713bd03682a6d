"""Spark's own logs of a query, from which a test derives the flights that were on time."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent.demo.flights import LOG_SCHEMA


def _watermark_ms(checkpoint: Path, batch: int) -> int:
    if batch < 0:
        return 0
    _, metadata, *_ = (checkpoint / "offsets" / str(batch)).read_text().splitlines()
    return json.loads(metadata)["batchWatermarkMs"]


def _batches(checkpoint: Path) -> dict[str, int]:
    """Return the batch that has read each file."""
    found: dict[str, int] = {}
    for log in checkpoint.glob("sources/*/*"):
        for line in log.read_text().splitlines():
            if line.startswith("{"):
                entry = json.loads(line)
                found[Path(urlsplit(entry["path"]).path).name] = entry["batchId"]
    return found


def flights_on_time(
    spark: SparkSession, logs: Path, checkpoint: Path, window: str, lateness_ms: int
) -> DataFrame:
    """Return the flights whose window had not ended at the watermark of the batch before."""
    watermarks = [
        (name, _watermark_ms(checkpoint, batch - 1)) for name, batch in _batches(checkpoint).items()
    ]
    before = spark.createDataFrame(
        [(name, ms + lateness_ms if ms else 0) for name, ms in watermarks],
        "file string, before_ms long",
    )
    lines = spark.read.schema(LOG_SCHEMA).json(str(logs)).select("*", "_metadata.file_name")
    assert lines.select("file_name").distinct().count() <= len(watermarks), "each file was read"
    ends_ms = F.unix_millis(F.window("departed_at", window).end)
    dated = lines.join(before, lines["file_name"] == before["file"])
    return (
        dated.withColumn("ends_ms", ends_ms)
        .filter("ends_ms > before_ms")
        .select(*spark.read.schema(LOG_SCHEMA).json(str(logs)).columns)
    )
