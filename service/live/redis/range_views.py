"""Single ranges on Redis, as people see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from service.frontier.columns import Int64s
from service.frontier.facts import Facts
from service.frontier.timestamps import MAX
from service.live import refusals
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.job_layout import JobLayout, indices_of
from service.live.redis.steps import Steps, stage_layout
from service.model.reports import (
    NOTHING_NOTED,
    HoldColumns,
    RangeNote,
    RangeOrder,
    RangeView,
    holds_at,
)

_VIEWS_AT_ONCE = 250
"""Ranges that are read in one step, and shown without a pause."""

_SHOWN_MOMENTS = tuple(each.name for each in fields(RangeView) if each.name in schema.MOMENTS)


async def ranges(
    steps: Steps, job: str, stage: str, *, limit: int, order: RangeOrder
) -> Sequence[RangeView]:
    """Run the step `LiveStore.ranges`."""
    return await steps.with_layout(
        job, lambda job_layout: _ranges(steps, job_layout, stage, limit, order)
    )


async def _ranges(
    steps: Steps, job_layout: JobLayout, stage: str, limit: int, order: RangeOrder
) -> Sequence[RangeView]:
    found = job_layout.pipeline.stages.get(stage)
    if found is None:
        raise refusals.unknown_stage(job_layout.job, stage)
    if found.layout is None:
        return []
    if order == "range":
        indices = list(range(min(limit, len(found.layout))))
    else:
        # Checked against the layout: it may have changed, and then the column is no damage.
        _, raw = await steps.step_with_columns(job_layout, "weights", (stage,), [])
        if len(raw) != 8 * len(found.layout):
            await steps.drop(job_layout.job)
            raise StateLostError(job_layout.job)
        weights = np.frombuffer(raw, dtype="<f8")
        # Idle ranges are not waited for: they come with the final ones.
        weights = np.where(weights == schema.IDLE, float(MAX), weights)
        indices = np.argsort(weights, kind="stable")[:limit].tolist()
    return await _views(steps, job_layout, stage, indices, waiting=False)


async def range_views(
    steps: Steps, job: str, stage: str, indices: Sequence[int]
) -> Sequence[RangeView]:
    """Run the step `LiveStore.range_views`."""

    async def read(job_layout: JobLayout) -> Sequence[RangeView]:
        count = len(stage_layout(job_layout, stage))
        there = [index for index in indices if index < count]
        return await _views(steps, job_layout, stage, there, waiting=True)

    return await steps.with_layout(job, read)


async def _views(
    steps: Steps, job_layout: JobLayout, stage: str, indices: Sequence[int], *, waiting: bool
) -> Sequence[RangeView]:
    views: list[RangeView] = []
    for start in range(0, len(indices), _VIEWS_AT_ONCE):
        part = indices[start : start + _VIEWS_AT_ONCE]
        answer, *columns = await steps.step_with_columns(
            job_layout, "ranges", (stage,), [part, waiting]
        )
        _, results, packed, raw_kept = answer
        kept = schema.read_kept(raw_kept)
        holds = {
            int(fence): _PackedHolds(indices_of(runs), schema.read_holds(column))
            for (fence, runs), column in zip(schema.read_list(packed), columns, strict=True)
        }
        for index, result in zip(part, schema.read_list(results), strict=True):
            view = _range_view(job_layout.name(stage, index), result)
            # A note of its own, even an empty one, is newer than any packed report.
            if not result[2] and result[-1]:
                view = replace(view, note=holds[int(result[-1])].note(index))
            if kept is not None:
                view = replace(view, note=kept.note(view.note, view.promise))
            views.append(view)
    return views


@dataclass(frozen=True, slots=True)
class _PackedHolds:
    """The holds of a packed report, for all ranges of its lease."""

    members: Int64s
    columns: HoldColumns

    def note(self, index: int) -> RangeNote:
        """Return the note of one range."""
        row = int(np.searchsorted(self.members, index))
        if row >= len(self.members) or self.members[row] != index:
            return NOTHING_NOTED
        return RangeNote(holds_at(self.columns, row))


def _facts(fields: Sequence[float]) -> Facts:
    *moments, has_pending, keeps_back = fields
    return schema.facts_of(moments, b"" if has_pending else None, keeps_back=bool(keeps_back))


def _range_view(name: str, result: Sequence[Any]) -> RangeView:
    promise, idle, note, moments, lease, facts, waiting, retired, _ = result
    at = {name: int(each) or None for name, each in zip(schema.MOMENTS, moments, strict=True)}
    fence, holder, left_ms = lease or (None, None, None)
    return RangeView(
        name=name,
        promise=schema.as_time(promise),
        idle=bool(idle),
        note=msgspec.json.decode(note, type=RangeNote) if note else NOTHING_NOTED,
        holder=holder,
        fence=None if fence is None else int(fence),
        expires_in_ms=None if left_ms is None else int(left_ms),
        **{name: at[name] for name in _SHOWN_MOMENTS},
        facts=_facts(facts) if facts else None,
        retired=bool(retired),
        waiting_promise=None if waiting is False else schema.as_time(waiting),
    )
