"""Topics of a real broker as sources."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline
from spark_agent.client.errors import UnknownJob
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    RANGES,
    SOURCE,
    START_MS,
    WINDOW_S,
    Flow,
    Reading,
    batches,
    ended,
    until,
    windows,
)
from tests.support.documents import block
from tests.support.kafka_server import KafkaServer
from tests.support.kafka_topic import Topic

pytestmark = pytest.mark.spark

DAY_S = 1_767_225_600
"""2026-01-01 in UTC."""
VALUE = "letter string, at timestamp"


def steady(seconds: Iterable[int], partitions: Iterable[int] = (0, 1, 2)) -> list[Reading]:
    """Each partition has a row of each key in each second."""
    return [
        Reading(str(partition), key, second)
        for second in seconds
        for partition in partitions
        for key in ("a", "b")
    ]


@pytest.fixture
def topic(broker: KafkaServer) -> Topic:
    return Topic(broker, 3)


@pytest.fixture
def pipeline(flow: Flow, topic: Topic) -> Iterator[Pipeline]:
    with started(flow, topic) as pipeline:
        yield pipeline


def started(flow: Flow, topic: Topic, *, replace: bool = False, **source: Any) -> Pipeline:
    spec: Mapping[str, Mapping[str, Any]] = {
        SOURCE: {"shards": [topic.shard(0)], "dynamic": True, **source},
        COUNTS: {"inputs": [SOURCE], "ranges": RANGES},
    }
    return Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms", replace=replace)


def counts(pipeline: Pipeline, topic: Topic, **options: Any) -> DataFrame:
    """Counts of readings, from the topic."""
    read: dict[str, Any] = {"value": VALUE, "event_time": "timestamp", "strategy": BOUND}
    read |= options
    rows = pipeline.read_kafka(topic.broker.servers, topic.name, stage=SOURCE, **read)
    at: str = read["event_time"]
    windowed = pipeline.watermarked(rows, stage=COUNTS, event_time=at)
    counted = windowed.groupBy(F.window(at, f"{WINDOW_S} seconds"), "letter").agg(
        F.count("*").alias("rows")
    )
    start = F.unix_seconds("window.start").alias("start")
    return pipeline.report(
        counted.select(F.col("letter").alias("key"), start, "rows"), stage=COUNTS
    )


def test_partitions_are_the_shards(flow: Flow, pipeline: Pipeline, topic: Topic) -> None:
    """Also one without rows, which holds the watermark; and no row is shuffled on its way."""
    topic.write(steady(range(60), [0, 1]))
    query = flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW)
    ended(query)
    promised = START_MS + 54_000
    assert _promises(flow) == {
        topic.shard(0): promised,
        topic.shard(1): promised,
        topic.shard(2): None,
    }
    assert flow.counted() == Counter()
    topic.write(steady(range(60), [2]))
    ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW))
    assert flow.counted() == windows(each for each in topic.written if each.second < 50)
    ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(topic.written)


def test_the_time_in_a_value(flow: Flow, pipeline: Pipeline, topic: Topic) -> None:
    """Also of rows that have none: a tombstone, and a value that is not JSON."""
    topic.write(steady(range(60)))
    topic.write_value(0, None)
    topic.write_value(1, b"{")
    frame = counts(pipeline, topic, event_time="at")
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(topic.written)


def test_columns_that_are_computed_before_the_source(
    flow: Flow, pipeline: Pipeline, topic: Topic
) -> None:
    """Milliseconds in a structure; and a partition without rows holds the watermark all the same."""
    written = steady(range(60), [0, 1])
    for each in written:
        ride = {"ms": START_MS + each.second * 1_000}
        value = json.dumps({"ride": ride, "name": each.key}).encode()
        topic.write_value(int(each.sensor), value)
    read = {
        "value": "ride struct<ms: long>, name string",
        "columns": {"ms": "ride.ms", "at": "timestamp_millis(ms)", "letter": F.col("name")},
        "event_time": "at",
    }
    ended(flow.start(pipeline, counts(pipeline, topic, **read), trigger=AVAILABLE_NOW))
    assert flow.counted() == Counter()
    last = counts(pipeline, topic, **read)
    ended(flow.start(pipeline, last, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(written)


def test_topics_that_are_read_by_hand(
    flow: Flow, pipeline: Pipeline, topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    """A partition joins with its first rows, which are late by then: a warning says so."""
    topic.write(steady(range(60), [0, 1]))
    rows = (
        flow.spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", topic.broker.servers)
        .option("subscribe", topic.name)
        .option("startingOffsets", "earliest")
        .load()
        .withColumn("shard", F.concat_ws("-", "topic", "partition"))
    )
    rows = pipeline.source(
        rows,
        stage=SOURCE,
        shard="shard",
        event_time="timestamp",
        strategy=BOUND,
        partitioned_by_shard=True,
    )
    rows = pipeline.watermarked(rows, stage=COUNTS, event_time="timestamp")
    counted = rows.groupBy(F.window("timestamp", "10 seconds")).count()
    ended(flow.start(pipeline, pipeline.report(counted, stage=COUNTS), trigger=AVAILABLE_NOW))
    assert f"reads {topic.name} by hand: the watermark does not wait for a partition" in caplog.text
    assert topic.shard(2) not in _promises(flow)


def test_a_value_is_parsed_once(
    pipeline: Pipeline, topic: Topic, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON of a row, also where filters go by its members."""
    counts(pipeline, topic, event_time="at").explain()
    assert capsys.readouterr().out.count("from_json(") == 1


