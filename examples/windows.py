"""Sum the litres of each tap by the hour, in windows that close by tidegauge's watermark.

    tidegauge serve &
    python examples/windows.py http://127.0.0.1:8000 /tmp/water

The windows of the first two hours close. The third one is open: the watermark is at 02:25.
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
    "taps": {"shards": ["north", "south"]},
    "hourly": {"inputs": ["taps"], "ranges": 4},
}


def main(url: str, folder: Path) -> None:
    """Write an input, run the query until the input is read, and print the closed windows."""
    rows = [
        {"tap": tap, "at": f"2026-01-01T0{hour}:{minute}:00Z", "litres": 1.5}
        for hour in range(3)
        for minute in ("05", "35")
        for tap in ("north", "south")
    ]
    (folder / "taps").mkdir(parents=True)
    (folder / "taps/1.json").write_text("\n".join(map(json.dumps, rows)))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.sql.shuffle.partitions", 4).getOrCreate()  # equal to `ranges`
    schema, strategy = (
        "tap string, at timestamp, litres double",
        BoundedOutOfOrderness("10 minutes"),
    )
    with Pipeline(url, job="water", spec=SPEC) as pipeline:
        taps = spark.readStream.schema(schema).json(f"{folder}/taps")
        taps = pipeline.source(taps, stage="taps", shard="tap", event_time="at", strategy=strategy)
        taps = pipeline.watermarked(taps, stage="hourly", event_time="at")
        hourly = taps.groupBy(F.window("at", "1 hour"), "tap").agg(F.sum("litres").alias("litres"))
        writer = pipeline.report(hourly, stage="hourly").writeStream.format("json")
        writer = writer.option("path", f"{folder}/hourly").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
        pipeline.start(writer).awaitTermination()
    for part in sorted((folder / "hourly").glob("part-*.json")):
        print(part.read_text(), end="")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
