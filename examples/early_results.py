"""Count votes in complete windows, and earlier in windows that ignore the stragglers.

    tidegauge serve &
    python examples/early_results.py http://127.0.0.1:8000 /tmp/votes

The early query closes its windows by the 66 % percentile, and has two windows more.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_agent import BoundedOutOfOrderness, Pipeline

SPEC = {
    "votes": {"shards": ["north", "south"], "percentiles": [66]},
    "tally": {"inputs": ["votes"], "ranges": 4},
}
BOUND = BoundedOutOfOrderness("1 hour")


def main(url: str, folder: Path) -> None:
    """Write ten hours of votes, count them twice, and print the number of closed windows."""
    rows = [
        {"county": county, "at": f"2026-01-01T{minute // 60:02d}:{minute % 60:02d}:00Z"}
        for minute in range(600)
        for county in ("north", "south")
    ]
    (folder / "votes").mkdir(parents=True)
    (folder / "votes/1.json").write_text("\n".join(map(json.dumps, rows)))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.sql.shuffle.partitions", 4).getOrCreate()
    votes = spark.readStream.schema("county string, at timestamp").json(f"{folder}/votes")
    with Pipeline(url, job="election", spec=SPEC) as pipeline:

        def run(counted: DataFrame, name: str) -> None:
            writer = counted.writeStream.format("json").option("path", f"{folder}/{name}")
            writer = writer.option("checkpointLocation", f"{folder}/{name}-checkpoint")
            pipeline.start(writer.trigger(availableNow=True)).awaitTermination()
            parts = (folder / name).glob("part-*.json")
            print(name, sum(len(part.read_text().splitlines()) for part in parts))

        own = pipeline.source(votes, stage="votes", shard="county", event_time="at", strategy=BOUND)
        complete = pipeline.watermarked(own, stage="tally", event_time="at")
        counted = complete.groupBy(F.window("at", "10 minutes")).count()
        run(pipeline.report(counted, stage="tally"), "complete")
        early = pipeline.watermarked(votes, stage="tally", event_time="at", percentile=66)
        run(early.groupBy(F.window("at", "10 minutes")).count(), "early")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
