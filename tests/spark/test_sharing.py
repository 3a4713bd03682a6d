"""Execution of stages: one query for each stage, and words for whoever finds it otherwise."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline, StageTakenError
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.executor.tally import Count
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    SHARDS,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    batches,
    ended,
    steady,
    until,
    windows,
)
from tests.support.gateway import Holding

pytestmark = pytest.mark.spark


def test_a_stage_has_one_query(flow: Flow, pipeline: Pipeline) -> None:
    flow.write(steady(range(30)))
    first = flow.start(pipeline, flow.counts(pipeline))
    with pytest.raises(StageTakenError, match=r"'sensors' is executed by query .* Stop that one"):
        flow.start(pipeline, flow.counts(pipeline))
    assert first.isActive
    first.stop()
    flow.start(pipeline, flow.counts(pipeline))


@pytest.mark.parametrize("tasks", [2, 3])
def test_each_task_gets_as_many_shards_as_the_others(flow: Flow, tasks: int) -> None:
    """And every row of a shard. Hashes would share these eight as three and five."""
    names = [str(number) for number in range(8)]
    spec = {"clicks": {"shards": names}, COUNTS: {"inputs": ["clicks"], "ranges": 2}}
    at = datetime.fromtimestamp(START_MS / 1_000, UTC)
    frame = flow.spark.createDataFrame(
        [(int(name), at) for name in 3 * names], "shard int, at timestamp"
    )
    with Pipeline(flow.url, "dealt", spec, spark=flow.spark) as pipeline:
        source = pipeline.source(
            frame, stage="clicks", shard="shard", event_time="at", strategy=BOUND, tasks=tasks
        )
        placed = source.select("shard", F.spark_partition_id().alias("task")).collect()
    tasks_of: dict[int, set[int]] = {}
    for row in placed:
        tasks_of.setdefault(row.shard, set()).add(row.task)
    assert all(len(found) == 1 for found in tasks_of.values())
    shares = Counter(task for found in tasks_of.values() for task in found)
    assert sorted(shares.values()) == sorted(len(names[task::tasks]) for task in range(tasks))


@pytest.mark.slow
def test_two_queries_read_the_same_data_and_one_of_them_reports_it(
    flow: Flow, tmp_path: Path
) -> None:
    readings = steady(range(90))
    for first in range(0, len(readings), 90):
        flow.write(readings[first : first + 90])
    spec = SPEC | {"minutes": {"inputs": [SOURCE], "ranges": 2}}
    with Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as pipeline:
        unlimited = flow.spark.readStream.schema("sensor string, key string, at timestamp")
        rows = pipeline.watermarked(
            unlimited.json(str(flow.inbox)), stage="minutes", event_time="at"
        )
        minutes = rows.groupBy(F.window("at", "1 minute")).count()
        writer = (
            pipeline.report(minutes, stage="minutes")
            .select(F.unix_seconds("window.start").alias("start"), "count")
            .writeStream.format("json")
            .option("path", str(tmp_path / "minutes"))
            .option("checkpointLocation", str(tmp_path / "minutes-checkpoint"))
        )
        other = pipeline.start(writer, bounded=True)
        ended(flow.start(pipeline, flow.counts(pipeline), bounded=True))
        ended(other)
    assert flow.counted() == windows(readings)
    written = flow.spark.read.json(str(tmp_path / "minutes")).collect()
    expected: dict[int, int] = {}
    for reading in readings:
        start = (START_MS // 1_000 + reading.second) // 60 * 60
        expected[start] = expected.get(start, 0) + 1
    assert {row["start"]: row["count"] for row in written} == expected


def test_a_fenced_query_stops_and_says_why(flow: Flow, pipeline: Pipeline) -> None:
    flow.write(steady(range(30)))
    query = flow.start(pipeline, flow.counts(pipeline))
    until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the ranges have promised")
    run = flow.client.open_run(JOB, [SOURCE, COUNTS], holder="another-driver")
    flow.write(steady(range(30, 40)))
    with pytest.raises(
        StreamingQueryException, match=rf"over by another-driver\. .* belongs to run {run}"
    ):
        query.awaitTermination(DEADLINE_S)
    assert not query.isActive


def test_a_fenced_query_goes_on_where_that_is_wanted(flow: Flow, pipeline: Pipeline) -> None:
    flow.write(steady(range(30)))
    query = flow.start(pipeline, flow.counts(pipeline), on_fenced="continue")
    until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the ranges have promised")
    flow.client.open_run(JOB, [SOURCE, COUNTS], holder="another-driver")
    for second in (30, 40):
        done = batches(query)
        flow.write(steady(range(second, second + 10)))
        until(lambda done=done: batches(query) > done, "another batch")
    assert query.isActive


def test_a_query_goes_on_if_its_own_earlier_request_opens_a_run_after_the_repeated_one(
    flow: Flow,
) -> None:
    """It failed, as one that was taken over by itself."""
    first, then = steady(range(30)), steady(range(30, 60))
    flow.write(first)

    def newest_run() -> int:
        return flow.client.runs(JOB)["runs"][0]["run"]

    with (
        Holding(flow.url) as gateway,
        Pipeline(gateway.url, JOB, SPEC, spark=flow.spark, poll="50 ms") as running,
    ):
        query = flow.start(running, flow.counts(running))
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the ranges have promised")
        run = newest_run()
        gateway.released.set()
        until(lambda: newest_run() > run, "the earlier request opens a run")
        flow.write(then)
        until(lambda: flow.output_of(COUNTS) == START_MS + 51_000, "the query goes on")
        assert query.isActive
        assert flow.client.commits(JOB, COUNTS)["run"] == newest_run()
    with flow.pipeline() as again:
        ended(flow.start(again, flow.counts(again), bounded=True))
    assert flow.counted() == windows([*first, *then])


def test_shards_that_are_not_where_they_were_said_to_be_are_told(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file has both sensors, and two files are two tasks: no shard is in one task alone."""
    readings = steady(range(30))
    flow.write(readings[::2])
    flow.write(readings[1::2])
    flow.files_per_batch = 2
    with flow.pipeline() as pipeline:
        flow.spark.conf.set("spark.sql.files.openCostInBytes", str(2**30))
        try:
            frame = flow.counts(pipeline, partitioned_by_shard=True)
            ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
        finally:
            flow.spark.conf.unset("spark.sql.files.openCostInBytes")
        assert pipeline.counts[Count.SPLIT_SHARDS] == 2
    message = "this source is not partitioned by shard, so leave out partitioned_by_shard=True"
    assert message in caplog.text
    assert flow.counted() == windows(readings)


