"""Reports of the driver for tasks that could not report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from spark_agent.client.reports import RangeReport
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.pending_reports import PendingReports
from tests.unit.agent.answers import FakeClock

LATER_MS = 5_000


@dataclass
class Reporter:
    """Takes the reports of shards that nobody else holds."""

    held: set[str] = field(default_factory=set[str])
    taken: list[dict[str, RangeReport]] = field(default_factory=list[dict[str, RangeReport]])

    watched: bool = True

    def report_shards(
        self, stage: str, reports: Mapping[str, RangeReport], *, watched: bool = True
    ) -> list[str]:
        self.watched = watched
        granted = {name: each for name, each in reports.items() if name not in self.held}
        self.taken.append(granted)
        return list(granted)


def report(pending: PendingReports, reporter: Reporter) -> None:
    pending.report(cast("DriverReporter", reporter))


def test_a_promise_is_made_twice_and_its_rows_are_counted_once() -> None:
    clock, reporter = FakeClock(), Reporter()
    pending = PendingReports(clock)
    pending.add("s", {"a": RangeReport(5, records=3, late=1)})
    report(pending, reporter)
    assert not pending, "a query may end now"
    report(pending, reporter)
    clock.now_ms += LATER_MS
    report(pending, reporter)
    report(pending, reporter)
    assert reporter.taken == [{"a": RangeReport(5, records=3, late=1)}, {"a": RangeReport(5)}]


def test_a_shard_that_a_task_holds_is_promised_for_again_later() -> None:
    clock, reporter = FakeClock(), Reporter()
    pending = PendingReports(clock)
    pending.add("s", {"a": RangeReport(5)})
    report(pending, reporter)
    reporter.held.add("a")
    clock.now_ms += LATER_MS
    report(pending, reporter)
    reporter.held.clear()
    report(pending, reporter)
    clock.now_ms += LATER_MS
    report(pending, reporter)
    assert reporter.taken == [{"a": RangeReport(5)}, {}, {"a": RangeReport(5)}]


def test_a_source_with_an_idle_policy_is_promised_for_once() -> None:
    """A watched lease while a batch reads would prove that its shards are quiet."""
    clock, reporter = FakeClock(), Reporter()
    pending = PendingReports(clock, watched=["s"])
    pending.add("s", {"a": RangeReport(5)})
    report(pending, reporter)
    clock.now_ms += LATER_MS
    report(pending, reporter)
    assert reporter.taken == [{"a": RangeReport(5)}]
    assert not reporter.watched


def test_a_report_without_a_promise_is_made_once() -> None:
    clock, reporter = FakeClock(), Reporter()
    pending = PendingReports(clock)
    pending.add("s", {"a": RangeReport(records=3)})
    report(pending, reporter)
    clock.now_ms += LATER_MS
    report(pending, reporter)
    assert reporter.taken == [{"a": RangeReport(records=3)}]
