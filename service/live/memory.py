"""The live store of one process: plain memory, and as real as the other.

Atomic because it runs in one thread and no method gives way (no `await`) between its first look and
its last write.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import ClassVar

import numpy as np

from service.clock import Clock
from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline, Stage
from service.frontier.ranges import Layout
from service.frontier.timestamps import MIN
from service.live import refusals
from service.live.port import (
    FENCE_BITS,
    MAX_WAITING_EPOCHS,
    REMEMBERED,
    Census,
    Claim,
    Column,
    Commit,
    Committed,
    Denied,
    Grant,
    JobView,
    LiveHead,
    LostLease,
    LostReason,
    PromiseChunk,
    RangeOrder,
    RangeView,
    Rank,
    Renewal,
    Report,
    Reported,
    StageCommit,
    StageView,
    StateLostError,
    Watch,
    new_token,
)
from service.live.range_table import NOBODY, Looked, RangeTable, as_list
from service.live.tournament import Int64s
from service.live.watches import Watches
from service.state import InstalledJob, InstalledStage


@dataclass(slots=True, eq=False)
class _Lease:
    token: str
    fence: int
    stage: str
    holder: str
    rank: Rank
    ttl_ms: int
    deadline_ms: int
    members: Int64s
    """What it was granted; it may have been taken over since, so ask the table who owns it."""
    held: int
    ended: LostReason | None = None
    looked: Looked | None = None

    def lost(self, now_ms: int) -> LostReason | None:
        """Why it is no longer current, or None. At its deadline it is not."""
        if self.ended is None and self.deadline_ms <= now_ms:
            return "expired"
        return self.ended

    def left_ms(self, now_ms: int) -> int:
        return max(0, self.deadline_ms - now_ms)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What a range has said in an epoch that is not committed yet."""

    promise: int
    capped_at_commit: bool
    idle: bool
    fence: int

    def joined(self, other: _Waiting) -> _Waiting:
        """Take the smallest of what two attempts at one epoch have promised; idle is no promise."""
        return _Waiting(
            min(self.promise, other.promise),
            self.capped_at_commit or other.capped_at_commit,
            self.idle and other.idle,
            other.fence,
        )


@dataclass(slots=True, eq=False)
class _Stage:
    table: RangeTable | None
    """None: a passthrough."""
    is_source: bool
    view: StageView
    run: int
    epoch: int | None
    recorded: int | None
    """The last epoch that the ledger knows to be committed."""
    layout_since: int
    waiting: dict[int, dict[int, _Waiting]] = field(default_factory=dict[int, dict[int, _Waiting]])


@dataclass(slots=True, eq=False)
class _Job:
    name: str
    pipeline: Pipeline
    incarnation: int
    generation: int
    layout_version: int
    revision: int
    last_run: int
    fence: int
    """The last one that was granted."""
    stages: dict[str, _Stage]
    views: dict[str, StageView]
    leases: dict[str, _Lease] = field(default_factory=dict[str, _Lease])
    """By token, those that have ended not long ago among them."""
    by_fence: dict[int, _Lease] = field(default_factory=dict[int, _Lease])
    ended: deque[str] = field(default_factory=deque[str])

    def stage(self, name: str) -> _Stage:
        found = self.stages.get(name)
        if found is None:
            raise refusals.unknown_stage(self.name, name)
        return found

    def table(self, name: str) -> tuple[_Stage, RangeTable]:
        stage = self.stage(name)
        if stage.table is None:
            raise refusals.no_ranges(name)
        return stage, stage.table


