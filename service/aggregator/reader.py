"""Reads of watermarks: at once, by a long poll, or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from service.aggregator.feed_changes import Changes
from service.aggregator.feeds import Feeds, watch_for
from service.aggregator.health import Examiner
from service.aggregator.soft import SoftState, SoftStates
from service.aggregator.states import StageState
from service.aggregator.throttling import Throttling
from service.clock import Clock
from service.consistency.outage_reads import OutageReads
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError
from service.frontier.health import Health
from service.live.port import LiveStore
from service.model.jobs import JobView, StageProgress
from service.model.reports import RangeOrder, RangeView
from service.tasks import Shutdown

_NO_SOFT_STATES: Mapping[str, SoftState] = {}


class Reader:
    """Reads of the jobs' watermarks and ranges."""

    def __init__(
        self,
        store: LiveStore,
        live: RecoveringLiveStore,
        last_seen: OutageReads,
        throttling: Throttling,
        examiner: Examiner,
        shutdown: Shutdown,
        clock: Clock,
    ) -> None:
        self._store = store
        self._live = live
        self._last_seen = last_seen
        self._clock = clock
        self._soft = SoftStates(live, examiner, clock, shared=store.shared)
        published = partial(self.snapshot, soft=False)
        self._feeds = Feeds(store, published, self.complete, throttling.read, shutdown)
        self._released = False

    def release(self) -> None:
        """Answer every long poll now: the service is about to end."""
        self._released = True
        self._store.wake_readers()
        self._feeds.release()

    async def stage(self, job: str, stage: str, *, soft: bool = True) -> StageState:
        """Return the state of a stage. `soft`: with the values that are computed at requests."""
        try:
            found = await self._live.stage(job, stage)
            self._last_seen.note(found[0], {stage: found[2]})
        except UnavailableError as outage:
            found = await self._last_seen.stage(job, stage, outage)
        view, stage_view, census = found
        states = await self._soft.read(view, (stage,)) if soft else _NO_SOFT_STATES
        return StageState(view, stage, stage_view, census, states.get(stage), self._clock.wall_ms())

    async def complete(self, states: Mapping[str, StageState]) -> Mapping[str, StageState]:
        """Return states of one snapshot with the values that are computed at requests.

        They take several steps of the live store, so they are computed only for a body.
        """
        if not states:
            return states
        soft = await self._soft.read(next(iter(states.values())).job, states)
        now_ms = self._clock.wall_ms()
        return {
            name: replace(state, soft=soft.get(name), now_ms=now_ms)
            for name, state in states.items()
        }

    async def snapshot(
        self, job: str, stages: Iterable[str] | None = None, *, soft: bool = True
    ) -> Mapping[str, StageState]:
        """Return the states of these stages (None: of all, each after its inputs), at one instant.

        `soft`: with the values that are computed at requests.
        """
        try:
            view, censuses = await self._live.snapshot(job)
            self._last_seen.note(view, censuses)
        except UnavailableError as outage:
            view, censuses = await self._last_seen.snapshot(job, outage)
            if censuses.keys() != view.stages.keys():
                raise
        chosen = [
            n for n in (view.pipeline.order if stages is None else stages) if n in view.stages
        ]
        states = await self._soft.read(view, chosen) if soft else _NO_SOFT_STATES
        now_ms = self._clock.wall_ms()
        return {
            name: StageState(
                view, name, view.stages[name], censuses[name], states.get(name), now_ms
            )
            for name in chosen
        }

    async def healths(self, job: str) -> Mapping[str, Health]:
        """Return the health of each stage of a job; empty while unknown."""
        try:
            states = await self.snapshot(job)
        except UnavailableError:
            return {}
        known = {name: state.soft for name, state in states.items()}
        return {name: soft.health for name, soft in known.items() if soft is not None}

    async def job(self, job: str) -> JobView:
        """Return one job, without values that are computed at requests. Raises `UnknownJobError`."""
        states = await self.snapshot(job, soft=False)
        return next(iter(states.values())).job

    async def progress(self, job: str, stage: str) -> tuple[int, StageProgress]:
        """Return the job's generation, and the run and the last committed epoch of a stage in it."""
        return await self._live.progress(job, stage)

    async def jobs(self) -> Sequence[JobView]:
        """Return every job. Raises `UnavailableError` if one of them cannot be read."""
        try:
            return await self._live_jobs()
        except UnavailableError as outage:
            return await self._last_seen.jobs(outage)

    async def readable_jobs(self) -> Sequence[JobView]:
        """Return the jobs that can be read: every job, unless the live store does not answer.

        Raises `UnavailableError` if neither store answers.
        """
        try:
            return await self._live_jobs()
        except UnavailableError:
            return await self._last_seen.readable_jobs()

    async def _live_jobs(self) -> Sequence[JobView]:
        jobs = await self._live.jobs()
        for job in jobs:
            self._last_seen.note(job, {})
        return jobs

    async def wait(
        self,
        job: str,
        stage: str,
        until: Callable[[StageState], bool],
        timeout_s: float,
        *,
        poll_s: float | None = None,
    ) -> StageState:
        """Return a stage once it meets `until`, or its state after the timeout.

        `poll_s`: the poll interval if `until` depends on soft values, which change without a
        publication. None: it does not, and the stage is returned without soft values.
        """
        read = partial(self.stage, job, stage, soft=poll_s is not None)
        if not timeout_s:
            return await read()
        with self._store.watch(job, stage) as watch:
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        watch.rearm()
                        state = await read()
                        if self._released or until(state):
                            return state
                        await watch_for(watch, poll_s)
            except TimeoutError:
                return await read()

    def changes(self, job: str, cursor: str | None) -> AsyncIterator[Changes]:
        """Follow the changes of a job; see `Feeds.follow`."""
        return self._feeds.follow(job, cursor)

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """Return ranges of a stage."""
        return await self._live.ranges(job, stage, limit=limit, order=order)
