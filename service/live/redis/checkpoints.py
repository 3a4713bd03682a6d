"""Promises on Redis: reading them, and saving them in checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import numpy as np

from service.errors import UnavailableError
from service.frontier.columns import Int64s
from service.live import refusals
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.schema import JobLayout
from service.live.redis.steps import FrozenError, LayoutChangedError, Steps
from service.model.checkpoints import PromiseChunk

_CHUNKS_AT_ONCE = 64


async def promises(steps: Steps, job: str, stage: str) -> Int64s:
    """See the port."""

    async def read(job_layout: JobLayout) -> Int64s:
        found = job_layout.pipeline.stages.get(stage)
        if found is None:
            raise refusals.unknown_stage(job, stage)
        if found.layout is None:
            return np.zeros(0, dtype=np.int64)
        chunks = [(stage, number) for number in schema.chunks_of(found.layout)]
        saved = await _chunks(steps, job_layout, chunks)
        return np.frombuffer(b"".join(c.promises for c in saved), dtype="<i8").astype(np.int64)

    return await steps.with_layout(job, read)


async def unsaved(steps: Steps, job: str | None = None) -> Sequence[PromiseChunk]:
    """See the port."""
    if job is not None:
        return await steps.with_layout(job, partial(_unsaved, steps))
    found: list[PromiseChunk] = []
    for name in await steps.names():
        with contextlib.suppress(StateLostError, UnavailableError):
            found += await steps.with_layout(name, partial(_unsaved, steps))
    return found


async def _unsaved(steps: Steps, job_layout: JobLayout) -> Sequence[PromiseChunk]:
    _, fields = await steps.step(job_layout, "unsaved", (), [])
    chunks: list[tuple[str, int]] = []
    for name in (fields or ())[::2]:
        stage, _, number = name.rpartition(":")
        if stage in job_layout.pipeline.stages:
            chunks.append((stage, int(number)))
    return await _chunks(steps, job_layout, sorted(chunks))


async def _chunks(
    steps: Steps, job_layout: JobLayout, chunks: Sequence[tuple[str, int]]
) -> Sequence[PromiseChunk]:
    found: list[PromiseChunk] = []
    for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
        part = chunks[start : start + _CHUNKS_AT_ONCE]
        stages = list(dict.fromkeys(stage for stage, _ in part))
        wanted = [[stages.index(stage) + 1, number] for stage, number in part]
        (_, heads, incarnation), *columns = await steps.step_with_columns(
            job_layout, "unsaved", stages, wanted
        )
        for (stage, number), (stamp, idle, since), column in zip(part, heads, columns, strict=True):
            weights = np.frombuffer(column, dtype="<f8")
            promises = schema.promises_of(weights, {int(i): p for i, p in idle or ()})
            found.append(
                PromiseChunk(
                    job=job_layout.job,
                    stage=stage,
                    incarnation=int(incarnation),
                    generation=job_layout.generation,
                    layout_since=int(since),
                    chunk=number,
                    stamp=int(stamp or 0),
                    promises=promises.astype("<i8").tobytes(),
                )
            )
    return found


async def mark_saved(steps: Steps, chunks: Sequence[PromiseChunk]) -> None:
    """See the port."""
    by_job: dict[str, list[PromiseChunk]] = {}
    for chunk in chunks:
        by_job.setdefault(chunk.job, []).append(chunk)
    for job, saved in by_job.items():
        args = [[f"{c.stage}:{c.chunk}", str(c.stamp)] for c in saved]
        # If the layout or the incarnation has changed, the dirty chunks are others, too.
        with contextlib.suppress(StateLostError, LayoutChangedError, FrozenError):
            job_layout = await steps.layout(job)
            if job_layout.generation == saved[0].generation:
                await steps.step(job_layout, "mark_saved", (), [str(saved[0].incarnation), args])
