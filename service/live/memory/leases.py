"""Leases in memory: granting, renewing and ending them.

The functions are parts of atomic steps: the store calls them without an `await` in between.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from service.frontier.columns import Int64s
from service.frontier.leases import (
    continues_watch,
    held_moment,
    is_current,
    is_fenced,
    is_of_run,
    opens_run,
    takes_over,
)
from service.frontier.ranges import RangeNames
from service.live import refusals
from service.live.memory.range_table import NOBODY, RangeTable
from service.live.memory.state import Lease, LiveJob, LiveStage
from service.live.port import REMEMBERED
from service.model.leases import (
    MAX_DENIED,
    Claim,
    Denied,
    Grant,
    LostLease,
    LostReason,
    Renewal,
)
from service.model.runs import RunEnd

NOTHING: Int64s = np.zeros(0, dtype=np.int64)


def grant(job: LiveJob, stage: str, claim: Claim, token: str, now_ms: int) -> Grant:
    """See `LiveStore.claim`."""
    state, table = job.table(stage)
    check_run(stage, state, claim.rank.run)
    wanted, unknown = find_wanted(table, claim.ranges)
    owners = table.owner[wanted]
    keepers = {
        fence: lease
        for fence in set(np.unique(owners).tolist()) - {NOBODY}
        if not _yields(lease := job.by_fence[fence], claim, now_ms)
    }
    kept = np.isin(owners, list(keepers)) if keepers else np.zeros(len(owners), dtype=np.bool_)
    denied = [Denied(name, "unknown") for name in unknown[:MAX_DENIED]]
    held = wanted[kept][: MAX_DENIED - len(denied)]
    for index, fence in zip(held.tolist(), table.owner[held].tolist(), strict=True):
        lease = keepers[fence]
        denied.append(Denied(table.name(index), "held", lease.holder, lease.left_ms(now_ms)))
    granted = wanted[~kept]
    denied_total = len(unknown) + len(wanted) - len(granted)
    if not len(granted):
        raise refusals.none_granted(stage, denied, denied_total)
    lease = _lease(job, stage, table, claim, granted, token, now_ms)
    return Grant(
        token=lease.token,
        fence=lease.fence,
        expires_in_ms=claim.ttl_ms,
        granted=RangeNames(table.layout, granted),
        denied=denied,
        denied_total=denied_total,
        returned=job.awaits_revision(stage, granted),
    )


def _lease(
    job: LiveJob,
    stage: str,
    table: RangeTable,
    claim: Claim,
    granted: Int64s,
    token: str,
    now_ms: int,
) -> Lease:
    job.fence += 1
    lease = Lease(
        token=token,
        fence=job.fence,
        stage=stage,
        holder=claim.holder,
        rank=claim.rank,
        ttl_ms=claim.ttl_ms,
        deadline_ms=now_ms + claim.ttl_ms,
        members=granted,
        held=len(granted),
        watched=claim.watched,
    )
    owners = table.owner[granted]
    losers, taken = np.unique(owners, return_counts=True)
    anew = [f for f in losers.tolist() if not _continues(job, f, claim, now_ms)]
    moment_ms = held_moment(now_ms, watched=claim.watched)
    table.held_since_ms[granted[np.isin(owners, anew)]] = moment_ms
    # The old leases are fenced here, in the same step that grants the new one: no report can come
    # between the two.
    table.own(granted, lease.fence)
    for fence, count in zip(losers.tolist(), taken.tolist(), strict=True):
        if fence != NOBODY:
            loser = job.by_fence[fence]
            loser.held -= count
            if not loser.held:
                forget(job, loser, loser.lost(now_ms) or "superseded")
    job.leases[lease.token] = lease
    job.by_fence[lease.fence] = lease
    return lease


def _continues(job: LiveJob, fence: int, claim: Claim, now_ms: int) -> bool:
    """Return whether a claim continues the proof of a lease, or begins one of its own."""
    if fence == NOBODY:
        return False
    lease = job.by_fence[fence]
    # A lease that has run out left a gap, even if nobody has ended it yet.
    before = lease.watched and lease.lost(now_ms) is None
    return continues_watch(watched=claim.watched, before=before)


def renew(
    job: LiveJob, tokens: Sequence[str], now_ms: int
) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
    """See `LiveStore.renew`."""
    renewed: list[Renewal] = []
    lost: list[LostLease] = []
    for token in tokens:
        lease = job.leases.get(token)
        reason = "unknown" if lease is None else lease.lost(now_ms)
        if lease is None or reason is not None:
            lost.append(LostLease(token, reason or "unknown"))
            continue
        lease.deadline_ms = now_ms + lease.ttl_ms
        table = job.table(lease.stage)[1]
        ranges = table.owned(lease.fence, lease.members)
        renewed.append(Renewal(token, lease.ttl_ms, RangeNames(table.layout, ranges)))
    return renewed, lost


def release(job: LiveJob, tokens: Sequence[str], now_ms: int) -> int:
    """See `LiveStore.release`."""
    leases = [lease for token in dict.fromkeys(tokens) if (lease := job.leases.get(token))]
    current = [lease for lease in leases if lease.lost(now_ms) is None]
    for lease in current:
        end(job, lease, "released", now_ms)
    return len(current)


def end(job: LiveJob, lease: Lease, reason: LostReason, now_ms: int) -> None:
    """End a lease: its ranges are free."""
    table = job.table(lease.stage)[1]
    freed = table.owned(lease.fence, lease.members)
    table.own(freed, NOBODY)
    table.held_since_ms[freed] = min(lease.deadline_ms, now_ms)
    if reason == "expired" and len(freed):
        job.stage(lease.stage).departed.appendleft((lease.deadline_ms, lease.holder))
    job.note_returns(lease.stage)
    forget(job, lease, reason)


def end_on(job: LiveJob, stage: str) -> None:
    """End the leases on a stage whose ranges were removed."""
    for lease in [lease for lease in job.by_fence.values() if lease.stage == stage]:
        forget(job, lease, "superseded")


def forget(job: LiveJob, lease: Lease, reason: LostReason) -> None:
    """Remove a lease that owns no range any more; its reason stays known for a while."""
    lease.ended = reason
    lease.members = NOTHING
    lease.last_lookup = None
    del job.by_fence[lease.fence]
    job.ended.append(lease.token)
    if len(job.ended) > REMEMBERED:
        del job.leases[job.ended.popleft()]


def open_run(job: LiveJob, stage: str, run: int, now_ms: int) -> None:
    """Give a stage to a run. The leases and waiting reports of older runs are void."""
    state = job.stage(stage)
    if not opens_run(run, state.run):
        return
    state.run = run
    state.end = None
    state.waiting = {}
    state.commits = None
    state.kept = None
    for lease in [lease for lease in job.by_fence.values() if lease.stage == stage]:
        if is_fenced(lease.rank.run, run):
            end(job, lease, "superseded", now_ms)


def end_run(job: LiveJob, stage: str, ended: RunEnd, now_ms: int) -> None:
    """End a run at a stage that still belongs to it, and its leases there."""
    state = job.stage(stage)
    if not is_of_run(ended.run, state.run):
        return
    state.end = ended
    # Its commits no longer prove that it finds nothing.
    state.commits = None
    for lease in [lease for lease in job.by_fence.values() if lease.stage == stage]:
        if is_of_run(lease.rank.run, ended.run):
            end(job, lease, "released", now_ms)


def current_lease(job: LiveJob, stage: str, state: LiveStage, token: str, now_ms: int) -> Lease:
    """Return a lease that is current. Raises `LeaseLostError`, `StaleRunError`."""
    lease = job.leases.get(token)
    if lease is None or lease.stage != stage:
        raise refusals.unknown_lease(stage)
    if is_fenced(lease.rank.run, state.run):
        raise refusals.stale_run(stage, state.run, lease.rank.run)
    reason = lease.lost(now_ms)
    if reason is not None:
        raise refusals.lost_lease(reason)
    return lease


def check_run(stage: str, state: LiveStage, run: int) -> None:
    """Raise `StaleRunError` unless the stage is of this run."""
    if not is_of_run(run, state.run):
        raise refusals.stale_run(stage, state.run, run)


def find_wanted(table: RangeTable, names: Sequence[str] | None) -> tuple[Int64s, list[str]]:
    """Return the indices of the claimed ranges (None: of all), and the names that are unknown."""
    if names is None:
        return np.arange(len(table), dtype=np.int64), []
    distinct = list(dict.fromkeys(names))
    found = table.layout.find(distinct)
    # In the order of the layout, in which the columns of packed reports come.
    return np.sort(found[found >= 0]), [distinct[k] for k in np.flatnonzero(found < 0).tolist()]


def _yields(lease: Lease, claim: Claim, now_ms: int) -> bool:
    """Tell whether a range under `lease` may be granted to `claim`."""
    return lease.lost(now_ms) is not None or takes_over(
        claim.rank, lease.rank, same_holder=lease.holder == claim.holder
    )


class Deadlines:
    """The deadlines of all leases, and the counts of those that have expired."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        """(deadline, fence, job), one entry a lease. A renewal does not change it: the new deadline is
        read when the entry comes up."""
        self._expired: dict[str, dict[str, int]] = {}

    def note(self, job: LiveJob) -> None:
        """Add the lease that was granted last."""
        lease = job.by_fence[job.fence]
        heapq.heappush(self._heap, (lease.deadline_ms, lease.fence, job.name))

    def expire(self, jobs: Mapping[str, LiveJob], now_ms: int) -> None:
        """End the leases that have run out."""
        while self._heap and not is_current(self._heap[0][0], now_ms):
            _, fence, name = heapq.heappop(self._heap)
            job = jobs.get(name)
            lease = None if job is None else job.by_fence.get(fence)
            if job is None or lease is None:
                continue
            if is_current(lease.deadline_ms, now_ms):
                heapq.heappush(self._heap, (lease.deadline_ms, fence, name))
                continue
            end(job, lease, "expired", now_ms)
            job.changes += 1
            counts = self._expired.setdefault(name, {})
            counts[lease.stage] = counts.get(lease.stage, 0) + 1

    def take_expired(self) -> Mapping[str, Mapping[str, int]]:
        """Return how many have expired since the last call, by job and stage."""
        expired, self._expired = self._expired, {}
        return expired
