"""Decisions about ranges in memory that workers do not make: idleness by policy, and retirement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from service.frontier.graph import is_ahead
from service.frontier.idleness import after_set_back, is_void
from service.frontier.leases import held_moment, held_since
from service.frontier.ranges import Layout
from service.live import refusals
from service.live.memory.state import LiveJob
from service.model.observations import Settled


def settle(
    job: LiveJob, stage: str, layout: Layout, decisions: Sequence[Settled], wall_ms: int
) -> bool:
    """See `LiveStore.settle`."""
    state, table = job.table(stage)
    for each in decisions if table.layout == layout else ():
        index = each.index
        facts = table.facts.get(index)
        if (
            index in table.retired
            or table.owned_by(index) != each.fence
            or (None if facts is None else facts.quiet_since_ms) != each.quiet_since_ms
            or (each.lets_pass and facts is not None and facts.is_unfinished)
        ):
            continue
        table.apply([index], [each.promise], [each.idle], wall_ms=wall_ms)
        if each.idle:
            table.idle_by_policy.add(index)
    job.note_returns(stage)
    return is_ahead(table.agreement, state.view.watermark)


def follow_set_back(job: LiveJob, stage: str, now_ms: int, after_ms: int) -> None:
    """See `LiveStore.follow_set_back`."""
    state, table = job.table(stage)
    if is_void(state.commits, now_ms):
        state.commits = None

    def corrected(index: int, given_ms: int) -> int:
        quiet_ms = after_ms if index in table.idle_by_policy else 0
        return after_set_back(given_ms, now_ms, quiet_ms=quiet_ms)

    for index, moment_ms in enumerate(table.held_since_ms.tolist()):
        since_ms = corrected(index, held_since(moment_ms))
        table.held_since_ms[index] = held_moment(since_ms, watched=moment_ms >= 0)
    for index, facts in table.facts.items():
        since_ms = corrected(index, facts.quiet_since_ms)
        table.facts[index] = replace(facts, quiet_since_ms=since_ms)


def retire(job: LiveJob, stage: str, range_name: str) -> bool:
    """See `LiveStore.retire`."""
    state, table = job.table(stage)
    index = table.index.get(range_name)
    if index is None:
        raise refusals.unknown_range(stage, range_name)
    table.retire(index)
    return is_ahead(table.agreement, state.view.watermark)
