"""The supervisor of a query that Spark has not started, or never starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from spark_agent.client.client import Client
from spark_agent.client.errors import StaleRun
from spark_agent.clock import Clock, SystemClock
from spark_agent.exceptions import QueryFailedError
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.started_query import StartedQuery
from spark_agent.strategies import Rows
from spark_agent.supervision import storage_errors
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.supervisor import Notes, Supervisor
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import NoNotes, source, started


def no_run(stages: Sequence[str]) -> int:
    raise AssertionError(stages)


def no_newer_run(run: int, error: StaleRun) -> int:
    del run
    raise error


def supervisor_of(
    query: StartedQuery,
    notes: Notes,
    open_run: Callable[[Sequence[str]], int] = no_run,
    *,
    running: RunningQuery | None = None,
    run: int | None = None,
    clock: Clock | None = None,
    client: Client | None = None,
    newer_own_run: Callable[[int, StaleRun], int] = no_newer_run,
) -> Supervisor:
    clock = clock or SystemClock()
    return Supervisor(
        query,
        running or RunningQuery(cast("SparkSession", None)),
        client=client or Client("http://127.0.0.1:1", patience_ms=1, clock=SystemClock()),
        run=run,
        open_run=open_run,
        newer_own_run=newer_own_run,
        tallies={},
        in_flight={},
        notes=notes,
        waits=BatchWaits(query),
        read=ReadThrough(query, 0),
        resumed_after=-1,
        clock=clock,
    )


def until(
    reached: Callable[[], bool], what: str, between: Callable[[int], object] = lambda _: None
) -> None:
    """Wait for a condition, with `between` called with the milliseconds that have passed."""
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
        between(1_000)


class BrokenNotes(NoNotes):
    """A checkpoint whose notes are damaged in a way that nobody has thought of."""

    def states(self, stage: str) -> tuple[int, str] | None:
        raise LookupError("broken")


class Newest:
    """A strategy with a state."""

    def update(self, state: int | None, rows: Rows) -> int:
        return rows.newest_ms

    def promise(self, state: int) -> int:
        return state


def test_a_supervisor_that_fails_fails_its_query() -> None:
    """The query went on without reports, and could end well."""
    query = started([source("s")], stateful={"s": Newest()})
    supervisor = supervisor_of(query, BrokenNotes())
    supervisor.start()
    assert not supervisor.commit_epoch(CommittedBatch(0, 0), 60_000)
    assert "its supervisor has failed" in (supervisor.running.failure or "")
    assert "LookupError: broken" in (supervisor.running.failure or "")
    supervisor.abandon("the test has ended")
    supervisor.join(60_000)
    assert not supervisor.alive


def test_a_start_that_fails_opens_no_run_however_late_the_service_returns() -> None:
    """The run would fence a healthy query that has the stages."""
    opened: list[Sequence[str]] = []

    def open_run(stages: Sequence[str]) -> int:
        opened.append(stages)
        return 7

    supervisor = supervisor_of(started([source("s")]), NoNotes(), open_run)
    supervisor.start()
    supervisor.abandon("there is not such a sink")
    supervisor.join(60_000)
    assert not supervisor.alive
    assert opened == []


class FailsAtTimes(RunningQuery):
    """A query whose topics cannot be read just when `fails` is set."""

    fails = True
    reads = 0

    def topic_ids(self) -> dict[str, str]:
        self.reads += 1
        if self.fails:
            self.fails = False
            raise Py4JError("the disk is away")
        return {}


def test_errors_of_the_storage_with_steps_between_that_fail_at_the_service_are_not_one() -> None:
    """Two errors of a moment, a minute apart, ended a query while the service was away."""
    query = started([source("s")])
    query = replace(query, stages=replace(query.stages, reads_topics=True))
    running, clock = FailsAtTimes(cast("SparkSession", None)), FakeClock()
    supervisor = supervisor_of(query, NoNotes(), running=running, run=7, clock=clock)
    supervisor.start()

    def wake(_: int) -> None:
        supervisor.notify(CommittedBatch(0, 0))

    until(lambda: "127.0.0.1:1" in supervisor.last_error, "it fails at the service", wake)
    clock.pause(storage_errors.PATIENCE_MS)
    running.fails = True
    reads = running.reads
    until(
        lambda: running.reads > reads + 1 or running.failure is not None,
        "the topics were read again after another error",
        wake,
    )
    assert running.failure is None
    supervisor.abandon("the test has ended")
    until(lambda: not supervisor.alive, "it gives up", clock.pause)


def test_errors_of_the_storage_for_longer_than_its_patience_fail_the_query() -> None:
    clock = FakeClock()
    errors = storage_errors.StorageErrors("q", clock)
    errors.note(Py4JError("the disk is away"))
    errors.interrupt()
    errors.check()
    clock.pause(storage_errors.PATIENCE_MS)
    errors.note(Py4JError("the disk is away"))
    clock.pause(storage_errors.PATIENCE_MS - 1)
    errors.note(Py4JError("the disk is away"))
    clock.pause(1)
    with pytest.raises(QueryFailedError, match="the disk is away"):
        errors.note(Py4JError("the disk is away"))
