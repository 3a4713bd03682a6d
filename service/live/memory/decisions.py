"""Decisions about ranges in memory that workers do not make: idleness by policy, and retirement."""

from __future__ import annotations

from collections.abc import Sequence

from service.frontier.graph import is_ahead
from service.live import refusals
from service.live.memory.state import LiveJob
from service.model.observations import Settled


def settle(job: LiveJob, stage: str, decisions: Sequence[Settled], wall_ms: int) -> bool:
    """See `LiveStore.settle`."""
    state, table = job.table(stage)
    for each in decisions:
        index = each.index
        facts = table.facts.get(index)
        if (
            index >= len(table)
            or index in table.retired
            or table.owned_by(index) != each.fence
            or (None if facts is None else facts.quiet_since_ms) != each.quiet_since_ms
            or (each.lets_pass and facts is not None and facts.is_unfinished)
        ):
            continue
        table.apply([index], [each.promise], [each.idle], wall_ms=wall_ms)
        if each.idle:
            table.idle_by_policy.add(index)
    return is_ahead(table.agreement, state.view.watermark)


def retire(job: LiveJob, stage: str, range_name: str) -> bool:
    """See `LiveStore.retire`."""
    state, table = job.table(stage)
    index = table.index.get(range_name)
    if index is None:
        raise refusals.unknown_range(stage, range_name)
    table.retire(index)
    return is_ahead(table.agreement, state.view.watermark)
