"""Applying a report in memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from service.frontier.graph import is_ahead
from service.frontier.ranges import RangeNames
from service.live import refusals
from service.live.memory.epochs import check_arrival, check_observed, note_unfinished, wait
from service.live.memory.leases import check_run, current_lease, end, find_wanted, grant
from service.live.memory.range_table import RangeTable
from service.live.memory.rows import Rows, as_list, neighbours
from service.live.memory.state import Lease, LiveJob, LiveStage
from service.live.port import UnknownShardsError
from service.model.leases import Claim, Grant, LostReason
from service.model.reports import Report, Reported, column


def apply(job: LiveJob, stage: str, report: Report, now_ms: int, wall_ms: int) -> Reported:
    """See `LiveStore.report`."""
    state, table = job.table(stage)
    lease, granted = _lease(job, stage, state, report, now_ms)
    report, rows, rejected = _covered(report, lease, table)
    lease.deadline_ms = now_ms + lease.ttl_ms
    if report.hold_columns is None:
        table.notes.put(rows, report.notes)
    else:
        table.notes.put_columns(rows, report.hold_columns)
    promises = column(report)
    # Also if it waits for its epoch: its worker lives.
    table.end_retirements(rows, lease.holder, wall_ms=wall_ms)
    if report.epoch is None:
        table.keep_facts(rows, report.facts, now_ms=now_ms, wall_ms=wall_ms)
        note_unfinished(state, table, rows, now_ms=now_ms)
        idle = table.staying_idle(rows, report.idle, report.facts)
        behind = table.apply(rows, promises, idle, wall_ms=wall_ms)
    else:
        behind = wait(state, table, report, report.epoch, lease.fence, rows, now_ms)
    names = RangeNames(table.layout, lease.members) if report.ranges is None else report.ranges
    if report.releases:
        end(job, lease, "released", now_ms)
    # A claim ends the idleness of its ranges, also if the report waits for its epoch.
    may_advance = report.epoch is None or granted is not None
    return Reported(
        accepted=len(promises),
        behind=[table.name(index) for index in behind],
        # Claimed ranges that were not granted are denied, and not rejected as well.
        rejected=rejected if granted is None else [],
        expires_in_ms=0 if report.releases else lease.ttl_ms,
        view=state.view,
        advances=may_advance and is_ahead(table.agreement, state.view.watermark),
        ranges=names,
        grant=granted,
        ends_retirement=table.changed.has_unsaved_end(rows),
        returned=job.awaits_revision(stage, rows),
    )


def _lease(
    job: LiveJob, stage: str, state: LiveStage, report: Report, now_ms: int
) -> tuple[Lease, Grant | None]:
    """Return the lease of a report, and its grant if the report claims it.

    The claim is checked last, so that a report that is refused claims nothing.
    """
    claim = report.claim
    if claim is None:
        lease = current_lease(job, stage, state, report.token, now_ms)
        _check(stage, state, report)
        return lease, None
    check_run(stage, state, claim.rank.run)
    _check(stage, state, report)
    _check_joined(job, stage, claim)
    granted = grant(job, stage, claim, report.token, now_ms)
    return job.by_fence[granted.fence], granted


def _check(stage: str, state: LiveStage, report: Report) -> None:
    check_arrival(stage, state, report.epoch)
    check_observed(stage, state, report.observed_input)


def _check_joined(job: LiveJob, stage: str, claim: Claim) -> None:
    if job.pipeline.stages[stage].policy.is_dynamic:
        unknown = find_wanted(job.table(stage)[1], claim.ranges)[1]
        if unknown:
            raise UnknownShardsError(unknown)


def _covered(
    report: Report, lease: Lease, table: RangeTable
) -> tuple[Report, Rows, list[tuple[str, LostReason]]]:
    """Reduce a report to the ranges that its lease is still on; return it, their indices, and the others
    with the reason.
    """
    names = report.ranges
    if names is None:
        members = lease.members
        report = refusals.spoken_for_all(report, len(members))
        rows = neighbours(members)
        if np.count_nonzero(table.owner[rows] == lease.fence) == len(members):
            return report, rows, []
        names = list(RangeNames(table.layout, members))
    else:
        lookup = table.covered(lease.fence, names, lease.last_lookup)
        if lookup is not None:
            lease.last_lookup = lookup
            return report, lookup.indices, []
    return _partly(report, names, lease, table)


def _partly(
    report: Report, names: Sequence[str], lease: Lease, table: RangeTable
) -> tuple[Report, Rows, list[tuple[str, LostReason]]]:
    kept = [k for k, name in enumerate(names) if table.is_on(lease.fence, name)]
    members = set(lease.members.tolist())
    rejected: list[tuple[str, LostReason]] = [
        (name, "superseded" if table.index.get(name) in members else "unknown")
        for name in names
        if not table.is_on(lease.fence, name)
    ]
    if not kept:
        raise refusals.none_covered(lease.stage, rejected)
    promises = as_list(column(report))
    part = msgspec.structs.replace(
        report,
        ranges=[names[k] for k in kept],
        promises=[promises[k] for k in kept],
        idle=None if report.idle is None else [report.idle[k] for k in kept],
        notes=None if report.notes is None else [report.notes[k] for k in kept],
        facts=None if report.facts is None else [report.facts[k] for k in kept],
        hold_columns=None
        if report.hold_columns is None
        else {name: each[kept] for name, each in report.hold_columns.items()},
    )
    return part, np.array([table.index[names[k]] for k in kept], dtype=np.int64), rejected
