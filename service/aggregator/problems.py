"""The problems of all jobs, examined once for all requests, at a bounded cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from service.aggregator.health import Examiner, JobHealth, Problem, worst_first
from service.aggregator.reader import Reader
from service.clock import Clock
from service.errors import UnavailableError, UnknownJobError
from service.model.jobs import JobView

_AT_ONCE = 8
"""Number of jobs that are examined at a time. Reports use the same connections."""

_REST = 20
"""The ratio of the age of an examination of all jobs to the time that it took: a twentieth of a
processor, for any number of requests."""

_LONGEST_MS = 15_000

_STEADY_MS = 600_000
"""Time for which the examination of a job is reused that has not changed. The texts of its problems have
the times of the day, without the day if that is today.
"""


@dataclass(frozen=True, slots=True)
class FoundProblems:
    """Problems of several jobs, the worst first."""

    problems: Sequence[Problem]
    total: int
    """Number of all, of which the first ones are here."""
    late_ranges: Mapping[str, int]
    """Number of the late ranges of final stages, by job; without jobs that have none."""


@dataclass(frozen=True, slots=True)
class _Cached:
    jobs: Mapping[str, JobHealth]
    at_ms: int
    took_ms: int


@dataclass(frozen=True, slots=True)
class _Examined:
    job: JobHealth
    at_ms: int


class Problems:
    """Examination of all jobs."""

    def __init__(self, reader: Reader, examiner: Examiner, clock: Clock) -> None:
        self._reader = reader
        self._examiner = examiner
        self._clock = clock
        self._cached: _Cached | None = None
        self._examined: dict[str, _Examined] = {}
        self._examining = asyncio.Lock()

    async def of_all(self, may_read: Callable[[str], bool], limit: int) -> FoundProblems:
        """Return the problems of the jobs that may be read. Raises `UnavailableError`."""
        jobs = {name: job for name, job in (await self.jobs()).items() if may_read(name)}
        found = [problem for job in jobs.values() for problem in job.problems]
        found.sort(key=worst_first)
        late = {name: job.late_ranges for name, job in jobs.items() if job.late_ranges}
        return FoundProblems(found[:limit], len(found), late)

    async def jobs(self) -> Mapping[str, JobHealth]:
        """Return every job with its problems. Raises `UnavailableError`."""
        async with self._examining:
            cached, now_ms = self._cached, self._clock.steady_ms()
            if cached is not None and now_ms - cached.at_ms < min(
                _REST * cached.took_ms, _LONGEST_MS
            ):
                return cached.jobs
            found = await self._examine_changed(await self._reader.jobs(), now_ms)
            at_ms = self._clock.steady_ms()
            self._cached = _Cached(found, at_ms, at_ms - now_ms)
            return found

    async def _examine_changed(
        self, jobs: Sequence[JobView], now_ms: int
    ) -> Mapping[str, JobHealth]:
        """Examine the jobs, but for those that are as they were at their last examination."""
        kept = {job.name: self._examined[job.name] for job in jobs if self._stands(job, now_ms)}
        changed = sorted(job.name for job in jobs if job.name not in kept)
        for start in range(0, len(changed), _AT_ONCE):
            # With the embedded stores, nothing below yields to other requests.
            await asyncio.sleep(0)
            some = changed[start : start + _AT_ONCE]
            for job in await asyncio.gather(*map(self._examine, some)):
                if job is not None:
                    kept[job.view.name] = _Examined(job, now_ms)
        self._examined = kept
        return {name: kept[name].job for name in sorted(kept)}

    def _stands(self, job: JobView, now_ms: int) -> bool:
        last = self._examined.get(job.name)
        return (
            last is not None
            and last.job.is_steady
            and not self._examiner.has_failure(job.name)
            and now_ms - last.at_ms < _STEADY_MS
            and job.is_as(last.job.view)
        )

    async def _examine(self, job: str) -> JobHealth | None:
        try:
            return await self._examiner.job(job)
        except UnknownJobError:
            return None

    async def jobs_if_available(self) -> Mapping[str, JobHealth]:
        """Return every job with its problems; none, while the live store does not answer."""
        try:
            return await self.jobs()
        except UnavailableError:
            return {}