def test_shards_that_are_where_they_were_said_to_be_need_no_shuffle(flow: Flow) -> None:
    readings = steady(range(30))
    for sensor in ("left", "right"):
        flow.write([reading for reading in readings if reading.sensor == sensor])
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, partitioned_by_shard=True)
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
        assert pipeline.counts.total() == 0
    assert flow.counted() == windows(readings)


def pipeline_with_policy(
    flow: Flow, *, after_ms: int, lease_ttl: str = "10 s", **members: Any
) -> Pipeline:
    policy = {"after_ms": after_ms, "then": "exclude"}
    spec = {**SPEC, SOURCE: {**SPEC[SOURCE], "idle": policy, **members}}
    return Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms", lease_ttl=lease_ttl)


@contextmanager
def pipeline_into_both(flow: Flow) -> Generator[Pipeline]:
    """Below the counts is a stage that also reads another source, which is far ahead."""
    policy = {"after_ms": 1_000, "then": "exclude"}
    spec = {
        **SPEC,
        SOURCE: {**SPEC[SOURCE], "idle": policy},
        "other": {"shards": ["only"]},
        "both": {"inputs": [COUNTS, "other"], "passthrough": True},
    }
    with Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as pipeline:
        rank = Rank(flow.client.open_run(JOB, ["other"], "by-hand"), 0, 0)
        lease = flow.client.claim(JOB, "other", None, holder="by-hand", ttl_ms=600_000, rank=rank)
        ahead = {"only": RangeReport(START_MS + 1_000_000)}
        flow.client.report(JOB, "other", lease, ahead)
        yield pipeline


def idle(flow: Flow) -> set[str]:
    ranges = flow.client.ranges(JOB, SOURCE, limit=10)["ranges"]
    return {each["range"] for each in ranges if each["status"] == "idle"}


