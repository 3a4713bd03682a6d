"""The pace of the work over all jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from service.aggregator.background import in_rounds
from service.errors import UnavailableError
from tests.support.clock import FakeClock


def pauses(rounds: Sequence[int | None]) -> list[float]:
    """Return the pauses before rounds of these durations in milliseconds (None: a store is unavailable
    for five seconds), and the pause after them.
    """
    clock = FakeClock()
    left = list(rounds)
    found: list[float] = []

    async def sleep(seconds: float) -> bool:
        found.append(seconds)
        return bool(left)

    async def step() -> None:
        took_ms = left.pop(0)
        clock.advance(5_000 if took_ms is None else took_ms)
        if took_ms is None:
            raise UnavailableError("away")

    asyncio.run(in_rounds(sleep, clock, 1, 10, step, "look at all jobs"))
    return found


@pytest.mark.parametrize(
    ("took_ms", "pause_s"), [(0, 1), (100, 1), (101, 1.01), (400, 4), (60_000, 10), (None, 1)]
)
def test_a_round_over_all_jobs_leaves_nine_tenths_of_the_time(
    took_ms: int | None, pause_s: float
) -> None:
    assert pauses([took_ms]) == [1, pytest.approx(pause_s)]


def test_a_short_round_after_a_long_one_is_as_often_as_before() -> None:
    assert pauses([400, 0, None, 400]) == [1, 4, 1, 1, 4]