def test_partitions_share_tasks(flow: Flow, pipeline: Pipeline, topic: Topic) -> None:
    """Three partitions in two tasks, each partition in one of them."""
    topic.write(steady(range(60)))
    rows = pipeline.read_kafka(
        topic.broker.servers, topic.name, stage=SOURCE, value=VALUE, strategy=BOUND, tasks=2
    )
    query = flow.start(pipeline, rows.select("shard", F.spark_partition_id().alias("task")))
    until(lambda: flow.output_of(SOURCE) == START_MS + 54_000, "the watermark")
    query.stop()
    read = flow.spark.read.json(str(flow.output)).distinct().collect()
    assert sorted(each["shard"] for each in read) == [topic.shard(each) for each in range(3)]
    assert {each["task"] for each in read} == {0, 1}
    assert not +pipeline.counts


def test_windows_of_partitions_that_share_tasks(
    flow: Flow, pipeline: Pipeline, topic: Topic
) -> None:
    topic.write(steady(range(60)))
    frame = counts(pipeline, topic, tasks=2)
    ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(topic.written)
    assert not +pipeline.counts


def test_a_rate_limit_leaves_nothing_behind_the_watermark(
    flow: Flow, pipeline: Pipeline, topic: Topic
) -> None:
    topic.write(steady(range(90)))
    frame = counts(pipeline, topic, options={"maxOffsetsPerTrigger": 30})
    query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True)
    ended(query)
    assert batches(query) > 10
    assert flow.counted() == windows(topic.written)
    assert not +pipeline.counts


def test_the_partition_that_holds_the_watermark_is_named(
    flow: Flow, pipeline: Pipeline, topic: Topic
) -> None:
    """With the offset up to which it is read, and its backlog."""
    topic.write(steady(range(60), [0, 1]))
    topic.write(steady([0] * 60, [2]))
    frame = counts(pipeline, topic, options={"maxOffsetsPerTrigger": 60})
    query = flow.start(pipeline, frame, trigger={"processingTime": "1 hour"})
    found = until(lambda: _explained(flow, "records to go"), "the explanation")
    [holder] = found["holders"]
    assert holder["range"] == topic.shard(2)
    assert (holder["position"], holder["backlog"]) == ("offset 20", 100)
    assert "it is read up to offset 20, with 100 records to go" in found["because"]
    query.stop()


def _explained(flow: Flow, word: str) -> Any:
    """Return the explanation of the source, if it has a word in it."""
    try:
        found = flow.client.explain(JOB, SOURCE)
    except UnknownJob:
        return None
    return found if word in found["because"] else None


def test_a_partition_that_is_added_joins(flow: Flow, pipeline: Pipeline, topic: Topic) -> None:
    """It holds the watermark from then on, before it has rows."""
    topic.write(steady(range(30)))
    query = flow.start(pipeline, counts(pipeline, topic))
    until(lambda: flow.output_of(SOURCE) == START_MS + 24_000, "the watermark")
    topic.grow(4)
    # Spark finds it with its next batch.
    until(lambda: topic.shard(3) in _promises(flow), "the new partition joins")
    topic.write(steady(range(30, 60)))
    read = START_MS + 54_000
    until(lambda: _promises(flow)[topic.shard(2)] == read, "the others are read")
    assert flow.output_of(SOURCE) == START_MS + 24_000
    topic.write(steady(range(30, 60), [3]))
    until(lambda: flow.output_of(SOURCE) == read, "it is held no longer")
    query.stop()


def _promises(flow: Flow) -> dict[str, int | None]:
    """Return the promise of each partition."""
    found = flow.client.ranges(JOB, SOURCE, limit=100)["ranges"]
    return {each["range"]: each["promise"] for each in found}


