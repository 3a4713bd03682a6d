"""The live store for the use cases, which ends expired leases and restores lost state.

Every use of a job's live state must first end expired leases, and must restore a lost state. This module
does both for every step, so that a use case cannot forget it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TypeVar

from typing_extensions import override

from service.consistency.failures import PublishFailure, failure_by
from service.consistency.outage_reads import OutageReads
from service.consistency.publisher import Publisher
from service.consistency.reconciler import Reconciler
from service.consistency.touched import Published
from service.errors import UnavailableError
from service.frontier.graph import Pipeline
from service.frontier.ranges import Layout
from service.live.port import JobState, LiveStore, StateLostError
from service.model.checkpoints import Columns
from service.model.jobs import Census, InstalledJob, JobView, StageProgress, StageView
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.observations import Instant, Marks, Settled, StageObservation
from service.model.reports import Commit, Committed, RangeOrder, RangeView, Report, Reported
from service.model.runs import RunEnd
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import SWITCH

R = TypeVar("R")

_FLUSH_TIMEOUT_S = 5.0
"""Wait of a response for its advance to become durable, before it is sent without the advance."""

_NONE_EXPIRED: Mapping[str, Mapping[str, int]] = {}

_VIEWS_AT_ONCE = 50
"""Number of ranges that are read singly without a pause for other requests."""


class RecoveringLiveStore(JobState):
    """A live store that restores the lost state of a job, and retries the step.

    All steps raise `UnknownJobError`, and `UnavailableError` if the restoration takes too long.
    """

    def __init__(
        self,
        live: LiveStore,
        reconciler: Reconciler,
        publisher: Publisher,
        last_seen: OutageReads,
        metrics: Metrics,
    ) -> None:
        self._live = live
        self._reconciler = reconciler
        self._run = reconciler.run_with_restore
        self._publisher = publisher
        self._last_seen = last_seen
        self._metrics = metrics
        self._changes: dict[str, int] = {}
        self._numbers = count(1)
        """Common to all jobs: the number of a job that is deleted and created anew still rises."""
        reconciler.add_keeper(self._keep_only)

    def changes_of(self, job: str) -> int:
        """Return a number that rises with each change of the job's ranges and leases by this process."""
        return self._changes.get(job, 0)

    def _note_change(self, job: str) -> None:
        self._changes[job] = next(self._numbers)

    def _keep_only(self, jobs: Collection[str]) -> None:
        """Drop what is kept of deleted jobs."""
        self._changes = {job: number for job, number in self._changes.items() if job in jobs}
        self._last_seen.keep_only(jobs)
        self._publisher.failures.keep_only(jobs)

    async def begin(self, job: InstalledJob) -> None:
        """Install a new job."""
        await self._live.begin(job)
        self._reconciler.note_installed(job.name, job.incarnation)

    # ---- steps that depend on current leases

    @override
    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        result = await self._expire_then_run(job, partial(self._live.claim, job, stage, claim))
        self._note_change(job)
        return result

    @override
    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        return await self._expire_then_run(job, partial(self._live.renew, job, tokens))

    @override
    async def release(self, job: str, tokens: Sequence[str]) -> int:
        result = await self._expire_then_run(job, partial(self._live.release, job, tokens))
        self._note_change(job)
        return result

    @override
    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        await self._expire_then_run(job, partial(self._live.open_run, job, stages, run))
        self._note_change(job)

    @override
    async def end_run(self, job: str, stages: Sequence[str], end: RunEnd) -> None:
        await self._expire_then_run(job, partial(self._live.end_run, job, stages, end))
        self._note_change(job)

    @override
    async def report(self, job: str, stage: str, report: Report) -> Reported:
        result = await self._expire_then_run(job, partial(self._live.report, job, stage, report))
        self._note_change(job)
        return result

    @override
    async def commit(self, job: str, commit: Commit) -> Committed:
        result = await self._expire_then_run(job, partial(self._live.commit, job, commit))
        self._note_change(job)
        return result

    @override
    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        return await self._expire_then_run(job, partial(self._live.stage, job, stage))

    @override
    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        return await self._expire_then_run(job, partial(self._live.snapshot, job))

    @override
    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        step = partial(self._live.ranges, job, stage, limit=limit, order=order)
        return await self._expire_then_run(job, step)

    @override
    async def observe(
        self, job: str, stages: Sequence[str]
    ) -> tuple[Instant, Mapping[str, StageObservation]]:
        return await self._expire_then_run(job, partial(self._live.observe, job, stages))

    @override
    async def settle(
        self, job: str, stage: str, layout: Layout, decisions: Sequence[Settled]
    ) -> bool:
        step = partial(self._live.settle, job, stage, layout, decisions)
        return await self._expire_then_run(job, step)

    @override
    async def follow_set_back(self, job: str, stage: str, after_ms: int) -> None:
        await self._run(job, partial(self._live.follow_set_back, job, stage, after_ms))

    @override
    async def retire(self, job: str, stage: str, range_name: str) -> bool:
        step = partial(self._live.retire, job, stage, range_name)
        result = await self._expire_then_run(job, step)
        self._note_change(job)
        return result

    @override
    async def range_views(
        self, job: str, stage: str, indices: Sequence[int]
    ) -> Sequence[RangeView]:
        # Each takes some 30 µs: other requests run in between.
        views: list[RangeView] = []
        for start in range(0, len(indices), _VIEWS_AT_ONCE):
            some = indices[start : start + _VIEWS_AT_ONCE]
            views += await self._expire_then_run(
                job, partial(self._live.range_views, job, stage, some)
            )
            await asyncio.sleep(0)
        return views

    # ---- steps that do not depend on leases

    @override
    async def install(self, job: InstalledJob) -> None:
        await self._run(job.name, partial(self._live.install, job))

    @override
    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        return await self._run(job, partial(self._live.pipeline, job, stage))

    @override
    async def progress(self, job: str, stage: str) -> tuple[int, StageProgress]:
        return await self._run(job, partial(self._live.progress, job, stage))

    @override
    async def columns(self, job: str, stage: str) -> Columns:
        return await self._run(job, partial(self._live.columns, job, stage))

    @override
    async def raise_marks(
        self, job: str, generation: int, marks: Mapping[str, Marks]
    ) -> Mapping[str, Marks]:
        return await self._run(job, partial(self._live.raise_marks, job, generation, marks))

    async def jobs(self) -> Sequence[JobView]:
        """Return every job, also after the loss of the whole store: lost states are restored first."""
        jobs = await self._live.jobs()
        if await self._reconciler.restore_missing({job.name for job in jobs}):
            jobs = await self._live.jobs()
        return jobs

    async def shown(self, job: str) -> JobView | None:
        """Return the published view of a job; None: not available until its state is restored.

        While the live store is unavailable, this is the last view that was read here.
        """
        try:
            return await self._live.job(job)
        except StateLostError:
            return None
        except UnavailableError:
            return self._last_seen.last(job)

    # ---- expired leases and advances

    async def _expire_then_run(self, job: str, step: Callable[[], Awaitable[R]]) -> R:
        try:
            expired = await self._live.expire(job)
        except UnavailableError:
            # If the store does not answer, the step itself will raise the error.
            expired = _NONE_EXPIRED
        if expired:
            self.note_expired(expired)
        if job in expired:
            with suppress(UnavailableError):
                await self.flush(job)
        tracing = SWITCH.tracing
        if tracing is None:
            return await self._run(job, step)
        called: object = getattr(step, "func", step)
        with tracing.live_step(getattr(called, "__name__", "step"), job):
            return await self._run(job, step)

    def note_expired(self, expired: Mapping[str, Mapping[str, int]]) -> None:
        """Count expired leases, by job and stage, and publish the consequences."""
        for job, stages in expired.items():
            self._note_change(job)
            self._metrics.count_expired(job, stages)
            self._publisher.touch(job, stages)

    def publish_failure(self, job: str) -> PublishFailure | None:
        """Return the failure to publish the job's advances; None: this process has none to retry."""
        return self._publisher.failures.of(job)

    async def publish(
        self, job: str, stages: Collection[str], now_ms: int
    ) -> PublishFailure | None:
        """Publish the advances of these stages now, also those of reports to other replicas.

        Returns the failure, also after a timeout; None: they are visible.
        """
        self._publisher.touch(job, stages)
        try:
            await self.flush(job)
        except Exception as error:  # noqa: BLE001  (the publisher has logged an unexpected one)
            return self.publish_failure(job) or failure_by(error, now_ms)
        return None

    async def flush(self, job: str) -> Published:
        """Wait until the advances of this job are visible; see `Publisher.flush`.

        Raises `UnavailableError` also after a timeout.
        """
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                published = await self._publisher.flush(job)
        except TimeoutError:
            raise UnavailableError("the advance was not recorded in time") from None
        if published is not None:
            self._last_seen.note(published, {})
        return published
