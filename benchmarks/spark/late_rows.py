"""Overhead of each treatment of late rows for a query with windows, by turns with `late="pass"`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.spark.overhead import RANGES
from benchmarks.spark.turns import ClickBench
from spark_agent import Pipeline

PASS: Final = "late='pass'"
DROP: Final = "late='drop'"
ASIDE: Final = "split_late()"
AGAIN: Final = "allowed_lateness='1 hour'"
FATES: Final = (PASS, DROP, ASIDE, AGAIN)

_STAGE: Final = "minutes"


def batch_ms(bench: ClickBench, fate: str) -> float:
    """Return the median duration of a batch (ms) of the same windows with a treatment of late rows."""

    def start(pipeline: Pipeline, rows: DataFrame, folder: Path) -> StreamingQuery:
        late = ()
        if fate == ASIDE:
            rows, aside = pipeline.split_late(rows, stage=_STAGE, event_time="at")
            late = aside.writeStream.format("parquet").option("path", str(folder / "late"))
        else:
            rows = pipeline.watermarked(
                rows,
                stage=_STAGE,
                event_time="at",
                late="drop" if fate == DROP else "pass",
                allowed_lateness="1 hour" if fate == AGAIN else None,
            )
        minutes = rows.groupBy(F.window("at", "1 minute"), "shard").agg(F.sum("amount"))
        writer = pipeline.report(minutes, stage=_STAGE).writeStream.foreachBatch(_ignore)
        writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
        return pipeline.start(writer.trigger(availableNow=True), late=late)

    return bench.batch_ms(start, stages={_STAGE: RANGES})


def _ignore(batch: DataFrame, number: int) -> None:
    """Compute the results, and write nothing."""
    del number
    batch.write.format("noop").mode("append").save()
