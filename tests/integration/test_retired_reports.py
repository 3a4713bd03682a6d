"""The driver's reports of facts leave a retired range retired; a reading of the range does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_agent import Client
from spark_agent.client.reports import RangeReport, StageProgress
from spark_agent.clock import SystemClock
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.pending_reports import PendingReports
from spark_agent.supervision.retired_ranges import RetiredRanges
from tests.support.gateway import Gateway
from tests.support.server import Service
from tests.unit.agent.queries import TIMING

JOB = "j"
SPEC = {"s": {"shards": ["a", "b"]}, "k": {"inputs": ["s"], "ranges": 2}}
LEFT = "00000000-80000000"


class Case:
    def __init__(self, client: Client) -> None:
        self.client = client
        client.declare(JOB, SPEC)
        run = client.open_run(JOB, ["s", "k"], "driver")
        self._retired = RetiredRanges(client, JOB)
        self._reporter = DriverReporter(
            client, JOB, "q", TIMING.ttl_ms, run, 0, retired=self._retired.of
        )

    def step(self) -> DriverReporter:
        """Return the reporter of one more step."""
        self._retired.begin_step()
        return self._reporter

    def retired(self, stage: str) -> list[str]:
        ranges = self.client.ranges(JOB, stage, limit=2, order="range")["ranges"]
        return [each["range"] for each in ranges if each.get("retired")]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path) as service:
        yield service


@pytest.fixture
def case(service: Service) -> Iterator[Case]:
    with Client(service.url) as client:
        yield Case(client)


def test_facts_about_a_retired_shard_are_left_out_until_it_is_read(case: Case) -> None:
    case.step().report_shards("s", {"a": RangeReport(5, records=1), "b": RangeReport(7, records=1)})
    case.client.retire(JOB, "s", "b", "it is gone")
    facts = dict.fromkeys("ab", RangeReport(records=0, backlog=0))
    assert sorted(case.step().report_shards("s", facts)) == ["a", "b"], "as if it had been made"
    lease = case.step().claim_some("s", None)
    assert case.step().report("s", lease, facts)
    assert case.step().report_shards("s", {"b": RangeReport(7)}) == ["b"], "a repeated promise"
    assert case.retired("s") == ["b"]
    case.step().report_shards("s", {"b": RangeReport(8, records=1)})
    assert case.retired("s") == []


def test_progress_of_a_retired_key_range_is_left_out(case: Case) -> None:
    case.step().report_shards("s", dict.fromkeys("ab", RangeReport(5, records=1)))
    lease = case.step().claim_some("k", None)
    assert case.step().report_progress("k", lease, StageProgress(5))
    case.client.retire(JOB, "k", LEFT, "it is gone")
    assert case.step().report_progress("k", lease, StageProgress(5), oldest_work_ms=7)
    assert case.retired("k") == [LEFT]


def test_a_batch_ends_the_retirement_of_a_key_range_without_a_task(case: Case) -> None:
    """With fewer tasks than key ranges, the driver alone reports for the others."""
    case.step().report_shards("s", {"a": RangeReport(5, records=1), "b": RangeReport(5, records=1)})
    case.client.retire(JOB, "k", LEFT, "it is gone")
    pending = PendingReports(SystemClock())
    pending.set_progress("k", StageProgress(5))
    pending.report(case.step())
    assert case.retired("k") == []
    assert not pending


def test_a_look_up_that_fails_keeps_no_backlog_from_the_service(service: Service) -> None:
    """The epoch was not committed meanwhile. A report that is sent may end a retirement, which is safe.
    Those without which the service is never early are left out.
    """
    with Gateway(service.url, lambda path, _: path.endswith("/watermarks")) as gateway:
        case = Case(Client(gateway.url, patience_ms=100))
        read = {"a": RangeReport(5, records=1), "b": RangeReport(5, records=1)}
        case.step().report_shards("s", read)
        case.client.retire(JOB, "s", "b", "it is gone")
        case.client.retire(JOB, "k", LEFT, "it is gone")
        nothing = RangeReport(records=0, backlog=0)
        assert case.step().report_shards("s", {"a": nothing, "b": nothing}) == []
        lease = case.step().claim_some("k", None)
        assert case.step().report_progress("k", lease, StageProgress(5), idle=True)
        assert (case.retired("s"), case.retired("k")) == (["b"], [LEFT])
        some = RangeReport(backlog=1)
        reporter = case.step()
        assert reporter.report_shards("s", {"a": some, "b": some}) == ["a", "b"]
        assert reporter.report_shards("s", {"a": some}) == ["a"]
        assert case.retired("s") == []
