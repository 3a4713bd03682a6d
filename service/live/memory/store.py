"""The live store of one process, in memory.

Each step is atomic because it runs in one thread, without an `await` between its first read and its last
write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from service.clock import Clock
from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.frontier.ranges import Layout
from service.live.memory import epochs, layouts, leases, reports, views
from service.live.memory.decisions import follow_set_back, retire, settle
from service.live.memory.leases import Deadlines
from service.live.memory.state import LiveJob
from service.live.port import LiveStore, StateLostError, Watch, new_token, with_token
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

VIEWS_AT_ONCE = 100
"""Ranges that are shown without a pause."""


class MemoryLiveStore(LiveStore):
    """A live store in this process."""

    shared: ClassVar[bool] = False

    def __init__(self, clock: Clock, tokens: Callable[[], str] = new_token) -> None:
        self._clock = clock
        self._new_token = tokens
        self._jobs: dict[str, LiveJob] = {}
        self._deadlines = Deadlines()
        self._watches = Watches()

    # ---- jobs

    @override
    async def open(self) -> None:
        pass

    @override
    async def begin(self, job: InstalledJob) -> None:
        old = self._jobs.get(job.name)
        if old is None or old.incarnation < job.incarnation:
            self._put(layouts.fresh(job))

    @override
    async def install(self, job: InstalledJob) -> None:
        old = self._job(job.name)
        if old.incarnation < job.incarnation:
            raise StateLostError(job.name)
        if old.incarnation > job.incarnation:
            return
        if old.generation < job.generation:
            self._put(layouts.reset(old, job))
        elif (old.generation, old.layout_version) == (job.generation, job.layout_version):
            self._catch_up(old, job)
        elif old.generation == job.generation and old.layout_version < job.layout_version:
            new = layouts.change(old, job)
            self._put(new)
            self._catch_up(new, job)

    def _put(self, job: LiveJob) -> None:
        job.changes += 1
        job.views = {name: stage.view for name, stage in job.stages.items()}
        self._jobs[job.name] = job
        self._watches.wake_job(job.name)

    def _catch_up(self, job: LiveJob, installed: InstalledJob) -> None:
        """Take over what is newer in the ledger: it was recorded there, but not published here."""
        now_ms = self._clock.steady_ms()
        job.changes += 1
        for name, stage in installed.stages.items():
            leases.open_run(job, name, stage.progress.run, now_ms)
            if stage.end is not None:
                leases.end_run(job, name, stage.end, now_ms)
        job.last_run = max(job.last_run, installed.last_run)
        self._publish(
            job, installed.revision, {name: stage.view for name, stage in installed.stages.items()}
        )

    @override
    async def remove(self, job: str, generation: int) -> None:
        found = self._jobs.get(job)
        if found is not None and found.generation <= generation:
            del self._jobs[job]
        self._watches.wake_job(job)

    @override
    async def head(self, job: str) -> LivePosition | None:
        found = self._jobs.get(job)
        return None if found is None else views.head(found)

    @override
    async def heads(self) -> Mapping[str, LivePosition]:
        return {name: views.head(job) for name, job in self._jobs.items()}

    @override
    async def jobs(self) -> Sequence[JobView]:
        return [views.job_view(job) for job in self._jobs.values()]

    @override
    def size(self) -> StoreSize:
        jobs = self._jobs.values()
        return StoreSize(len(jobs), sum(job.pipeline.range_count for job in jobs))

    @override
    def known(self) -> Mapping[str, Pipeline]:
        return {name: job.pipeline for name, job in self._jobs.items()}

    @override
    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        return self._job(job).pipeline

    @override
    async def job(self, job: str) -> JobView:
        return views.job_view(self._job(job))

    @override
    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        found = self._job(job)
        return views.job_view(found), {n: views.census(s.table) for n, s in found.stages.items()}

    @override
    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        found = self._job(job)
        state = found.stage(stage)
        return views.job_view(found), state.view, views.census(state.table)

    @override
    async def progress(self, job: str, stage: str) -> tuple[int, StageProgress]:
        found = self._job(job)
        state = found.stage(stage)
        return found.generation, StageProgress(state.run, state.recorded)

    def _job(self, name: str) -> LiveJob:
        job = self._jobs.get(name)
        if job is None:
            raise StateLostError(name)
        return job

    def _changing(self, name: str) -> LiveJob:
        """Find a job for a step that may change it."""
        job = self._job(name)
        job.changes += 1
        return job

    # ---- leases

    @override
    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        found = self._changing(job)
        grant = leases.grant(found, stage, claim, self._new_token(), self._clock.steady_ms())
        self._deadlines.note(found)
        return grant

    @override
    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        return leases.renew(self._job(job), tokens, self._clock.steady_ms())

    @override
    async def release(self, job: str, tokens: Sequence[str]) -> int:
        return leases.release(self._changing(job), tokens, self._clock.steady_ms())

    @override
    async def expire(
        self,
        job: str | None = None,
    ) -> Mapping[str, Mapping[str, int]]:
        self._expire()
        return self._deadlines.take_expired()

    def _expire(self) -> None:
        self._deadlines.expire(self._jobs, self._clock.steady_ms())

    # ---- runs, reports, commits

    @override
    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        found = self._changing(job)
        for name in stages:
            leases.open_run(found, name, run, self._clock.steady_ms())
        found.last_run = max(found.last_run, run)

    @override
    async def end_run(self, job: str, stages: Sequence[str], end: RunEnd) -> None:
        found = self._changing(job)
        there = [name for name in stages if name in found.stages]
        for name in there:
            leases.end_run(found, name, end, self._clock.steady_ms())
        self._watches.wake(job, there)

    @override
    async def report(self, job: str, stage: str, report: Report) -> Reported:
        clock, found = self._clock, self._changing(job)
        report = with_token(report, self._new_token)
        reported = reports.apply(found, stage, report, clock.steady_ms(), clock.wall_ms())
        if reported.grant is not None and not report.releases:
            self._deadlines.note(found)
        return reported

    @override
    async def commit(self, job: str, commit: Commit) -> Committed:
        clock = self._clock
        return epochs.commit(self._changing(job), commit, clock.steady_ms(), clock.wall_ms())

    # ---- publishing and reading

    @override
    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        self._expire()
        found = self._job(job)
        reach = found.pipeline.reach(touched & found.stages.keys())
        return views.job_view(found), {
            name: replace(
                table.agreement,
                leaves_out=table.leaves_out,
                has_returned=found.has_returned(name),
                records=table.counts.records,
                late=table.counts.late,
            )
            for name in reach
            if name in found.stages and (table := found.stages[name].table) is not None
        }

    @override
    async def publish(
        self,
        job: str,
        generation: int,
        revision: int,
        views: Mapping[str, StageView],
        epochs: Mapping[str, int],
    ) -> None:
        found = self._job(job)
        if found.generation != generation:
            return
        self._publish(found, revision, views)
        for name, epoch in epochs.items():
            state = found.stages.get(name)
            if state is not None:
                state.recorded = epoch if state.recorded is None else max(epoch, state.recorded)

    def _publish(self, job: LiveJob, revision: int, views: Mapping[str, StageView]) -> None:
        job.revision = max(job.revision, revision)
        changed: list[str] = []
        for name, view in views.items():
            state = job.stages.get(name)
            if state is None or view.version <= state.view.version:
                continue
            state.view = job.views[name] = view
            changed.append(name)
        job.changes += bool(changed)
        self._watches.wake(job.name, changed)

    @override
    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        found = self._job(job)
        state = found.stage(stage)
        table = state.table
        if table is None:
            return []
        now_ms = self._clock.steady_ms()
        indices = range(min(limit, len(table))) if order == "range" else table.lowest_first(limit)
        found_views: list[RangeView] = []
        for index in indices:
            found_views.append(views.range_view(found, state, table, index, now_ms))
            if not len(found_views) % VIEWS_AT_ONCE:
                # Others get their turn; this is for people, who need not see all at one instant.
                await asyncio.sleep(0)
        return found_views

    @override
    async def range_views(
        self, job: str, stage: str, indices: Sequence[int]
    ) -> Sequence[RangeView]:
        found = self._job(job)
        state, table = found.table(stage)
        now_ms = self._clock.steady_ms()
        return [
            replace(
                views.range_view(found, state, table, index, now_ms),
                waiting_promise=epochs.waiting_promise(state, index),
            )
            for index in indices
            if index < len(table)
        ]

    @override
    async def columns(self, job: str, stage: str) -> Columns:
        return views.columns(self._job(job).stage(stage).table)

    @override
    async def observe(
        self, job: str, stages: Sequence[str]
    ) -> tuple[Instant, Mapping[str, StageObservation]]:
        found = self._job(job)
        return Instant(self._clock.wall_ms(), self._clock.steady_ms()), {
            name: views.observation(found, found.stage(name), table)
            for name in stages
            if (table := found.stage(name).table) is not None
        }

    @override
    async def settle(
        self, job: str, stage: str, layout: Layout, decisions: Sequence[Settled]
    ) -> bool:
        self._expire()
        return settle(self._changing(job), stage, layout, decisions, self._clock.wall_ms())

    @override
    async def follow_set_back(self, job: str, stage: str, after_ms: int) -> None:
        follow_set_back(self._changing(job), stage, self._clock.steady_ms(), after_ms)

    @override
    async def retire(self, job: str, stage: str, range_name: str) -> bool:
        self._expire()
        return retire(self._changing(job), stage, range_name)

    @override
    async def raise_marks(
        self, job: str, generation: int, marks: Mapping[str, Marks]
    ) -> Mapping[str, Marks]:
        found = self._job(job)
        joined: dict[str, Marks] = {}
        if found.generation != generation:
            return joined
        for name, stage_marks in marks.items():
            kept = found.stage(name).marks
            for mark, value in stage_marks.items():
                if mark not in kept or kept[mark] < value:
                    kept[mark] = value
                    found.changes += 1
            joined[name] = dict(kept)
        return joined

    @override
    async def unsaved(self, job: str | None = None) -> Sequence[CheckpointChunk]:
        jobs = self._jobs.values() if job is None else [self._job(job)]
        return [chunk for found in jobs for chunk in views.unsaved(found)]

    @override
    async def note_saved(self, chunks: Sequence[CheckpointChunk]) -> None:
        for chunk in chunks:
            job = self._jobs.get(chunk.job)
            if job is None or job.incarnation != chunk.incarnation:
                continue
            state = job.stages.get(chunk.stage)
            if state is None or state.table is None or state.layout_since != chunk.layout_since:
                continue
            state.table.changed.saved(chunk.chunk, chunk.stamp)

    @override
    def watch(self, job: str, stage: str | None = None) -> AbstractContextManager[Watch]:
        return self._watches.watch(job, stage)

    @override
    def wake_readers(self) -> None:
        self._watches.wake_all()

    @override
    async def ping(self) -> None:
        pass

    @override
    async def close(self) -> None:
        pass