class MemoryLiveStore:
    """Keeps everything in this process. See `service.live.port.LiveStore` for what each method does."""

    shared: ClassVar[bool] = False

    def __init__(self, clock: Clock, tokens: Callable[[], str] = new_token) -> None:
        self._clock = clock
        self._new_token = tokens
        self._jobs: dict[str, _Job] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        """A heap of (deadline, fence, job), one entry a lease. A renewal leaves it where it is: it is
        looked at again when it comes up."""
        self._expired: dict[str, dict[str, int]] = {}
        """Leases that ran out, by job and stage, which `expire` has yet to tell of."""
        self._watches = Watches()

    # ---- jobs

    async def open(self) -> None:
        """See the port."""

    async def begin(self, job: InstalledJob) -> None:
        """See the port."""
        old = self._jobs.get(job.name)
        if old is None or old.incarnation < job.incarnation:
            self._put(self._fresh(job))

    async def install(self, job: InstalledJob) -> None:
        """See the port."""
        old = self._job(job.name)
        if old.incarnation < job.incarnation:
            raise StateLostError(job.name)
        if old.incarnation > job.incarnation:
            return
        if old.generation < job.generation:
            new = self._fresh(job)
            # Tokens of the generation before are known to be over, and fences go on.
            for name in old.stages:
                self._end_on(old, name)
            new.ended, new.leases, new.fence = old.ended, old.leases, old.fence
            self._put(new)
        elif (old.generation, old.layout_version) == (job.generation, job.layout_version):
            self._catch_up(old, job)
        elif old.generation == job.generation and old.layout_version < job.layout_version:
            new = replace(
                old,
                pipeline=job.pipeline,
                layout_version=job.layout_version,
                last_run=max(old.last_run, job.last_run),
                revision=max(old.revision, job.revision),
                stages={},
                views={},
            )
            self._carry_over(old, new, job)
            self._put(new)
            self._catch_up(new, job)

    def _fresh(self, job: InstalledJob) -> _Job:
        new = _Job(
            name=job.name,
            pipeline=job.pipeline,
            incarnation=job.incarnation,
            generation=job.generation,
            layout_version=job.layout_version,
            revision=job.revision,
            last_run=job.last_run,
            fence=job.incarnation << FENCE_BITS,
            stages={},
            views={},
        )
        for name, installed in job.stages.items():
            new.stages[name] = _fresh_stage(job.pipeline.stages[name], installed)
        return new

    def _put(self, job: _Job) -> None:
        job.views = {name: stage.view for name, stage in job.stages.items()}
        self._jobs[job.name] = job
        self._watches.wake_job(job.name)

    def _catch_up(self, job: _Job, installed: InstalledJob) -> None:
        """Take over what is newer in the ledger: somebody recorded it and then could not say it here."""
        for name, stage in installed.stages.items():
            self._open_run(job, name, stage.progress.run)
        job.last_run = max(job.last_run, installed.last_run)
        self._publish(
            job, installed.revision, {name: stage.view for name, stage in installed.stages.items()}
        )

    def _carry_over(self, old: _Job, new: _Job, job: InstalledJob) -> None:
        for name, installed in job.stages.items():
            before = old.stages.get(name)
            layout = job.pipeline.stages[name].layout
            if before is None or not _same_kind(before.table, layout):
                stage = _fresh_stage(job.pipeline.stages[name], installed)
                self._end_on(new, name)
            else:
                stage = self._carried(new, name, before, layout, installed)
            new.stages[name] = stage
        for name in old.stages.keys() - new.stages.keys():
            self._end_on(new, name)

    def _carried(
        self, job: _Job, name: str, before: _Stage, layout: Layout | None, installed: InstalledStage
    ) -> _Stage:
        view = max(before.view, installed.view, key=lambda view: view.version)
        stage = replace(before, view=view)
        table = before.table
        if table is None or layout is None or table.layout == layout:
            return stage
        stage.is_source = job.pipeline.stages[name].is_source
        stage.table = table.carried_over(layout)
        stage.layout_since = installed.layout_since
        stage.waiting = _renumbered(before.waiting, table, stage.table)
        owned = _by_owner(stage.table.owner)
        for lease in [lease for lease in job.by_fence.values() if lease.stage == name]:
            lease.members = owned.get(lease.fence, _NONE)
            lease.held = len(lease.members)
            if not lease.held:
                self._forget(job, lease, "superseded")
        return stage

    async def remove(self, job: str, generation: int) -> None:
        """See the port."""
        found = self._jobs.get(job)
        if found is not None and found.generation <= generation:
            del self._jobs[job]
        self._watches.wake_job(job)

    async def head(self, job: str) -> LiveHead | None:
        """See the port."""
        found = self._jobs.get(job)
        return None if found is None else _head(found)

    async def heads(self) -> Mapping[str, LiveHead]:
        """See the port."""
        return {name: _head(job) for name, job in self._jobs.items()}

    async def jobs(self) -> Sequence[JobView]:
        """See the port."""
        return [_job_view(job) for job in self._jobs.values()]

    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:  # noqa: ARG002 - never out of date
        """See the port."""
        return self._job(job).pipeline

    async def job(self, job: str) -> JobView:
        """See the port."""
        return _job_view(self._job(job))

    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        """See the port."""
        found = self._job(job)
        return _job_view(found), {n: _census(s.table) for n, s in found.stages.items()}

    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        """See the port."""
        found = self._job(job)
        state = found.stage(stage)
        return _job_view(found), state.view, _census(state.table)

    def _job(self, name: str) -> _Job:
        job = self._jobs.get(name)
        if job is None:
            raise StateLostError(name)
        return job

    # ---- leases

    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        """See the port."""
        found = self._job(job)
        state, table = found.table(stage)
        _check_run(stage, state, claim.rank.run)
        now_ms = self._clock.steady_ms()
        wanted, unknown = _wanted(table, claim.ranges)
        owners = table.owner[wanted]
        keepers = {
            fence: lease
            for fence in set(owners.tolist()) - {NOBODY}
            if not _yields(lease := found.by_fence[fence], claim, now_ms)
        }
        kept = np.isin(owners, list(keepers)) if keepers else np.zeros(len(owners), dtype=np.bool_)
        denied = [Denied(name, "unknown") for name in unknown]
        for index, fence in zip(wanted[kept].tolist(), owners[kept].tolist(), strict=True):
            lease = keepers[fence]
            denied.append(Denied(table.name(index), "held", lease.holder, lease.left_ms(now_ms)))
        granted = wanted[~kept]
        if not len(granted):
            raise refusals.none_granted(stage, denied)
        lease = self._grant(found, stage, table, claim, granted, now_ms)
        return Grant(
            token=lease.token,
            fence=lease.fence,
            expires_in_ms=claim.ttl_ms,
            granted=[table.name(index) for index in granted.tolist()],
            denied=denied,
        )

    def _grant(
        self, job: _Job, stage: str, table: RangeTable, claim: Claim, granted: Int64s, now_ms: int
    ) -> _Lease:
        job.fence += 1
        lease = _Lease(
            token=self._new_token(),
            fence=job.fence,
            stage=stage,
            holder=claim.holder,
            rank=claim.rank,
            ttl_ms=claim.ttl_ms,
            deadline_ms=now_ms + claim.ttl_ms,
            members=granted,
            held=len(granted),
        )
        losers, taken = np.unique(table.owner[granted], return_counts=True)
        # The old leases are fenced here, in the same step that grants the new one: no report can
        # fall between the two.
        table.own(granted, lease.fence)
        for fence, count in zip(losers.tolist(), taken.tolist(), strict=True):
            if fence != NOBODY:
                loser = job.by_fence[fence]
                loser.held -= count
                if not loser.held:
                    self._forget(job, loser, loser.lost(now_ms) or "superseded")
        job.leases[lease.token] = lease
        job.by_fence[lease.fence] = lease
        heapq.heappush(self._deadlines, (lease.deadline_ms, lease.fence, job.name))
        return lease

    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        """See the port."""
        found = self._job(job)
        now_ms = self._clock.steady_ms()
        renewed: list[Renewal] = []
        lost: list[LostLease] = []
        for token in tokens:
            lease = found.leases.get(token)
            reason = "unknown" if lease is None else lease.lost(now_ms)
            if lease is None or reason is not None:
                lost.append(LostLease(token, reason or "unknown"))
                continue
            lease.deadline_ms = now_ms + lease.ttl_ms
            table = found.table(lease.stage)[1]
            ranges = [table.name(i) for i in table.owned(lease.fence, lease.members).tolist()]
            renewed.append(Renewal(token, lease.ttl_ms, ranges))
        return renewed, lost

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        """See the port."""
        found = self._job(job)
        now_ms = self._clock.steady_ms()
        leases = [lease for token in dict.fromkeys(tokens) if (lease := found.leases.get(token))]
        current = [lease for lease in leases if lease.lost(now_ms) is None]
        for lease in current:
            self._end(found, lease, "released")
        return len(current)

    async def expire(
        self,
        job: str | None = None,  # noqa: ARG002 - to ask all of them costs nothing here
    ) -> Mapping[str, Mapping[str, int]]:
        """See the port."""
        self._expire()
        ended, self._expired = self._expired, {}
        return ended

    def _expire(self) -> None:
        now_ms = self._clock.steady_ms()
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, fence, name = heapq.heappop(self._deadlines)
            found = self._jobs.get(name)
            lease = None if found is None else found.by_fence.get(fence)
            if found is None or lease is None:
                continue
            if lease.deadline_ms > now_ms:
                heapq.heappush(self._deadlines, (lease.deadline_ms, fence, name))
                continue
            self._end(found, lease, "expired")
            counts = self._expired.setdefault(name, {})
            counts[lease.stage] = counts.get(lease.stage, 0) + 1

    def _end(self, job: _Job, lease: _Lease, reason: LostReason) -> None:
        table = job.table(lease.stage)[1]
        table.own(table.owned(lease.fence, lease.members), NOBODY)
        self._forget(job, lease, reason)

    def _end_on(self, job: _Job, stage: str) -> None:
        """Void the leases on a stage whose ranges are gone."""
        for lease in [lease for lease in job.by_fence.values() if lease.stage == stage]:
            self._forget(job, lease, "superseded")

    def _forget(self, job: _Job, lease: _Lease, reason: LostReason) -> None:
        """Let go of a lease that owns nothing any more; its reason is remembered for a while."""
        lease.ended = reason
        lease.members = _NONE
        lease.looked = None
        del job.by_fence[lease.fence]
        job.ended.append(lease.token)
        if len(job.ended) > REMEMBERED:
            del job.leases[job.ended.popleft()]

    # ---- runs, reports, commits

    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        """See the port."""
        found = self._job(job)
        for name in stages:
            self._open_run(found, name, run)
        found.last_run = max(found.last_run, run)

    def _open_run(self, job: _Job, stage: str, run: int) -> None:
        state = job.stage(stage)
        if run <= state.run:
            return
        state.run = run
        state.waiting = {}
        for lease in [lease for lease in job.by_fence.values() if lease.stage == stage]:
            if lease.rank.run < run:
                self._end(job, lease, "superseded")

    async def report(self, job: str, stage: str, report: Report) -> Reported:
        """See the port."""
        found = self._job(job)
        state, table = found.table(stage)
        now_ms = self._clock.steady_ms()
        lease = self._current_lease(found, stage, state, report.token, now_ms)
        _check_epoch(stage, state, report.epoch)
        _check_observed(stage, state, report.observed_input)
        rejected: list[tuple[str, LostReason]] = []
        looked = table.covered(lease.fence, report.ranges, lease.looked)
        if looked is None:
            report, rejected = _partly(report, lease, table)
            indices: Column = [table.index[name] for name in report.ranges]
        else:
            lease.looked = looked
            indices = looked.indices
        lease.deadline_ms = now_ms + lease.ttl_ms
        table.note(indices, report.holds, self._clock.wall_ms())
        if report.epoch is None:
            behind = table.say(indices, report.promises, report.idle)
        else:
            behind = _wait(state, table, report, report.epoch, lease.fence, indices)
        return Reported(
            accepted=len(indices),
            behind=[table.name(index) for index in behind],
            rejected=rejected,
            expires_in_ms=lease.ttl_ms,
            view=state.view,
            advances=report.epoch is None and _is_ahead(state, table.agreement),
        )

    def _current_lease(
        self, job: _Job, stage: str, state: _Stage, token: str, now_ms: int
    ) -> _Lease:
        lease = job.leases.get(token)
        if lease is None or lease.stage != stage:
            raise refusals.unknown_lease(stage)
        if lease.rank.run < state.run:
            raise refusals.stale_run(stage, state.run, lease.rank.run)
        reason = lease.lost(now_ms)
        if reason is not None:
            raise refusals.lost_lease(reason)
        return lease

    async def commit(self, job: str, commit: Commit) -> Committed:
        """See the port."""
        found = self._job(job)
        now_ms = self._clock.steady_ms()
        states = {name: found.stage(name) for name in commit.stages}
        fresh = {
            name
            for name, stage_commit in commit.stages.items()
            if _check_commit(name, states[name], commit, stage_commit)
        }
        # Everything is checked: from here on nothing can fail, so no epoch is half committed.
        applied = dict.fromkeys(commit.stages, 0)
        for name in fresh:
            state = states[name]
            applied[name] = _apply_epoch(
                found, state, commit.epoch, commit.stages[name].observed_input, now_ms
            )
            state.epoch = commit.epoch
        unrecorded = [name for name, state in states.items() if state.recorded != state.epoch]
        return Committed(
            applied=applied,
            unrecorded=unrecorded,
            incarnation=found.incarnation,
            generation=found.generation,
        )

    # ---- publishing and reading

    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        """See the port."""
        self._expire()
        found = self._job(job)
        reach = found.pipeline.reach(touched & found.stages.keys())
        return _job_view(found), {
            name: table.agreement
            for name in reach
            if name in found.stages and (table := found.stages[name].table) is not None
        }

    async def publish(
        self,
        job: str,
        generation: int,
        revision: int,
        views: Mapping[str, StageView],
        epochs: Mapping[str, int],
    ) -> None:
        """See the port."""
        found = self._jobs.get(job)
        if found is None or found.generation != generation:
            return
        self._publish(found, revision, views)
        for name, epoch in epochs.items():
            state = found.stages.get(name)
            if state is not None:
                state.recorded = epoch if state.recorded is None else max(epoch, state.recorded)

    def _publish(self, job: _Job, revision: int, views: Mapping[str, StageView]) -> None:
        job.revision = max(job.revision, revision)
        changed: list[str] = []
        for name, view in views.items():
            state = job.stages.get(name)
            if state is None or view.version <= state.view.version:
                continue
            state.view = job.views[name] = view
            changed.append(name)
        self._watches.wake(job.name, changed)

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """See the port."""
        found = self._job(job)
        table = found.stage(stage).table
        if table is None:
            return []
        now_ms = self._clock.steady_ms()
        indices = iter(range(len(table))) if order == "range" else table.lowest_first()
        return [
            _range_view(found, table, index, now_ms)
            for index, _ in zip(indices, range(limit), strict=False)
        ]

    async def promises(self, job: str, stage: str) -> Sequence[int]:
        """See the port."""
        table = self._job(job).stage(stage).table
        return [] if table is None else table.promises.tolist()

    async def unsaved(self, job: str | None = None) -> Sequence[PromiseChunk]:
        """See the port."""
        jobs = self._jobs.values() if job is None else [self._job(job)]
        return [chunk for found in jobs for chunk in _unsaved(found)]

    async def mark_saved(self, chunks: Sequence[PromiseChunk]) -> None:
        """See the port."""
        for chunk in chunks:
            job = self._jobs.get(chunk.job)
            if job is None or job.incarnation != chunk.incarnation:
                continue
            state = job.stages.get(chunk.stage)
            if state is None or state.table is None or state.layout_since != chunk.layout_since:
                continue
            state.table.saved(chunk.chunk, chunk.stamp)

    def watch(self, job: str, stage: str | None = None) -> AbstractContextManager[Watch]:
        """See the port."""
        return self._watches.watch(job, stage)

    def let_go(self) -> None:
        """See the port."""
        self._watches.wake_all()

    async def ping(self) -> None:
        """See the port."""

    async def close(self) -> None:
        """See the port."""


