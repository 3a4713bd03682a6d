"""The driver's leases on shards of a source with an idle policy, while a batch runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from spark_agent import Client
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.unwatched_leases import UnwatchedLeases
from tests.support.binaries import wait_until
from tests.support.server import Service
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import TIMING, source, started

JOB = "j"
SPEC = {"s": {"shards": ["a", "b"], "idle": {"after_ms": 600_000, "then": "exclude"}}}
THIRD_MS = TIMING.ttl_ms // 3


class Case:
    def __init__(self, client: Client) -> None:
        self.client, self.clock = client, FakeClock()
        client.declare(JOB, SPEC)
        self.run = client.open_run(JOB, ["s"], "driver")
        self.not_final = {"s": {"a", "b"}}
        query = started([source("s", has_idle_policy=True)])
        self.leases = UnwatchedLeases(query, self.not_final, client, self.clock)

    def keep(self, epoch: int = 0) -> None:
        reporter = DriverReporter(self.client, JOB, "q", TIMING.ttl_ms, self.run, epoch)
        self.leases.keep(reporter)

    def holders(self) -> Mapping[str, tuple[str | None, int | None]]:
        """By shard: the holder and the fence."""
        ranges = self.client.ranges(JOB, "s", limit=2)["ranges"]
        return {each["range"]: (each["holder"], each["fence"]) for each in ranges}

    def task(self, shard: str, epoch: int, ttl_ms: int) -> None:
        self.client.claim_and_report(
            JOB,
            "s",
            {shard: RangeReport(1, records=1)},
            holder="task",
            ttl_ms=ttl_ms,
            rank=Rank(self.run, epoch, 0),
            epoch=epoch,
            watched=False,
        )


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with Service(tmp_path) as service, Client(service.url) as client:
        yield Case(client)


def test_a_lease_is_renewed_and_not_claimed_anew(case: Case) -> None:
    case.keep()
    first = case.holders()
    assert {holder for holder, _ in first.values()} == {"q.driver"}
    case.clock.pause(THIRD_MS)
    case.keep()
    assert case.holders() == first
    case.leases.drop()
    case.keep()
    assert case.holders() != first, "others may have taken the place of the leases"


def test_a_task_keeps_its_shard_until_its_lease_expires(case: Case) -> None:
    case.keep()
    before = case.holders()
    case.task("a", epoch=1, ttl_ms=1_000)
    case.clock.pause(THIRD_MS)
    case.keep()
    assert case.holders()["a"][0] == "task"
    assert case.holders()["b"] == before["b"]
    assert case.leases.due_ms is not None
    assert case.leases.due_ms <= case.clock.steady_ms() + 1_000, "when the task's lease expires"
    wait_until(lambda: case.holders()["a"][0] is None, "the task's lease expires")
    case.clock.pause(1_000)
    case.keep()
    assert case.holders()["a"][0] == "q.driver", "in less than a third of the lease"
    assert case.holders()["b"] == before["b"]


def test_after_the_commit_the_driver_takes_the_shard_of_a_task(case: Case) -> None:
    case.keep()
    case.task("a", epoch=1, ttl_ms=60_000)
    case.clock.pause(THIRD_MS)
    case.keep(epoch=1)
    assert {holder for holder, _ in case.holders().values()} == {"q.driver"}


def test_a_final_shard_is_left_alone(case: Case) -> None:
    case.not_final["s"].remove("a")
    case.keep()
    assert case.holders()["a"][0] is None
    assert case.holders()["b"][0] == "q.driver"
