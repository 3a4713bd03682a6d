"""Reports and commits on Redis. Reports that arrive together share a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from service.live import refusals
from service.live.batching import Batcher
from service.live.redis import schema
from service.live.redis.schema import Plan
from service.live.redis.spans import Asked, asked_of, report_args, reported_of
from service.live.redis.steps import MovedError, Steps, layout_of
from service.model.reports import Commit, Committed, Report, Reported

_FLIGHTS = 2
"""Calls with reports for one job that may be under way: one is worked on while the next is packed."""


async def report(steps: Steps, job: str, stage: str, report: Report) -> Reported:
    """See the port."""

    async def use(plan: Plan) -> Reported:
        layout_of(plan, stage)
        asked = asked_of(plan, stage, report)
        return await _batcher(steps, job).ask((plan, asked))

    return await steps.by_plan(job, use)


async def _report_all(
    steps: Steps, asked: Sequence[tuple[Plan, Asked]]
) -> Sequence[Reported | Exception]:
    plan = asked[0][0]
    # The layout may have changed between two that were asked: those go again by the new one.
    same = [each for by, each in asked if by is plan]
    stages = list(dict.fromkeys(each.stage for each in same))
    args = [report_args(stages.index(each.stage) + 1, each) for each in same]
    _, results, ahead = await steps.step(plan, "report", stages, args)
    outcomes: Iterator[Reported | Exception] = iter(
        [
            reported_of(plan, each, result, ahead=bool(ahead[stages.index(each.stage)]))
            for each, result in zip(same, results, strict=True)
        ]
    )
    return [next(outcomes) if by is plan else MovedError() for by, _ in asked]


async def commit(steps: Steps, job: str, commit: Commit) -> Committed:
    """See the port."""
    return await steps.by_plan(job, lambda plan: _commit(steps, plan, commit))


async def _commit(steps: Steps, plan: Plan, commit: Commit) -> Committed:
    stages = list(commit.stages)
    for name in stages:
        if name not in plan.pipeline.stages:
            raise refusals.unknown_stage(plan.job, name)
    observed = [commit.stages[name].observed_input for name in stages]
    reply = await steps.step(
        plan,
        "commit",
        stages,
        [
            str(commit.run),
            schema.epoch_text(commit.epoch),
            [False if value is None else float(value) for value in observed],
        ],
    )
    word, rest = reply[0], reply[1:]
    if word == "ok":
        applied, unrecorded = schema.read_list(rest[1]), schema.read_list(rest[2])
        return Committed(
            applied=dict(zip(stages, map(int, applied), strict=True)),
            unrecorded=[stages[int(k) - 1] for k in unrecorded],
            incarnation=int(rest[0]),
            generation=plan.generation,
        )
    k = int(rest[0]) - 1
    if word == "stale-run":
        raise refusals.stale_run(stages[k], int(rest[1]), commit.run)
    if word == "stale-epoch":
        raise refusals.stale_epoch(stages[k], commit.epoch, int(rest[1]))
    if word == "input-ahead":
        published = schema.read_view(rest[1]).watermark.input
        raise refusals.input_ahead(stages[k], observed[k] or 0, published)
    raise refusals.uncapped(stages[k], commit.epoch)


def _batcher(steps: Steps, job: str) -> Batcher[tuple[Plan, Asked], Reported]:
    known = steps.known(job)
    if known.reports is None:
        known.reports = Batcher(
            partial(_report_all, steps), lambda asked: asked[1].looked.count, _FLIGHTS
        )
    return known.reports