_NONE: Int64s = np.zeros(0, dtype=np.int64)


def _same_kind(table: RangeTable | None, layout: Layout | None) -> bool:
    return type(None if table is None else table.layout) is type(layout)


def _fresh_stage(stage: Stage, installed: InstalledStage) -> _Stage:
    table = None if stage.layout is None else RangeTable(stage.layout, installed.promises)
    return _Stage(
        table=table,
        is_source=stage.is_source,
        view=installed.view,
        run=installed.progress.run,
        epoch=installed.progress.epoch,
        recorded=installed.progress.epoch,
        layout_since=installed.layout_since,
    )


def _job_view(job: _Job) -> JobView:
    return JobView(
        job.name,
        job.pipeline,
        job.incarnation,
        job.generation,
        job.layout_version,
        job.revision,
        job.views,
    )


def _head(job: _Job) -> LiveHead:
    return LiveHead(job.incarnation, job.generation, job.layout_version, job.revision, job.last_run)


def _unsaved(job: _Job) -> list[PromiseChunk]:
    return [
        PromiseChunk(
            job=job.name,
            stage=name,
            incarnation=job.incarnation,
            generation=job.generation,
            layout_since=state.layout_since,
            chunk=number,
            stamp=stamp,
            promises=state.table.chunk(number),
        )
        for name, state in job.stages.items()
        if state.table is not None
        for number, stamp in sorted(state.table.unsaved())
    ]