def test_a_partition_without_rows_is_left_out_by_a_policy(flow: Flow, topic: Topic) -> None:
    """While the others have some."""
    policy = {"after_ms": 1_000, "then": "exclude"}
    seconds = itertools.count()
    with started(flow, topic, idle=policy) as pipeline:
        query = flow.start(pipeline, counts(pipeline, topic))

        def closes() -> bool:
            topic.write(steady([next(seconds)], [0, 1]))
            return flow.output_of(COUNTS) > START_MS + 2 * WINDOW_S * 1_000

        until(closes, "the windows close without it")
        last = next(seconds) + WINDOW_S
        topic.write(steady([last]))
        until(lambda: flow.output_of(COUNTS) >= START_MS + (last - 5) * 1_000, "it is there again")
        query.stop()
    done = flow.counted()
    expected = windows(topic.written)
    assert done == {each: expected[each] for each in done}
    assert not +pipeline.counts


def test_a_backlog_is_not_idle(flow: Flow, topic: Topic) -> None:
    """Triggers are rarer than what makes a partition idle, and their rows are limited."""
    policy = {"after_ms": 1_000, "then": "exclude"}
    with started(flow, topic, idle=policy) as pipeline:
        topic.write(steady(range(60), [0]))
        topic.write(steady(range(20), [1, 2]))
        frame = counts(pipeline, topic, options={"maxOffsetsPerTrigger": 50})
        query = flow.start(pipeline, frame, trigger={"processingTime": "2 seconds"})
        until(lambda: _promises(flow).get(topic.shard(0)) == START_MS + 54_000, "all is read")
        topic.write(steady([70]))
        until(lambda: flow.output_of(COUNTS) >= START_MS + 60_000, "all windows close")
        query.stop()
        assert not +pipeline.counts
    assert flow.counted() == windows(each for each in topic.written if each.second < 60)


def test_a_run_that_ends_takes_none_for_idle(flow: Flow, topic: Topic) -> None:
    """It reads what was there at its start: later rows of a quiet partition wait for the next run."""
    policy = {"after_ms": 2_000, "then": "exclude"}
    with started(flow, topic, idle=policy) as pipeline:
        topic.write(steady(range(200), [0, 1]))
        topic.write(steady(range(2), [2]))
        frame = counts(pipeline, topic, options={"maxOffsetsPerTrigger": 30})
        query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW)
        until((flow.checkpoint / "offsets" / "0").exists, "the run has begun")
        topic.write(steady(range(2, 200), [2]))
        ended(query)
        ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True))
        assert not +pipeline.counts
    assert flow.counted() == windows(topic.written)


@pytest.mark.parametrize("rows", [40, 60, 90], ids=["fewer", "as many", "more"])
def test_a_topic_that_is_made_again_is_not_read_on(
    flow: Flow, pipeline: Pipeline, topic: Topic, rows: int
) -> None:
    """With more rows than were read, Spark would leave out the first, and with as many, all."""
    topic.write(steady(range(60)))
    ended(flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW))
    before = flow.counted()
    topic.make_again(3)
    topic.write(steady(range(60, 60 + rows)))
    again = flow.start(pipeline, counts(pipeline, topic), trigger=AVAILABLE_NOW, bounded=True)
    with pytest.raises(StreamingQueryException) as failure:
        again.awaitTermination(DEADLINE_S)
    lost = "offset was changed|data may have been missed|data loss"
    assert re.search(
        lost if rows < 60 else "deleted and made again", str(failure.value), re.IGNORECASE
    )
    assert flow.counted() == before


def test_a_topic_that_is_made_again_under_a_running_query(
    flow: Flow, pipeline: Pipeline, topic: Topic
) -> None:
    topic.write(steady(range(30)))
    query = flow.start(pipeline, counts(pipeline, topic))
    until(lambda: flow.output_of(SOURCE) == START_MS + 24_000, "the watermark")
    topic.make_again(3)
    topic.write(steady(range(30, 90)))
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(DEADLINE_S)
    assert flow.output_of(SOURCE) == START_MS + 24_000


def test_a_topic_that_is_made_again_under_the_first_batch(
    flow: Flow, pipeline: Pipeline, topic: Topic, tmp_path: Path
) -> None:
    """Also if the batch has read its rows by then."""
    go_on = tmp_path / "go-on"
    topic.write(steady(range(30)))
    slow = F.udf(lambda letter: _once_there(go_on, letter), "string")
    rows = pipeline.read_kafka(
        topic.broker.servers, topic.name, stage=SOURCE, value=VALUE, strategy=BOUND
    )
    query = flow.start(pipeline, rows.withColumn("letter", slow("letter")))
    noted = flow.checkpoint / "tidegauge" / "topics"
    until(lambda: noted.exists() and any(noted.rglob("*")), "the topic is noted")
    topic.make_again(3)
    topic.write(steady(range(30, 90)))
    go_on.touch()
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(DEADLINE_S)
    assert flow.output_of(SOURCE) <= START_MS + 29_000


