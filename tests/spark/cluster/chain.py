"""Two stages, each a query, the second reading the files of the first: under tidegauge, and plain.

The first reads files, or a topic of Kafka.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import BoundedOutOfOrderness, Pipeline
from tests.spark.cluster.lag import JsonFiles, Lag, Read, TopicRows, Trail
from tests.spark.flow import RANGES, ended, until
from tests.spark.matrix.observer import Output
from tests.support.kafka_server import KafkaServer

START_S: Final = 1_700_000_000
FILES: Final = 12
FILE_S: Final = 10
WINDOWS_S: Final = (10, 20)
"""Length of each stage's windows: each file lets a window of the first close."""
BOUND_S: Final = 5
SHARDS: Final = ("left", "right")
KEYS: Final = "abc"
STAGES: Final = ("first", "second")
SOURCE: Final = "sensors"
SPEC: Final = {
    STAGES[0]: {"inputs": [SOURCE], "ranges": RANGES},
    STAGES[1]: {"inputs": [STAGES[0]], "ranges": RANGES},
}
_STRATEGY: Final = BoundedOutOfOrderness(f"{BOUND_S} s")
_LETTER: Final = "letter"
_SENSOR: Final = f"{_LETTER} string, at timestamp"
_BY_FILES: Final[Mapping[str, Any]] = {"maxOffsetsPerTrigger": FILE_S * len(SHARDS) * len(KEYS)}
_PATIENCE_S: Final = 60


@dataclass(frozen=True)
class Chain:
    """A chain's folders; it reads files. With a URL its watermarks are tidegauge's, else Spark's own."""

    spark: SparkSession
    folder: Path
    url: str | None = None
    job: str = "chain"

    def land(self, count: int = FILES) -> None:
        """Put so many more files into the inbox."""
        inbox = self.folder / "inbox"
        inbox.mkdir(parents=True, exist_ok=True)
        there = len(list(inbox.iterdir()))
        for number in range(there, there + count):
            rows = _rows(number)
            path = self.folder / f"{number:04d}.json"
            path.write_text("\n".join(map(json.dumps, rows)))
            os.utime(path, (START_S + number, START_S + number))
            path.rename(inbox / path.name)

    @contextmanager
    def frames(
        self,
    ) -> Generator[tuple[list[DataFrame], Callable[[DataStreamWriter], StreamingQuery]]]:
        """Both stages, and how to start a query."""
        (self.folder / STAGES[0]).mkdir(parents=True, exist_ok=True)
        second = self.spark.readStream.schema("key string, ended_at timestamp, rows long").json(
            str(self.folder / STAGES[0])
        )
        if self.url is None:
            delayed = self._sensors().withWatermark("at", f"{BOUND_S} seconds")
            # Windows leave the first stage in the order of their ends.
            yield (
                [_first(delayed), _second(second.withWatermark("ended_at", "0 seconds"))],
                DataStreamWriter.start,
            )
            return
        # A machine that is busy must not have the agent go on without the service.
        spec = {SOURCE: self._source_spec(), **SPEC}
        with Pipeline(
            self.url, self.job, spec, spark=self.spark, poll="50 ms", patience="30 s"
        ) as pipeline:
            sensors = self._source(pipeline)
            made = [
                _first(pipeline.watermarked(sensors, stage=STAGES[0], event_time="at")),
                _second(pipeline.watermarked(second, stage=STAGES[1], event_time="ended_at")),
            ]
            yield (
                [
                    pipeline.report(frame, stage=stage)
                    for frame, stage in zip(made, STAGES, strict=True)
                ],
                pipeline.start,
            )

    def _sensors(self) -> DataFrame:
        """Read what has landed, a file's worth in each batch."""
        return (
            self.spark.readStream.schema("shard string, key string, at timestamp")
            .option("maxFilesPerTrigger", 1)
            .json(str(self.folder / "inbox"))
        )

    def _source_spec(self) -> dict[str, Any]:
        return {"shards": list(SHARDS)}

    def _source(self, pipeline: Pipeline) -> DataFrame:
        """Read the same as a source."""
        return pipeline.source(
            self._sensors(), stage=SOURCE, shard="shard", event_time="at", strategy=_STRATEGY
        )

    def _first_read(self) -> Read:
        return JsonFiles("at")

    def run(self, trigger: str) -> None:
        """Run both queries under a trigger."""
        if trigger == "availableNow":
            self.available_now()
        else:
            self.continuous()

    def continuous(self) -> None:
        """Run both at once, until every window is shown that can close."""
        with self.frames() as (frames, start), ExitStack() as started:
            queries: list[StreamingQuery] = []
            for frame, stage in zip(frames, STAGES, strict=True):
                queries.append(start(self.writer(frame, stage)))
                started.callback(queries[-1].stop)
            for stage in range(len(STAGES)):
                until(
                    lambda stage=stage: self._all_shown(stage, queries),
                    f"{STAGES[stage]} is through",
                )

    def _all_shown(self, stage: int, queries: list[StreamingQuery]) -> bool:
        for query in queries:
            assert query.isActive, query.exception()
        shown = {lag.end_ms for lag in self.lags(stage)}
        return len(shown) >= self.closable(stage)

    def closable(self, stage: int) -> int:
        """Return the number of a stage's windows that some row lets close."""
        newest = START_S + FILES * FILE_S - 1 - BOUND_S
        first = _ends(WINDOWS_S[0], newest)
        # A row of the first stage lets a window of the second close.
        return len(first) if stage == 0 else len(_ends(WINDOWS_S[1], first[-1], start_s=first[0]))

    def available_now(self) -> None:
        """Run one after the other."""
        with self.frames() as (frames, start):
            for frame, stage in zip(frames, STAGES, strict=True):
                ended(start(self.writer(frame, stage).trigger(availableNow=True)))

    def writer(self, frame: DataFrame, stage: str) -> DataStreamWriter:
        return (
            frame.writeStream.format("json")
            .option("path", str(self.folder / stage))
            .option("checkpointLocation", str(self.folder / f"{stage}-checkpoint"))
        )

    def lags(self, stage: int) -> list[Lag]:
        """The lags of a stage's windows that are shown so far."""
        return self.trail(stage).lags()

    def trail(self, stage: int) -> Trail:
        """The trail of a stage's query."""
        read = self._first_read() if stage == 0 else JsonFiles("ended_at")
        return Trail(
            self.folder / f"{STAGES[stage]}-checkpoint",
            self.folder / STAGES[stage],
            read,
            "ended_at",
            delay_ms=BOUND_S * 1_000 if stage == 0 else 0,
        )

    def lines(self, stage: int) -> list[str]:
        """Everything that a stage has shown."""
        shown = Output(self.folder / STAGES[stage], "ended_at")
        return sorted(shown.lines().elements())


