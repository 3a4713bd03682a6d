"""Drop repeated deliveries of a message within an hour.

    tidegauge serve &
    python examples/deduplication.py http://127.0.0.1:8000 /tmp/messages

Message 1 is delivered again after half an hour and dropped. Message 2 is delivered once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from spark_agent import BoundedOutOfOrderness, Pipeline

SPEC = {
    "deliveries": {"shards": ["queue"]},
    "messages": {"inputs": ["deliveries"], "ranges": 4},
}


def main(url: str, folder: Path) -> None:
    """Write the deliveries, drop the repeated ones, and print the messages."""
    rows = [
        {"queue": "queue", "message": message, "at": f"2026-01-01T10:{minute}:00Z"}
        for message, minute in ((1, "00"), (2, "10"), (1, "30"))
    ]
    (folder / "deliveries").mkdir(parents=True)
    (folder / "deliveries/1.json").write_text("\n".join(map(json.dumps, rows)))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.sql.shuffle.partitions", 4).getOrCreate()
    with Pipeline(url, job="messages", spec=SPEC) as pipeline:
        schema = "queue string, message long, at timestamp"
        deliveries = pipeline.source(
            spark.readStream.schema(schema).json(f"{folder}/deliveries"),
            stage="deliveries",
            shard="queue",
            event_time="at",
            strategy=BoundedOutOfOrderness("5 minutes"),
        )
        watermarked = pipeline.watermarked(
            deliveries, stage="messages", event_time="at", deduplicate_within="1 hour"
        )
        messages = watermarked.dropDuplicatesWithinWatermark(["message"])
        writer = pipeline.report(messages, stage="messages").writeStream.format("json")
        writer = writer.option("path", f"{folder}/messages").trigger(availableNow=True)
        pipeline.start(
            writer.option("checkpointLocation", f"{folder}/checkpoint")
        ).awaitTermination()
    for part in sorted((folder / "messages").glob("part-*.json")):
        print(part.read_text(), end="")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
