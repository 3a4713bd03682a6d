"""Applying a report in memory."""

from __future__ import annotations

from dataclasses import replace

from service.frontier.graph import is_ahead
from service.live import refusals
from service.live.memory.epochs import check_arrival, check_observed, wait
from service.live.memory.leases import current_lease
from service.live.memory.range_table import RangeTable, as_list
from service.live.memory.state import Lease, LiveJob
from service.model.leases import LostReason
from service.model.reports import Column, Report, Reported


def apply(job: LiveJob, stage: str, report: Report, now_ms: int, wall_ms: int) -> Reported:
    """See `LiveStore.report`."""
    state, table = job.table(stage)
    lease = current_lease(job, stage, state, report.token, now_ms)
    check_arrival(stage, state, report.epoch)
    check_observed(stage, state, report.observed_input)
    rejected: list[tuple[str, LostReason]] = []
    lookup = table.covered(lease.fence, report.ranges, lease.last_lookup)
    if lookup is None:
        report, rejected = _partly(report, lease, table)
        indices: Column = [table.index[name] for name in report.ranges]
    else:
        lease.last_lookup = lookup
        indices = lookup.indices
    lease.deadline_ms = now_ms + lease.ttl_ms
    table.note(indices, report.notes)
    if report.epoch is None:
        table.keep_facts(indices, report.facts, now_ms=now_ms, wall_ms=wall_ms)
        behind = table.apply(indices, report.promises, report.idle, wall_ms=wall_ms)
    else:
        behind = wait(state, table, report, report.epoch, lease.fence, indices)
    return Reported(
        accepted=len(indices),
        behind=[table.name(index) for index in behind],
        rejected=rejected,
        expires_in_ms=lease.ttl_ms,
        view=state.view,
        advances=report.epoch is None and is_ahead(table.agreement, state.view.watermark),
    )


def _partly(
    report: Report, lease: Lease, table: RangeTable
) -> tuple[Report, list[tuple[str, LostReason]]]:
    """Reduce a report to the ranges that its lease is still on; return it and the rejected ranges."""
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
        notes=None if report.notes is None else [report.notes[k] for k in kept],
        facts=None if report.facts is None else [report.facts[k] for k in kept],
    )
    return part, rejected
