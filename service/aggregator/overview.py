"""Overview of all jobs: the health of each, its stage that is furthest behind, and the instant since
when the stage stands there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from service.aggregator.health import JobHealth
from service.aggregator.reader import Reader
from service.clock import Clock
from service.frontier.graph import Status
from service.frontier.health import Health, badness
from service.model.jobs import JobView, StageView

_AT_ONCE = 200
"""Number of jobs that are summarised without a pause."""

_MANY = 1_000
"""Number of jobs up to which each request gets their present state."""

_REST = 20
"""The ratio of the age of the order of more jobs to the time that it took: a twentieth of a processor,
for any number of requests."""

_LONGEST_MS = 2_000

_ORDER = {Status.UNKNOWN: 0, Status.ACTIVE: 0, Status.IDLE: 1, Status.FINAL: 2}


_ReadHealths = Callable[[], Awaitable[Mapping[str, JobHealth]]]


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job, and its slowest stage."""

    job: JobView
    stage: str
    view: StageView
    found: JobHealth | None = None
    """Health of the job; None: unknown."""

    @property
    def status(self) -> Status:
        """Status of the slowest stage: if this stage is final, so is the job."""
        return self.view.watermark.status

    @property
    def slowest_ended(self) -> bool:
        """True if the last run of the slowest stage has finished."""
        return self.found is not None and self.found.stages.get(self.stage) is Health.ENDED


@dataclass(frozen=True, slots=True)
class Overview:
    """The requested jobs, and the number of all."""

    jobs: Sequence[JobSummary]
    matching: int
    total: int


@dataclass(frozen=True, slots=True)
class _Cached:
    jobs: Sequence[JobSummary]
    at_ms: int
    took_ms: int


class Overviews:
    """Overviews of all jobs, computed once for all concurrent requests."""

    def __init__(self, reader: Reader, read_healths: _ReadHealths, clock: Clock) -> None:
        self._reader = reader
        self._read_healths = read_healths
        self._clock = clock
        self._cached: _Cached | None = None
        self._looking = asyncio.Lock()

    async def read(self, may_read: Callable[[str], bool], search: str, limit: int) -> Overview:
        """Return the jobs whose names contain `search`, the worst health first, and then the longest
        still.
        """
        wanted = search.lower()
        total, found = 0, list[JobSummary]()
        for each in await self._in_order():
            if may_read(each.job.name):
                total += 1
                if wanted in each.job.name.lower():
                    found.append(each)
        return Overview(found[:limit], len(found), total)

    async def _in_order(self) -> Sequence[JobSummary]:
        async with self._looking:
            cached, now_ms = self._cached, self._clock.steady_ms()
            if cached is not None and now_ms - cached.at_ms < min(
                _REST * cached.took_ms, _LONGEST_MS
            ):
                return cached.jobs
            healths = await self._read_healths()
            found: list[JobSummary] = []
            for number, view in enumerate(await self._reader.jobs()):
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                found.append(summary(view, healths.get(view.name)))
            found.sort(key=_worst_first)
            at_ms = self._clock.steady_ms()
            self._cached = _Cached(found, at_ms, at_ms - now_ms) if len(found) > _MANY else None
            return found


def summary(job: JobView, found: JobHealth | None = None) -> JobSummary:
    """Find the slowest stage: an active one before an idle one, and of equal ones the most upstream.

    Downstream stages wait for it.
    """
    name = min(job.pipeline.order, key=lambda stage: _behind(job.stages[stage]))
    return JobSummary(job, name, job.stages[name], found)


def _behind(view: StageView) -> tuple[int, int]:
    return _ORDER[view.watermark.status], view.watermark.output


def _worst_first(of: JobSummary) -> tuple[int, int, int, str]:
    health = Health.OK if of.found is None else of.found.health
    return badness(health), _ORDER[of.status], of.view.advanced_at_ms, of.job.name
