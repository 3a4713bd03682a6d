"""Reads while the live store is unavailable: its last values, if they are still the newest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from service.errors import UnavailableError, UnknownJobError, UnknownStageError
from service.ledger.port import JobHead, Ledger
from service.model.jobs import Census, JobView, StageView
from service.model.positions import NOT_LIVE


class OutageReads:
    """The last view of each job that the live store returned.

    An advance is in the ledger before it is visible. So if the ledger has the position of the last
    read, no reader has received anything newer, and the same view may be returned again. If the ledger
    is ahead, the newer values may or may not have been read from another replica, and neither value is
    safe: the older one may be a step back for a reader of the newer one, and the newer one would cause
    a step back later, when the live store returns with the older one.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._views: dict[str, JobView] = {}
        self._censuses: dict[str, dict[str, Census]] = {}

    def note(self, view: JobView, censuses: Mapping[str, Census]) -> None:
        """Keep a view that the live store has just returned."""
        before = self._views.get(view.name)
        if before is not None and _position(before) > _position(view):
            return
        if before is None or before.pipeline is not view.pipeline:
            self._censuses[view.name] = {}
        self._views[view.name] = view
        self._censuses[view.name].update(censuses)

    def forget(self, job: str) -> None:
        """Drop a deleted job."""
        self._views.pop(job, None)
        self._censuses.pop(job, None)

    def keep_only(self, jobs: Collection[str]) -> None:
        """Drop all other jobs."""
        for job in self._views.keys() - jobs:
            self.forget(job)

    def last(self, job: str) -> JobView | None:
        """Return the last view of a job, even if it is not the newest."""
        return self._views.get(job)

    async def stage(
        self, job: str, stage: str, outage: UnavailableError
    ) -> tuple[JobView, StageView, Census]:
        """Return a stage. Raises `outage` if it could be a step back for a reader."""
        view, censuses = await self.snapshot(job, outage)
        if stage not in view.stages:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        if stage not in censuses:
            raise outage
        return view, view.stages[stage], censuses[stage]

    async def snapshot(
        self, job: str, outage: UnavailableError
    ) -> tuple[JobView, Mapping[str, Census]]:
        """Return a job, with the censuses of stages that were read before. Raises `outage`."""
        view = self._views.get(job)
        try:
            head = await self._ledger.head(job)
        except UnknownJobError:
            self.forget(job)
            raise
        except UnavailableError:
            raise outage from None
        if view is None or _position(view) != _position(head):
            raise outage
        # The job may have been deleted during the request to the ledger.
        return _not_live(view), self._censuses.get(job, {})

    async def jobs(self, outage: UnavailableError) -> Sequence[JobView]:
        """Return every job. Raises `outage` if the last view of one is not the newest."""
        heads = await self._ledger.heads()
        views = self._newest(heads)
        if len(views) < len(heads):
            raise outage
        return views

    async def readable_jobs(self) -> Sequence[JobView]:
        """Return the jobs whose last view is still the newest. Raises `UnavailableError`."""
        return self._newest(await self._ledger.heads())

    def _newest(self, heads: Iterable[JobHead]) -> Sequence[JobView]:
        return [
            _not_live(view)
            for head in heads
            if (view := self._views.get(head.job)) is not None
            and _position(view) == _position(head)
        ]


def _not_live(view: JobView) -> JobView:
    """Return a view in which nothing that was computed for an earlier one is reused."""
    return replace(view, changes=NOT_LIVE)


def _position(of: JobView | JobHead) -> tuple[int, int, int]:
    return of.generation, of.layout_version, of.revision
