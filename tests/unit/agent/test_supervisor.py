"""The supervisor of a query that Spark has not started, or never starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from pyspark.sql import SparkSession

from spark_agent.client.client import Client
from spark_agent.clock import SystemClock
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.started_query import StartedQuery
from spark_agent.strategies import Rows
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.supervisor import Notes, Supervisor
from tests.unit.agent.queries import NoNotes, source, started


def no_run(stages: Sequence[str]) -> int:
    raise AssertionError(stages)


def supervisor_of(
    query: StartedQuery, notes: Notes, open_run: Callable[[Sequence[str]], int] = no_run
) -> Supervisor:
    clock = SystemClock()
    return Supervisor(
        query,
        RunningQuery(cast("SparkSession", None)),
        client=Client("http://127.0.0.1:1", patience_ms=1, clock=clock),
        run=None,
        open_run=open_run,
        tallies={},
        in_flight={},
        notes=notes,
        waits=BatchWaits(query),
        read=ReadThrough(query, 0),
        resumed_after=-1,
        clock=clock,
    )


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
