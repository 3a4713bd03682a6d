"""Whatever dies, the results are complete, and the same as a batch job's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent.client.errors import LeaseLost, StaleRun
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.exceptions import Unavailable
from spark_agent.executor.tally import Count
from spark_agent.jvm.progress import Listener
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.pipeline import Pipeline
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.pending_reports import PendingReports
from spark_agent.supervision.supervisor import Supervisor
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    DEADLINE_S,
    JOB,
    SHARDS,
    SOURCE,
    START_MS,
    Flow,
    batches,
    ended,
    spark_watermark,
    steady,
    until,
    windows,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark

TTL_MS = 60_000


@dataclass(frozen=True)
class Gated:
    """A strategy whose task stops between its rows and its report, until a file is there."""

    folder: Path

    def promise_ms(self, newest_ms: int) -> int:
        (self.folder / f"read-{os.getpid()}").touch()
        end = time.monotonic() + DEADLINE_S
        while not (self.folder / "go").exists() and time.monotonic() < end:
            time.sleep(0.01)
        return BOUND.promise_ms(newest_ms)

    def reached(self) -> bool:
        return any(self.folder.glob("read-*"))


def test_an_attempt_that_reports_after_a_newer_one_has_claimed_is_refused(
    flow: Flow, tmp_path: Path
) -> None:
    readings = steady(range(30))
    flow.write(readings)
    with flow.pipeline() as pipeline:
        gated = Gated(tmp_path)
        query = flow.start(pipeline, flow.counts(pipeline, gated), bounded=True)
        until(gated.reached, "a task has read its rows")
        supervisor = only_supervisor(pipeline)
        run = supervisor._run
        assert run is not None
        newer = flow.client.claim(
            JOB, SOURCE, None, holder="newer-attempt", ttl_ms=TTL_MS, rank=Rank(run, 0, 10**6)
        )
        assert set(newer.granted) == set(SHARDS), "a newer attempt outranks the older one"
        (tmp_path / "go").touch()
        ended(query)
        assert pipeline.counts[Count.REPORTS_DROPPED] == len(SHARDS), "both were fenced"
    assert flow.counted() == windows(readings), "and the query never noticed"


def test_the_service_is_killed_and_restarted_in_mid_query(flow: Flow, service: Service) -> None:
    readings = steady(range(90))
    for first in range(0, len(readings), 60):
        flow.write(readings[first : first + 60])
    with flow.pipeline(patience="300 ms") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=True)
        until(lambda: flow.output_of(COUNTS) > START_MS, "the first windows are closed")
        service.kill()
        done = batches(query)
        until(lambda: batches(query) >= done + 2, "the query goes on without the service")
        assert query.isActive
        service.start()
        ended(query)
    assert flow.counted() == windows(readings)
    assert flow.watermark(COUNTS).final


def test_a_service_that_dies_while_the_tasks_run_gets_their_promises_later(
    flow: Flow, service: Service, tmp_path: Path
) -> None:
    """The tasks cannot report, the batch is committed without the service, and no further data comes."""
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        gated = Gated(tmp_path)
        query = flow.start(pipeline, flow.counts(pipeline, gated), bounded=False)
        until(gated.reached, "a task has read its rows")
        service.kill()
        (tmp_path / "go").touch()
        until(lambda: batches(query) >= 1, "the batch is done without the service")
        service.start()
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "all ranges have promised")


def test_a_query_goes_on_from_its_checkpoint_in_a_new_run(flow: Flow) -> None:
    readings = steady(range(90))
    half = len(readings) // 2
    flow.write(readings[:half])
    with flow.pipeline() as first:
        flow.start(first, flow.counts(first), bounded=False)
        until(lambda: flow.output_of(COUNTS) > START_MS, "the first windows are closed")
        supervisor = only_supervisor(first)
        old_run = supervisor._run
        assert old_run is not None
    old = flow.client.claim(
        JOB, SOURCE, None, holder="old", ttl_ms=TTL_MS, rank=Rank(old_run, 10**6, 0)
    )
    before = flow.output_of(COUNTS)

    flow.write(readings[half:])
    with flow.pipeline() as second:
        query = flow.start(second, flow.counts(second), bounded=True)
        with pytest.raises(StaleRun):
            flow.client.commit(JOB, old_run, 10**6, {SOURCE: None})
        with pytest.raises(StaleRun):
            flow.client.claim(
                JOB, SOURCE, None, holder="old", ttl_ms=TTL_MS, rank=Rank(old_run, 10**6, 0)
            )
        with pytest.raises((LeaseLost, StaleRun)):
            flow.client.report(JOB, SOURCE, old, {"left": RangeReport(START_MS + 10**9)})
        assert flow.output_of(COUNTS) >= before
        ended(query)
    assert flow.counted() == windows(readings)


def test_an_epoch_that_was_never_committed_is_made_good_for_after_a_restart(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies between Spark's commit and its own, and no further data comes."""
    flow.write(steady(range(30)))
    with flow.pipeline() as first:
        query = flow.start(first, flow.counts(first), bounded=False)
        until(lambda: flow.output_of(SOURCE) == START_MS + 21_000, "the source has promised")
        supervisor = only_supervisor(first)
        monkeypatch.setattr(supervisor._commits, "commit", _lose_contact)
        until(lambda: spark_watermark(query) == START_MS + 21_000, "Spark has closed its windows")
        query.stop()
        supervisor._shutdown_deadline_ms = 0  # a driver that dies takes no leave
        until(lambda: not supervisor.alive, "the driver is gone")
    assert flow.output_of(COUNTS) < START_MS
    with flow.pipeline() as second:
        flow.start(second, flow.counts(second), bounded=False)
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the ranges have promised")


