"""What readers, and the publisher, are shown of a job on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from service.frontier.agreement import Agreement, agree
from service.frontier.graph import Pipeline
from service.frontier.timestamps import MAX
from service.live import refusals
from service.live.batching import Batcher
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.leases import expire_job
from service.live.redis.packing import pack
from service.live.redis.schema import Plan
from service.live.redis.steps import Read, Steps, reply
from service.model.jobs import Census, JobView, StageView
from service.model.positions import Position
from service.model.reports import NOTHING_NOTED, RangeNote, RangeOrder, RangeView


class _DueError(Exception):
    """Leases have run out, and must be ended first."""


async def head(steps: Steps, job: str) -> Position | None:
    """See the port."""
    raw = await steps.run(job, "head", schema.job_keys(job), "", pack([]))
    _, word, *fields = reply.decode(raw)
    return Position(*(int(value) for value in fields)) if word == "ok" else None


async def heads(steps: Steps) -> Mapping[str, Position]:
    """See the port."""
    every = await steps.names()
    found = await asyncio.gather(*(head(steps, name) for name in every))
    return {name: where for name, where in zip(every, found, strict=True) if where is not None}


async def jobs(steps: Steps) -> Sequence[JobView]:
    """See the port."""
    found = await asyncio.gather(
        *(job_view(steps, name) for name in await steps.names()), return_exceptions=True
    )
    views: list[JobView] = []
    for each in found:
        if isinstance(each, JobView):
            views.append(each)
        elif not isinstance(each, StateLostError):
            raise each
    return views


async def pipeline(steps: Steps, job: str, stage: str | None = None) -> Pipeline:
    """See the port."""
    pipeline = await steps.by_plan(job, _pipeline_of)
    if stage is not None and stage not in pipeline.stages:
        steps.known(job).plan = None
        pipeline = await steps.by_plan(job, _pipeline_of)
    return pipeline


async def job_view(steps: Steps, job: str) -> JobView:
    """See the port."""
    return (await _batcher(steps, job).ask("")).view


async def snapshot(steps: Steps, job: str) -> tuple[JobView, Mapping[str, Census]]:
    """See the port."""
    read = await _batcher(steps, job).ask(None)
    return read.view, read.censuses


async def stage(steps: Steps, job: str, stage: str) -> tuple[JobView, StageView, Census]:
    """See the port."""
    read = await _batcher(steps, job).ask(stage)
    if stage not in read.view.stages:
        raise refusals.unknown_stage(job, stage)
    return read.view, read.view.stages[stage], read.censuses[stage]


async def _read_all(
    steps: Steps, job: str, asked: Sequence[str | None]
) -> Sequence[Read | Exception]:
    """Read a job once for all who asked before the call began: each sees what was there then."""

    async def use(plan: Plan) -> Read:
        stages = plan.pipeline.stages
        wanted = list(stages) if None in asked else [n for n in set(asked) if n in stages]
        word = await _read(steps, plan, [name for name in wanted if name], agreements=False)
        return Read(word[0], word[1])

    read = await steps.by_plan(job, use)
    return [read] * len(asked)


async def _read(
    steps: Steps, plan: Plan, stages: Sequence[str], *, agreements: bool
) -> tuple[JobView, Mapping[str, Census], Sequence[float]]:
    word, *rest = await steps.step(plan, "read", stages, [list(stages), agreements])
    if word == "due":
        raise _DueError
    incarnation, revision, views, censuses, lows = rest
    view = JobView(
        plan.job,
        plan.pipeline,
        int(incarnation),
        plan.generation,
        plan.layout_version,
        int(revision),
        {name: schema.read_view(fields) for name, fields in views},
    )
    return (
        view,
        {n: Census(*map(int, c)) for n, c in zip(stages, censuses or (), strict=True)},
        lows or (),
    )


async def agreements(
    steps: Steps, job: str, touched: frozenset[str]
) -> tuple[JobView, Mapping[str, Agreement]]:
    """See the port."""

    async def use(plan: Plan) -> tuple[JobView, Mapping[str, Agreement]]:
        reach = plan.pipeline.reach(touched & plan.pipeline.stages.keys())
        stages = [n for n in reach if plan.pipeline.stages[n].layout is not None]
        while True:
            try:
                view, _, lows = await _read(steps, plan, stages, agreements=True)
            except _DueError:
                await expire_job(steps, plan)
                continue
            return view, {n: _agreed(low) for n, low in zip(stages, lows, strict=True)}

    return await steps.by_plan(job, use)


async def ranges(
    steps: Steps, job: str, stage: str, *, limit: int, order: RangeOrder
) -> Sequence[RangeView]:
    """See the port."""
    return await steps.by_plan(job, lambda plan: _ranges(steps, plan, stage, limit, order))


async def _ranges(
    steps: Steps, plan: Plan, stage: str, limit: int, order: RangeOrder
) -> Sequence[RangeView]:
    found = plan.pipeline.stages.get(stage)
    if found is None:
        raise refusals.unknown_stage(plan.job, stage)
    if found.layout is None:
        return []
    if order == "range":
        indices = list(range(min(limit, len(found.layout))))
    else:
        raw = await steps.client.command("GET", schema.stage_keys(plan.job, stage)[1])
        weights = np.frombuffer(raw or b"", dtype="<f8")
        # Idle ranges are not waited for: they come with the final ones.
        weights = np.where(weights == schema.IDLE, float(MAX), weights)
        indices = np.argsort(weights, kind="stable")[:limit].tolist()
    views: list[RangeView] = []
    for start in range(0, len(indices), 1_000):
        part = indices[start : start + 1_000]
        _, results = await steps.step(plan, "ranges", (stage,), part)
        views += [
            _range_view(plan.name(stage, index), result)
            for index, result in zip(part, schema.read_list(results), strict=True)
        ]
    return views


async def _pipeline_of(plan: Plan) -> Pipeline:
    return plan.pipeline


def _agreed(lowest: float) -> Agreement:
    """Draw the conclusion from the least weight, as `rules.lua` has it."""
    is_idle = lowest == schema.IDLE
    return agree(MAX if is_idle else schema.as_time(lowest), int(is_idle))


def _range_view(name: str, result: Sequence[Any]) -> RangeView:
    promise, idle, note, moment, lease = result
    fence, holder, left_ms = lease or (None, None, None)
    return RangeView(
        name=name,
        promise=schema.as_time(promise),
        idle=bool(idle),
        note=msgspec.json.decode(note, type=RangeNote) if note else NOTHING_NOTED,
        holder=holder,
        fence=None if fence is None else int(fence),
        expires_in_ms=None if left_ms is None else int(left_ms),
        reported_at_ms=int(moment) or None,
    )


def _batcher(steps: Steps, job: str) -> Batcher[str | None, Read]:
    known = steps.known(job)
    if known.reads is None:
        known.reads = Batcher(lambda asked: _read_all(steps, job, asked), lambda _: 1, 1)
    return known.reads