def _once_there(file: Path, value: str) -> str:
    """Return a value once a file is there."""
    while not file.exists():
        time.sleep(0.05)
    return value


def test_the_page_on_kafka(
    flow: Flow, broker: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rides of two lifts in two days, each of three people."""
    monkeypatch.chdir(tmp_path)
    for topic, partitions in (("rides", 3), ("hours", 2), ("days", 1)):
        broker.create(topic, partitions)
    producer = broker.producer()
    for minute in range(2 * 24 * 60):
        at = datetime.fromtimestamp(DAY_S + 60 * minute, UTC).isoformat()
        for number, lift in enumerate(("east", "west", "east")):
            ride = {"lift": lift, "at": at, "people": 3}
            producer.produce("rides", json.dumps(ride).encode(), partition=number)
    assert producer.flush(60) == 0
    program = block("python", 'job="lifts"')
    local = {
        "127.0.0.1:9092": broker.servers,
        "http://127.0.0.1:8000": flow.url,
        "lifts/{topic}": f"{tmp_path}/{{topic}}",
        'spark.conf.set("spark.sql.shuffle.partitions", 4)': "",
        '"ranges": 4': f'"ranges": {RANGES}',
    }
    for documented, here in local.items():
        assert documented in program
        program = program.replace(documented, here)
    exec(program, {"spark": flow.spark})
    reader = flow.spark.read.format("kafka").option("kafka.bootstrap.servers", broker.servers)
    values = reader.option("subscribe", "days").load().select(F.col("value").cast("string"))
    found = [json.loads(row["value"]) for row in values.collect()]
    assert Counter({each["lift"]: each["people"] for each in found}) == Counter(
        east=2 * 24 * 60 * 3, west=24 * 60 * 3
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"options": {"minPartitions": "8"}}, "minPartitions.*read by one task"),
        ({"options": {"maxRecordsPerPartition": 8}}, "maxRecordsPerPartition.*read by one task"),
        ({"options": {"assign": "{}"}}, "assign.*name whole topics"),
        ({"options": {"failOnDataLoss": False}}, "failOnDataLoss.*leave it at true"),
        ({"options": {"subscribe": "x"}}, "is the argument topics="),
        ({"options": {"minOffsetsPerTrigger": 5}}, "minOffsetsPerTrigger.*unread"),
        ({"options": {"maxOffsetsPerTrigger": 0}}, "invalid maxOffsetsPerTrigger '0'"),
        ({"options": {"maxOffsetsPerTrigger": "-1"}}, "invalid maxOffsetsPerTrigger '-1'"),
        ({"topics": ["a", "a"]}, "write each topic once"),
        ({"topics": 7}, "invalid topics 7"),
        ({"topics": "_taps"}, "topic '_taps' cannot be read.*begins with a letter"),
        ({"topics": "t" * 200}, "cannot be read.*128 characters"),
        ({"servers": "localhost"}, "invalid servers 'localhost'.*ports"),
        ({"servers": ["localhost:9092"]}, "invalid servers.*ports"),
        ({"value": "array<int>"}, "invalid value 'array<int>'"),
        ({"value": "tap string", "shard": "tap"}, "shard 'tap' is a member of the value"),
        ({"topics": "a,b"}, "write the name of a topic"),
        ({"starting": "now"}, "write 'earliest' or 'latest'"),
        ({"value": "topic string"}, "'topic' of the value is a column of Kafka's too"),
        ({"shard": "offset"}, "'offset' is a column of Kafka's"),
        ({"tasks": 0}, "invalid tasks 0"),
        ({"columns": {"shard": "'a'"}}, "column 'shard' is the shard"),
        ({"columns": {"at": 7}}, "invalid column 'at', 7: write an expression"),
        ({"columns": {"at": "to_date("}}, "invalid column 'at'"),
        ({"columns": {"at": "nowhere.at"}}, "invalid column 'at'"),
        ({"event_time": "offset"}, r"of type bigint.*columns=\{'at': 'timestamp_millis\(offset\)'"),
        (
            {"value": "ride struct<at: timestamp>", "event_time": "ride.at"},
            r"field of the structure 'ride'.*in read_kafka\(\), columns=\{'at': 'ride.at'\}",
        ),
    ],
)
def test_what_could_not_be_promised_is_refused(
    pipeline: Pipeline, broker: KafkaServer, option: dict[str, Any], message: str
) -> None:
    topics, servers = option.get("topics", "readings"), option.get("servers", broker.servers)
    others = {name: option[name] for name in option.keys() - {"topics", "servers"}}
    with pytest.raises(ValueError, match=message):
        pipeline.read_kafka(servers, topics, stage=SOURCE, strategy=BOUND, **others)
