"""Join each order with its payment, if the payment comes within an hour.

    tidegauge serve &
    python examples/join.py http://127.0.0.1:8000 /tmp/sales

The payment of the third order is one second too late.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_agent import Ascending, Pipeline

SOURCES = {"orders": {"shards": ["shop"]}, "payments": {"shards": ["bank"]}}
SPEC = SOURCES | {"paid": {"inputs": ["orders", "payments"], "ranges": 4}}
BOUNDS = "paid_at >= ordered_at AND paid_at <= ordered_at + INTERVAL 1 HOUR"


def main(url: str, folder: Path) -> None:
    """Write both inputs, join them, and print the pairs."""
    (folder / "orders").mkdir(parents=True)
    (folder / "payments").mkdir()
    for number, time in enumerate(("10:59:59", "11:00:00", "11:00:01")):
        order = {"by": "shop", "id": number, "ordered_at": "2026-01-01T10:00:00Z"}
        payment = {"by": "bank", "order_id": number, "paid_at": f"2026-01-01T{time}Z"}
        (folder / f"orders/{number}.json").write_text(json.dumps(order))
        (folder / f"payments/{number}.json").write_text(json.dumps(payment))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.sql.shuffle.partitions", 4).getOrCreate()
    with Pipeline(url, job="sales", spec=SPEC) as pipeline:

        def read(stage: str, schema: str, event_time: str) -> DataFrame:
            rows = spark.readStream.schema(schema).json(f"{folder}/{stage}")
            rows = pipeline.source(
                rows, stage=stage, shard="by", event_time=event_time, strategy=Ascending()
            )
            return pipeline.watermarked(rows.drop("by"), stage="paid", event_time=event_time)

        orders = read("orders", "by string, id long, ordered_at timestamp", "ordered_at")
        payments = read("payments", "by string, order_id long, paid_at timestamp", "paid_at")
        paid = orders.join(payments, F.expr(f"id = order_id AND {BOUNDS}"))
        writer = pipeline.report(paid, stage="paid", event_time="paid_at").writeStream
        writer = writer.option("path", f"{folder}/paid").format("json").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
        pipeline.start(writer, bounded=True).awaitTermination()
    for part in sorted((folder / "paid").glob("part-*.json")):
        print(part.read_text(), end="")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
