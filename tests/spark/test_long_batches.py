"""Stuck batches and waiting data: the two lags tell one from the other.

The figures 3-12 to 3-15 of *Streaming Systems* (Akidau, Chernyak and Lax): a data watermark that stands
still has a processing watermark that stands still beside it where work is stuck, and one that advances
where data waits for the end of its window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Pipeline
from spark_agent.supervision.driver_reporter import WATCH_MS
from tests.spark.flow import (
    BOUND,
    COUNTS,
    JOB,
    RANGES,
    SHARDS,
    SOURCE,
    SPEC,
    Flow,
    Reading,
    until,
)
from tests.support.gateway import Gateway

pytestmark = pytest.mark.spark

SHORT_LEASE = "2 s"


def lags(flow: Flow, stage: str) -> tuple[int, int, int]:
    """Return the processing watermark, the system lag and the data lag of a stage, in ms."""
    body: Any = flow.client.snapshot(JOB)["watermarks"][stage]
    return body["processing_watermark"], body["system_lag_ms"], body["data_lag_ms"]


def reason(flow: Flow, stage: str) -> str:
    holders = flow.client.explain(JOB, stage)["holders"]
    return holders[0]["reason"] if holders else ""


def healths(flow: Flow) -> dict[str, str]:
    return {each["stage"]: each["health"] for each in flow.client.problems()["problems"]}


def test_a_stuck_batch_is_stalled_until_it_goes_on(flow: Flow, stuck: Path) -> None:
    """Figures 3-12 and 3-13: both watermarks stand still, and both lags grow."""
    with flow.pipeline(lease_ttl=SHORT_LEASE) as pipeline:
        rows = _hanging_source(flow, pipeline, stuck)
        rows = pipeline.watermarked(rows, stage=COUNTS, event_time="at")
        counted = rows.groupBy(F.window("at", "10 seconds"), "key").agg(F.count("*").alias("rows"))
        frame = pipeline.report(counted, stage=COUNTS)
        flow.write([Reading(sensor, "a", second) for sensor in SHARDS for second in (1, 20)])
        query = flow.start(pipeline, frame)
        before_ms = until(lambda: max(0, flow.output_of(COUNTS)), "the first rows are reported")
        with _touched(stuck):
            flow.write([Reading(sensor, "a", 60) for sensor in SHARDS])
            until(lambda: healths(flow).get(SOURCE) == "stalled", "the batch is stalled")
            assert reason(flow, SOURCE) == reason(flow, COUNTS) == "stalled"
            first = lags(flow, COUNTS)
            until(lambda: lags(flow, COUNTS)[1] > first[1] + 1_000, "the system lag grows")
            later = lags(flow, COUNTS)
            assert later[0] == first[0], "the processing watermark stands still"
            assert later[2] > first[2], "the data lag grows, too"
            assert flow.output_of(COUNTS) == before_ms
        until(lambda: flow.output_of(COUNTS) > before_ms, "the batch goes on")
        until(lambda: lags(flow, COUNTS)[0] > later[0], "the processing watermark goes on")
        until(lambda: not healths(flow), "not a problem is left")
        query.stop()


def test_a_keyed_task_that_hangs_before_its_first_row_is_stalled(flow: Flow, stuck: Path) -> None:
    """Its reporter has begun, and waits: the task must not keep the driver from its range."""
    with flow.pipeline(lease_ttl=SHORT_LEASE) as pipeline:
        rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
        counted = rows.groupBy(F.window("at", "10 seconds"), "key").agg(F.count("*").alias("rows"))
        counted = counted.withColumn("rows", F.udf(_held_by(stuck), "long", useArrow=False)("rows"))
        query = flow.start(pipeline, pipeline.report(counted, stage=COUNTS))
        flow.write([Reading(sensor, "a", second) for sensor in SHARDS for second in (1, 20)])
        until(lambda: max(0, flow.output_of(COUNTS)), "the first rows are reported")
        with _touched(stuck):
            flow.write([Reading(sensor, "a", 60) for sensor in SHARDS])
            until(lambda: healths(flow).get(COUNTS) == "stalled", "the batch is stalled")
            assert reason(flow, COUNTS) == "stalled"
        until(lambda: not healths(flow), "the problem is solved")
        query.stop()


def test_a_keyed_stage_that_was_idle_has_a_worker_in_the_batch_after(
    flow: Flow, stuck: Path
) -> None:
    """The lease of an idle range is short. The next claim was due a third of a long lease later."""
    idle = {"after_ms": 1_000, "then": "exclude"}
    spec = {**SPEC, SOURCE: {"shards": SHARDS, "idle": idle}}
    options: Any = {"spark": flow.spark, "poll": "50 ms", "lease_ttl": "60 s"}
    with Pipeline(flow.url, JOB, spec, **options) as pipeline:
        rows = _hanging_source(flow, pipeline, stuck)
        rows = pipeline.watermarked(rows, stage=COUNTS, event_time="at")
        flow.write([Reading(sensor, "a", 20) for sensor in SHARDS])
        query = flow.start(pipeline, pipeline.report(rows, stage=COUNTS, event_time="at"))
        until(lambda: flow.watermark(COUNTS).status == "idle", "it has nothing to emit")
        found: set[str | None] = set()

        def is_held() -> bool:
            found.add(healths(flow).get(COUNTS))
            ranges = flow.client.ranges(JOB, COUNTS, limit=RANGES)["ranges"]
            return all((each["expires_in_ms"] or 0) > 2 * WATCH_MS for each in ranges)

        until(lambda: not is_held(), "its leases are short")
        with _touched(stuck):
            flow.write([Reading(sensor, "a", 60) for sensor in SHARDS])
            until(lambda: query.status["isDataAvailable"], "the batch hangs")
            until(is_held, "the driver holds its ranges")
        assert "no_worker" not in found
        query.stop()


def test_the_commit_of_a_long_batch_has_the_age_of_its_plan(flow: Flow, stuck: Path) -> None:
    """The shards that it has not read were quiet until then, and not until it has ended."""
    ages_ms: list[int] = []

    def note_commit(path: str, body: Any) -> bool:
        if path.endswith("/commits") and body is not None:
            ages_ms.append(body["evidence_age_ms"])
        return False

    idle = {"after_ms": 60_000, "then": "exclude"}
    spec = {**SPEC, SOURCE: {"shards": SHARDS, "idle": idle}}
    with (
        Gateway(flow.url, note_commit) as gateway,
        Pipeline(gateway.url, JOB, spec, spark=flow.spark, poll="50 ms") as pipeline,
    ):
        rows = _hanging_source(flow, pipeline, stuck)
        rows = pipeline.watermarked(rows, stage=COUNTS, event_time="at")
        query = flow.start(pipeline, pipeline.report(rows, stage=COUNTS, event_time="at"))
        with _touched(stuck):
            flow.write([Reading(sensor, "a", 20) for sensor in SHARDS])
            until(lambda: query.status["isDataAvailable"], "the batch hangs")
            since = time.monotonic()
            until(lambda: time.monotonic() > since + 1, "the batch is long")
            hung_ms = int((time.monotonic() - since) * 1_000)
        until(lambda: flow.output_of(SOURCE) > 0, "its epoch is committed")
        assert max(ages_ms) >= hung_ms
        query.stop()


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """A file: batches hang while it exists."""
    return tmp_path / "stuck"


@contextmanager
def _touched(stuck: Path) -> Generator[None]:
    """Let batches hang, also if the test fails: a query that hangs does not stop."""
    stuck.touch()
    try:
        yield
    finally:
        stuck.unlink()


def _hanging(stuck: Path) -> Callable[[Iterable[pd.DataFrame]], Iterator[pd.DataFrame]]:
    def hang(frames: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            while stuck.exists():
                time.sleep(0.05)
            yield frame

    return hang


def _hanging_source(flow: Flow, pipeline: Pipeline, stuck: Path) -> DataFrame:
    """Read the shards in batches that hang before their rows."""
    read = flow.readings()
    return pipeline.source(
        read.mapInPandas(_hanging(stuck), read.schema),
        stage=SOURCE,
        shard="sensor",
        event_time="at",
        strategy=BOUND,
    )


def _held_by(stuck: Path) -> Callable[[int], int]:
    def hold(rows: int) -> int:
        while stuck.exists():
            time.sleep(0.05)
        return rows

    return hold


def _after_the_claim(flow: Flow, pipeline: Pipeline, stuck: Path) -> StreamingQuery:
    """Rows hang between the source's report and the windows."""
    rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
    rows = rows.mapInPandas(_hanging(stuck), rows.schema)
    counted = rows.groupBy(F.window("at", "10 seconds"), "key").agg(F.count("*").alias("rows"))
    return flow.start(pipeline, pipeline.report(counted, stage=COUNTS))


