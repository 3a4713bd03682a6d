"""Shards of a dynamic source join when their first rows come, and are waited for from then on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from spark_agent import OldCheckpointError, Pipeline
from spark_agent.client.client import Client
from spark_agent.executor.tally import Count
from spark_agent.jvm.progress import Listener
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    DEADLINE_S,
    JOB,
    RANGES,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    ended,
    steady,
    until,
    windows,
)
from tests.support.gateway import Gateway
from tests.support.server import Service

pytestmark = pytest.mark.spark


def pipeline(flow: Flow, *more: str) -> Pipeline:
    spec = {**SPEC, SOURCE: {"shards": ["left", *more], "dynamic": True}}
    return Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms", replace=bool(more))


def test_shards_join_with_their_first_rows_and_the_last_windows_come_out(flow: Flow) -> None:
    readings = [
        *steady(range(30)),
        *(Reading("late-comer", "a", second) for second in range(25, 40)),
    ]
    flow.write(readings)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
        assert running.counts[Count.UNKNOWN_SHARD_ROWS] == 0
    assert flow.counted() == windows(readings)
    assert flow.watermark(COUNTS).final


@pytest.mark.slow
def test_a_shard_that_has_joined_is_waited_for_the_next_day_and_ends_with_its_source(
    flow: Flow,
) -> None:
    """The second day's driver knows it from the service alone: its files have no rows of it."""
    first_day = steady(range(30))
    flow.write(first_day)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW))
    stood_ms = flow.output_of(SOURCE)
    assert stood_ms <= START_MS + 26_000, "where the one that has joined stands"

    second_day = [Reading("left", "a", second) for second in range(30, 90)]
    flow.write(second_day)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW))
    assert flow.output_of(SOURCE) == stood_ms

    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows([*first_day, *second_day])
    assert flow.watermark(SOURCE).final


FORGOTTEN = r"run 1, but .* is 0: .* the shards that have joined sensors, .* Add them"


def test_a_lost_ledger_has_forgotten_which_shards_have_joined(flow: Flow, service: Service) -> None:
    """The watermark would pass the quiet one, whose rows were lost then. With what the error says, it
    does not.
    """
    right = [Reading("right", "a", second) for second in range(20)]
    flow.write([*(Reading("left", "a", second) for second in range(60)), *right])
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW))
    service.lose_ledger()
    flow.write([Reading("left", "a", second) for second in range(60, 80)])
    with pipeline(flow) as running, pytest.raises(OldCheckpointError, match=FORGOTTEN):
        flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW)
    with pipeline(flow, "right") as running:
        frame = flow.counts(running)
        ended(flow.start(running, frame, trigger=AVAILABLE_NOW, on_lost_checkpoint="continue"))
    assert flow.output_of(SOURCE) == -1, "it waits for the one that is quiet"
    late = [Reading("right", "a", second) for second in range(20, 80)]
    flow.write(late)
    with pipeline(flow, "right") as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
    left = [Reading("left", "a", second) for second in range(80)]
    assert flow.counted() == windows([*left, *right, *late])


@pytest.mark.slow
def test_a_ledger_that_is_lost_while_shards_are_quiet_ends_the_query(
    flow: Flow, service: Service
) -> None:
    flow.write([Reading(shard, "a", second) for shard in ("left", "right") for second in range(20)])
    with pipeline(flow) as running:
        query = flow.start(running, flow.counts(running))
        until(lambda: flow.output_of(COUNTS) == START_MS + 14_000, "both have joined")
        service.lose_ledger()
        flow.write([Reading("left", "a", second) for second in range(20, 60)])
        with pytest.raises(StreamingQueryException, match=FORGOTTEN):
            query.awaitTermination(DEADLINE_S)
    assert flow.output_of(SOURCE) == -1