def _census(table: RangeTable | None) -> Census:
    if table is None:
        return Census(0, 0, 0, 0, 0)
    return Census(len(table), table.promised, table.idle, table.final, table.leased)


def _wanted(table: RangeTable, names: Sequence[str] | None) -> tuple[Int64s, list[str]]:
    if names is None:
        return np.arange(len(table), dtype=np.int64), []
    distinct = dict.fromkeys(names)
    known = [table.index[name] for name in distinct if name in table.index]
    return np.array(known, dtype=np.int64), [n for n in distinct if n not in table.index]


def _yields(lease: _Lease, claim: Claim, now_ms: int) -> bool:
    """Tell whether a range under `lease` may be granted to `claim`."""
    return lease.lost(now_ms) is not None or lease.holder == claim.holder or claim.rank > lease.rank


def _check_run(stage: str, state: _Stage, run: int) -> None:
    if run != state.run:
        raise refusals.stale_run(stage, state.run, run)


def _check_epoch(stage: str, state: _Stage, epoch: int | None) -> None:
    if epoch is None:
        return
    if state.epoch is not None and epoch <= state.epoch:
        raise refusals.stale_epoch(stage, epoch, state.epoch)
    if epoch not in state.waiting and len(state.waiting) >= MAX_WAITING_EPOCHS:
        raise refusals.epochs_waiting(stage, len(state.waiting))


