"""Checkpoints of ranges on Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from service.errors import UnavailableError
from service.live import refusals
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.heads import all_heads
from service.live.redis.job_layout import JobLayout
from service.live.redis.steps import FrozenError, LayoutChangedError, Steps
from service.model.checkpoints import (
    CHUNK,
    CheckpointChunk,
    Columns,
    chunk_numbers,
    joined_columns,
    packed_column,
    packed_flags,
)

_CHUNKS_AT_ONCE = 64


async def columns(steps: Steps, job: str, stage: str) -> Columns:
    """Run the step `LiveStore.columns`."""

    async def read(job_layout: JobLayout) -> Columns:
        found = job_layout.pipeline.stages.get(stage)
        if found is None:
            raise refusals.unknown_stage(job, stage)
        size = 0 if found.layout is None else len(found.layout)
        saved = await _chunks(steps, job_layout, [(stage, n) for n in chunk_numbers(size)])
        return joined_columns(size, ((chunk.chunk, chunk.columns) for chunk in saved))

    return await steps.with_layout(job, read)


async def unsaved(steps: Steps, job: str | None = None) -> Sequence[CheckpointChunk]:
    """Run the step `LiveStore.unsaved`."""
    if job is not None:
        return await steps.with_layout(job, partial(_unsaved, steps))
    changed = [name for name, head in (await all_heads(steps)).items() if head.unsaved]
    found: list[CheckpointChunk] = []
    for name in changed:
        with contextlib.suppress(StateLostError, UnavailableError):
            found += await steps.with_layout(name, partial(_unsaved, steps))
    return found


async def _unsaved(steps: Steps, job_layout: JobLayout) -> Sequence[CheckpointChunk]:
    _, fields = await steps.step(job_layout, "unsaved", (), [])
    chunks: list[tuple[str, int]] = []
    for name in (fields or ())[::2]:
        stage, _, number = name.rpartition(":")
        if stage in job_layout.pipeline.stages:
            chunks.append((stage, int(number)))
    return await _chunks(steps, job_layout, sorted(chunks))


async def _chunks(
    steps: Steps, job_layout: JobLayout, chunks: Sequence[tuple[str, int]]
) -> Sequence[CheckpointChunk]:
    found: list[CheckpointChunk] = []
    for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
        part = chunks[start : start + _CHUNKS_AT_ONCE]
        stages = list(dict.fromkeys(stage for stage, _ in part))
        wanted = [[stages.index(stage) + 1, number] for stage, number in part]
        (_, heads, incarnation), *columns = await steps.step_with_columns(
            job_layout, "unsaved", stages, wanted
        )
        width = 1 + len(schema.SAVED_MOMENTS)
        by_column = (columns[k::width] for k in range(width))
        for (stage, number), head, *raw in zip(part, heads, *by_column, strict=True):
            stamp, aside, since, unfinished, retired_at, returned_at = head
            retired = [int(at) for at in schema.read_list(retired_at)]
            returned = {int(at): who for at, who in schema.read_list(returned_at)}
            weights, *moments = (np.frombuffer(column, dtype="<f8") for column in raw)
            promises = schema.promises_of(weights, {int(i): p for i, p in aside or ()})
            saved = dict(zip(schema.SAVED_MOMENTS, map(schema.as_times, moments), strict=True))
            saved["promises"] = promises
            found.append(
                CheckpointChunk(
                    job=job_layout.job,
                    stage=stage,
                    incarnation=int(incarnation),
                    generation=job_layout.generation,
                    layout_since=int(since),
                    chunk=number,
                    stamp=int(stamp or 0),
                    columns={
                        **{name: packed_column(column) for name, column in saved.items()},
                        "unfinished": packed_flags(map(int, schema.read_list(unfinished))),
                        "retired": packed_flags(retired),
                    },
                    returned=_returned(job_layout, stage, number, returned, retired),
                )
            )
    return found


def _returned(
    job_layout: JobLayout,
    stage: str,
    chunk: int,
    returned: Mapping[int, str],
    retired: Collection[int],
) -> Mapping[str, str]:
    """Return the ranges at these positions of a chunk that are not retired again, with their holders."""
    layout = job_layout.pipeline.stages[stage].layout
    if layout is None:
        return {}
    return {
        layout.name(CHUNK * chunk + at): holder
        for at, holder in sorted(returned.items())
        if at not in retired
    }


async def note_saved(steps: Steps, chunks: Sequence[CheckpointChunk]) -> None:
    """Run the step `LiveStore.note_saved`."""
    by_job: dict[str, list[CheckpointChunk]] = {}
    for chunk in chunks:
        by_job.setdefault(chunk.job, []).append(chunk)
    for job, saved in by_job.items():
        # If the layout or the incarnation has changed, the dirty chunks are others, too.
        with contextlib.suppress(StateLostError, LayoutChangedError, FrozenError):
            job_layout = await steps.layout(job)
            if job_layout.generation == saved[0].generation:
                known = [c for c in saved if c.stage in job_layout.pipeline.stages]
                stages = list(dict.fromkeys(c.stage for c in known))
                args = [
                    [f"{c.stage}:{c.chunk}", str(c.stamp), stages.index(c.stage) + 1, c.chunk]
                    for c in known
                ]
                await steps.step(
                    job_layout, "note_saved", stages, [str(saved[0].incarnation), args]
                )
