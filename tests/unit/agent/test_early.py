"""Answers to the control source of an early query: percentiles of its inputs, or why there is none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

import pytest

from spark_agent.client.client import Client
from spark_agent.driver.early_feed import EarlyFeed
from spark_agent.exceptions import Unavailable
from spark_agent.soundness.query_stages import EarlyStage
from spark_agent.sources.control import END_MS
from spark_agent.sources.driver_link import Offset
from spark_agent.times import MAX_MS
from tests.unit.agent.answers import FakeClock

POLL_MS = 100


class Percentiles:
    """A service that knows percentiles of stages; None: it does not answer."""

    def __init__(self, **known: int | None) -> None:
        self.known: Mapping[str, int | None] | None = known
        self.asked = 0

    def percentile_ms(self, job: str, stage: str, percentage: int) -> int | None:
        assert (job, percentage) == ("j", 66)
        self.asked += 1
        if self.known is None:
            raise Unavailable("it is down")
        return self.known[stage]


class Early:
    def __init__(self, service: Percentiles, *, stays: bool = False) -> None:
        self.clock = FakeClock()
        self._feed = EarlyFeed(
            "j",
            EarlyStage("k", 66, frozenset({"a", "b"})),
            stays=stays,
            poll_ms=POLL_MS,
            client=cast("Client", service),
            clock=self.clock,
        )
        self.at = Offset(None, 0)

    def next(self, after_ms: int = POLL_MS) -> int | None:
        self.clock.now_ms += after_ms
        self.at = self._feed.next(self.at)
        return self.at.watermark_ms


def test_it_follows_the_least_of_its_inputs_and_never_goes_back() -> None:
    service = Percentiles(a=7, b=5)
    early = Early(service)
    assert early.next() == 5
    service.known = {"a": 9, "b": 20}
    assert early.next() == 9
    turn = early.at.turn
    service.known = {"a": 3, "b": 20}
    assert early.next() == 9
    assert early.at.turn == turn, "nothing new causes no batch"
    service.known = {"a": MAX_MS, "b": MAX_MS}
    assert early.next() == END_MS


def test_it_asks_no_more_often_than_it_has_to() -> None:
    service = Percentiles(a=7, b=5)
    early = Early(service)
    for _ in range(POLL_MS):
        early.next(after_ms=1)
    assert service.asked == 2


def test_a_query_that_reads_what_was_there_stays_where_its_input_was() -> None:
    service = Percentiles(a=None, b=5)
    early = Early(service, stays=True)
    assert early.next() is None
    service.known = {"a": 7, "b": 6}
    assert early.next() == 6
    service.known = {"a": 70, "b": 60}
    assert early.next() == 6


def test_it_says_why_there_are_no_early_results(caplog: pytest.LogCaptureFixture) -> None:
    service = Percentiles(a=None, b=5)
    early = Early(service)
    assert early.next() is None
    assert caplog.text == ""
    for _ in range(400):
        early.next()
    assert caplog.text.count("a or b has no percentile watermark yet") == 1


def test_it_says_that_the_service_is_away(caplog: pytest.LogCaptureFixture) -> None:
    service = Percentiles()
    service.known = None
    early = Early(service)
    for _ in range(20):
        assert early.next(after_ms=10_000) is None
    assert caplog.text.count("early results wait for the service") == 1
    service.known = {"a": 5, "b": 5}
    assert early.next(after_ms=10_000) == 5


def test_it_says_that_the_job_is_behind_its_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    early = Early(Percentiles(a=5, b=5))
    early.at = Offset(1_000, 3)
    assert early.next() == 1_000
    early.next()
    assert caplog.text.count("1970-01-01T00:00:01.000Z, but its input's percentile") == 1
