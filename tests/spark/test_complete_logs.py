"""Folders that are complete: nothing follows in them, and the watermark does not wait for them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Ascending, Pipeline, Strategy
from spark_agent.exceptions import FinalSourceError
from spark_agent.executor.tally import Count
from spark_agent.jvm.progress import read_progress
from spark_agent.supervision.complete_shards import CompleteShards
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    DEADLINE_S,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    batches,
    ended,
    until,
    windows,
)
from tests.spark.test_logs import (
    SCHEMA,
    Folders,
    alone,
    counts,
    pipeline_of,
    promises,
    statuses,
)
from tests.spark.test_logs import read as read_folders
from tests.support.server import ROOT, Service

pytestmark = pytest.mark.spark

MARKER = "_SUCCESS"
OFTEN: Mapping[str, object] = {"processingTime": "0 seconds"}
DYNAMIC = SPEC | {SOURCE: {"shards": ["left"], "dynamic": True}}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "logs")


def read(
    pipeline: Pipeline,
    folders: Folders,
    most: int | None = 1,
    strategy: Strategy = Ascending(),  # noqa: B008  (it is immutable)
) -> DataFrame:
    return read_folders(pipeline, folders, most, strategy=strategy, complete=MARKER)


def complete(folders: Folders, *shards: str) -> None:
    for shard in shards:
        (folders.path / shard).mkdir(exist_ok=True)
        (folders.path / shard / MARKER).touch()


def run(
    flow: Flow,
    folders: Folders,
    build: Callable[[Pipeline, DataFrame], DataFrame] = counts,
    trigger: Mapping[str, object] | None = AVAILABLE_NOW,
    **options: Any,
) -> StreamingQuery:
    """Run a query of a pipeline of its own to its end."""
    with pipeline_of(flow) as pipeline:
        frame = build(pipeline, read(pipeline, folders))
        query = flow.start(pipeline, frame, trigger=trigger, **options)
        ended(query)
    return query


def rows_read(query: StreamingQuery) -> int:
    return sum(read_progress(json.loads(each.json)).rows for each in query.recentProgress)


def final(flow: Flow) -> set[str]:
    return {shard for shard, status in statuses(flow).items() if status == "final"}


def test_all_complete_folders_close_the_last_windows_and_the_next_night_finds_nothing(
    flow: Flow, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folders.write_each("left", range(60))
    folders.write_each("right", range(40))
    complete(folders, "left", "right")
    query = run(flow, folders)
    assert query.exception() is None
    assert flow.watermark(SOURCE).final
    assert flow.watermark(COUNTS).final
    assert flow.counted() == windows(folders.readings)
    again = run(flow, folders)
    assert rows_read(again) == 0
    assert flow.counted() == windows(folders.readings)
    assert caplog.messages == [], "all is well"


def test_windows_close_under_a_trigger_without_an_end_and_the_query_goes_on(
    flow: Flow, folders: Folders
) -> None:
    """One shard is final before the other: the watermark waits for the other alone."""
    folders.write_each("left", range(20))
    complete(folders, "left")
    folders.write_each("right", range(40))
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, counts(pipeline, read(pipeline, folders)), trigger=OFTEN)
        until(lambda: final(flow) == {"left"}, "nothing follows in it")
        until(lambda: flow.output_of(COUNTS) == START_MS + 39_000, "the other one is waited for")
        folders.write_each("right", range(40, 60))
        complete(folders, "right")
        until(lambda: flow.watermark(COUNTS).final, "the last windows have come out")
        until(lambda: flow.counted() == windows(folders.readings), "as a batch job has them")
        done = batches(query)
        assert query.isActive
        until(lambda: batches(query) == done, "an idle query")
        assert pipeline.counts[Count.LATE_ROWS] == 0
    assert query.exception() is None


@pytest.mark.parametrize("trigger", [AVAILABLE_NOW, OFTEN])
def test_a_query_without_windows_makes_its_shards_final(
    flow: Flow, folders: Folders, trigger: Mapping[str, object]
) -> None:
    """No control source polls the driver after its last batch."""
    folders.write_each("left", range(20))
    complete(folders, "left", "right")  # the right one never had a file
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, alone(pipeline, read(pipeline, folders)), trigger=trigger)
        if trigger is AVAILABLE_NOW:
            ended(query)
        until(lambda: flow.watermark(SOURCE).final, "both are final")
        assert query.isActive == (trigger is OFTEN)
    assert rows_read(query) == 20


def test_a_marker_that_comes_in_a_later_night(flow: Flow, folders: Folders) -> None:
    """Nothing is read in that night, and its windows close all the same."""
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    run(flow, folders)
    assert final(flow) == set()
    complete(folders, "left", "right")
    assert rows_read(run(flow, folders)) == 0
    assert flow.watermark(COUNTS).final
    assert flow.counted() == windows(folders.readings)


@pytest.mark.parametrize("build", [counts, pytest.param(alone, marks=pytest.mark.slow)])
def test_a_driver_that_is_killed_before_the_report_reports_at_its_next_start(
    flow: Flow,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Pipeline, DataFrame], DataFrame],
) -> None:
    """Spark has committed the batch by which the checkpoint has the folders as complete."""
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    complete(folders, "left", "right")
    with monkeypatch.context() as killed:
        killed.setattr(CompleteShards, "report", lambda *_: None)
        killed.setattr(CompleteShards, "is_due", lambda *_: False)
        run(flow, folders, build)
        assert final(flow) == set()
    assert rows_read(run(flow, folders, build)) == 0
    assert flow.watermark(SOURCE).final
    if build is counts:
        assert flow.counted() == windows(folders.readings)


@pytest.mark.slow
def test_a_driver_that_is_killed_with_its_jvm_before_the_report(
    flow: Flow, folders: Folders, tmp_path: Path
) -> None:
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    complete(folders, "left", "right")
    (tmp_path / "own").mkdir()
    driver = [sys.executable, "-m", "tests.spark.complete_logs_driver", flow.url, str(tmp_path)]
    died = subprocess.run(driver, cwd=ROOT, start_new_session=True, timeout=DEADLINE_S, check=False)
    assert died.returncode == -signal.SIGKILL
    assert final(flow) == set()
    assert rows_read(run(flow, folders)) == 0
    assert flow.watermark(COUNTS).final
    assert flow.counted() == windows(folders.readings)


@pytest.mark.slow
@pytest.mark.parametrize("trigger", [AVAILABLE_NOW, OFTEN])
def test_a_bounded_query_over_complete_folders_ends_however_often(
    flow: Flow, folders: Folders, trigger: Mapping[str, object]
) -> None:
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    complete(folders, "left")
    for _ in range(2):
        run(flow, folders, trigger=trigger, bounded=True)
        assert flow.watermark(COUNTS).final
        assert flow.counted() == windows(folders.readings)


def test_a_service_that_is_away_at_that_moment_gets_the_report_later(
    flow: Flow, folders: Folders, service: Service
) -> None:
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, counts(pipeline, read(pipeline, folders)))
        until(lambda: flow.output_of(COUNTS) == START_MS + 19_000, "all is read")
        service.kill()
        done = batches(query)
        complete(folders, "left", "right")
        until(lambda: batches(query) > done, "the checkpoint has it")
        service.start()
        until(lambda: flow.watermark(COUNTS).final, "it is reported")
        until(lambda: flow.counted() == windows(folders.readings), "the last windows")


@pytest.mark.slow
def test_a_service_that_is_away_for_the_whole_night_gets_the_report_in_the_next(
    flow: Flow, folders: Folders, service: Service
) -> None:
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    run(flow, folders)
    complete(folders, "left", "right")
    service.kill()
    with pipeline_of(flow, patience="300 ms", finish_timeout="1 s") as pipeline:
        ended(
            flow.start(pipeline, counts(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW)
        )
    service.start()
    run(flow, folders)
    assert flow.watermark(COUNTS).final
    assert flow.counted() == windows(folders.readings)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_file_that_comes_into_a_complete_folder_fails_the_query_and_is_not_lost(
    flow: Flow, folders: Folders, *, restarts: bool
) -> None:
    folders.write_each("left", range(20))
    complete(folders, "left")
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, read(pipeline, folders))
        until(lambda: final(flow) == {"left"}, "nothing follows in it")
        if restarts:
            query.stop()
        folders.write([Reading("left", "a", 30)], name="0009.json")
        if restarts:
            query = flow.start(pipeline, read(pipeline, folders))
        until(lambda: not query.isActive, "the query fails")
        with pytest.raises(StreamingQueryException) as failed:
            query.awaitTermination()
    assert "the folder of shard 'left'" in str(failed.value)
    assert "was complete, and after that came '0009.json'" in str(failed.value)
    assert "Move the file into the folder of a shard that is not final" in str(failed.value)
    (folders.path / "right").mkdir()
    (folders.path / "left" / "0009.json").rename(folders.path / "right" / "0009.json")
    (folders.path / "left" / MARKER).unlink()  # a promise stays true
    run(flow, folders, alone)
    assert promises(flow)["right"] == 30
    assert final(flow) == {"left"}


def test_a_folder_that_cannot_join_by_its_name_fails_the_query_before_it_is_read(
    flow: Flow, folders: Folders
) -> None:
    """Its rows had passed, nothing waited for them, and most of them were late."""
    folders.write_each("left", range(60))
    folders.write_each("zürich", range(60))
    with pipeline_of(flow, spec=DYNAMIC) as pipeline:
        query = flow.start(
            pipeline, counts(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW
        )
        with pytest.raises(StreamingQueryException, match="has 'zürich', and a folder joins"):
            query.awaitTermination()
        assert not flow.counted()
        (folders.path / "zürich").rename(folders.path / "zurich")
        frame = counts(pipeline, read(pipeline, folders))
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
        assert not pipeline.counts
    assert flow.counted() == windows(folders.readings)


def test_a_dynamic_source_is_open_however_many_of_its_folders_are_complete(
    flow: Flow, folders: Folders
) -> None:
    """The shard that is the furthest stays open, so that there is a source to join."""
    folders.write_each("left", range(20))
    folders.write_each("one", range(30))
    complete(folders, "left", "one")
    with pipeline_of(flow, spec=DYNAMIC) as pipeline:
        query = flow.start(pipeline, counts(pipeline, read(pipeline, folders)))
        until(lambda: final(flow) == {"left"}, "it holds nothing")
        until(
            lambda: flow.output_of(COUNTS) == START_MS + 29_000, "the watermark is that of the one"
        )
        folders.write_each("two", range(29, 39))
        until(lambda: "two" in promises(flow), "a new one joins")
        until(lambda: "one" not in promises(flow), "the other one leaves")
        until(lambda: flow.output_of(COUNTS) == START_MS + 38_000, "the new one is waited for")
        complete(folders, "two")
        done = batches(query)
        until(lambda: batches(query) > done, "the checkpoint has it")
        assert not flow.watermark(SOURCE).final
        assert pipeline.counts[Count.LATE_ROWS] == 0
    with pipeline_of(flow, spec=DYNAMIC) as pipeline:
        frame = counts(pipeline, read(pipeline, folders))
        folders.write_each("three", range(38, 58))
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        assert flow.output_of(COUNTS) == START_MS + 57_000
        assert not flow.watermark(SOURCE).final
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
        assert pipeline.counts[Count.LATE_ROWS] == 0
    assert flow.counted() == windows(folders.readings)


def test_ordered_logs_are_a_perfect_source(flow: Flow, folders: Folders) -> None:
    """Not one row is late, although the files of the left one bring four times as much."""
    folders.write_each("left", range(160), file_s=40)
    complete(folders, "left")
    folders.write_each("right", range(100))
    complete(folders, "right")
    with pipeline_of(flow) as pipeline:
        frame = counts(pipeline, read(pipeline, folders))
        query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW)
        ended(query)
        assert pipeline.counts.total() == 0
    assert flow.watermark(COUNTS).final
    assert flow.counted() == windows(folders.readings)


def test_rows_out_of_order_within_a_log_are_counted_and_the_watermark_is_not_early(
    flow: Flow, folders: Folders
) -> None:
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    folders.write([Reading("left", "a", 3), Reading("left", "a", 25), Reading("right", "a", 22)])
    complete(folders, "left", "right")
    with pipeline_of(flow) as pipeline:
        ended(
            flow.start(pipeline, counts(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW)
        )
        assert pipeline.counts[Count.LATE_ROWS] == 1
        assert pipeline.counts[Count.EARLY_ROWS] == 0
    assert flow.watermark(COUNTS).final


def test_a_final_source_is_not_read_on_and_a_marker_is_needed_to_run_it_again(
    flow: Flow, folders: Folders
) -> None:
    """A bounded query has promised that nothing follows, and there is a file without a marker."""
    folders.write_each("left", range(20))
    folders.write_each("right", range(20))
    run(flow, folders, bounded=True)
    with pipeline_of(flow) as pipeline:
        frame = pipeline.read_logs(
            folders.path,
            stage=SOURCE,
            format="json",
            schema=SCHEMA,
            event_time="at",
            strategy=Ascending(),
        )
        with pytest.raises(
            FinalSourceError, match="is final: a bounded query, or complete folders"
        ):
            flow.start(pipeline, frame, trigger=AVAILABLE_NOW)
        assert rows_read(run(flow, folders)) == 0
        folders.write_each("right", range(20, 30))
        query = flow.start(
            pipeline, counts(pipeline, read(pipeline, folders)), trigger=AVAILABLE_NOW
        )
        with pytest.raises(
            StreamingQueryException, match="is final, but has unread files of shard right"
        ):
            query.awaitTermination(DEADLINE_S)


@pytest.mark.slow
def test_a_report_outlives_a_service_that_had_not_saved_it(
    spark: SparkSession, folders: Folders, tmp_path: Path
) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    never_saves = {"TIDEGAUGE_CHECKPOINT_INTERVAL_MS": "60000"}
    with Service(folder, environment=never_saves) as service:
        flow = Flow(spark, service.url, tmp_path)
        folders.write_each("left", range(20))
        complete(folders, "left")
        with pipeline_of(flow) as pipeline:
            query = flow.start(pipeline, read(pipeline, folders))
            until(lambda: final(flow) == {"left"}, "it is reported")
            service.kill()
            service.start()
            until(lambda: final(flow) == {"left"}, "again")
            assert query.isActive


@pytest.mark.slow
def test_a_report_outlives_a_ledger(flow: Flow, folders: Folders, service: Service) -> None:
    folders.write_each("left", range(20))
    complete(folders, "left")
    with pipeline_of(flow) as pipeline:
        query = flow.start(pipeline, read(pipeline, folders))
        until(lambda: final(flow) == {"left"}, "it is reported")
        service.lose_ledger()
        folders.write_each("right", range(20))
        until(lambda: flow.client.jobs()["jobs"], "the job is declared again")
        until(lambda: promises(flow).get("right") == 19, "it goes on")
        until(lambda: final(flow) == {"left"}, "it is reported again")
        assert query.isActive
