"""Requests of the driver while its query finds nothing to read, and what they leave as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from spark_agent import Client
from spark_agent.client.reports import RangeReport, Rank, StageProgress
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.soundness.operators import Promise
from spark_agent.supervision import idle_shards
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.idle_shards import QuietWatch
from spark_agent.supervision.in_flight_reports import InFlightReports
from spark_agent.supervision.lease_keeper import LeaseKeeper
from tests.support.binaries import wait_until
from tests.support.gateway import Gateway
from tests.support.server import Service
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import source, started

JOB = "j"
SPEC = {
    "s": {"shards": ["a", "b"], "idle": {"after_ms": 500, "then": "exclude"}},
    "other": {"shards": ["c"]},
    "k": {"inputs": ["s"], "ranges": 2},
}
STAGES = ["s", "other", "k"]
LEFT = "00000000-80000000"
LONG_MS = 60_000
"""Leases that outlast a stall of the machine."""


class Polls(RunningQuery):
    """A query that finds nothing, unless it is in a batch."""

    in_batch = False

    def has_just_found_nothing(self) -> bool:
        return not self.in_batch

    def has_no_new_data(self) -> bool:
        return not self.in_batch


@dataclass
class Requests:
    """Paths of requests, and the stage of each."""

    paths: list[str] = field(default_factory=list[str])

    def note(self, path: str, body: Any) -> bool:
        claims = isinstance(body, dict) and "claim" in body
        self.paths.append(f"{path} (claims)" if claims else path)
        return False


class Case:
    def __init__(self, client: Client, requests: Requests) -> None:
        self.client, self.requests, self.clock = client, requests, FakeClock()
        client.declare(JOB, SPEC)
        run = client.open_run(JOB, STAGES, "driver")
        query = started(
            [source("s", has_idle_policy=True), source("other")],
            {"k": Promise()},
            inputs={"k": ["s"]},
        )
        query = replace(query, stages=replace(query.stages, below_idle=frozenset({"k"})))
        self.running = Polls(cast("Any", None))
        not_final = {"s": {"a", "b"}, "other": {"c"}}
        self.run = run
        self.reporter = DriverReporter(client, JOB, "q", LONG_MS, run, 0)
        self.reporter.report_shards(
            "s", {"a": RangeReport(5, records=1), "b": RangeReport(5, records=1)}
        )
        self.committed = Committed(0, {"k": StageProgress(5)}, {"k": 5})
        self.watch = QuietWatch(
            query,
            self.running,
            not_final,
            client=client,
            tallies={},
            in_flight=InFlightReports({}, ["s"], self.clock),
            waits=BatchWaits(query),
            clock=self.clock,
        )
        self.keeper = LeaseKeeper(query, lambda: False, not_final, self.clock)

    def step(self) -> None:
        """Watch once more, after so long that the leases are due."""
        self.clock.pause(idle_shards.WATCH_MS // 3)
        ended = self.watch.watch(self.reporter, self.committed, polls=True, drained=False)
        self.keeper.renew_soon(ended)
        self.keeper.keep(
            self.reporter, self.committed, oldest_ms=0, waits=False, held=self.watch.held
        )


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(idle_shards, "WATCH_MS", LONG_MS)
    requests = Requests()
    with (
        Service(tmp_path) as service,
        Gateway(service.url, requests.note) as gateway,
        Client(gateway.url) as client,
    ):
        yield Case(client, requests)


def idle(case: Case) -> bool:
    return all(case.client.watermark(JOB, stage).status == "idle" for stage in ("s", "k"))


def test_an_idle_query_renews_and_leaves_its_stages_idle(case: Case) -> None:
    """Each claim ended the idleness at the service, which wrote it to the ledger twice a second."""

    def becomes_idle() -> bool:
        case.step()
        return idle(case)

    wait_until(becomes_idle, "the policy takes the shards for idle", 30)
    etags = {stage: case.client.watermark(JOB, stage).etag for stage in STAGES}
    case.requests.paths.clear()
    for _ in range(5):
        case.step()
    paths = list(case.requests.paths)
    assert not [each for each in paths if "/s/" in each and each.endswith(("/leases", "(claims)"))]
    assert not [each for each in paths if "/k/" in each and each.endswith(("/leases", "(claims)"))]
    assert sum(each.endswith("/leases/renew") for each in paths) == 5
    assert idle(case)
    assert {stage: case.client.watermark(JOB, stage).etag for stage in STAGES} == etags


def test_a_batch_between_two_steps_leaves_no_range_to_a_task(case: Case) -> None:
    """The range would not be idle, and be without a worker once the task's lease has expired."""
    case.step()
    task = Rank(case.run, 1, 0)
    taken = case.client.claim(JOB, "k", [LEFT], holder="task", ttl_ms=LONG_MS, rank=task)
    assert taken.granted == (LEFT,)
    case.committed = replace(case.committed, epoch=1)
    case.reporter = replace(case.reporter, epoch=1)
    case.step()
    ranges = case.client.ranges(JOB, "k", limit=2)["ranges"]
    assert {each["holder"] for each in ranges} == {"q.driver"}


def test_the_end_of_a_quiet_moment_claims_what_was_held_by_short_leases(case: Case) -> None:
    case.step()
    case.step()
    case.running.in_batch = True
    case.clock.pause(1)
    case.requests.paths.clear()
    ended = case.watch.watch(case.reporter, case.committed, polls=False, drained=False)
    assert ended == {"k"}
    case.keeper.renew_soon(ended)
    case.keeper.keep(case.reporter, case.committed, oldest_ms=0, waits=False)
    claims = [each for each in case.requests.paths if each.endswith("/leases")]
    assert [each.split("/")[-2] for each in claims] == ["s", "k"]
