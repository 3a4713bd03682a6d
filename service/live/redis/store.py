"""The live store on Redis: any number of processes share one state, and each step is one script.

The scripts in `lua/` define the state and the steps. The modules here translate names to indices and
back, batch steps that arrive together, and turn the scripts' replies into results and errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from typing_extensions import override

from service.clock import Clock
from service.errors import StoreRefusedError, UnavailableError
from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.frontier.ranges import Layout
from service.live.port import LiveStore, Watch, new_token, with_token
from service.live.redis import (
    checkpoints,
    layouts,
    leases,
    publishing,
    range_views,
    reads,
    reports,
    schema,
)
from service.live.redis.client import Hint, RedisClient
from service.live.redis.steps import Steps, reply
from service.live.watches import Watches
from service.model.checkpoints import CheckpointChunk, Columns
from service.model.jobs import (
    Census,
    InstalledJob,
    JobView,
    StageProgress,
    StageView,
    StoreSize,
)
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.observations import Instant, Marks, Settled, StageObservation
from service.model.positions import LivePosition
from service.model.reports import Commit, Committed, RangeOrder, RangeView, Report, Reported
from service.model.runs import RunEnd
from service.tasks import end_task

log = logging.getLogger(__name__)

_LISTEN_RETRY_S = 0.2
_LONGEST_LISTEN_RETRY_S = 2.0


class RedisLiveStore(LiveStore):
    """A live store in Redis."""

    shared: ClassVar[bool] = True

    def __init__(self, url: str, clock: Clock, tokens: Callable[[], str] = new_token) -> None:
        self._client = RedisClient(url)
        self._steps = Steps(self._client, clock)
        self._new_token = tokens
        self._watches = Watches()
        self._listening: asyncio.Task[None] | None = None

    @override
    async def open(self) -> None:
        with contextlib.suppress(UnavailableError):
            # Known before the first step, so that none is refused in its middle.
            await self._client.check_rights()
        self._listening = asyncio.create_task(self._listen(), name="listen")

    @override
    async def close(self) -> None:
        if self._listening is not None:
            await end_task(self._listening)
        await self._client.close()

    @override
    async def ping(self) -> None:
        await self._client.check_rights()
        await self._client.probe(schema.PROBE)

    # ---- jobs

    @override
    async def begin(self, job: InstalledJob) -> None:
        await layouts.begin(self._steps, job)

    @override
    async def install(self, job: InstalledJob) -> None:
        if await layouts.install(self._steps, job):
            self._watches.wake_job(job.name)

    @override
    async def remove(self, job: str, generation: int) -> None:
        await layouts.remove(self._steps, job, generation)
        self._watches.wake_job(job)

    @override
    async def head(self, job: str) -> LivePosition | None:
        return await reads.head(self._steps, job)

    @override
    async def heads(self) -> Mapping[str, LivePosition]:
        return await reads.heads(self._steps)

    @override
    async def jobs(self) -> Sequence[JobView]:
        return await reads.jobs(self._steps)

    @override
    def known(self) -> Mapping[str, Pipeline]:
        # The reconciler checks every job each second, so its layout is known here.
        return dict(self._steps.pipelines)

    @override
    def size(self) -> StoreSize:
        known = self.known().values()
        return StoreSize(len(known), sum(pipeline.range_count for pipeline in known))

    @override
    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        return await reads.pipeline(self._steps, job, stage)

    @override
    async def job(self, job: str) -> JobView:
        return await reads.job_view(self._steps, job)

    @override
    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        return await reads.snapshot(self._steps, job)

    @override
    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        return await reads.stage(self._steps, job, stage)

    @override
    async def progress(self, job: str, stage: str) -> tuple[int, StageProgress]:
        return await reads.progress(self._steps, job, stage)

    # ---- leases

    @override
    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        return await leases.claim(self._steps, job, stage, claim, self._new_token())

    @override
    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        return await leases.renew(self._steps, job, tokens)

    @override
    async def release(self, job: str, tokens: Sequence[str]) -> int:
        return await leases.release(self._steps, job, tokens)

    @override
    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        await leases.open_run(self._steps, job, stages, run)

    @override
    async def end_run(self, job: str, stages: Sequence[str], end: RunEnd) -> None:
        await leases.end_run(self._steps, job, stages, end)

    @override
    async def expire(self, job: str | None = None) -> Mapping[str, Mapping[str, int]]:
        return await leases.expire(self._steps, job)

    # ---- reports

    @override
    async def report(self, job: str, stage: str, report: Report) -> Reported:
        return await reports.report(self._steps, job, stage, with_token(report, self._new_token))

    @override
    async def commit(self, job: str, commit: Commit) -> Committed:
        return await reports.commit(self._steps, job, commit)

    # ---- publishing and saving

    @override
    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        return await reads.agreements(self._steps, job, touched)

    @override
    async def publish(
        self,
        job: str,
        generation: int,
        revision: int,
        views: Mapping[str, StageView],
        epochs: Mapping[str, int],
    ) -> None:
        await publishing.publish(self._steps, job, generation, revision, views, epochs)
        self._watches.wake(job, views)

    @override
    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        return await range_views.ranges(self._steps, job, stage, limit=limit, order=order)

    @override
    async def range_views(
        self, job: str, stage: str, indices: Sequence[int]
    ) -> Sequence[RangeView]:
        return await range_views.range_views(self._steps, job, stage, indices)

    @override
    async def columns(self, job: str, stage: str) -> Columns:
        return await checkpoints.columns(self._steps, job, stage)

    @override
    async def observe(
        self, job: str, stages: Sequence[str]
    ) -> tuple[Instant, Mapping[str, StageObservation]]:
        return await reads.observe(self._steps, job, stages)

    @override
    async def settle(
        self, job: str, stage: str, layout: Layout, decisions: Sequence[Settled]
    ) -> bool:
        return await reads.settle(self._steps, job, stage, layout, decisions)

    @override
    async def follow_set_back(self, job: str, stage: str, after_ms: int) -> None:
        await reads.follow_set_back(self._steps, job, stage, after_ms)

    @override
    async def retire(self, job: str, stage: str, range_name: str) -> bool:
        return await reads.retire(self._steps, job, stage, range_name)

    @override
    async def raise_marks(
        self, job: str, generation: int, marks: Mapping[str, Marks]
    ) -> Mapping[str, Marks]:
        return await reads.raise_marks(self._steps, job, generation, marks)

    @override
    async def unsaved(self, job: str | None = None) -> Sequence[CheckpointChunk]:
        return await checkpoints.unsaved(self._steps, job)

    @override
    async def note_saved(self, chunks: Sequence[CheckpointChunk]) -> None:
        await checkpoints.note_saved(self._steps, chunks)

    # ---- waiting

    @override
    def watch(self, job: str, stage: str | None = None) -> AbstractContextManager[Watch]:
        return self._watches.watch(job, stage)

    @override
    def wake_readers(self) -> None:
        self._watches.wake_all()

    async def _listen(self) -> None:
        """Listen to what other processes publish. A message is only a hint: who is woken reads again."""
        pause_s = _LISTEN_RETRY_S
        while True:
            try:
                async with contextlib.aclosing(self._hints()) as hints:
                    async for hint in hints:
                        self._handle(hint)
                        # The first is sent before the server has answered.
                        if hint is not None:
                            pause_s = _LISTEN_RETRY_S
            except (UnavailableError, StoreRefusedError) as error:
                log.warning("cannot listen to other replicas, retrying: %s", error.detail)
            except Exception:
                log.exception("listening to other replicas failed; retrying")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LISTEN_RETRY_S)

    def _hints(self) -> AsyncGenerator[Hint]:
        return self._client.hints(schema.CHANNELS)

    def _handle(self, hint: Hint) -> None:
        if hint is None:
            # Messages may have been missed while nobody listened.
            self.wake_readers()
            return
        name, message = hint
        job = name.removeprefix(schema.channel(""))
        stages = reply.decode(message)
        if stages:
            self._watches.wake(job, stages)
        elif job in self._steps.caches:
            self._steps.forget_layout(job)
            self._watches.wake_job(job)
