"""Leases and runs on Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from service.errors import UnavailableError
from service.live import refusals
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.grants import claim_args, read_denied, read_grant
from service.live.redis.job_layout import JobLayout, runs_of
from service.live.redis.steps import Steps, reply, stage_layout
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.runs import RunEnd

_MAX_EXPIRED = 256
"""Leases that one step ends at most, as in `expire.lua`."""


async def claim(steps: Steps, job: str, stage: str, wanted: Claim, token: str) -> Grant:
    """Run the step `LiveStore.claim`."""
    return await steps.with_layout(
        job, lambda job_layout: _claim(steps, job_layout, stage, wanted, token)
    )


async def _claim(
    steps: Steps, job_layout: JobLayout, stage: str, claim: Claim, token: str
) -> Grant:
    layout = stage_layout(job_layout, stage)
    if claim.ranges is None:
        runs, unknown = [0, len(layout)], []
    else:
        distinct = list(dict.fromkeys(claim.ranges))
        found = layout.find(distinct)
        unknown = [distinct[k] for k in np.flatnonzero(found < 0).tolist()]
        runs = runs_of(np.sort(found[found >= 0]))
    code, *values = await steps.step(
        job_layout, "claim", (stage,), [token, *claim_args(claim, runs)]
    )
    if code == "stale-run":
        raise refusals.stale_run(stage, int(values[0]), claim.rank.run)
    if code == "conflict":
        denied = read_denied(job_layout, stage, unknown, values[0])
        raise refusals.none_granted(stage, *denied)
    *granted, returned = values
    grant = read_grant(job_layout, stage, claim, token, unknown, granted)
    return replace(grant, returned=bool(returned))


async def _stages_by_token(
    steps: Steps, job_layout: JobLayout, tokens: Sequence[str]
) -> dict[str, str]:
    """Look up the stage of each token. Whether it is current is checked by the step that follows."""
    if not tokens:
        return {}
    records = await steps.command(
        job_layout.job, "HMGET", job_layout.job_keys[2], *(f"t{token}" for token in tokens)
    )
    stages: dict[str, str] = {}
    for token, record in zip(tokens, records, strict=True):
        if record is not None:
            stages[token] = reply.decode(record.removeprefix(b"x"))[1]
    return {t: s for t, s in stages.items() if s in job_layout.pipeline.stages}


async def renew(
    steps: Steps, job: str, tokens: Sequence[str]
) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
    """Run the step `LiveStore.renew`."""
    return await steps.with_layout(job, lambda job_layout: _renew(steps, job_layout, tokens))


async def _renew(
    steps: Steps, job_layout: JobLayout, tokens: Sequence[str]
) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
    stage_of = await _stages_by_token(steps, job_layout, tokens)
    stages = list(dict.fromkeys(stage_of.values()))
    entries = [
        [token, stages.index(stage_of[token]) + 1 if token in stage_of else 0] for token in tokens
    ]
    _, results = await steps.step(job_layout, "renew", stages, entries)
    renewed: list[Renewal] = []
    lost: list[LostLease] = []
    for token, (code, *rest) in zip(tokens, schema.read_list(results), strict=True):
        if code == "ok":
            ttl_ms, stage, runs = rest
            renewed.append(Renewal(token, int(ttl_ms), job_layout.names(stage, runs or ())))
        else:
            lost.append(LostLease(token, code))
    return renewed, lost


async def release(steps: Steps, job: str, tokens: Sequence[str]) -> int:
    """Run the step `LiveStore.release`."""
    return await steps.with_layout(
        job, lambda job_layout: _release(steps, job_layout, list(dict.fromkeys(tokens)))
    )


async def _release(steps: Steps, job_layout: JobLayout, tokens: Sequence[str]) -> int:
    stage_of = await _stages_by_token(steps, job_layout, tokens)
    stages = list(dict.fromkeys(stage_of.values()))
    entries = [[token, stages.index(stage) + 1] for token, stage in stage_of.items()]
    _, ended = await steps.step(job_layout, "release", stages, entries)
    return int(ended)


async def open_run(steps: Steps, job: str, stages: Sequence[str], run: int) -> None:
    """Run the step `LiveStore.open_run`."""

    async def open_in(job_layout: JobLayout) -> None:
        known = [name for name in dict.fromkeys(stages) if name in job_layout.pipeline.stages]
        await steps.step(job_layout, "open_run", known, str(run))

    await steps.with_layout(job, open_in)


async def end_run(steps: Steps, job: str, stages: Sequence[str], end: RunEnd) -> None:
    """Run the step `LiveStore.end_run`."""

    async def end_in(job_layout: JobLayout) -> None:
        known = [name for name in dict.fromkeys(stages) if name in job_layout.pipeline.stages]
        args = [schema.channel(job), known, str(end.run), schema.pack_end(end)]
        await steps.step(job_layout, "end_run", known, args)

    await steps.with_layout(job, end_in)


async def expire(steps: Steps, job: str | None = None) -> Mapping[str, Mapping[str, int]]:
    """Run the step `LiveStore.expire`."""
    for name in steps.with_expired_lease(job):
        try:
            await steps.with_layout(name, partial(expire_job, steps))
        except StateLostError:
            # The next state begins without leases.
            steps.note_next_expiry(name, -1)
        except UnavailableError:
            # One node that does not answer must not hold up the jobs on others.
            if not steps.client.is_cluster:
                raise
    return steps.take_expired(job)


async def expire_job(steps: Steps, job_layout: JobLayout) -> None:
    """End the leases of one job that have run out, and count them for `expire`."""
    stages: list[str] = []
    while True:
        _, counts, others = await steps.step(job_layout, "expire", stages, stages)
        found = {name: int(count) for name, count in schema.read_list(counts)}
        steps.note_expired(job_layout.job, found)
        stages = [name for name in schema.read_list(others) if name in job_layout.pipeline.stages]
        if not stages and sum(found.values()) < _MAX_EXPIRED:
            return
        stages = stages or list(found)
