"""When a task holds its leases: to the service, a lease may prove that somebody watches a shard."""

from __future__ import annotations

from typing import cast

from pyspark import Accumulator

from spark_agent.client.reports import RangeReport, Rank
from spark_agent.executor.tally import Tallies
from spark_agent.executor.task import ReportTarget, Task, TaskAttempt
from tests.unit.agent.answers import Answer, Answers, FakeClock

GRANTED = Answer(201, {"token": "t", "granted": ["a"], "denied": []})
ACCEPTED = Answer(200, {"accepted": 1})
RELEASED = Answer(200, {"released": 1})


def attempt(server: Answers, *, releases: bool) -> TaskAttempt:
    target = ReportTarget(
        url=server.url,
        job="j",
        stage="s",
        ttl_ms=60_000,
        patience_ms=3_000,
        clock=FakeClock(),
        tallies=cast("Accumulator[Tallies]", None),
        releases=releases,
    )
    return TaskAttempt(target, Task("q", Rank(1, 0, 0), 0, 0, "task-0"))


def asked(server: Answers) -> list[str]:
    return [each.path.rpartition("/")[2] for each in server.asked]


def test_a_shard_that_may_be_idle_is_not_held_while_its_rows_are_read() -> None:
    with Answers(GRANTED, ACCEPTED, RELEASED) as server:
        task = attempt(server, releases=True)
        task.claim(["a"])
        assert asked(server) == []
        task.report({"a": RangeReport(5, records=1, late=0)})
    assert asked(server) == ["leases", "reports", "release"]
    assert server.asked[0].body["ttl_ms"] <= 5_000


def test_any_other_is_held_from_its_first_rows_on() -> None:
    with Answers(GRANTED, ACCEPTED) as server:
        task = attempt(server, releases=False)
        task.claim(["a"])
        assert asked(server) == ["leases"]
        task.report({"a": RangeReport(5, records=1, late=0)})
    assert asked(server) == ["leases", "reports"]