def _in_the_sink(flow: Flow, pipeline: Pipeline, stuck: Path) -> StreamingQuery:
    def hang(frame: DataFrame, _: int) -> None:
        rows = frame.collect()
        while rows and stuck.exists():
            time.sleep(0.05)

    writer = flow.source(pipeline).writeStream.option("checkpointLocation", str(flow.checkpoint))
    return pipeline.start(writer.foreachBatch(hang))


def _without_a_keyed_stage(flow: Flow, pipeline: Pipeline, stuck: Path) -> StreamingQuery:
    rows = flow.source(pipeline)
    return flow.start(pipeline, rows.mapInPandas(_hanging(stuck), rows.schema))


@pytest.mark.parametrize(
    ("start", "reasons"),
    [
        # The few rows hang before the source's task has reached their end.
        (_after_the_claim, {"stalled", "waiting_for_commit"}),
        (_without_a_keyed_stage, {"stalled", "waiting_for_commit"}),
        (_in_the_sink, {"waiting_for_commit"}),
    ],
)
def test_a_batch_that_hangs_after_its_claims_is_stalled(
    flow: Flow,
    stuck: Path,
    start: Callable[[Flow, Pipeline, Path], StreamingQuery],
    reasons: Collection[str],
) -> None:
    """Also where the ranges have reported, and wait for the commit."""
    with flow.pipeline(lease_ttl=SHORT_LEASE) as pipeline:
        flow.write([Reading(sensor, "a", second) for sensor in SHARDS for second in (1, 20)])
        query = start(flow, pipeline, stuck)
        before_ms = until(lambda: max(0, flow.output_of(SOURCE)), "the first rows are reported")
        with _touched(stuck):
            flow.write([Reading(sensor, "a", 60) for sensor in SHARDS])
            until(lambda: healths(flow).get(SOURCE) == "stalled", "the batch is stalled")
            assert reason(flow, SOURCE) in reasons
        until(lambda: flow.output_of(SOURCE) > before_ms, "the batch goes on")
        until(lambda: SOURCE not in healths(flow), "the problem is solved")
        query.stop()