@dataclass(frozen=True)
class TopicChain(Chain):
    """Likewise; its first stage reads a topic with a partition for each shard."""

    broker: KafkaServer = field(kw_only=True)
    topic: str = field(default_factory=lambda: f"{SOURCE}-{uuid4().hex[:8]}", kw_only=True)

    def land(self, count: int = FILES) -> None:
        """Write the rows of so many files, from the first on, to a new topic."""
        self.broker.create(self.topic, len(SHARDS))
        producer = self.broker.producer({"enable.idempotence": "true"})
        for row in (each for number in range(count) for each in _rows(number)):
            partition = SHARDS.index(row["shard"])
            # A member "key" would be taken for the key of Kafka.
            value = {_LETTER: row["key"], "at": row["at"]}
            producer.produce(self.topic, json.dumps(value).encode(), partition=partition)
        assert producer.flush(_PATIENCE_S) == 0

    def _sensors(self) -> DataFrame:
        rows = self.spark.readStream.format("kafka").option("subscribe", self.topic)
        rows = rows.option("kafka.bootstrap.servers", self.broker.servers).options(**_BY_FILES)
        sensor = F.from_json(F.col("value").cast("string"), _SENSOR).alias("sensor")
        rows = rows.option("startingOffsets", "earliest").load().select(sensor)
        return rows.select(F.col(f"sensor.{_LETTER}").alias("key"), "sensor.at")

    def _source_spec(self) -> dict[str, Any]:
        return {"shards": [f"{self.topic}-0"], "dynamic": True}

    def _source(self, pipeline: Pipeline) -> DataFrame:
        rows = pipeline.read_kafka(
            self.broker.servers,
            self.topic,
            stage=SOURCE,
            event_time="at",
            value=_SENSOR,
            strategy=_STRATEGY,
            options=_BY_FILES,
        )
        return rows.select(F.col(_LETTER).alias("key"), "at")

    def _first_read(self) -> Read:
        rows = [row for number in range(FILES) for row in _rows(number)]
        return TopicRows(
            self.topic,
            {
                partition: [_ms(row["at"]) for row in rows if row["shard"] == shard]
                for partition, shard in enumerate(SHARDS)
            },
        )


def _rows(number: int) -> list[dict[str, str]]:
    """Return the rows of a file."""
    return [
        {"shard": shard, "key": key, "at": _iso(number * FILE_S + second)}
        for second in range(FILE_S)
        for shard in SHARDS
        for key in KEYS
    ]


def _first(frame: DataFrame) -> DataFrame:
    counted = frame.groupBy(F.window("at", f"{WINDOWS_S[0]} seconds"), "key").agg(
        F.count("*").alias("rows")
    )
    return counted.select("key", F.col("window.end").alias("ended_at"), "rows")


def _second(frame: DataFrame) -> DataFrame:
    counted = frame.groupBy(F.window("ended_at", f"{WINDOWS_S[1]} seconds")).agg(
        F.sum("rows").alias("rows")
    )
    return counted.select(F.col("window.end").alias("ended_at"), "rows")


def _ends(length_s: int, until_s: int, start_s: int = START_S) -> list[int]:
    """The ends of all windows from a start that are not after an instant."""
    first = start_s // length_s * length_s + length_s
    return list(range(first, until_s + 1, length_s))


def _iso(second: int) -> str:
    return datetime.fromtimestamp(START_S + second, UTC).isoformat()


def _ms(iso: str) -> int:
    return int(datetime.fromisoformat(iso).timestamp() * 1_000)
