"""All jobs at a glance: for each, the stage that is furthest behind, and since when it stands there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.aggregator.reader import Reader
from service.frontier.graph import Status
from service.model.jobs import JobView, StageView

_AT_ONCE = 200
"""Jobs that are looked at without a pause."""

_ORDER = {Status.UNKNOWN: 0, Status.ACTIVE: 0, Status.IDLE: 1, Status.FINAL: 2}


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job, and its slowest stage."""

    job: JobView
    stage: str
    view: StageView

    @property
    def status(self) -> Status:
        """Of the slowest stage: if that is final, so is the job."""
        return self.view.watermark.status


@dataclass(frozen=True, slots=True)
class Overview:
    """The jobs that were asked for, and how many there are."""

    jobs: Sequence[JobSummary]
    matching: int
    total: int


class Overviews:
    """Looks at all jobs at once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def read(self, may_read: Callable[[str], bool], search: str, limit: int) -> Overview:
        """Return the jobs whose names contain `search`, what stands still for longest first."""
        views = [view for view in await self._reader.jobs() if may_read(view.name)]
        wanted = search.lower()
        found: list[JobSummary] = []
        for number, view in enumerate(views):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if wanted in view.name.lower():
                found.append(summary(view))
        found.sort(key=_still_first)
        return Overview(found[:limit], len(found), len(views))


def summary(job: JobView) -> JobSummary:
    """Find the slowest stage: an active one before an idle one, and of equal ones the first upstream.

    What is downstream waits for it.
    """
    name = min(job.pipeline.order, key=lambda stage: _behind(job.stages[stage]))
    return JobSummary(job, name, job.stages[name])


def _behind(view: StageView) -> tuple[int, int]:
    return _ORDER[view.watermark.status], view.watermark.output


def _still_first(found: JobSummary) -> tuple[int, int, str]:
    return _ORDER[found.status], found.view.updated_at_ms, found.job.name