def _check_observed(stage: str, state: _Stage, observed: int | None) -> None:
    published = state.view.watermark.input
    if observed is not None and observed > published:
        raise refusals.input_ahead(stage, observed, published)


def _partly(
    report: Report, lease: _Lease, table: RangeTable
) -> tuple[Report, list[tuple[str, LostReason]]]:
    """Cut a report down to what its lease is still on; say why not, of the rest."""
    kept = [k for k, name in enumerate(report.ranges) if table.is_on(lease.fence, name)]
    members = set(lease.members.tolist())
    rejected: list[tuple[str, LostReason]] = [
        (name, "superseded" if table.index.get(name) in members else "unknown")
        for name in report.ranges
        if not table.is_on(lease.fence, name)
    ]
    if not kept:
        raise refusals.none_covered(lease.stage, rejected)
    promises = as_list(report.promises)
    part = replace(
        report,
        ranges=[report.ranges[k] for k in kept],
        promises=[promises[k] for k in kept],
        idle=None if report.idle is None else [report.idle[k] for k in kept],
        holds=None if report.holds is None else [report.holds[k] for k in kept],
    )
    return part, rejected


def _is_ahead(state: _Stage, agreement: Agreement) -> bool:
    published = state.view.watermark
    return agreement.watermark > published.output or (
        state.is_source and agreement.idle != published.idle
    )


