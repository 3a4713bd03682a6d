"""The live store as the use cases speak to it: what is due has ended, and what was lost is restored.

Whoever asks a live store about a job must have noticed first which leases have run out, and must be
ready to find the job's state lost. Here that is done for every step, so that no use case can forget it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from service.errors import UnavailableError
from service.frontier.graph import Pipeline
from service.last_seen import LastSeen
from service.live.port import LiveStore
from service.metrics import Metrics
from service.model.jobs import Census, InstalledJob, JobView, StageView
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.reports import Commit, Committed, RangeOrder, RangeView, Report, Reported
from service.publisher import Publisher, Shown
from service.reconciler import Reconciler

R = TypeVar("R")

_FLUSH_TIMEOUT_S = 5.0
"""How long an answer waits for its advance to be durable, before it is given without it."""


class LiveJobs:
    """Each method is that of `LiveStore` of the same name.

    None raises `StateLostError`: the state is restored, and the step is done again. All raise
    `UnknownJobError`, and `UnavailableError` if that takes too long.
    """

    def __init__(
        self,
        live: LiveStore,
        reconciler: Reconciler,
        publisher: Publisher,
        last_seen: LastSeen,
        metrics: Metrics,
    ) -> None:
        self._live = live
        self._restored = reconciler.on
        self._publisher = publisher
        self._last_seen = last_seen
        self._metrics = metrics

    # ---- steps that judge by leases, or show what depends on them

    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        """See the port."""
        return await self._settled(job, partial(self._live.claim, job, stage, claim))

    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        """See the port."""
        return await self._settled(job, partial(self._live.renew, job, tokens))

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        """See the port."""
        return await self._settled(job, partial(self._live.release, job, tokens))

    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        """See the port."""
        await self._settled(job, partial(self._live.open_run, job, stages, run))

    async def report(self, job: str, stage: str, report: Report) -> Reported:
        """See the port."""
        return await self._settled(job, partial(self._live.report, job, stage, report))

    async def commit(self, job: str, commit: Commit) -> Committed:
        """See the port."""
        return await self._settled(job, partial(self._live.commit, job, commit))

    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        """See the port."""
        return await self._settled(job, partial(self._live.stage, job, stage))

    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        """See the port."""
        return await self._settled(job, partial(self._live.snapshot, job))

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """See the port."""
        step = partial(self._live.ranges, job, stage, limit=limit, order=order)
        return await self._settled(job, step)

    # ---- steps to which leases are nothing

    async def install(self, job: InstalledJob) -> None:
        """See the port."""
        await self._restored(job.name, partial(self._live.install, job))

    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        """See the port."""
        return await self._restored(job, partial(self._live.pipeline, job, stage))

    async def promises(self, job: str, stage: str) -> Sequence[int]:
        """See the port."""
        return await self._restored(job, partial(self._live.promises, job, stage))

    # ---- what has ended, and what has moved

    async def _settled(self, job: str, step: Callable[[], Awaitable[R]]) -> R:
        ended: Mapping[str, Mapping[str, int]] = {}
        # If the store is away, the step says so, or whoever asked for it has a way without it.
        with suppress(UnavailableError):
            ended = await self._live.expire(job)
        self.note_expired(ended)
        if job in ended:
            with suppress(UnavailableError):
                await self.flush(job)
        return await self._restored(job, step)

    def note_expired(self, ended: Mapping[str, Mapping[str, int]]) -> None:
        """Count leases that have run out, by job and stage, and have published what that moves."""
        for job, stages in ended.items():
            self._metrics.leases_expired.inc(sum(stages.values()))
            self._publisher.touch(job, stages)

    async def flush(self, job: str) -> Shown:
        """Wait until what this job has moved is visible; see `Publisher.flush`.

        Raises `UnavailableError` also if the stores have not taken it in time.
        """
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                shown = await self._publisher.flush(job)
        except TimeoutError:
            raise UnavailableError("the stores have not taken it in time") from None
        if shown is not None:
            self._last_seen.note(shown, {})
        return shown
