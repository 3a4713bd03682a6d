"""Epochs in memory: reports that wait for a commit, and the commit."""

from __future__ import annotations

from itertools import repeat

from service.frontier.epochs import (
    Admission,
    Arrival,
    Waiting,
    admission,
    arrival,
    idle_at_commit,
    join_attempts,
    lacks_cap,
    promise_at_commit,
)
from service.frontier.facts import LEFT_UNFINISHED
from service.frontier.idleness import next_commit, repeat_commit
from service.frontier.reports import is_behind, may_observe
from service.live import refusals
from service.live.memory.leases import check_run
from service.live.memory.range_table import RangeTable
from service.live.memory.rows import Rows, as_list
from service.live.memory.state import LiveJob, LiveStage
from service.model.reports import Commit, Committed, Report, StageCommit, column


def check_arrival(stage: str, state: LiveStage, epoch: int | None) -> None:
    """Raise `StaleEpochError` or `EpochsWaitingError` if a report of this epoch may not wait."""
    if epoch is None:
        return
    match arrival(epoch, state.epoch, state.waiting):
        case Arrival.STALE:
            raise refusals.stale_epoch(stage, epoch, state.epoch)
        case Arrival.TOO_MANY:
            raise refusals.epochs_waiting(stage, len(state.waiting))
        case Arrival.WAITS:
            return


def check_observed(stage: str, state: LiveStage, observed: int | None) -> None:
    """Raise `InputAheadError` if nobody can have observed this input watermark."""
    published = state.view.watermark.input
    if observed is not None and not may_observe(observed, published):
        raise refusals.input_ahead(stage, observed, published)


def wait(
    state: LiveStage,
    table: RangeTable,
    report: Report,
    epoch: int,
    fence: int,
    rows: Rows,
    now_ms: int,
) -> list[int]:
    """Let a report wait for its epoch; return the indices of the ranges that are behind already."""
    waiting = state.waiting.setdefault(epoch, {})
    behind: list[int] = []
    idle = report.idle or repeat(False)
    facts = report.facts or repeat(None)
    reported = zip(as_list(rows), as_list(column(report)), idle, facts, strict=False)
    for index, promise, is_idle, work in reported:
        unfinished = work is not None and work.is_unfinished
        new = Waiting(promise, report.capped_at_commit, is_idle, fence, work, unfinished)
        earlier = waiting.get(index)
        waiting[index] = new if earlier is None else join_attempts(earlier, new)
        if work is not None:
            table.note_waiting(index, work, now_ms=now_ms)
        if is_behind(table.promise(index), promise):
            behind.append(index)
    return behind


def note_unfinished(state: LiveStage, table: RangeTable, rows: Rows, *, now_ms: int) -> None:
    """Note anew those of some ranges that reports left unfinished which still wait. Facts that are
    applied before end the earlier note.
    """
    if not state.waiting or not table.facts:
        return
    indices = as_list(rows)
    for reports in state.waiting.values():
        for index in indices:
            report = reports.get(index)
            if report is not None and report.unfinished:
                table.note_waiting(index, LEFT_UNFINISHED, now_ms=now_ms)


def commit(job: LiveJob, commit: Commit, now_ms: int, wall_ms: int) -> Committed:
    """See `LiveStore.commit`."""
    states = {name: job.stage(name) for name in commit.stages}
    fresh = {
        name
        for name, stage_commit in commit.stages.items()
        if _check_commit(name, states[name], commit, stage_commit)
    }
    # Everything is checked: from here on nothing can fail, so no epoch is half committed.
    applied = dict.fromkeys(commit.stages, 0)
    for name in commit.stages.keys() - fresh:
        series = states[name].commits
        if series is not None:
            age_ms = commit.evidence_age_ms
            states[name].commits = repeat_commit(series, now_ms, age_ms=age_ms)
    for name in fresh:
        state, stage_commit = states[name], commit.stages[name]
        applied[name] = _apply_epoch(
            job, state, commit.epoch, stage_commit, now_ms=now_ms, wall_ms=wall_ms
        )
        if state.table is not None:
            job.note_returns(name)
        state.epoch = commit.epoch
        policy = job.pipeline.stages[name].policy.idle
        if policy is not None:
            state.commits = next_commit(
                state.commits, now_ms, after_ms=policy.after_ms, age_ms=commit.evidence_age_ms
            )
    return Committed(
        applied=applied,
        unrecorded=[name for name, state in states.items() if state.recorded != state.epoch],
        incarnation=job.incarnation,
        generation=job.generation,
    )


def _check_commit(name: str, state: LiveStage, commit: Commit, stage_commit: StageCommit) -> bool:
    """Raise if the epoch may not be committed for this stage; False if it already was."""
    check_run(name, state, commit.run)
    match admission(commit.epoch, state.epoch):
        case Admission.STALE:
            raise refusals.stale_epoch(name, commit.epoch, state.epoch)
        case Admission.REPEATED:
            return False
        case Admission.FRESH:
            pass
    observed = stage_commit.observed_input
    check_observed(name, state, observed)
    waiting = state.waiting.get(commit.epoch, {})
    if any(
        lacks_cap(observed, capped_at_commit=report.capped_at_commit) for report in waiting.values()
    ):
        raise refusals.uncapped(name, commit.epoch)
    return True


def _apply_epoch(
    job: LiveJob,
    state: LiveStage,
    epoch: int,
    stage_commit: StageCommit,
    *,
    now_ms: int,
    wall_ms: int,
) -> int:
    """Apply what waits for this epoch; return how many ranges that was."""
    waiting = state.waiting.get(epoch, {})
    # Reports of earlier epochs that were never committed are dropped, too: they promise less than these.
    state.waiting = {number: reports for number, reports in state.waiting.items() if number > epoch}
    state.kept = stage_commit.kept
    table = state.table
    if table is None:
        return 0
    table.counts = table.counts.plus_committed(stage_commit.late, stage_commit.corrections)
    if not waiting:
        return 0
    cap = stage_commit.cap
    promises = [promise_at_commit(report.promise, cap) for report in waiting.values()]
    idle = [
        report.idle and _stays_idle(job, report, table.owned_by(index), now_ms)
        for index, report in waiting.items()
    ]
    facts = [report.facts_at_commit for report in waiting.values()]
    indices = list(waiting)
    table.keep_facts(indices, facts if any(facts) else None, now_ms=now_ms, wall_ms=wall_ms)
    note_unfinished(state, table, indices, now_ms=now_ms)
    table.apply(indices, promises, table.staying_idle(indices, idle, facts), wall_ms=wall_ms)
    return len(waiting)


def _stays_idle(job: LiveJob, report: Waiting, owner: int, now_ms: int) -> bool:
    lease = job.by_fence.get(report.fence)
    return idle_at_commit(
        idle=report.idle,
        same_lease=owner == report.fence,
        is_current=lease is not None and lease.lost(now_ms) is None,
    )


def waiting_promise(state: LiveStage, index: int) -> int | None:
    """Return the greatest promise that a range has reported in an epoch that is not committed."""
    waiting = [reports[index].promise for reports in state.waiting.values() if index in reports]
    return max(waiting, default=None)
