"""Count the visits of each day, in a run of every night.

    tidegauge serve &
    python examples/nightly.py http://127.0.0.1:8000 /tmp/visits

Each run reads the files present at its start, closes the days that are complete, and ends. The
third run is the last one: `bounded=True` makes the source final, and closes the last day too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_agent import BoundedOutOfOrderness, Pipeline

SPEC = {
    "visits": {"shards": ["web"]},
    "daily": {"inputs": ["visits"], "ranges": 4},
}


def main(url: str, folder: Path) -> None:
    """Run three nights."""
    (folder / "visits").mkdir(parents=True)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.sql.shuffle.partitions", 4).getOrCreate()
    for day in (1, 2, 3):
        rows = [{"host": "web", "at": f"2026-01-0{day}T{hour:02d}:00:00Z"} for hour in range(24)]
        (folder / f"visits/{day}.json").write_text("\n".join(map(json.dumps, rows)))
        run(spark, url, folder, last=day == 3)
        parts = (folder / "daily").glob("part-*.json")
        print("night", day, "days", sum(len(part.read_text().splitlines()) for part in parts))


def run(spark: SparkSession, url: str, folder: Path, *, last: bool) -> None:
    """Run one night."""
    with Pipeline(url, job="nightly", spec=SPEC) as pipeline:
        visits = spark.readStream.schema("host string, at timestamp").json(f"{folder}/visits")
        strategy = BoundedOutOfOrderness("2 hours")
        visits = pipeline.source(
            visits, stage="visits", shard="host", event_time="at", strategy=strategy
        )
        visits = pipeline.watermarked(visits, stage="daily", event_time="at")
        daily = visits.groupBy(F.window("at", "1 day")).count()
        writer = pipeline.report(daily, stage="daily").writeStream.format("json")
        writer = writer.option("path", f"{folder}/daily").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
        pipeline.start(writer, bounded=last).awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
