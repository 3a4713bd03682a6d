"""The moment from which a complete shard may be reported as final."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from spark_agent.client.reports import RangeReport
from spark_agent.exceptions import QueryFailedError
from spark_agent.executor.in_flight import StageInFlight, sketch_of
from spark_agent.sources.admission import Wanted
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.in_flight_reports import InFlightReports
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import source, started


def test_a_shard_is_due_once_spark_has_committed_the_batch_that_has_it() -> None:
    waits = BatchWaits(started([source("s")], by_shard=["s"]))
    waits.note_complete("s", Wanted({}, completing=("a",)), latest_epoch=6)
    assert waits.complete_after(6) == {"s": set()}
    assert waits.complete_after(7) == {"s": {"a"}}
    waits.note_complete("s", Wanted({}, completing=("b",)), latest_epoch=9)
    assert waits.complete_after(9) == {"s": {"a"}}
    assert waits.complete_after(10) == {"s": {"a", "b"}}


def test_a_shard_that_the_checkpoint_has_at_the_start_is_due_at_once() -> None:
    waits = BatchWaits(started([source("s")], by_shard=["s"]))
    waits.note_complete("s", Wanted({}, complete=("a",), completing=("b",)), latest_epoch=-1)
    assert waits.complete_after(-1) == {"s": {"a"}}
    assert waits.complete_after(0) == {"s": {"a", "b"}}


def test_an_offset_that_is_planned_again_counts_from_then_on() -> None:
    waits = BatchWaits(started([source("s")], by_shard=["s"]))
    waits.note_complete("s", Wanted({}, completing=("a",)), latest_epoch=6)
    waits.note_complete("s", Wanted({}, completing=("a",)), latest_epoch=7)
    assert waits.complete_after(7) == {"s": set()}


def test_unread_files_of_a_final_source_fail_the_query_and_those_of_a_stranger_do_not() -> None:
    waits = BatchWaits(started([source("s"), source("t")], by_shard=["s", "t"]))
    waits.final_sources = ["s"]
    wanted = Wanted({"a": 1, "stranger": 1})
    waits.note_complete("t", wanted, latest_epoch=-1)
    waits.note_complete("s", replace(wanted, unread={"stranger": 1}), latest_epoch=-1)
    with pytest.raises(
        QueryFailedError, match=r"'s' of job 'j' is final, but has unread .* shard a"
    ):
        waits.note_complete("s", wanted, latest_epoch=-1)


@dataclass
class Reporter:
    """Takes every report."""

    taken: list[set[str]] = field(default_factory=list[set[str]])
    watched: bool | None = None

    def report_shards(
        self, stage: str, reports: Mapping[str, RangeReport], *, watched: bool
    ) -> list[str]:
        self.watched = watched
        self.taken.append(set(reports))
        return list(reports)


def test_rows_in_flight_of_a_final_shard_are_not_reported() -> None:
    """Its claim would let it join again, and nothing would make it final then."""
    in_flight, reporter = StageInFlight(), Reporter()
    for shard in ("a", "b"):
        in_flight.add(shard, sketch_of([5]).serialize(), 0)
    reports = InFlightReports({"s": in_flight}, (), FakeClock())
    for not_final in ({"a", "b"}, {"b"}):
        in_flight.repeat()
        reports.report(cast("DriverReporter", reporter), {"s": not_final})
    assert reporter.taken == [{"a", "b"}, {"b"}]
    assert in_flight.unreported(10) == {}
    assert reporter.watched


def test_rows_in_flight_of_a_source_with_an_idle_policy_prove_nothing() -> None:
    in_flight, reporter = StageInFlight(), Reporter()
    in_flight.add("a", sketch_of([5]).serialize(), 0)
    InFlightReports({"s": in_flight}, ["s"], FakeClock()).report(
        cast("DriverReporter", reporter), {"s": {"a"}}
    )
    assert (reporter.taken, reporter.watched) == ([{"a"}], False)
