"""A small pipeline to test with: readings of two sensors, counted by key in windows of ten seconds."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.client.client import Client, StageWatermark
from spark_agent.client.errors import UnknownJob
from spark_agent.jvm.progress import parse_watermark_ms
from spark_agent.strategies import AnyStrategy

JOB = "readings"
SOURCE = "sensors"
COUNTS = "counts"
RANGES = 2
SHARDS = ["left", "right"]
SPEC = {SOURCE: {"shards": SHARDS}, COUNTS: {"inputs": [SOURCE], "ranges": RANGES}}
BOUND = BoundedOutOfOrderness("5 s")
POLL_MS = 50

WINDOW_S = 10
START_S = 1_700_000_000
START_MS = START_S * 1_000
DEADLINE_S = 120


@dataclass(frozen=True)
class Reading:
    """A row: which sensor wrote it, which key it is of, and when it was, in seconds from START_S."""

    sensor: str
    key: str
    second: int


AVAILABLE_NOW: Mapping[str, object] = {"availableNow": True}

T = TypeVar("T")

Windows = Counter[tuple[str, int]]
"""Rows by key and start of the window, in seconds from START_S."""


def windows(readings: Iterable[Reading]) -> Windows:
    """Return a batch job's result for them."""
    return Counter((r.key, r.second // WINDOW_S * WINDOW_S) for r in readings)


def steady(seconds: Iterable[int]) -> list[Reading]:
    """Each sensor reads each key once a second, the right one three seconds late."""
    return [
        Reading(sensor, key, max(second - late, 0))
        for second in seconds
        for sensor, late in (("left", 0), ("right", 3))
        for key in ("a", "b", "c")
    ]


def until(what: Callable[[], T | None], why: str, deadline_s: float = DEADLINE_S) -> T:
    """Wait for a condition, and return what it found."""
    end = time.monotonic() + deadline_s
    while not (found := what()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {why}")
        time.sleep(0.02)
    return found


class Flow:
    """Files in, one query, files out."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark = spark
        self.url = url
        self.client = Client(url)
        self.inbox = folder / "inbox"
        self.output = folder / "output"
        self.checkpoint = folder / "checkpoint"
        self.inbox.mkdir(parents=True, exist_ok=True)
        self.output.mkdir(exist_ok=True)
        self.files_per_batch: int | None = 1
        self._files = 0

    def write(self, readings: Iterable[Reading]) -> None:
        """Put one more file into the inbox, at once and as a whole."""
        lines = [
            json.dumps({"sensor": r.sensor, "key": r.key, "at": _iso(r.second)}) for r in readings
        ]
        hidden = self.inbox / f".{self._files:04d}"
        hidden.write_text("\n".join(lines))
        os.utime(hidden, (START_S + self._files, START_S + self._files))
        hidden.rename(self.inbox / f"{self._files:04d}.json")
        self._files += 1

    def pipeline(self, **options: object) -> Pipeline:
        return Pipeline(self.url, JOB, SPEC, spark=self.spark, poll=f"{POLL_MS} ms", **options)  # type: ignore[arg-type]

    def readings(self) -> DataFrame:
        """`files_per_batch` files a batch; None: all that there are."""
        reader = self.spark.readStream.schema("sensor string, key string, at timestamp")
        if self.files_per_batch is not None:
            reader = reader.option("maxFilesPerTrigger", self.files_per_batch)
        return reader.json(str(self.inbox))

    def source(
        self, pipeline: Pipeline, strategy: AnyStrategy = BOUND, **options: object
    ) -> DataFrame:
        return pipeline.source(
            self.readings(),
            stage=SOURCE,
            shard="sensor",
            event_time="at",
            strategy=strategy,
            **options,  # type: ignore[arg-type]
        )

    def counts(
        self, pipeline: Pipeline, strategy: AnyStrategy = BOUND, **options: object
    ) -> DataFrame:
        windowed = pipeline.watermarked(
            self.source(pipeline, strategy, **options), stage=COUNTS, event_time="at"
        )
        counted = (
            windowed.groupBy(F.window("at", f"{WINDOW_S} seconds"), "key")
            .agg(F.count("*").alias("rows"))
            .select("key", F.unix_seconds("window.start").alias("start"), "rows")
        )
        return pipeline.report(counted, stage=COUNTS)

    def start(
        self,
        pipeline: Pipeline,
        frame: DataFrame,
        *,
        bounded: bool = False,
        trigger: Mapping[str, object] | None = None,
        **options: object,
    ) -> StreamingQuery:
        writer = (
            frame.writeStream.format("json")
            .option("path", str(self.output))
            .option("checkpointLocation", str(self.checkpoint))
        )
        if trigger is not None:
            writer = writer.trigger(**trigger)  # type: ignore[arg-type]
        return pipeline.start(writer, bounded=bounded, **options)  # type: ignore[arg-type]

    def counted(self) -> Windows:
        """Return the windows that came out; a window that came out twice is an error."""
        found: Windows = Counter()
        rows = self.spark.read.schema("key string, start long, rows long").json(str(self.output))
        for row in rows.collect():
            window = (row["key"], row["start"] - START_S)
            assert window not in found, f"{window} came out twice"
            found[window] = row["rows"]
        return found

    def watermark(self, stage: str) -> StageWatermark:
        return self.client.watermark(JOB, stage)

    def leased(self, stage: str) -> int:
        """Return the number of a stage's leased ranges."""
        with urllib.request.urlopen(f"{self.url}/v1/jobs/{JOB}/stages/{stage}/watermark") as answer:
            return json.load(answer)["ranges"]["leased"]

    def delete_job(self) -> None:
        """Make the service forget."""
        request = urllib.request.Request(f"{self.url}/v1/jobs/{JOB}", method="DELETE")
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 204

    def output_of(self, stage: str) -> int:
        """A stage's output watermark in ms; before all time if there is none."""
        try:
            output_ms = self.watermark(stage).output_ms
        except UnknownJob:
            return -1
        return -1 if output_ms is None else output_ms


def ended(query: StreamingQuery) -> None:
    """Wait for a query to end by itself, and well."""
    assert query.awaitTermination(DEADLINE_S), f"still running: {query.lastProgress}"
    assert query.exception() is None


def batches(query: StreamingQuery) -> int:
    """Number of batches that this start of the query has done. Triggers that ran none do not count."""
    return sum("addBatch" in each["durationMs"] for each in query.recentProgress)


def spark_watermark(query: StreamingQuery) -> int:
    """Spark's own watermark in ms, in the newest batch; 0 if there is none."""
    progress = query.lastProgress
    return parse_watermark_ms(progress["eventTime"].get("watermark") if progress else None)


def _iso(second: int) -> str:
    return datetime.fromtimestamp(START_S + second, UTC).isoformat()