def only_supervisor(pipeline: Pipeline) -> Supervisor:
    [started] = pipeline._queries._started
    return started.supervisor


def _lose_contact(run: int) -> None:
    raise Unavailable(f"run {run}")


@pytest.mark.slow
def test_a_new_checkpoint_in_an_old_job_starts_its_epochs_over(flow: Flow, tmp_path: Path) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as first:
        flow.start(first, flow.counts(first), bounded=False)
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the first run is through")
    flow.checkpoint, flow.output = tmp_path / "checkpoint-2", tmp_path / "output-2"
    flow.write(steady(range(30, 60)))
    with flow.pipeline() as second:
        frame = flow.counts(second)
        ended(flow.start(second, frame, bounded=True, on_lost_checkpoint="continue"))
    assert flow.watermark(COUNTS).final


def test_a_service_that_lost_its_ledger_is_told_of_the_job_again(
    flow: Flow, service: Service
) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=False)
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the ranges have promised")
        service.lose_ledger()
        flow.write(steady(range(30, 40)))
        until(lambda: flow.output_of(COUNTS) == START_MS + 31_000, "all have promised again")
        assert query.isActive


def test_the_first_run_after_a_loss_closes_the_windows_that_it_completes(
    flow: Flow, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is behind Spark's watermark then, so the driver reports, and not the commit."""
    report = PendingReports.report

    def takes_its_time(self: PendingReports, reporter: DriverReporter) -> None:
        time.sleep(0.3)
        report(self, reporter)

    monkeypatch.setattr(PendingReports, "report", takes_its_time)
    readings = steady(range(30))
    flow.write(readings)
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    service.lose_ledger()
    flow.write(steady(range(30, 60)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    expected = windows(steady(range(60)))
    assert flow.counted() == {each: expected[each] for each in expected if each[1] < 50}


def test_a_job_that_was_deleted_is_another_one(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=False)
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the ranges have promised")
        flow.delete_job()
        flow.write(steady(range(30, 40)))
        with pytest.raises(StreamingQueryException, match="it was reset, or declared anew"):
            query.awaitTermination(DEADLINE_S)


def test_an_aggregator_that_is_away_from_the_start_may_come_later(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    service = Service(folder)
    flow = Flow(spark, service.url, tmp_path)
    readings = steady(range(60))
    flow.write(readings)
    with flow.pipeline(patience="200 ms") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=True)
        state = until(lambda: query.recentProgress, "the query runs")[0]["stateOperators"]
        assert state[0]["numRowsTotal"] == len(windows(readings)), "every row is in its window"
        assert query.isActive
        with service:
            ended(query)
            assert flow.watermark(COUNTS).final
    assert flow.counted() == windows(readings)


def test_an_aggregator_that_is_away_all_the_time_costs_no_row(
    spark: SparkSession, tmp_path: Path
) -> None:
    flow = Flow(spark, "http://127.0.0.1:1", tmp_path)
    readings = steady(range(30))
    flow.write(readings)
    with flow.pipeline(patience="200 ms") as pipeline:
        query = flow.start(pipeline, flow.source(pipeline))
        query.processAllAvailable()
        assert query.isActive
    rows = spark.read.json(str(flow.output)).collect()
    assert sorted((r["sensor"], r["key"]) for r in rows) == sorted(
        (r.sensor, r.key) for r in readings
    )


def is_idle(query: StreamingQuery) -> bool:
    """Return whether Spark has reported a trigger without a batch, as it does after ten seconds."""
    progress = query.lastProgress
    return progress is not None and "addBatch" not in progress["durationMs"]


@pytest.mark.slow
def test_a_query_that_was_idle_has_committed_no_batch_that_it_has_not_run(flow: Flow) -> None:
    """That trigger has the number of the next batch, whose reports were dropped then. And a restart was
    refused, as if the checkpoint were an old copy.
    """
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "windows have closed")
        until(lambda: is_idle(query), "it is idle")
        flow.write(steady(range(30, 40)))
        until(lambda: flow.output_of(COUNTS) == START_MS + 31_000, "it goes on")
        until(lambda: is_idle(query), "it is idle again")
        assert pipeline.counts[Count.REPORTS_DROPPED] == 0
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(steady(range(40)))


@pytest.fixture
def soon_idle(spark: SparkSession) -> Iterator[None]:
    """Triggers without a batch are on Spark's record after a moment, not after ten seconds."""
    name = "spark.sql.streaming.noDataProgressEventInterval"
    spark.conf.set(name, "100")
    yield
    spark.conf.unset(name)


@pytest.mark.usefixtures("soon_idle")
def test_a_batch_that_spark_has_not_notified_its_listeners_of_is_committed(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener bus drops events if its queue is full. A query without a control source commits only
    what it is notified of, so its last batch waited for new data, or for its end.
    """
    monkeypatch.setattr(Listener, "onQueryProgress", lambda _self, _event: None)
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.source(pipeline))
        until(lambda: flow.output_of(SOURCE) == START_MS + 21_000, "its batch is committed")
        until(lambda: is_idle(query), "it is idle")
        idle = RunningQuery(flow.spark)
        idle.attach(query)
        found = idle.batch_after(-1)
        assert found is not None
        assert (found.epoch, idle.batch_after(0)) == (0, None), "that of an idle trigger is none"
        flow.write(steady(range(30, 40)))
        until(lambda: flow.output_of(SOURCE) == START_MS + 31_000, "the next one is committed")
        assert pipeline.counts[Count.REPORTS_DROPPED] == 0
