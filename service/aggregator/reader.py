"""Reading watermarks: at once, when they change, or as a stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.errors import UnavailableError, UnknownJobError
from service.last_seen import LastSeen
from service.live.port import LiveStore, Watch
from service.live_jobs import LiveJobs
from service.model.jobs import Census, JobView, StageView
from service.model.reports import RangeOrder, RangeView
from service.tasks import Shutdown

HEARTBEAT_S = 15.0
"""How long a stream of changes is silent at most."""

_RETRY_S = 1.0
"""How long a stream of changes waits while the live store does not answer."""

_CURSOR: Final = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class StageState:
    """A stage as a reader sees it at one instant."""

    job: JobView
    name: str
    view: StageView
    census: Census

    @property
    def etag(self) -> str:
        """Changes with input, output or status, and never returns to an earlier value."""
        return f"{self.job.generation}-{self.view.version}"


@dataclass(frozen=True, slots=True)
class Change:
    """A stage that has changed, for a stream of changes."""

    state: StageState
    cursor: str | None
    """Where a stream can be resumed after this change; None: not between changes that belong
    together."""


class Reader:
    """Reads the jobs' watermarks and ranges."""

    def __init__(
        self, store: LiveStore, live: LiveJobs, last_seen: LastSeen, shutdown: Shutdown
    ) -> None:
        self._store = store
        self._live = live
        self._last_seen = last_seen
        self._shutdown = shutdown
        self._released = False

    def release(self) -> None:
        """Answer every waiting reader now: the service is about to end."""
        self._released = True
        self._store.wake_readers()

    async def stage(self, job: str, stage: str) -> StageState:
        """Return the state of a stage."""
        try:
            found = await self._live.stage(job, stage)
            self._last_seen.note(found[0], {stage: found[2]})
        except UnavailableError as outage:
            found = await self._last_seen.stage(job, stage, outage)
        view, stage_view, census = found
        return StageState(view, stage, stage_view, census)

    async def snapshot(
        self, job: str, stages: Iterable[str] | None = None
    ) -> Mapping[str, StageState]:
        """Return the states of these stages of a job (None: of all), at one instant."""
        try:
            view, censuses = await self._live.snapshot(job)
            self._last_seen.note(view, censuses)
        except UnavailableError as outage:
            view, censuses = await self._last_seen.snapshot(job, outage)
            if censuses.keys() != view.stages.keys():
                raise
        chosen = view.stages if stages is None else stages
        return {
            name: StageState(view, name, view.stages[name], censuses[name])
            for name in chosen
            if name in view.stages
        }

    async def jobs(self) -> Sequence[JobView]:
        """Return every job; while the live store does not answer, those that `LastSeen` may still
        return.
        """
        try:
            jobs = await self._store.jobs()
        except UnavailableError:
            return await self._last_seen.jobs()
        for job in jobs:
            self._last_seen.note(job, {})
        return jobs

    async def wait(
        self, job: str, stage: str, until: Callable[[StageState], bool], timeout_s: float
    ) -> StageState:
        """Return a stage once `until` is true of it, or as it is after the timeout."""
        with self._store.watch(job, stage) as watch:
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        watch.rearm()
                        state = await self.stage(job, stage)
                        if self._released or until(state):
                            return state
                        await watch.wait()
            except TimeoutError:
                return await self.stage(job, stage)

    async def changes(self, job: str, cursor: str | None) -> AsyncIterator[Sequence[Change]]:
        """Yield changed stages: first all of them (or those changed since `cursor`), then each change.

        Changes that happen while the reader is busy are merged: it gets the latest, and blocks nobody.
        An empty sequence is yielded after `HEARTBEAT_S` of silence. Ends with the job or the service.
        """
        seen: dict[str, int] = {}
        generation, revision = _read_cursor(cursor)
        with self._store.watch(job) as watch:
            while not self._released:
                watch.rearm()
                try:
                    states = await self.snapshot(job)
                except UnknownJobError:
                    return
                except UnavailableError:
                    if revision < 0 and not seen:
                        raise
                    await self._shutdown.sleep(_RETRY_S)
                    yield ()
                    continue
                current = next(iter(states.values())).job.generation
                if current != generation:
                    generation, revision, seen = current, -1, {}
                fresh = [
                    state
                    for name, state in states.items()
                    if seen.get(name, -1) < state.view.version and state.view.revision > revision
                ]
                seen = {name: state.view.version for name, state in states.items()}
                revision = -1
                if fresh:
                    yield _changes(fresh, current)
                if not await _changed(watch):
                    yield ()

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """Return ranges of a stage."""
        return await self._live.ranges(job, stage, limit=limit, order=order)


async def _changed(watch: Watch) -> bool:
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            await watch.wait()
    except TimeoutError:
        return False
    return True


def _read_cursor(cursor: str | None) -> tuple[int, int]:
    """Read the position of a stream. An invalid cursor is the beginning."""
    found = _CURSOR.fullmatch(cursor or "")
    return (-1, -1) if found is None else (int(found[1]), int(found[2]))


def _changes(fresh: Sequence[StageState], generation: int) -> Sequence[Change]:
    """Put changes in order. Stages that changed in one step share a revision, and only the last of them
    has a cursor: a reader that resumed after the first would miss the others.
    """
    ordered = sorted(fresh, key=lambda state: state.view.revision)
    following = [state.view.revision for state in ordered[1:]] + [-1]
    return [
        Change(
            state, f"{generation}-{state.view.revision}" if state.view.revision != after else None
        )
        for state, after in zip(ordered, following, strict=True)
    ]
