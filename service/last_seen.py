"""What readers are shown while the live store is away: what it showed last, if that is the newest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.errors import UnavailableError, UnknownJobError, UnknownStageError
from service.ledger.port import JobHead, Ledger
from service.model.jobs import Census, JobView, StageView


class LastSeen:
    """Remembers what the live store showed of each job last.

    An advance is in the ledger before anybody sees it. So if the ledger is still where the live store
    was when this process looked last, nobody has seen anything newer, and to show that again is no step
    back. If the ledger is further, it may or may not have been shown elsewhere: then neither value is
    safe. The older one may be a step back now, and the newer one would make it one later, once the live
    store is back as it was.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._views: dict[str, JobView] = {}
        self._censuses: dict[str, dict[str, Census]] = {}

    def note(self, view: JobView, censuses: Mapping[str, Census]) -> None:
        """Remember what the live store has just shown."""
        before = self._views.get(view.name)
        if before is not None and _position(before) > _position(view):
            return
        if before is None or before.pipeline is not view.pipeline:
            self._censuses[view.name] = {}
        self._views[view.name] = view
        self._censuses[view.name].update(censuses)

    def forget(self, job: str) -> None:
        """Forget a job that is gone."""
        self._views.pop(job, None)
        self._censuses.pop(job, None)

    async def stage(
        self, job: str, stage: str, away: UnavailableError
    ) -> tuple[JobView, StageView, Census]:
        """Show a stage. Raises `away` if that could be a step back for somebody."""
        view, censuses = await self.snapshot(job, away)
        if stage not in view.stages:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        if stage not in censuses:
            raise away
        return view, view.stages[stage], censuses[stage]

    async def snapshot(
        self, job: str, away: UnavailableError
    ) -> tuple[JobView, Mapping[str, Census]]:
        """Show a job; of stages that were never looked at the census is missing. Raises `away`."""
        view = self._views.get(job)
        try:
            head = await self._ledger.head(job)
        except UnknownJobError:
            self.forget(job)
            raise
        except UnavailableError:
            raise away from None
        if view is None or _position(view) != _position(head):
            raise away
        return view, self._censuses[job]

    async def jobs(self) -> Sequence[JobView]:
        """Show the jobs of which nobody has seen anything newer. Raises `UnavailableError`."""
        return [
            view
            for head in await self._ledger.heads()
            if not head.deleted
            and (view := self._views.get(head.job)) is not None
            and _position(view) == _position(head)
        ]


def _position(of: JobView | JobHead) -> tuple[int, int, int]:
    return of.generation, of.layout_version, of.revision
