"""Polls of a value: one request at once, long polls afterwards."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

import pytest

from spark_agent.client.poller import Poller
from spark_agent.exceptions import Unavailable
from tests.support.binaries import wait_until
from tests.unit.agent.answers import FakeClock

POLL_MS = 100
WAIT_S = 10
TIMEOUT_S = 10.0


class Service:
    """Answers polls that may wait, from another thread."""

    def __init__(self) -> None:
        self.polls: list[tuple[int | None, int]] = []
        self.now: Callable[[], int] = lambda: 1
        self._later = SimpleQueue[Callable[[], int]]()

    def fetch(self, latest: int | None, wait_s: int) -> int:
        self.polls.append((latest, wait_s))
        answer = self._later.get(timeout=TIMEOUT_S) if wait_s else self.now
        return answer()

    def end_long_poll(self, answer: Callable[[], int]) -> None:
        self._later.put(answer)


def error() -> int:
    raise Unavailable("it is away")


def bug() -> int:
    raise ZeroDivisionError


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def poller(service: Service, clock: FakeClock) -> Poller[int]:
    return Poller(service.fetch, poll_ms=POLL_MS, clock=clock, wait_s=WAIT_S)


def in_long_poll(poller: Poller[int], service: Service, clock: FakeClock) -> None:
    assert poller.latest() == 1
    clock.now_ms += POLL_MS
    assert poller.latest() == 1
    wait_until(lambda: service.polls == [(None, 0), (1, WAIT_S)], "a long poll", TIMEOUT_S)


def test_a_value_that_does_not_change_costs_one_request_while_a_long_poll_lasts(
    poller: Poller[int], service: Service, clock: FakeClock
) -> None:
    in_long_poll(poller, service, clock)
    for _ in range(2_000 * WAIT_S // POLL_MS - 2):
        clock.now_ms += POLL_MS
        assert poller.latest() == 1
    assert len(service.polls) == 2
    service.end_long_poll(lambda: 1)

    def polls_again() -> bool:
        clock.now_ms += POLL_MS
        return poller.latest() == 1 and len(service.polls) == 3

    wait_until(polls_again, "the next long poll", TIMEOUT_S)
    service.end_long_poll(lambda: 1)


def test_a_value_that_a_long_poll_brings_is_the_latest(
    poller: Poller[int], service: Service, clock: FakeClock
) -> None:
    in_long_poll(poller, service, clock)
    service.end_long_poll(lambda: 2)
    wait_until(lambda: poller.latest() == 2, "the new value", TIMEOUT_S)
    assert poller.received_ms == clock.now_ms
    assert len(service.polls) == 2


def test_a_value_is_current_after_a_refresh_only_if_it_was_polled_since(
    poller: Poller[int], service: Service, clock: FakeClock
) -> None:
    in_long_poll(poller, service, clock)
    poller.refresh_soon()
    service.end_long_poll(lambda: 2)
    service.now = lambda: 3
    assert not poller.is_current
    assert poller.latest() == 3, "polled at once"
    assert poller.is_current
    for _ in range(10):
        assert poller.latest() == 3, "the long poll began before"
    assert service.polls == [(None, 0), (1, WAIT_S), (1, 0)]


def test_a_long_poll_that_fails_backs_off_and_then_the_caller_polls(
    poller: Poller[int], service: Service, clock: FakeClock
) -> None:
    in_long_poll(poller, service, clock)
    service.end_long_poll(error)
    wait_until(lambda: poller.latest() == 1 and poller.error is not None, "the error", TIMEOUT_S)
    service.now = lambda: 2
    clock.now_ms += POLL_MS
    assert poller.latest() == 1, "it backs off"
    clock.now_ms += POLL_MS
    assert poller.latest() == 2
    assert poller.error is None
    assert service.polls[-1] == (1, 0)


def test_a_bug_in_a_long_poll_is_raised_to_the_caller(
    poller: Poller[int], service: Service, clock: FakeClock
) -> None:
    in_long_poll(poller, service, clock)
    service.end_long_poll(bug)
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: poller.latest() == 2, "never", TIMEOUT_S)


def test_without_a_wait_each_poll_is_made_by_the_caller(service: Service, clock: FakeClock) -> None:
    poller = Poller(service.fetch, poll_ms=POLL_MS, clock=clock)
    for _ in range(3):
        clock.now_ms += POLL_MS
        poller.latest()
    assert [wait_s for _, wait_s in service.polls] == [0, 0, 0]


def test_a_value_older_than_two_long_polls_is_polled_by_the_caller(
    poller: Poller[int], service: Service, clock: FakeClock
) -> None:
    in_long_poll(poller, service, clock)
    service.now = lambda: 2
    clock.now_ms += 2_000 * WAIT_S
    assert poller.latest() == 2
    service.end_long_poll(lambda: 1)
