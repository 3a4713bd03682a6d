"""Installing a job on Redis, and changing its layout."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np

from service.live.port import FENCE_BITS, StateLostError
from service.live.redis import schema
from service.live.redis.job_layout import JobLayout, layout_id, pack_pipeline, read_pipeline
from service.live.redis.packing import pack
from service.live.redis.states import (
    META_FIELDS,
    Dumped,
    LayoutChange,
    Meta,
    flat,
    fresh,
    read_leases,
    restored,
)
from service.live.redis.steps import FrozenError, LayoutChangedError, Steps, reply, stage_layout
from service.model.jobs import InstalledJob


async def begin(steps: Steps, job: InstalledJob) -> None:
    """Run the step `LiveStore.begin`."""
    while True:
        # Damaged state is dropped, and then there is nothing in the way.
        with contextlib.suppress(StateLostError):
            meta = await _meta(steps, job.name)
            if meta.incarnation is not None and meta.incarnation >= job.incarnation:
                # Perhaps another server's state: then the next step notices, and a later one begins.
                return
            if await _start(steps, job, meta, supersede=False):
                return


async def install(steps: Steps, job: InstalledJob) -> bool:
    """See `LiveStore.install`; return whether anything was done."""
    while True:
        meta = await _meta(steps, job.name)
        if meta.incarnation is None or meta.incarnation < job.incarnation:
            raise StateLostError(job.name)
        if meta.incarnation > job.incarnation:
            return False
        there, wanted = meta.version, (job.generation, job.layout_version)
        if there > wanted:
            return False
        try:
            if meta.generation < job.generation:
                done = await _start(steps, job, meta, supersede=True)
            elif there < wanted:
                done = await _relayout(steps, job, meta)
            else:
                done = await _catch_up(steps, job)
        except (LayoutChangedError, FrozenError):
            continue
        if done:
            steps.forget_layout(job.name)
            return True


async def _meta(steps: Steps, job: str) -> Meta:
    return Meta.read(await steps.command(job, "HMGET", schema.job_keys(job)[0], *META_FIELDS))


async def _start(steps: Steps, job: InstalledJob, meta: Meta, *, supersede: bool) -> bool:
    """Write a job's state afresh; False: its head is no longer `meta`, so read it again."""
    stages = list(job.stages)
    head: dict[str, bytes | str | int] = {
        "incarnation": job.incarnation,
        "generation": job.generation,
        "layout_version": job.layout_version,
        "at": layout_id(job.generation, job.layout_version),
        "revision": job.revision,
        "last_run": job.last_run,
        "pipeline": pack_pipeline(job.pipeline),
        "stages": msgspec.json.encode(stages).decode(),
    }
    if not supersede:
        head |= {"fence": job.incarnation << FENCE_BITS, "stamp": 0}
    columns: list[bytes] = []
    entries: list[Any] = []
    for name in stages:
        fields, *own_columns = fresh(name, job)
        installed = job.stages[name]
        view, kept = schema.pack_view(installed.view), restored(installed)
        end = installed.end
        noted = "" if end is None else f"{end.run} {schema.pack_end(end)}"
        entries.append([flat(fields), name, view, kept.facts, noted, kept.retired])
        columns += own_columns
    gone = [stage for stage in meta.stage_names if stage not in job.stages]
    keys = schema.job_keys(job.name)
    for name in (*stages, *gone):
        keys += schema.stage_keys(job.name, name)
    await steps.list_job(job.name)
    raw = await steps.run(
        job.name,
        "begin",
        keys,
        layout_id(job.generation, job.layout_version),
        pack([schema.channel(job.name), meta.identity, supersede, flat(head), entries]),
        *columns,
        # Each incarnation begins only once: if it began again after a loss, it would grant the same
        # fences twice.
        repeatable=supersede,
    )
    steps.forget_layout(job.name)
    return reply.decode(raw)[1] == "ok"


async def _catch_up(steps: Steps, job: InstalledJob) -> bool:
    job_layout = await steps.layout(job.name)
    stages = list(job.stages)
    entries = [
        [
            name,
            str(stage.progress.run),
            schema.pack_view(stage.view),
            schema.pack_end(stage.end),
        ]
        for name, stage in job.stages.items()
    ]
    await steps.step(
        job_layout,
        "catch_up",
        stages,
        [schema.channel(job.name), str(job.revision), str(job.last_run), entries],
        layout_id=layout_id(job.generation, job.layout_version),
    )
    return True


async def _relayout(steps: Steps, job: InstalledJob, meta: Meta) -> bool:
    """Install the next layout; always False: `install` has to look again, and then catches up.

    The job is frozen first, which stops every step on it: what is read from then on cannot change until
    it is written back with the ranges in their new order. If this replica dies in between, the next one
    that installs the layout takes over.
    """
    frozen = f"!{layout_id(*meta.version)}"
    pipeline = read_pipeline(await _packed(steps, job.name))
    job_layout = JobLayout(job.name, frozen, *meta.version, pipeline, steps.lookups)
    if meta.layout_id != frozen:
        with contextlib.suppress(FrozenError):
            await steps.step(job_layout, "freeze", (), [], layout_id=meta.layout_id)
    change = LayoutChange(job, job_layout)
    stages = {name: await _dump(steps, job_layout, name) for name in change.carried}
    leases = read_leases(await steps.command(job.name, "HGETALL", job_layout.job_keys[2]))
    keys, args, columns = change.make(stages, leases)
    raw = await steps.run(job.name, "relayout", keys, frozen, pack(args), *columns)
    steps.read_reply(job_layout, raw)
    # The layout is in place; the rest of the ledger's state is still to come.
    return False


async def _packed(steps: Steps, job: str) -> bytes:
    packed = await steps.command(job, "HGET", schema.job_keys(job)[0], "pipeline")
    if packed is None:
        raise StateLostError(job)
    return packed


async def _dump(steps: Steps, job_layout: JobLayout, stage: str) -> Dumped:
    # In one step: another replica may finish the same change meanwhile, and columns of two layouts do
    # not fit together.
    _, *columns, fields, notes, waiting, idle, facts, marks, packed = await steps.step_with_columns(
        job_layout, "dump", (stage,), []
    )
    size = 8 * len(stage_layout(job_layout, stage))
    if not fields or [len(column) for column in columns] != [
        size,
        size,
        len(schema.MOMENTS) * size,
    ]:
        await steps.drop(job_layout.job)
        raise StateLostError(job_layout.job)
    weights, owners, moments = (np.frombuffer(column, dtype="<f8") for column in columns)
    return Dumped(
        schema.pairs(fields),
        weights,
        owners,
        moments,
        schema.pairs(notes),
        schema.pairs(waiting),
        schema.pairs(idle),
        schema.pairs(facts),
        schema.pairs(marks),
        schema.pairs(packed),
    )


async def remove(steps: Steps, job: str, generation: int) -> None:
    """Run the step `LiveStore.remove`."""
    while True:
        # Damaged state is dropped, and then there is nothing to remove.
        with contextlib.suppress(StateLostError):
            meta = await _meta(steps, job)
            keys = schema.job_keys(job)
            for name in meta.stage_names:
                keys += schema.stage_keys(job, name)
            raw = await steps.run(
                job, "remove", keys, "", pack([schema.channel(job), generation, meta.identity])
            )
            if reply.decode(raw)[1] == "ok":
                break
    if (await _meta(steps, job)).incarnation is None:
        await steps.unlist_job(job)
    steps.forget(job)