def _wait(
    state: _Stage,
    table: RangeTable,
    report: Report,
    epoch: int,
    fence: int,
    indices: Column,
) -> list[int]:
    """Let what was said wait for the epoch; return the indices of what is behind already."""
    waiting = state.waiting.setdefault(epoch, {})
    behind: list[int] = []
    idle = report.idle or repeat(False)
    said_by = zip(as_list(indices), as_list(report.promises), idle, strict=False)
    for index, promise, is_idle in said_by:
        said = _Waiting(promise, report.capped_at_commit, is_idle, fence)
        earlier = waiting.get(index)
        waiting[index] = said if earlier is None else earlier.joined(said)
        if MIN < promise < table.promise(index):
            behind.append(index)
    return behind


def _check_commit(name: str, state: _Stage, commit: Commit, stage_commit: StageCommit) -> bool:
    """Raise if the epoch may not be committed for this stage; False if it already was."""
    _check_run(name, state, commit.run)
    if state.epoch is not None and commit.epoch < state.epoch:
        _check_epoch(name, state, commit.epoch)
    if commit.epoch == state.epoch:
        return False
    _check_observed(name, state, stage_commit.observed_input)
    waiting = state.waiting.get(commit.epoch, {})
    if stage_commit.observed_input is None and any(w.capped_at_commit for w in waiting.values()):
        raise refusals.uncapped(name, commit.epoch)
    return True


