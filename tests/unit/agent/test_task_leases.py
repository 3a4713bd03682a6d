"""Requests of a task."""

from __future__ import annotations

from typing import cast

import pytest
from pyspark import Accumulator

from spark_agent.client.reports import RangeReport, Rank
from spark_agent.executor.tally import Count, Tallies
from spark_agent.executor.task import ReportTarget, Task, TaskAttempt
from tests.unit.agent.answers import Answer, Answers, FakeClock, problem

CLAIMED = Answer(200, {"accepted": 1, "token": "t", "granted": ["a"], "denied": []})
WATERMARK = Answer(200, {"input_watermark": 5, "output_watermark": 5, "status": "active"})
REPORT = {"a": RangeReport(5, records=1, late=0)}
LONG_MS = 600_000


def attempt(
    server: Answers,
    *,
    watched: bool = True,
    ttl_ms: int = LONG_MS,
    epoch: int = 0,
    query: str = "q",
) -> TaskAttempt:
    target = ReportTarget(
        url=server.url,
        job="j",
        stage="s",
        ttl_ms=ttl_ms,
        patience_ms=3_000,
        clock=FakeClock(),
        tallies=cast("Accumulator[Tallies]", None),
        watched=watched,
    )
    return TaskAttempt(target, Task(query, Rank(1, epoch, 7), epoch, 0, "task-7"))


def asked(server: Answers) -> list[str]:
    return [each.path.rpartition("/")[2] for each in list(server.asked)]


@pytest.mark.parametrize("watched", [True, False])
def test_a_task_makes_one_request(watched: bool) -> None:
    with Answers(CLAIMED) as server:
        task = attempt(server, watched=watched)
        task.report_shards(REPORT)
        assert asked(server) == ["reports"]
        body = server.asked[0].body
    claim = {"holder": "task-7", "ttl_ms": LONG_MS, "run": 1, "epoch": 0, "attempt": 7}
    assert body["claim"] == claim | ({} if watched else {"watched": False})
    assert body["epoch"] == 0
    assert body["ranges"] == {"a": {"watermark": 5, "records": 1, "late": 0}}
    assert not task.counts[Count.REPORTS_DROPPED]


def test_a_range_that_is_not_granted_is_counted() -> None:
    conflict = problem(409, "lease-conflict")
    with Answers(conflict) as server:
        task = attempt(server)
        task.report_shards(REPORT)
    assert task.counts[Count.REPORTS_DROPPED] == 1


def test_tasks_of_a_process_share_the_promise_of_their_epoch() -> None:
    with Answers(WATERMARK) as server:
        promised = [attempt(server, epoch=3).promised_ms() for _ in range(5)]
        assert promised == [5] * 5
        assert asked(server) == ["watermark"]
        attempt(server, epoch=4).promised_ms()
        attempt(server, epoch=4, query="restarted").promised_ms()
        assert len(server.asked) == 3


def test_a_promise_that_was_not_answered_is_requested_again() -> None:
    with Answers(problem(404, "unknown-stage"), WATERMARK) as server:
        assert attempt(server).promised_ms() is None
        assert attempt(server).promised_ms() == 5