def holders(flow: Flow) -> dict[str, str]:
    """The holder of each shard that is under a lease."""
    shards = flow.client.ranges(JOB, SOURCE, limit=10)["ranges"]
    return {each["range"]: each["holder"] for each in shards if each["holder"] is not None}


def joins_after_a_backup(
    flow: Flow, service: Service, running: Pipeline, folder: Path
) -> list[Reading]:
    """Start a query, back the ledger up, and let a shard join; return what it has read."""
    left = [Reading("left", "a", second) for second in range(20)]
    flow.write(left)
    flow.start(running, flow.counts(running))
    until(lambda: flow.output_of(COUNTS) == START_MS + 14_000, "the declared shard is read")
    service.back_up(folder)
    right = [Reading("right", "a", second) for second in range(15, 25)]
    flow.write(right)
    # The driver's claim outranks the task's once the epoch is acknowledged.
    until(lambda: holders(flow).get("right", "").endswith(".driver"), "another one has joined")
    assert (flow.checkpoint / "tidegauge" / "joined" / "1" / SOURCE / "right").exists()
    return [*left, *right]


def ahead(flow: Flow) -> list[Reading]:
    readings = [Reading("left", "a", second) for second in range(20, 90)]
    flow.write(readings)
    return readings


def test_a_backup_from_within_the_run_does_not_pass_a_shard_that_has_joined_since(
    flow: Flow, service: Service, tmp_path: Path
) -> None:
    """By the number of its run, such a ledger is not older than the checkpoint, which has the shard."""
    with pipeline(flow) as running:
        readings = joins_after_a_backup(flow, service, running, tmp_path / "backup")
    service.restore(tmp_path / "backup")
    readings += ahead(flow)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW))
    assert flow.output_of(SOURCE) == START_MS + 14_000, "it waits for the one that is quiet"
    late = [Reading("right", "a", second) for second in range(25, 90)]
    flow.write(late)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows([*readings, *late])


@pytest.mark.slow
def test_a_backup_from_within_the_run_ends_the_query_while_it_runs(
    flow: Flow, service: Service, tmp_path: Path
) -> None:
    with pipeline(flow) as running:
        readings = joins_after_a_backup(flow, service, running, tmp_path / "backup")
        [query] = flow.spark.streams.active
        service.restore(tmp_path / "backup")
        readings += ahead(flow)
        words = "was restored from an older backup while the query ran"
        with pytest.raises(StreamingQueryException, match=words):
            query.awaitTermination(DEADLINE_S)
    assert flow.output_of(SOURCE) == START_MS + 14_000
    late = [Reading("right", "a", second) for second in range(25, 90)]
    flow.write(late)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows([*readings, *late])


def test_a_shard_whose_name_cannot_be_one_is_counted(flow: Flow) -> None:
    readings = [*steady(range(30)), Reading("été", "a", 12)]
    flow.write(readings)
    with pipeline(flow) as running:
        ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
        assert running.counts[Count.UNKNOWN_SHARD_ROWS] == 1
    assert flow.counted() == windows(readings)


