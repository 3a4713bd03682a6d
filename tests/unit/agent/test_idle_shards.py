"""Reports of the driver beside a commit, without which quiet and unread shards look alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from spark_agent.client.client import Client
from spark_agent.client.reports import RangeReport
from spark_agent.executor.tally import Count, Tallies, Tally
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.idle_shards import SOME_BACKLOG, QuietWatch
from spark_agent.supervision.in_flight_reports import InFlightReports
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import source, started

ROWS = RangeReport(5, records=3)


@dataclass
class Reporter:
    """Takes each report, and notes it if the report is not evidence that its shard is quiet."""

    taken: dict[str, RangeReport] = field(default_factory=dict[str, RangeReport])

    def report_shards(
        self, stage: str, reports: Mapping[str, RangeReport], *, watched: bool = True
    ) -> list[str]:
        assert stage == "s"
        assert not watched
        self.taken |= reports
        return list(reports)


def quiet_watch(tallies: Tallies, clock: FakeClock) -> QuietWatch:
    """A watch over the shards a and b of a source with an idle policy."""
    query = started([source("s", has_idle_policy=True)])
    return QuietWatch(
        query,
        cast("RunningQuery", None),
        {"s": {"a", "b"}},
        client=cast("Client", None),
        tallies=tallies,
        in_flight=InFlightReports({}, ["s"], clock),
        waits=BatchWaits(query),
        clock=clock,
    )


def reported_before_commit(watch: QuietWatch, batch: CommittedBatch) -> dict[str, RangeReport]:
    reporter = Reporter()
    watch.report_backlogs(cast("DriverReporter", cast("Any", reporter)), batch)
    return reporter.taken


def tally(*shards: str, dropped: int = 0) -> Tally:
    return Tally(dict.fromkeys(shards, ROWS), {0: {Count.REPORTS_DROPPED: dropped}})


@pytest.mark.parametrize(
    ("tallies", "unread"),
    [
        ({("q", "s", 4): tally("a")}, []),
        ({("q", "s", 4): tally("a", dropped=1)}, ["a"]),
        ({("q", "s", 3): tally("a"), ("q", "s", 4): tally("b")}, ["a"]),
        ({("q", "other", 4): tally("a", dropped=1), ("q", "s", 5): tally("b", dropped=1)}, []),
    ],
    ids=["reported", "dropped", "of an epoch before", "of another stage and a later epoch"],
)
def test_a_shard_whose_report_was_dropped_has_a_backlog_before_its_epoch_is_committed(
    tallies: Tallies, unread: list[str]
) -> None:
    """By the commit alone, the shard would look quiet in the very batch that has its rows."""
    watch = quiet_watch(tallies, FakeClock())
    found = reported_before_commit(watch, CommittedBatch(4, 0))
    assert found == dict.fromkeys(unread, SOME_BACKLOG)
