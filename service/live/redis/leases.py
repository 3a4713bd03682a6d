"""Leases and runs on Redis."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from service.errors import UnavailableError
from service.live import refusals
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.schema import Plan
from service.live.redis.steps import Steps, layout_of, reply
from service.model.leases import Claim, Denied, Grant, LostLease, Renewal

_LOOK_AGAIN_MS = 500
"""How long a job's next deadline, as heard last, is relied upon: others may have granted since."""

_EXPIRED_AT_ONCE = 256
"""Leases that one step ends."""


async def claim(steps: Steps, job: str, stage: str, wanted: Claim, token: str) -> Grant:
    """See the port."""
    return await steps.by_plan(job, lambda plan: _claim(steps, plan, stage, wanted, token))


async def _claim(steps: Steps, plan: Plan, stage: str, claim: Claim, token: str) -> Grant:
    layout = layout_of(plan, stage)
    if claim.ranges is None:
        runs, unknown = [0, len(layout)], []
    else:
        index = plan.index(stage)
        distinct = dict.fromkeys(claim.ranges)
        unknown = [name for name in distinct if name not in index]
        known = sorted(index[name] for name in distinct if name in index)
        runs = schema.runs_of(np.array(known, dtype=np.int64))
    rank = "".join(
        schema.number_text(part) for part in (claim.rank.run, claim.rank.epoch, claim.rank.attempt)
    )
    word, *rest = await steps.step(
        plan,
        "claim",
        (stage,),
        [runs, claim.holder, claim.ttl_ms, rank, str(claim.rank.run), token],
    )
    if word == "stale-run":
        raise refusals.stale_run(stage, int(rest[0]), claim.rank.run)
    denied = [Denied(name, "unknown") for name in unknown]
    for holder, left_ms, held in rest[-1] or ():
        denied += [Denied(name, "held", holder, int(left_ms)) for name in plan.names(stage, held)]
    if word == "conflict":
        raise refusals.none_granted(stage, denied)
    fence, granted, _ = rest
    return Grant(token, int(fence), claim.ttl_ms, plan.names(stage, granted), denied)


async def _stages_of(steps: Steps, plan: Plan, tokens: Sequence[str]) -> dict[str, str]:
    """Look up which stage each token is for. What it is worth is judged by the step that follows."""
    if not tokens:
        return {}
    records = await steps.client.command(
        "HMGET", plan.job_keys[2], *(f"t{token}" for token in tokens)
    )
    stages: dict[str, str] = {}
    for token, record in zip(tokens, records, strict=True):
        if record is not None:
            stages[token] = reply.decode(record.removeprefix(b"x"))[1]
    return {t: s for t, s in stages.items() if s in plan.pipeline.stages}


async def renew(
    steps: Steps, job: str, tokens: Sequence[str]
) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
    """See the port."""
    return await steps.by_plan(job, lambda plan: _renew(steps, plan, tokens))


async def _renew(
    steps: Steps, plan: Plan, tokens: Sequence[str]
) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
    of = await _stages_of(steps, plan, tokens)
    stages = list(dict.fromkeys(of.values()))
    asked = [[token, stages.index(of[token]) + 1 if token in of else 0] for token in tokens]
    _, results = await steps.step(plan, "renew", stages, asked)
    renewed: list[Renewal] = []
    lost: list[LostLease] = []
    for token, (word, *rest) in zip(tokens, schema.read_list(results), strict=True):
        if word == "ok":
            ttl_ms, stage, runs = rest
            renewed.append(Renewal(token, int(ttl_ms), plan.names(stage, runs or ())))
        else:
            lost.append(LostLease(token, word))
    return renewed, lost


async def release(steps: Steps, job: str, tokens: Sequence[str]) -> int:
    """See the port."""
    return await steps.by_plan(job, lambda plan: _release(steps, plan, list(dict.fromkeys(tokens))))


async def _release(steps: Steps, plan: Plan, tokens: Sequence[str]) -> int:
    of = await _stages_of(steps, plan, tokens)
    stages = list(dict.fromkeys(of.values()))
    asked = [[token, stages.index(stage) + 1] for token, stage in of.items()]
    _, ended = await steps.step(plan, "release", stages, asked)
    return int(ended)


async def open_run(steps: Steps, job: str, stages: Sequence[str], run: int) -> None:
    """See the port."""

    async def use(plan: Plan) -> None:
        known = [name for name in dict.fromkeys(stages) if name in plan.pipeline.stages]
        await steps.step(plan, "open_run", known, str(run))

    await steps.by_plan(job, use)


async def expire(steps: Steps, job: str | None = None) -> Mapping[str, Mapping[str, int]]:
    """See the port."""
    now_ms = steps.clock.steady_ms()
    if job is not None:
        found = steps.jobs.get(job)
        due = None if found is None else found.due
        due_jobs = [job] if due is not None and due.is_over(now_ms) else []
    else:
        due_jobs = [
            name
            for name in await steps.names()
            if (due := steps.known(name).due) is None
            or due.is_over(now_ms)
            or due.heard_at_ms + _LOOK_AGAIN_MS <= now_ms
        ]
    for name in due_jobs:
        # One job's node that is away must not hold up the others.
        with contextlib.suppress(StateLostError, UnavailableError):
            await steps.by_plan(name, partial(expire_job, steps))
    told: dict[str, Mapping[str, int]] = {}
    for name in list(steps.jobs) if job is None else [job]:
        found = steps.jobs.get(name)
        if found is not None and found.ended:
            told[name], found.ended = found.ended, Counter()
    return told


async def expire_job(steps: Steps, plan: Plan) -> None:
    """End what has run out in one job, and note it."""
    ended = steps.known(plan.job).ended
    stages: list[str] = []
    while True:
        _, counts, others = await steps.step(plan, "expire", stages, stages)
        found = {name: int(count) for name, count in schema.read_list(counts)}
        ended.update(found)
        stages = [name for name in schema.read_list(others) if name in plan.pipeline.stages]
        if not stages and sum(found.values()) < _EXPIRED_AT_ONCE:
            return
        stages = stages or list(found)
