"""All jobs at a glance: how often they are looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from service.aggregator.health import JobHealth
from service.aggregator.overview import Overview, Overviews
from service.aggregator.reader import Reader
from service.frontier.graph import Pipeline, Stage, StageWatermark
from service.frontier.ranges import ShardLayout
from service.model.jobs import JobView, StageView
from tests.support.clock import FakeClock

FLOW = Pipeline({"s": Stage((), ShardLayout.of(["0"]))})
JOB = JobView("j", FLOW, 1, 1, 1, 0, {"s": StageView(StageWatermark(), 0, 0, 0, 0)}, 0)
TOOK_MS = 40


async def _unknown() -> Mapping[str, JobHealth]:
    return {}


class Jobs:
    """Many jobs, which take a while to read."""

    def __init__(self, clock: FakeClock, count: int) -> None:
        self._clock = clock
        self._jobs = [replace(JOB, name=f"j{n}") for n in range(count)]
        self.read = 0

    async def jobs(self) -> Sequence[JobView]:
        self.read += 1
        await asyncio.sleep(0)
        self._clock.advance(TOOK_MS)
        return self._jobs


def overviews(count: int) -> tuple[Overviews, Jobs, FakeClock]:
    clock = FakeClock()
    jobs = Jobs(clock, count)
    return Overviews(cast("Reader", jobs), _unknown, clock), jobs, clock


def test_who_asks_at_the_same_time_shares_the_order_of_very_many_jobs() -> None:
    all_jobs, jobs, clock = overviews(1_001)

    async def at_once() -> Sequence[Overview]:
        return await asyncio.gather(*(all_jobs.read(lambda _: True, "", 5) for _ in range(9)))

    found = asyncio.run(at_once())
    assert jobs.read == 1
    assert [(len(each.jobs), each.matching, each.total) for each in found] == [
        (5, 1_001, 1_001)
    ] * 9
    mine = asyncio.run(all_jobs.read(lambda job: job in ("j7", "j70", "j8"), "J7", 5))
    assert ([each.job.name for each in mine.jobs], mine.total) == (["j7", "j70"], 3)
    assert jobs.read == 1, "each sees what their key allows, of one look"
    clock.advance(20 * TOOK_MS)
    asyncio.run(all_jobs.read(lambda _: True, "", 5))
    assert jobs.read == 2


def test_of_a_thousand_jobs_each_reader_gets_the_newest() -> None:
    all_jobs, jobs, _ = overviews(1_000)
    for _ in range(3):
        asyncio.run(all_jobs.read(lambda _: True, "", 5))
    assert jobs.read == 3
