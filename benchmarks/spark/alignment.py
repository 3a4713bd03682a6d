"""`python -m benchmarks.spark.alignment`: what alignment does for a join of two uneven sources.

Two queries each read a log and write it out again, one of them ten times as fast, and a third joins what
they write by event time, within a minute. Without alignment, the join has to keep nearly all that
the fast one has written until the slow one gets there. With it, the fast one waits for the slow one.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.table import Table

from benchmarks.servers import service
from benchmarks.spark.figures import local_spark
from benchmarks.spark.overhead import RANGES
from spark_agent import Ascending, Pipeline
from spark_agent.client.client import Client

FAST, SLOW, JOINED = "fast", "slow", "joined"
PACE: Final = {FAST: 10, SLOW: 1}
"""Files in a batch."""
FILES: Final = 120
FILE_S: Final = 6
"""Seconds of event time in a file."""
ROWS: Final = 200
DRIFT_S: Final = 180
_START_S: Final = 1_700_000_000
_SPEC: Final = {
    FAST: {"shards": [FAST]},
    SLOW: {"shards": [SLOW]},
    JOINED: {"inputs": [FAST, SLOW], "ranges": RANGES},
}
_ALIGNED: Final = {"groups": [{"stages": [FAST, SLOW], "max_drift_ms": DRIFT_S * 1_000}]}


@dataclass(frozen=True)
class Run:
    """Observations of a run."""

    seconds: float
    spread_s: int
    """The furthest that the fast source was ahead."""
    state_rows: int
    """The most rows that the join has kept."""
    joined: int


def main() -> None:
    """Run with and without, by turns, and print a table."""
    console = Console(stderr=True)
    runs: dict[bool, list[Run]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="tidegauge-bench-") as name:
        folder = Path(name)
        for source in PACE:
            _write_log(folder / source)
        with local_spark(folder) as spark:
            for number in range(4):
                aligned = number % 2 == 1
                with service(folder / f"service-{number}") as server:
                    run = _run(spark, server.url, folder, folder / f"run-{number}", aligned=aligned)
                console.print(f"aligned: {aligned}, {run}")
                runs[aligned].append(run)
    Console().print(_table(runs))


def _run(spark: SparkSession, url: str, logs: Path, folder: Path, *, aligned: bool) -> Run:
    throttle = _ALIGNED if aligned else None
    began = time.monotonic()
    with Pipeline(url, "join", _SPEC, spark=spark, throttle=throttle, poll="50 ms") as pipeline:
        queries = [_copy(pipeline, spark, logs, folder, source) for source in PACE]
        join = _join(pipeline, spark, folder)
        spread_ms = _follow(Client(url), join)
        assert not any(query.isActive for query in queries), "the sources are final"
        seconds = time.monotonic() - began
    kept = [
        sum(operator["numRowsTotal"] for operator in progress["stateOperators"])
        for progress in join.recentProgress
    ]
    joined = spark.read.parquet(str(folder / JOINED)).count()
    return Run(seconds, spread_ms // 1_000, max(kept), joined)


def _copy(
    pipeline: Pipeline, spark: SparkSession, logs: Path, folder: Path, source: str
) -> StreamingQuery:
    (folder / source).mkdir(parents=True)
    log = spark.readStream.schema(_SCHEMA).option("maxFilesPerTrigger", PACE[source])
    frame = pipeline.source(
        log.parquet(str(logs / source)).withColumn("shard", F.lit(source)),
        stage=source,
        shard="shard",
        event_time="at",
        strategy=Ascending(),
    )
    return pipeline.start(_writer(frame, folder, source), bounded=True)


def _join(pipeline: Pipeline, spark: SparkSession, folder: Path) -> StreamingQuery:
    sides = {
        source: pipeline.watermarked(
            spark.readStream.schema(_SCHEMA).parquet(str(folder / source)),
            stage=JOINED,
            event_time="at",
        ).alias(source)
        for source in PACE
    }
    within = F.expr(
        "fast.key = slow.key AND fast.at >= slow.at - INTERVAL 1 MINUTE"
        " AND fast.at <= slow.at + INTERVAL 1 MINUTE"
    )
    rows = sides[FAST].join(sides[SLOW], within).select("fast.key", F.col("slow.at").alias("at"))
    return pipeline.start(
        _writer(pipeline.report(rows, stage=JOINED, event_time="at"), folder, JOINED), bounded=True
    )


def _follow(client: Client, join: StreamingQuery) -> int:
    """Wait for the join to end; return the furthest that the fast source was ahead, in ms."""
    furthest_ms = 0
    while join.isActive:
        outputs = client.watermarks("join")
        fast, slow = outputs[FAST], outputs[SLOW]
        if fast.output_ms and slow.output_ms and not (fast.final or slow.final):
            furthest_ms = max(furthest_ms, fast.output_ms - slow.output_ms)
        time.sleep(0.05)
    assert join.exception() is None
    return furthest_ms


def _writer(frame: DataFrame, folder: Path, name: str) -> Any:  # noqa: ANN401
    return (
        frame.writeStream.format("parquet")
        .option("path", str(folder / name))
        .option("checkpointLocation", str(folder / f"{name}-checkpoint"))
    )


_SCHEMA: Final = "key long, at timestamp"


def _write_log(folder: Path) -> None:
    folder.mkdir()
    for number in range(FILES):
        first_us = (_START_S + number * FILE_S) * 1_000_000
        step_us = FILE_S * 1_000_000 // ROWS
        times = [first_us + row * step_us for row in range(ROWS)]
        rows = {"key": list(range(ROWS)), "at": pa.array(times, pa.timestamp("us", "UTC"))}
        file = folder / f"{number:03d}.parquet"
        pq.write_table(pa.table(rows), file)
        os.utime(file, (_START_S + number, _START_S + number))  # Spark reads the oldest first


def _table(runs: Mapping[bool, Sequence[Run]]) -> Table:
    table = Table("", "without", f"aligned, drift {DRIFT_S} s", "ratio")
    for name, of in (
        ("seconds", lambda run: run.seconds),
        ("furthest ahead, s of event time", lambda run: run.spread_s),
        ("most rows kept by the join", lambda run: run.state_rows),
        ("rows joined", lambda run: run.joined),
    ):
        without, aligned = ([of(run) for run in runs[each]] for each in (False, True))
        ratio = sum(aligned) / sum(without)
        table.add_row(
            name,
            " ".join(f"{each:,.0f}" for each in without),
            " ".join(f"{each:,.0f}" for each in aligned),
            f"{ratio:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
