"""Reports of the oldest work: while a batch runs for long, and until its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from spark_agent.client.reports import Lease, RangeReport, StageProgress
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.long_batches import LongBatches
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import TIMING, source, started

THIRD_MS = TIMING.ttl_ms // 3
OLDEST_MS = 700
WORK = RangeReport(records=0, oldest_work_ms=OLDEST_MS)
DONE = RangeReport(records=0)


@dataclass
class Reporter:
    """Takes the reports of what no task holds."""

    held: set[str] = field(default_factory=set[str])
    taken: list[tuple[str, object]] = field(default_factory=list[tuple[str, object]])

    def report_shards(self, stage: str, reports: Mapping[str, RangeReport]) -> list[str]:
        granted = {name: each for name, each in reports.items() if name not in self.held}
        if granted:
            self.taken.append((stage, granted))
        return list(granted)

    def claim(self, stage: str, ranges: None) -> Lease | None:
        del ranges
        return None if stage in self.held else Lease("token", ("0",), ())

    def report_progress(
        self, stage: str, lease: Lease, progress: StageProgress, *, oldest_work_ms: int
    ) -> bool:
        self.taken.append((stage, (lease.granted, progress, oldest_work_ms)))
        return True


class Case:
    def __init__(self, *, has_idle_policy: bool = False) -> None:
        self.clock, self.reporter, self.runs, self.waits = FakeClock(), Reporter(), True, False
        query = started([source("s", has_idle_policy=has_idle_policy)])
        self.batches = LongBatches(query, lambda: self.runs, {"s": {"a", "b"}}, self.clock)

    def after(self, pause_ms: int, committed: Committed) -> list[tuple[str, object]]:
        """Return what is reported after a pause."""
        self.clock.pause(pause_ms)
        self.reporter.taken.clear()
        self.batches.report(
            cast("DriverReporter", self.reporter), committed, oldest_ms=OLDEST_MS, waits=self.waits
        )
        return list(self.reporter.taken)


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_long_batch_is_reported_again_and_again(case: Case) -> None:
    progress = StageProgress(500)
    committed = Committed(3, {"k": progress})
    assert case.after(0, committed) == []
    assert case.after(THIRD_MS - 1, committed) == []
    reported = [("s", {"a": WORK, "b": WORK}), ("k", (("0",), progress, OLDEST_MS))]
    assert case.after(1, committed) == reported
    assert case.after(THIRD_MS - 1, committed) == []
    assert case.after(1, committed) == reported


def test_reports_are_as_far_apart_as_the_batch_before_was_long(case: Case) -> None:
    committed = Committed(3, duration_ms=60_000)
    case.after(0, committed)
    assert case.after(59_999, committed) == []
    assert case.after(1, committed) == [("s", {"a": WORK, "b": WORK})]


def test_what_a_task_holds_is_not_reported(case: Case) -> None:
    case.reporter.held = {"a", "k"}
    committed = Committed(3, {"k": StageProgress(500)})
    case.after(0, committed)
    assert case.after(THIRD_MS, committed) == [("s", {"b": WORK})]


def test_the_commit_ends_the_work_of_shards_without_rows(case: Case) -> None:
    case.after(0, Committed(3))
    case.after(THIRD_MS, Committed(3))
    assert case.after(1, Committed(4)) == [("s", {"a": DONE, "b": DONE})]
    assert case.after(1, Committed(4)) == []


@pytest.mark.parametrize("state", ["waits", "polls", "first batch", "idle policy"])
def test_a_query_without_a_long_batch_reports_nothing(state: str) -> None:
    case = Case(has_idle_policy=state == "idle policy")
    case.waits, case.runs = state == "waits", state != "polls"
    committed = Committed(-1 if state == "first batch" else 3)
    case.after(0, committed)
    assert case.after(10 * THIRD_MS, committed) == []
