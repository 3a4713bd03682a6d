"""The waiting requests of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from typing_extensions import override

from service.live.port import Watch
from service.tasks import Wakeups


class EventWatch(Watch):
    """Wake-up of one waiting request."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @override
    def rearm(self) -> None:
        self._event.clear()

    @override
    async def wait(self) -> None:
        await self._event.wait()

    @property
    def event(self) -> asyncio.Event:
        """Set after a change."""
        return self._event


class Watches:
    """The waiting requests, by job and stage (None: any)."""

    def __init__(self) -> None:
        self._by_job: dict[str, dict[str | None, set[EventWatch]]] = {}
        self._wakeups = Wakeups()

    @contextmanager
    def watch(self, job: str, stage: str | None) -> Generator[EventWatch]:
        """Register a request for as long as it waits."""
        watch = EventWatch()
        self._by_job.setdefault(job, {}).setdefault(stage, set()).add(watch)
        try:
            yield watch
        finally:
            by_stage = self._by_job[job]
            by_stage[stage].discard(watch)
            if not by_stage[stage]:
                del by_stage[stage]
            if not by_stage:
                del self._by_job[job]

    def wake(self, job: str, stages: Iterable[str]) -> None:
        """Wake the requests that wait for these stages, or for any stage of the job."""
        by_stage = self._by_job.get(job)
        if by_stage is None:
            return
        # Requests for any stage first: a feed with many followers may be among them.
        for stage in (None, *stages):
            self._wakeups.wake(watch.event for watch in by_stage.get(stage, ()))

    def wake_job(self, job: str) -> None:
        """Wake all requests that wait for the job."""
        for watches in self._by_job.get(job, {}).values():
            self._wakeups.wake(watch.event for watch in watches)

    def wake_all(self) -> None:
        """Wake all waiting requests."""
        for job in self._by_job:
            self.wake_job(job)