@pytest.mark.parametrize("with_windows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_bounded_query_whose_shards_cannot_join_fails_and_can_be_continued(
    spark: SparkSession, tmp_path: Path, with_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has room for the declared shard alone. A query without windows never ended; or well,
    and final, if it had found nothing more to read before Spark told of its batch.
    """
    tell = Listener.onQueryProgress

    def tell_late(self: Listener, event: Any) -> None:
        time.sleep(0.5)
        tell(self, event)

    monkeypatch.setattr(Listener, "onQueryProgress", tell_late)
    folder = tmp_path / "small"
    folder.mkdir()
    readings = steady(range(30))
    small = {"TIDEGAUGE_MAX_RANGES_PER_JOB": str(1 + RANGES)}
    with Service(folder, environment=small) as service:
        flow = Flow(spark, service.url, tmp_path)
        flow.write(readings)
        with pipeline(flow) as running:
            frame = flow.counts(running) if with_windows else flow.source(running)
            query = flow.start(running, frame, bounded=True)
            with pytest.raises(Exception, match="TIDEGAUGE_MAX_RANGES_PER_JOB"):
                query.awaitTermination(DEADLINE_S)
        assert not flow.watermark(SOURCE).final
    with Service(folder) as service:
        flow = Flow(spark, service.url, tmp_path)
        with pipeline(flow) as running:
            frame = flow.counts(running) if with_windows else flow.source(running)
            ended(flow.start(running, frame, bounded=True))
        assert flow.watermark(SOURCE).final
        assert not with_windows or flow.counted() == windows(readings)


def test_a_query_whose_shard_cannot_join_fails_and_goes_on_in_the_next_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The service has not room for the new shard: committed without it, the epoch passed its rows. The
    query went on without a commit, for as long as it ran.
    """
    folder = tmp_path / "small"
    folder.mkdir()
    left = [Reading("left", "a", second) for second in range(60)]
    right = [Reading("right", "a", second) for second in range(20)]
    with Service(folder, environment={"TIDEGAUGE_MAX_RANGES_PER_JOB": str(1 + RANGES)}) as service:
        flow = Flow(spark, service.url, tmp_path)
        flow.write([*left, *right])
        for _ in range(2):
            with pipeline(flow) as running:
                query = flow.start(running, flow.counts(running))
                with pytest.raises(StreamingQueryException, match="TIDEGAUGE_MAX_RANGES_PER_JOB"):
                    query.awaitTermination(DEADLINE_S)
            assert flow.output_of(SOURCE) == -1
            [run, *_] = flow.client.runs(JOB)["runs"]
            assert run["outcome"] == "failed"
            assert "TIDEGAUGE_MAX_RANGES_PER_JOB" in (run["because"] or "")
        assert flow.client.commits(JOB, SOURCE)["epoch"] is None
    with Service(folder) as service:
        flow.url, flow.client = service.url, Client(service.url)
        flow.write(ahead := [Reading("left", "a", second) for second in range(60, 90)])
        with pipeline(flow) as running:
            ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW))
        assert flow.output_of(SOURCE) == -1, "it waits for the one that could not join before"
        flow.write(late := [Reading("right", "a", second) for second in range(20, 90)])
        with pipeline(flow) as running:
            ended(flow.start(running, flow.counts(running), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows([*left, *right, *ahead, *late])


def introduces_right(path: str, body: Any) -> bool:
    """True for the report of the task that has read the new shard."""
    if not path.endswith("/reports"):
        return False
    return "right" in body.get("ranges", {}) and ".task-" in body.get("claim", {}).get("holder", "")


def test_an_epoch_waits_for_a_new_shard_whose_task_could_not_report(flow: Flow) -> None:
    """Committed with the other shard's report alone, the epoch passed the rows of the new one."""
    left = [Reading("left", "a", second) for second in range(60)]
    right = [Reading("right", "a", second) for second in range(20)]
    flow.write(left)
    flow.write(right)
    flow.files_per_batch = 2
    with Gateway(flow.url, introduces_right) as gateway:
        spec = {**SPEC, SOURCE: {"shards": ["left"], "dynamic": True}}
        options: Any = {"spark": flow.spark, "poll": "50 ms", "patience": "1 s"}
        with Pipeline(gateway.url, JOB, spec, **options) as running:
            flow.start(running, flow.counts(running, partitioned_by_shard=True))
            until(lambda: flow.output_of(COUNTS) >= START_MS + 14_000, "the driver has reported it")
            assert flow.output_of(SOURCE) == START_MS + 14_000
        assert gateway.dropped
        late = [Reading("right", "a", second) for second in range(20, 60)]
        flow.write(late)
        with Pipeline(flow.url, JOB, spec, **options) as running:
            frame = flow.counts(running, partitioned_by_shard=True)
            ended(flow.start(running, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows([*left, *right, *late])
