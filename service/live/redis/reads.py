"""Reading a job from Redis, for readers and for the publisher."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from service.frontier.agreement import Agreement
from service.frontier.columns import Int64s
from service.frontier.facts import Counts
from service.frontier.graph import Pipeline
from service.frontier.ranges import Layout
from service.frontier.timestamps import MAX
from service.live import refusals
from service.live.batching import Batcher
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.heads import JOBS_AT_ONCE, all_heads, heads_of, parts_of
from service.live.redis.job_layout import JobLayout
from service.live.redis.leases import expire_job
from service.live.redis.steps import Snapshot, Steps, stage_layout
from service.model.jobs import Census, JobView, StageProgress, StageView
from service.model.observations import Instant, Marks, Settled, StageObservation, without
from service.model.positions import LivePosition
from service.tasks import aside


class _ExpiredError(Exception):
    """Leases have run out and must be ended before the agreements are read."""


async def head(steps: Steps, job: str) -> LivePosition | None:
    """Run the step `LiveStore.head`."""
    found = (await heads_of(steps, [job])).get(job)
    if found is None:
        return None
    # The set of names is one more key that may be lost.
    await steps.list_job(job)
    return found.position


async def heads(steps: Steps) -> Mapping[str, LivePosition]:
    """Run the step `LiveStore.heads`."""
    return {job: head.position for job, head in (await all_heads(steps)).items()}


async def jobs(steps: Steps) -> Sequence[JobView]:
    """Run the step `LiveStore.jobs`."""
    there = await heads(steps)
    views: dict[str, JobView] = {
        name: view for name, at in there.items() if (view := _kept_view(steps, name, at))
    }
    # A few at a time: reports use the same connections, and must not queue behind thousands of these.
    for some in parts_of([name for name in there if name not in views], JOBS_AT_ONCE):
        found = await asyncio.gather(
            *(job_view(steps, name) for name in some), return_exceptions=True
        )
        for each in found:
            if isinstance(each, JobView):
                views[each.name] = each
            elif not isinstance(each, StateLostError):
                raise each
    return [views[name] for name in there if name in views]


def _kept_view(steps: Steps, job: str, at: LivePosition) -> JobView | None:
    """Return the last view that was read here, unless the job has changed since."""
    view = steps.cache(job).view
    if view is None:
        return None
    read_at = (view.incarnation, view.generation, view.layout_version, view.changes)
    return (
        view if read_at == (at.incarnation, at.generation, at.layout_version, at.changes) else None
    )


async def pipeline(steps: Steps, job: str, stage: str | None = None) -> Pipeline:
    """Run the step `LiveStore.pipeline`."""
    known = steps.pipelines.get(job)
    if known is not None and (stage is None or stage in known.stages):
        return known
    pipeline = await steps.with_layout(job, _pipeline_of)
    if stage is not None and stage not in pipeline.stages:
        steps.forget_layout(job)
        pipeline = await steps.with_layout(job, _pipeline_of)
    return pipeline


async def job_view(steps: Steps, job: str) -> JobView:
    """Run the step `LiveStore.job`."""
    return (await _batcher(steps, job).submit("")).view


async def snapshot(steps: Steps, job: str) -> tuple[JobView, Mapping[str, Census]]:
    """Run the step `LiveStore.snapshot`."""
    found = await _batcher(steps, job).submit(None)
    return found.view, found.censuses


async def stage(steps: Steps, job: str, stage: str) -> tuple[JobView, StageView, Census]:
    """Run the step `LiveStore.stage`."""
    found = await _batcher(steps, job).submit(stage)
    if stage not in found.view.stages:
        raise refusals.unknown_stage(job, stage)
    return found.view, found.view.stages[stage], found.censuses[stage]


async def progress(steps: Steps, job: str, stage: str) -> tuple[int, StageProgress]:
    """Run the step `LiveStore.progress`."""

    async def read(job_layout: JobLayout) -> tuple[int, StageProgress]:
        if stage not in job_layout.pipeline.stages:
            raise refusals.unknown_stage(job, stage)
        _, run, epoch = await steps.step(job_layout, "progress", (stage,), [])
        return job_layout.generation, StageProgress(int(run), int(epoch) if epoch else None)

    # The layout that is remembered may lack a stage that another replica has added.
    await pipeline(steps, job, stage)
    return await steps.with_layout(job, read)


async def _read_all(
    steps: Steps, job: str, wanted: Sequence[str | None]
) -> Sequence[Snapshot | Exception]:
    """Read a job once for several requests: a stage each, None for all stages, "" for none.

    All of them were made before the call began, so its result is new enough for each.
    """

    async def read(job_layout: JobLayout) -> Snapshot:
        known = job_layout.pipeline.stages
        stages = list(known) if None in wanted else [n for n in set(wanted) if n and n in known]
        view, censuses, _ = await _read(steps, job_layout, stages, agreements=False)
        return Snapshot(view, censuses)

    return [await steps.with_layout(job, read)] * len(wanted)


_Agreed = tuple[float, bool, bool, str, str, bool]
"""An agreement: see `read.lua`."""


async def _read(
    steps: Steps, job_layout: JobLayout, stages: Sequence[str], *, agreements: bool
) -> tuple[JobView, Mapping[str, Census], Sequence[_Agreed]]:
    code, *rest = await steps.step(job_layout, "read", stages, [list(stages), agreements])
    if code == "due":
        raise _ExpiredError
    incarnation, revision, changes, views, censuses, agreed = rest
    if {str(name) for name, _ in views} != set(job_layout.pipeline.stages):
        await steps.drop(job_layout.job)
        raise StateLostError(job_layout.job)
    view = JobView(
        job_layout.job,
        job_layout.pipeline,
        int(incarnation),
        job_layout.generation,
        job_layout.layout_version,
        int(revision),
        {name: schema.read_view(fields) for name, fields in views},
        int(changes),
    )
    steps.cache(job_layout.job).view = view
    return (
        view,
        {n: Census(*map(int, c)) for n, c in zip(stages, censuses or (), strict=True)},
        agreed or (),
    )


async def agreements(
    steps: Steps, job: str, touched: frozenset[str]
) -> tuple[JobView, Mapping[str, Agreement]]:
    """Run the step `LiveStore.agreements`."""

    async def read(job_layout: JobLayout) -> tuple[JobView, Mapping[str, Agreement]]:
        reach = job_layout.pipeline.reach(touched & job_layout.pipeline.stages.keys())
        stages = [n for n in reach if job_layout.pipeline.stages[n].layout is not None]
        while True:
            try:
                view, _, agreed = await _read(steps, job_layout, stages, agreements=True)
            except _ExpiredError:
                await expire_job(steps, job_layout)
                continue
            return view, {
                n: Agreement(
                    schema.as_time(watermark),
                    bool(idle),
                    bool(leaves_out),
                    bool(has_returned),
                    int(records),
                    int(late),
                )
                for n, (watermark, idle, leaves_out, records, late, has_returned) in zip(
                    stages, agreed, strict=True
                )
            }

    return await steps.with_layout(job, read)


_PARTS = 9
"""Parts of a reply to `observe` for each stage."""


async def observe(
    steps: Steps, job: str, stages: Sequence[str]
) -> tuple[Instant, Mapping[str, StageObservation]]:
    """Run the step `LiveStore.observe`."""

    async def read(job_layout: JobLayout) -> tuple[Instant, Mapping[str, StageObservation]]:
        known = job_layout.pipeline.stages
        found = [n for n in stages if (each := known.get(n)) and each.layout is not None]
        (_, now), *parts = await steps.step_with_columns(job_layout, "observe", found, [])

        def observations() -> Mapping[str, StageObservation]:
            return {
                name: _observation(job_layout, name, *parts[_PARTS * k : _PARTS * (k + 1)])
                for k, name in enumerate(found)
            }

        ranges = sum(len(stage_layout(job_layout, name)) for name in found)
        return Instant(int(now), int(now)), await aside(observations, ranges)

    return await steps.with_layout(job, read)


def _observation(
    job_layout: JobLayout,
    stage: str,
    raw_weights: bytes,
    raw_moments: bytes,
    raw_owners: bytes,
    marks: Any,  # noqa: ANN401 - parts of a reply
    idle: Any,  # noqa: ANN401
    facts: Any,  # noqa: ANN401
    end: bytes,
    census: Sequence[bytes],
    departed: bytes,
) -> StageObservation:
    weights = np.frombuffer(raw_weights, dtype="<f8")
    packed = {int(index): each for index, each in schema.pairs(idle).items()}
    retired = {index for index, each in packed.items() if schema.is_retired(each)}
    is_idle = np.zeros(len(weights), dtype=np.bool_)
    is_idle[list(packed.keys() - retired)] = True
    rows = _whole(raw_moments).reshape(len(schema.MOMENTS), -1)
    moments = dict(zip(schema.MOMENTS, rows, strict=True))
    by_name = schema.pairs(facts)
    counted = [int(by_name.pop(name, 0)) for name in (b"#records", b"#late", b"#corrections")]
    promises = {
        index: float(MAX) if index in retired else schema.idle_promise(each)
        for index, each in packed.items()
    }
    by_mark = schema.pairs(marks)
    commits, kept = by_mark.pop(schema.COMMITS_MARK, b""), by_mark.pop(schema.KEPT_MARK, b"")
    return StageObservation(
        stage_layout(job_layout, stage),
        schema.promises_of(weights, promises),
        is_idle,
        moments["reported_at_ms"],
        moments["raised_at_ms"],
        without({int(i): schema.read_facts(each) for i, each in by_name.items()}, retired),
        Counts(*counted),
        _whole(raw_owners),
        moments["held_since_ms"],
        {index for index, each in packed.items() if schema.is_by_policy(each)},
        retired,
        schema.read_commits(commits),
        schema.read_kept(kept),
        schema.read_end(end),
        Census(*(int(count or 0) for count in census)),
        {name.decode(): schema.as_time(float(value)) for name, value in by_mark.items()},
        job_layout.generation,
        schema.read_departed(departed),
    )


def _whole(raw: bytes) -> Int64s:
    return np.frombuffer(raw, dtype="<f8").astype(np.int64)


async def follow_set_back(steps: Steps, job: str, stage: str, after_ms: int) -> None:
    """Run the step `LiveStore.follow_set_back`."""

    async def correct(job_layout: JobLayout) -> None:
        await steps.step(job_layout, "follow_set_back", (stage,), float(after_ms))

    await steps.with_layout(job, correct)


async def settle(
    steps: Steps, job: str, stage: str, layout: Layout, decisions: Sequence[Settled]
) -> bool:
    """Run the step `LiveStore.settle`."""

    async def apply(job_layout: JobLayout) -> bool:
        is_same = stage_layout(job_layout, stage) == layout
        args = [
            [d.index, float(d.fence), _quiet_since(d), d.idle, float(d.promise)]
            for d in decisions
            if is_same
        ]
        _, ahead = await steps.step(job_layout, "settle", (stage,), args)
        return bool(ahead)

    return await steps.with_layout(job, apply)


def _quiet_since(decision: Settled) -> float:
    return -1.0 if decision.quiet_since_ms is None else float(decision.quiet_since_ms)


async def retire(steps: Steps, job: str, stage: str, range_name: str) -> bool:
    """Run the step `LiveStore.retire`."""

    async def apply(job_layout: JobLayout) -> bool:
        index = stage_layout(job_layout, stage).index.get(range_name)
        if index is None:
            raise refusals.unknown_range(stage, range_name)
        _, ahead = await steps.step(job_layout, "retire", (stage,), index)
        return bool(ahead)

    # The layout that is remembered may lack a stage that another replica has added.
    await pipeline(steps, job, stage)
    return await steps.with_layout(job, apply)


async def raise_marks(
    steps: Steps, job: str, generation: int, marks: Mapping[str, Marks]
) -> Mapping[str, Marks]:
    """Run the step `LiveStore.raise_marks`."""

    async def join(job_layout: JobLayout) -> Mapping[str, Marks]:
        if job_layout.generation != generation:
            return {}
        stages = [name for name in marks if name in job_layout.pipeline.stages]
        args = [[[n, float(v)] for n, v in marks[name].items()] for name in stages]
        _, joined = await steps.step(job_layout, "raise_marks", stages, args)
        return {
            name: {str(mark): schema.as_time(value) for mark, value in schema.read_list(kept)}
            for name, kept in zip(stages, schema.read_list(joined), strict=True)
        }

    return await steps.with_layout(job, join)


async def _pipeline_of(job_layout: JobLayout) -> Pipeline:
    return job_layout.pipeline


def _batcher(steps: Steps, job: str) -> Batcher[str | None, Snapshot]:
    cached = steps.cache(job)
    if cached.reads is None:
        cached.reads = Batcher(lambda wanted: _read_all(steps, job, wanted), lambda _: 1, 1)
    return cached.reads
