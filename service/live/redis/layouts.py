"""Installing a job on Redis, and changing its layout."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np

from service.live.port import FENCE_BITS, StateLostError
from service.live.redis import schema
from service.live.redis.packing import pack
from service.live.redis.schema import Plan
from service.live.redis.states import (
    META_FIELDS,
    Dumped,
    LayoutChange,
    Meta,
    flat,
    fresh,
    pairs,
    read_leases,
)
from service.live.redis.steps import FrozenError, MovedError, Steps, reply
from service.model.jobs import InstalledJob


async def begin(steps: Steps, job: InstalledJob) -> None:
    """See the port."""
    while True:
        now = await _meta(steps, job.name)
        if now.incarnation is not None and now.incarnation >= job.incarnation:
            # Of another server perhaps: then the next step finds that out, and begins a later one.
            return
        if await _start(steps, job, now, supersede=False):
            return


async def install(steps: Steps, job: InstalledJob) -> bool:
    """See `LiveStore.install`; return whether anything was done."""
    while True:
        now = await _meta(steps, job.name)
        if now.incarnation is None or now.incarnation < job.incarnation:
            raise StateLostError(job.name)
        if now.incarnation > job.incarnation:
            return False
        there, wanted = now.position, (job.generation, job.layout_version)
        if there > wanted:
            return False
        try:
            if now.generation < job.generation:
                done = await _start(steps, job, now, supersede=True)
            elif there < wanted:
                done = await _relayout(steps, job, now)
            else:
                done = await _catch_up(steps, job)
        except (MovedError, FrozenError):
            continue
        if done:
            steps.known(job.name).plan = None
            return True


async def _meta(steps: Steps, job: str) -> Meta:
    return Meta.read(await steps.client.command("HMGET", schema.job_keys(job)[0], *META_FIELDS))


async def _start(steps: Steps, job: InstalledJob, now: Meta, *, supersede: bool) -> bool:
    """Write a job's state afresh; False: it is not as `now` any more."""
    stages = list(job.stages)
    meta: dict[str, bytes | str | int] = {
        "incarnation": job.incarnation,
        "generation": job.generation,
        "layout_version": job.layout_version,
        "at": schema.position(job.generation, job.layout_version),
        "revision": job.revision,
        "last_run": job.last_run,
        "pipeline": schema.pack_pipeline(job.pipeline),
        "stages": msgspec.json.encode(stages).decode(),
    }
    if not supersede:
        meta |= {"fence": job.incarnation << FENCE_BITS, "stamp": 0}
    columns: list[bytes] = []
    entries: list[Any] = []
    for name in stages:
        fields, weights, tree = fresh(name, job)
        entries.append([flat(fields), name, schema.pack_view(job.stages[name].view)])
        columns += [weights, tree]
    gone = [stage for stage in now.stage_names if stage not in job.stages]
    keys = schema.job_keys(job.name)
    for name in (*stages, *gone):
        keys += schema.stage_keys(job.name, name)
    await steps.client.command("SADD", schema.JOBS, job.name)
    raw = await steps.run(
        job.name,
        "begin",
        keys,
        schema.position(job.generation, job.layout_version),
        pack([schema.channel(job.name), now.identity, supersede, flat(meta), entries]),
        *columns,
        # Each incarnation begins once: a second time, after a loss in between, would grant the
        # fences of the first again.
        repeatable=supersede,
    )
    steps.known(job.name).plan = None
    return reply.decode(raw)[1] == "ok"


async def _catch_up(steps: Steps, job: InstalledJob) -> bool:
    plan = await steps.plan(job.name)
    stages = list(job.stages)
    entries = [
        [name, str(job.stages[name].progress.run), schema.pack_view(job.stages[name].view)]
        for name in stages
    ]
    await steps.step(
        plan,
        "catch_up",
        stages,
        [schema.channel(job.name), str(job.revision), str(job.last_run), entries],
        at=schema.position(job.generation, job.layout_version),
    )
    return True


async def _relayout(steps: Steps, job: InstalledJob, now: Meta) -> bool:
    """Put the next layout in place; False: somebody else was at it, look again.

    First every step on the job is stopped: what is read then stays as it is, until it is written
    back with the ranges in their new order. Whoever dies in between leaves it to the next one.
    """
    frozen = f"!{schema.position(*now.position)}"
    plan = Plan(
        job.name, frozen, *now.position, schema.read_pipeline(await _packed(steps, job.name))
    )
    if now.at != frozen:
        with contextlib.suppress(FrozenError):
            await steps.step(plan, "freeze", (), [], at=now.at)
    change = LayoutChange(job, plan)
    stages = {name: await _dump(steps, plan, name) for name in change.carried}
    leases = read_leases(await steps.client.command("HGETALL", plan.job_keys[2]))
    keys, args, columns = change.make(stages, leases)
    raw = await steps.run(job.name, "relayout", keys, frozen, pack(args), *columns)
    steps.read_reply(plan, raw)
    # Once more: what the ledger knows beside the layout.
    return False


async def _packed(steps: Steps, job: str) -> bytes:
    packed = await steps.client.command("HGET", schema.job_keys(job)[0], "pipeline")
    if packed is None:
        raise StateLostError(job)
    return packed


async def _dump(steps: Steps, plan: Plan, stage: str) -> Dumped:
    keys = schema.stage_keys(plan.job, stage)
    fields = pairs(await steps.client.command("HGETALL", keys[0]))
    weights, owners, moments = [
        np.frombuffer(await steps.client.command("GET", key) or b"", dtype="<f8")
        for key in (keys[1], keys[3], keys[4])
    ]
    notes = pairs(await steps.client.command("HGETALL", keys[5]))
    waiting = pairs(await steps.client.command("HGETALL", keys[6]))
    idle = pairs(await steps.client.command("HGETALL", keys[7]))
    layout = plan.pipeline.stages[stage].layout
    if not fields or (layout is not None and len(weights) != len(layout)):
        # As the scripts do it: what is left is no state.
        await steps.client.command("DEL", plan.job_keys[0])
        raise StateLostError(plan.job)
    return Dumped(fields, weights, owners, moments, notes, waiting, idle)


async def remove(steps: Steps, job: str, generation: int) -> None:
    """See the port."""
    while True:
        now = await _meta(steps, job)
        keys = schema.job_keys(job)
        for name in now.stage_names:
            keys += schema.stage_keys(job, name)
        raw = await steps.run(
            job, "remove", keys, "", pack([schema.channel(job), generation, now.identity])
        )
        if reply.decode(raw)[1] == "ok":
            break
    if (await _meta(steps, job)).incarnation is None:
        await steps.client.command("SREM", schema.JOBS, job)
    steps.forget(job)
