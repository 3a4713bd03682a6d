"""Topics between stages: written by one query, read by another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import Pipeline, UnsoundPlanError
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    JOB,
    RANGES,
    SOURCE,
    START_S,
    Flow,
    ended,
    until,
)
from tests.spark.test_kafka import VALUE, steady
from tests.support.kafka_server import KafkaServer
from tests.support.kafka_topic import Topic

pytestmark = pytest.mark.spark

TOTALS = "totals"
BLOCK_S = 30
PARTS = 2
LIMITED = {"maxOffsetsPerTrigger": 5}
READ_COMMITTED = {"kafka.isolation.level": "read_committed"}


class Stages:
    """Counts by letter in windows of ten seconds, to a topic; their sums in windows of thirty."""

    def __init__(self, flow: Flow, broker: KafkaServer, topic: Topic) -> None:
        self.flow = flow
        self.broker = broker
        self.topic = topic
        self.between = f"between-{uuid4().hex[:8]}"
        broker.create(self.between, PARTS)
        spec: Mapping[str, Mapping[str, Any]] = {
            SOURCE: {"shards": [topic.shard(0)], "dynamic": True},
            COUNTS: {"inputs": [SOURCE], "ranges": RANGES},
            TOTALS: {"inputs": [COUNTS], "ranges": RANGES},
        }
        self.pipeline = Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms")

    def counts(self) -> DataFrame:
        rows = self.pipeline.read_kafka(
            self.broker.servers, self.topic.name, stage=SOURCE, value=VALUE, strategy=BOUND
        )
        windowed = self.pipeline.watermarked(rows, stage=COUNTS, event_time="timestamp")
        counted = windowed.groupBy(F.window("timestamp", "10 seconds"), "letter").count()
        at = F.window_time("window").alias("at")
        counted = self.pipeline.report(counted.select("letter", at, "count"), stage=COUNTS)
        value = F.to_json(F.struct("letter", F.col("at"), "count")).alias("value")
        return counted.select(F.col("letter").alias("key"), value)

    def writer(self, frame: DataFrame) -> DataStreamWriter:
        return (
            frame.writeStream.format("kafka")
            .option("kafka.bootstrap.servers", self.broker.servers)
            .option("topic", self.between)
            .option("checkpointLocation", f"{self.flow.checkpoint}-counts")
        )

    def start_counts(self, **options: Any) -> StreamingQuery:
        return self.pipeline.start(self.writer(self.counts()), **options)

    def totals(self, **options: Any) -> DataFrame:
        """Sums of the counts; a count that was written twice is taken once."""
        reader = self.flow.spark.readStream.format("kafka").options(**options)
        raw = reader.options(
            **{"kafka.bootstrap.servers": self.broker.servers, "subscribe": self.between}
        )
        rows = raw.option("startingOffsets", "earliest").load()
        schema = "letter string, at timestamp, count long"
        parsed = rows.select(F.from_json(F.col("value").cast("string"), schema).alias("v"))
        windowed = self.pipeline.watermarked(parsed.select("v.*"), stage=TOTALS, event_time="at")
        once = windowed.dropDuplicates(["letter", "at"])
        summed = once.groupBy(F.window("at", f"{BLOCK_S} seconds"), "letter").agg(
            F.sum("count").alias("rows")
        )
        start = F.unix_seconds("window.start").alias("start")
        return self.pipeline.report(
            summed.select(F.col("letter").alias("key"), start, "rows"), stage=TOTALS
        )

    def expected(self) -> Counter[tuple[str, int]]:
        """Return a batch job's result."""
        found: Counter[tuple[str, int]] = Counter()
        for each in self.topic.written:
            start = (START_S + each.second) // BLOCK_S * BLOCK_S - START_S
            found[each.key, start] += 1
        return found


@pytest.fixture
def stages(flow: Flow, broker: KafkaServer) -> Iterator[Stages]:
    stages = Stages(flow, broker, Topic(broker, 3))
    with stages.pipeline:
        yield stages


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="at once", marks=pytest.mark.slow),
        pytest.param(LIMITED, id="limited"),
        pytest.param(LIMITED | READ_COMMITTED, id="committed", marks=pytest.mark.slow),
    ],
)
def test_a_topic_between_two_stages(flow: Flow, stages: Stages, options: dict[str, Any]) -> None:
    """Both run at the same time, then to the end."""
    first = stages.start_counts()
    second = flow.start(stages.pipeline, stages.totals(**options))
    for step in range(5):
        stages.topic.write(steady(range(40 * step, 40 * step + 40)))
        until(lambda: flow.output_of(TOTALS) > 0, "windows of windows close")
    until(lambda: flow.output_of(TOTALS) >= (START_S + 180) * 1_000, "almost all is through")
    first.stop()
    second.stop()
    ended(stages.start_counts(bounded=True))
    ended(flow.start(stages.pipeline, stages.totals(**options), bounded=True))
    assert flow.counted() == stages.expected()
    assert not +stages.pipeline.counts


def test_a_limited_topic_in_a_run_that_ends(flow: Flow, stages: Stages) -> None:
    """Twice, and the second run has new rows."""
    for step in range(2):
        stages.topic.write(steady(range(100 * step, 100 * step + 100)))
        writer = stages.writer(stages.counts()).trigger(availableNow=True)
        ended(stages.pipeline.start(writer))
        ended(flow.start(stages.pipeline, stages.totals(**LIMITED), trigger=AVAILABLE_NOW))
    writer = stages.writer(stages.counts()).trigger(availableNow=True)
    ended(stages.pipeline.start(writer, bounded=True))
    last = flow.start(
        stages.pipeline, stages.totals(**LIMITED), trigger=AVAILABLE_NOW, bounded=True
    )
    ended(last)
    assert flow.counted() == stages.expected()
    assert not +stages.pipeline.counts


@pytest.mark.parametrize("acks", ["0", "1"])
def test_a_writer_that_does_not_wait_for_the_broker_is_refused(stages: Stages, acks: str) -> None:
    writer = stages.writer(stages.counts()).option("kafka.ACKS", acks)
    with pytest.raises(ValueError, match=f"kafka.acks={acks}.*leave it out"):
        stages.pipeline.start(writer)


def test_a_query_that_would_go_on_after_a_loss_is_refused(flow: Flow, stages: Stages) -> None:
    with pytest.raises(UnsoundPlanError, match=r"failOnDataLoss.*leave it at true"):
        flow.start(stages.pipeline, stages.totals(failOnDataLoss="false"))