def _has_advanced(flow: Flow, processed_ms: int) -> bool:
    return lags(flow, COUNTS)[0] > processed_ms


def test_a_long_window_lets_data_wait_and_no_work(flow: Flow) -> None:
    """Figures 3-14 and 3-15: the data lag grows by the window, and the system lag does not."""
    with flow.pipeline(lease_ttl=SHORT_LEASE) as pipeline:
        rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
        grouped = rows.groupBy(F.window("at", "1 hour"), "key").agg(F.min("at").alias("at"))
        frame = pipeline.report(grouped, stage=COUNTS, output_time="earliest")
        flow.write([Reading(sensor, "a", 60) for sensor in SHARDS])
        query = flow.start(pipeline, frame)
        begin_ms = until(lambda: max(0, flow.output_of(COUNTS)), "the window is open")
        for second in range(120, 1_800, 600):
            before = lags(flow, COUNTS)
            flow.write([Reading(sensor, "a", second) for sensor in SHARDS])
            until(partial(_has_advanced, flow, before[0]), "the processing watermark advances")
            assert flow.output_of(COUNTS) == begin_ms, "the data watermark stands at the window"
        until(lambda: reason(flow, COUNTS) == "buffering", "the window keeps the watermark back")
        assert healths(flow) == {}
        query.stop()