def each_task(flow: Flow, work: Callable[[Any], None]) -> None:
    """Let each task do some work on the rows of its batch, before they get to `source()`."""
    readings = flow.readings()

    def worked(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            work(batch)
            yield batch

    flow.readings = lambda: readings.mapInArrow(worked, readings.schema)


def _rows(flow: Flow, pipeline: Pipeline, **options: Any) -> DataFrame:
    return pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at", **options)


def _all(flow: Flow, pipeline: Pipeline) -> DataFrame:
    return pipeline.report(_rows(flow, pipeline), stage=COUNTS)


def _distinct(flow: Flow, pipeline: Pipeline) -> DataFrame:
    return pipeline.report(_rows(flow, pipeline).dropDuplicates(["key", "at"]), stage=COUNTS)


def _early(rows: DataFrame) -> DataFrame:
    """The rows that have left Spark's state once the query finds nothing to read."""
    return rows.where(F.col("at").cast("long") < START_MS // 1_000 + 5)


def _distinct_then_windows(flow: Flow, pipeline: Pipeline) -> DataFrame:
    rows = _rows(flow, pipeline).dropDuplicates(["key", "at"])
    counted = _early(rows).groupBy(F.window("at", "10 seconds")).count()
    return pipeline.report(counted, stage=COUNTS)


def _distinct_within(flow: Flow, pipeline: Pipeline) -> DataFrame:
    rows = _rows(flow, pipeline, deduplicate_within="1 hour")
    return pipeline.report(rows.dropDuplicatesWithinWatermark(["key"]), stage=COUNTS)


def _pairs(flow: Flow, pipeline: Pipeline) -> DataFrame:
    flow.files_per_batch = None
    left = _early(_rows(flow, pipeline)).alias("left")
    other = pipeline.watermarked(flow.readings(), stage=COUNTS, event_time="at")
    right = _early(other.select("sensor", F.col("at").alias("then"))).alias("right")
    near = F.expr("then BETWEEN at - INTERVAL 2 SECONDS AND at + INTERVAL 2 SECONDS")
    pairs = left.join(right, (F.col("left.sensor") == F.col("right.sensor")) & near)
    return pipeline.report(pairs.select("key", "at"), stage=COUNTS, event_time="at")


def _earliest(flow: Flow, pipeline: Pipeline) -> DataFrame:
    counted = _early(_rows(flow, pipeline)).groupBy(F.window("at", "10 seconds"))
    found = counted.agg(F.min("at").alias("at"))
    return pipeline.report(found, stage=COUNTS, output_time="earliest")


class TestQuietShards:
    @pytest.mark.parametrize(
        ("files_per_batch", "members"), [(1, {}), (None, {}), (None, {"percentiles": [66]})]
    )
    def test_nobody_waits_for_a_quiet_shard(
        self, flow: Flow, files_per_batch: int | None, members: dict[str, Any]
    ) -> None:
        flow.files_per_batch = files_per_batch
        flow.write(steady(range(30)))
        with pipeline_with_policy(flow, after_ms=2_000, **members) as pipeline:
            flow.start(pipeline, flow.counts(pipeline))
            until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "both sensors have promised")
            flow.write([Reading("left", "a", second) for second in range(30, 90)])
            until(lambda: flow.output_of(COUNTS) == START_MS + 84_000, "the left one alone")
            flow.write([Reading("right", "a", 100), Reading("left", "a", 100)])
            until(lambda: flow.output_of(COUNTS) == START_MS + 95_000, "the right one is back")

    def test_a_shard_with_rows_to_read_is_not_quiet(self, flow: Flow, tmp_path: Path) -> None:
        """However long the batch takes that reads them, and however long the leases before it last."""
        gate = tmp_path / "gate"

        def wait(rows: Any) -> None:
            if len(rows) <= len(SHARDS):  # those of the second batch
                until(gate.exists, "the gate")

        each_task(flow, wait)
        flow.write(steady(range(30)))
        flow.write([Reading(sensor, "a", 40) for sensor in SHARDS])
        with pipeline_with_policy(flow, after_ms=1_000) as pipeline:
            flow.start(pipeline, flow.counts(pipeline))
            until(lambda: flow.output_of(SOURCE) == START_MS + 21_000, "the first batch is done")
            end = time.monotonic() + 4
            until(lambda: time.monotonic() > end, "far longer than the policy says")
            assert idle(flow) == set()
            gate.touch()
            until(lambda: idle(flow) == set(SHARDS), "nothing is left to read")

    @pytest.mark.parametrize("lease_ttl", ["2 s", "30 s"])
    def test_shards_have_a_worker_in_each_batch_and_between(
        self, flow: Flow, tmp_path: Path, lease_ttl: str
    ) -> None:
        """While batches follow each other, while one takes longer than a lease, and while none runs.

        Long leases are renewed seldom, and nothing may replace them by shorter ones meanwhile.
        """
        gate = tmp_path / "gate"
        gate.touch()

        def wait(_rows: Any) -> None:
            until(gate.exists, "the gate")

        each_task(flow, wait)
        flow.write(steady(range(30)))
        seen: set[str | None] = set()

        def after(seconds: float) -> bool:
            seen.add(flow.client.show(JOB, SOURCE).get("health"))
            return time.monotonic() > begin + seconds

        with pipeline_with_policy(flow, after_ms=60_000, lease_ttl=lease_ttl) as pipeline:
            query = flow.start(pipeline, flow.counts(pipeline))
            until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "windows are closed")
            begin, before = time.monotonic(), batches(query)
            for number in range(5):
                flow.write([Reading("left", "a", 60 + number)])
                until(lambda n=number: after(0) and batches(query) > before + n, "the next batch")
            begin = time.monotonic()
            until(lambda: after(3), "nothing to read for longer than a lease")
            gate.unlink()
            flow.write([Reading(sensor, "a", 100) for sensor in SHARDS])
            begin = time.monotonic()
            until(lambda: after(5), "a batch that takes longer than its leases")
            gate.touch()
            until(lambda: after(0) and flow.output_of(SOURCE) == START_MS + 95_000, "its end")
        assert seen == {"ok"}

    @pytest.mark.parametrize("has_policy", [False, True])
    def test_shards_have_a_worker_in_the_first_batch_after_a_restart(
        self, flow: Flow, tmp_path: Path, has_policy: bool
    ) -> None:
        """However long it takes: after a stop, there is much to read."""
        gate = tmp_path / "gate"
        gate.touch()

        def wait(_rows: Any) -> None:
            until(gate.exists, "the gate")

        def pipeline() -> Pipeline:
            if has_policy:
                return pipeline_with_policy(flow, after_ms=60_000, lease_ttl="2 s")
            return flow.pipeline(lease_ttl="2 s")

        def healths() -> set[str | None]:
            return {flow.client.show(JOB, stage).get("health") for stage in (SOURCE, COUNTS)}

        each_task(flow, wait)
        flow.write(steady(range(30)))
        with pipeline() as before:
            flow.start(before, flow.counts(before))
            until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "windows are closed")
        gate.unlink()
        flow.write([Reading(sensor, "a", 60) for sensor in SHARDS])
        with pipeline() as after:
            flow.start(after, flow.counts(after))
            until(lambda: healths() == {"ok"}, "the driver has claimed")
            end, seen = time.monotonic() + 5, set[str | None]()
            until(lambda: seen.update(healths()) or time.monotonic() > end, "longer than a lease")
            gate.touch()
            until(lambda: flow.output_of(SOURCE) == START_MS + 55_000, "its end")
        assert seen == {"ok"}

    @pytest.mark.slow
    def test_a_shard_that_is_left_for_a_later_batch_is_not_quiet(self, flow: Flow) -> None:
        """One file at a time, those of the left sensor first: the right one is not idle meanwhile."""
        each_task(flow, lambda _: time.sleep(0.4))
        for number in range(12):
            flow.write([Reading("left", "a", 10 * number)])
        flow.write([Reading("right", "a", 0)])
        with pipeline_with_policy(flow, after_ms=2_000) as pipeline:
            query = flow.start(pipeline, flow.counts(pipeline))
            until(lambda: flow.output_of(SOURCE) > 0, "the source has promised")
            assert batches(query) >= 12
        points = flow.client.history(JOB, SOURCE)["points"]
        outputs = [each["output_watermark"] for each in points]
        assert next(each for each in outputs if each is not None) == START_MS - 5_000

    @pytest.mark.parametrize(
        "operate", [_all, _distinct, _distinct_then_windows, _distinct_within, _pairs, _earliest]
    )
    def test_a_keyed_stage_that_keeps_nothing_is_idle_with_its_input(
        self, flow: Flow, operate: Callable[[Flow, Pipeline], DataFrame]
    ) -> None:
        """Keys of a deduplication are kept, but they do not come out."""
        flow.write(steady(range(30)))
        with pipeline_into_both(flow) as pipeline:
            flow.start(pipeline, operate(flow, pipeline))
            until(lambda: flow.output_of("both") == START_MS + 1_000_000, "nobody waits for it")
            flow.write([Reading(sensor, "a", 2_000) for sensor in SHARDS])
            until(lambda: flow.output_of(COUNTS) == START_MS + 1_995_000, "it is back")

    def test_a_keyed_stage_with_open_windows_holds_back_those_below(self, flow: Flow) -> None:
        flow.write(steady(range(30)))
        with pipeline_into_both(flow) as pipeline:
            flow.start(pipeline, flow.counts(pipeline))
            until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "windows are open")
            until(lambda: idle(flow) == set(SHARDS), "nothing is left to read")
            end = time.monotonic() + 3
            until(lambda: time.monotonic() > end, "it would have said so by now")
            assert flow.output_of("both") == START_MS + 21_000

    def test_a_shard_that_says_nothing_of_it_holds_the_stage(
        self, flow: Flow, pipeline: Pipeline
    ) -> None:
        flow.write(steady(range(30)))
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "both sensors have promised")
        done = batches(query)
        flow.write([Reading("left", "a", second) for second in range(30, 90)])
        until(lambda: batches(query) > done, "the left one has gone on")
        query.processAllAvailable()
        assert flow.output_of(COUNTS) == START_MS + 21_000
