"""Leases that the driver keeps, and the oldest work of a batch that runs for long, until its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from spark_agent.client.errors import LeaseConflict
from spark_agent.client.reports import Lease, RangeReport, StageProgress
from spark_agent.exceptions import Unavailable
from spark_agent.soundness.operators import Promise
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.lease_keeper import LeaseKeeper
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import TIMING, source, started

THIRD_MS = TIMING.ttl_ms // 3
OLDEST_MS = 700
PROGRESS = StageProgress(500)
WORK = RangeReport(records=0, oldest_work_ms=OLDEST_MS)
DONE = RangeReport(records=0)
CLAIMS = [("s", "claim"), ("k", "claim")]
ALL_WORK = [
    ("s", "claim"),
    ("s", {"a": WORK, "b": WORK}),
    ("k", "claim"),
    ("k", (("0",), PROGRESS, OLDEST_MS)),
]


@dataclass
class Reporter:
    """Takes claims and reports of what no task holds."""

    held: set[str] = field(default_factory=set[str])
    free_in_ms: int | None = None
    taken: list[tuple[str, object]] = field(default_factory=list[tuple[str, object]])
    is_away: bool = False

    def claim_some(self, stage: str, ranges: None) -> Lease:
        del ranges
        self.taken.append((stage, "claim"))
        if stage in self.held:
            denied = [{"range": "0", "expires_in_ms": self.free_in_ms}]
            raise LeaseConflict(409, {"denied": denied})
        granted = tuple(sorted({"a", "b"} - self.held)) if stage == "s" else ("0",)
        denied = bool(self.held.intersection({"a", "b"})) if stage == "s" else False
        return Lease("token", granted, (), self.free_in_ms if denied else None)

    def report(self, stage: str, lease: Lease, reports: Mapping[str, RangeReport]) -> bool:
        assert set(reports) <= set(lease.granted)
        self.taken.append((stage, reports))
        return True

    def report_shards(self, stage: str, reports: Mapping[str, RangeReport]) -> list[str]:
        if self.is_away:
            raise Unavailable
        self.taken.append((stage, reports))
        return list(reports)

    def report_progress(
        self, stage: str, lease: Lease, progress: StageProgress, *, oldest_work_ms: int
    ) -> bool:
        self.taken.append((stage, (lease.granted, progress, oldest_work_ms)))
        return True


class Case:
    def __init__(self, *, has_idle_policy: bool = False) -> None:
        self.clock, self.reporter, self.runs, self.waits = FakeClock(), Reporter(), True, False
        query = started([source("s", has_idle_policy=has_idle_policy)], {"k": Promise()})
        self.not_final = {"s": {"a", "b"}}
        self.keeper = LeaseKeeper(query, lambda: self.runs, self.not_final, self.clock)

    def after(self, pause_ms: int, committed: Committed) -> list[tuple[str, object]]:
        """Return what is claimed and reported after a pause."""
        self.clock.pause(pause_ms)
        self.reporter.taken.clear()
        self.keeper.keep(
            cast("DriverReporter", self.reporter), committed, oldest_ms=OLDEST_MS, waits=self.waits
        )
        return list(self.reporter.taken)


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_long_batch_is_reported_again_and_again(case: Case) -> None:
    committed = Committed(3, {"k": PROGRESS})
    assert case.after(0, committed) == CLAIMS
    assert case.after(THIRD_MS - 1, committed) == []
    assert case.after(1, committed) == ALL_WORK
    assert case.after(THIRD_MS - 1, committed) == []
    assert case.after(1, committed) == ALL_WORK


def test_reports_are_as_far_apart_as_the_batch_before_was_long(case: Case) -> None:
    committed = Committed(3, {"k": PROGRESS}, duration_ms=2 * THIRD_MS)
    case.after(0, committed)
    for _ in range(2):
        assert case.after(THIRD_MS, committed) == CLAIMS
        assert case.after(THIRD_MS, committed) == ALL_WORK


def test_before_the_first_commit_of_a_start_the_leases_are_kept_without_work(case: Case) -> None:
    for _ in range(3):
        assert case.after(THIRD_MS, Committed()) == CLAIMS
    committed = Committed(3, {"k": PROGRESS})
    assert case.after(THIRD_MS, committed) == CLAIMS
    assert case.after(THIRD_MS, committed) == ALL_WORK


def test_what_a_task_holds_is_claimed_as_soon_as_its_lease_expires(case: Case) -> None:
    committed = Committed(3, {"k": PROGRESS})
    case.after(0, committed)
    case.reporter.held, case.reporter.free_in_ms = {"a", "k"}, 600
    assert case.after(THIRD_MS, committed) == [("s", "claim"), ("s", {"b": WORK}), ("k", "claim")]
    assert case.keeper.due_ms == case.clock.steady_ms() + 600
    case.reporter.held.clear()
    assert case.after(599, committed) == []
    assert case.after(1, committed) == CLAIMS
    assert case.after(THIRD_MS, committed) == ALL_WORK


def test_final_shards_have_no_work(case: Case) -> None:
    case.not_final["s"].remove("a")
    case.after(0, Committed(3))
    assert case.after(THIRD_MS, Committed(3)) == [
        ("s", "claim"),
        ("s", {"b": WORK}),
        ("k", "claim"),
    ]


def test_the_commit_ends_the_work_of_shards_without_rows(case: Case) -> None:
    case.after(0, Committed(3))
    case.after(THIRD_MS, Committed(3))
    assert case.after(1, Committed(4)) == [("s", {"a": DONE, "b": DONE})]
    assert case.after(1, Committed(4)) == []


def test_the_end_of_work_is_reported_once_the_service_answers(case: Case) -> None:
    case.after(0, Committed(3))
    case.after(THIRD_MS, Committed(3))
    case.reporter.is_away = True
    with pytest.raises(Unavailable):
        case.after(1, Committed(4))
    case.reporter.is_away = False
    assert case.after(1, Committed(4)) == [("s", {"a": DONE, "b": DONE})]
    assert case.after(1, Committed(4)) == []


@pytest.mark.parametrize("state", ["waits", "polls"])
def test_between_batches_the_leases_are_kept_without_work(case: Case, state: str) -> None:
    case.waits, case.runs = state == "waits", state != "polls"
    committed = Committed(3, {"k": PROGRESS})
    case.after(0, committed)
    for _ in range(3):
        assert case.after(THIRD_MS, committed) == CLAIMS


def test_a_source_with_an_idle_policy_is_not_claimed() -> None:
    case = Case(has_idle_policy=True)
    case.after(0, Committed(3))
    assert case.after(THIRD_MS, Committed(3)) == [("k", "claim")]
