"""The supervisor of a query that Spark has not started, or never starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pyspark.sql import SparkSession

from spark_agent.client.client import Client
from spark_agent.clock import SystemClock
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.supervisor import Supervisor
from tests.unit.agent.queries import NoNotes, source, started


def test_a_start_that_fails_opens_no_run_however_late_the_service_returns() -> None:
    """The run would fence a healthy query that has the stages."""
    opened: list[Sequence[str]] = []

    def open_run(stages: Sequence[str]) -> int:
        opened.append(stages)
        return 7

    query, clock = started([source("s")]), SystemClock()
    supervisor = Supervisor(
        query,
        RunningQuery(cast("SparkSession", None)),
        client=Client("http://127.0.0.1:1", patience_ms=1, clock=clock),
        run=None,
        open_run=open_run,
        tallies={},
        in_flight={},
        notes=NoNotes(),
        waits=BatchWaits(query),
        read=ReadThrough(query, 0),
        resumed_after=-1,
        clock=clock,
    )
    supervisor.start()
    supervisor.abandon("there is not such a sink")
    supervisor.join(60_000)
    assert not supervisor.alive
    assert opened == []