def _apply_epoch(
    job: _Job, state: _Stage, epoch: int, observed_input: int | None, now_ms: int
) -> int:
    waiting = state.waiting.get(epoch, {})
    # Reports of earlier epochs that were never committed go too: they promise less than these.
    state.waiting = {number: said for number, said in state.waiting.items() if number > epoch}
    table = state.table
    if table is None or not waiting:
        return 0
    promises = [
        said.promise if observed_input is None else min(said.promise, observed_input)
        for said in waiting.values()
    ]
    # A promise stays true whoever holds the range now. The word "idle" does not: the next worker may
    # have seen data, so it counts only under a lease that is still current.
    idle = [
        said.idle
        and table.owned_by(index) == said.fence
        and job.by_fence[said.fence].lost(now_ms) is None
        for index, said in waiting.items()
    ]
    table.say(list(waiting), promises, idle)
    return len(waiting)


def _renumbered(
    waiting: Mapping[int, Mapping[int, _Waiting]], old: RangeTable, new: RangeTable
) -> dict[int, dict[int, _Waiting]]:
    """Keep what waits for ranges that stay; what changed ranges have said is void with their leases."""
    return {
        epoch: {
            new.index[name]: what
            for index, what in said.items()
            if (name := old.name(index)) in new.index
        }
        for epoch, said in waiting.items()
    }


def _by_owner(owner: Int64s) -> dict[int, Int64s]:
    order = np.argsort(owner, kind="stable")
    fences, starts = np.unique(owner[order], return_index=True)
    parts = np.split(order.astype(np.int64), starts[1:])
    return dict(zip(fences.tolist(), parts, strict=True))


def _range_view(job: _Job, table: RangeTable, index: int, now_ms: int) -> RangeView:
    lease = job.by_fence.get(table.owned_by(index))
    if lease is None or lease.lost(now_ms) is not None:
        return replace(table.view(index, None, None), fence=None)
    return table.view(index, lease.holder, lease.left_ms(now_ms))
