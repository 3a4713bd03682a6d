"""Reports and commits on Redis. Reports that arrive together share a call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec

from service.errors import InvalidReportError
from service.live import refusals
from service.live.batching import Batcher
from service.live.redis import schema
from service.live.redis.job_layout import JobLayout
from service.live.redis.spans import (
    RangeLookup,
    ResolvedReport,
    known_members,
    members_lookup,
    note_left,
    read_result,
    report_args,
    resolve,
    resolve_all,
)
from service.live.redis.steps import LayoutChangedError, Steps, stage_layout
from service.model.reports import Commit, Committed, Report, Reported

_MAX_CALLS = 2
"""Calls with reports for one job that may run at a time: one is executed while the next is packed."""


async def report(steps: Steps, job: str, stage: str, report: Report) -> Reported:
    """Run the step `LiveStore.report`."""

    async def submit(job_layout: JobLayout) -> Reported:
        stage_layout(job_layout, stage)
        if report.ranges is None:
            resolved = await _resolve_all(steps, job_layout, stage, report)
        else:
            resolved = resolve(job_layout, stage, report)
        return await _batcher(steps, job).submit((job_layout, resolved))

    return await steps.with_layout(job, submit)


async def _resolve_all(
    steps: Steps, job_layout: JobLayout, stage: str, report: Report
) -> ResolvedReport:
    known = known_members(job_layout, stage, report.token)
    if known is not None:
        # If it does not fit, the lease may be over by now, and then that is what its worker must hear.
        with suppress(InvalidReportError):
            return resolve_all(stage, report, known)
    return resolve_all(stage, report, await _members(steps, job_layout, stage, report.token))


async def _members(steps: Steps, job_layout: JobLayout, stage: str, token: str) -> RangeLookup:
    code, *values = await steps.step(job_layout, "members", (stage,), [token])
    if code == "stale-run":
        raise refusals.stale_run(stage, int(values[0]), int(values[1]))
    if code == "lease-lost":
        unknown = values[0] == "unknown"
        raise refusals.unknown_lease(stage) if unknown else refusals.lost_lease(values[0])
    return members_lookup(job_layout, stage, token, schema.read_list(values[0]))


async def _report_all(
    steps: Steps, batch: Sequence[tuple[JobLayout, ResolvedReport]]
) -> Sequence[Reported | Exception]:
    job_layout = batch[0][0]
    # The layout may have changed between two of them: those of another layout are retried.
    same = [resolved for of, resolved in batch if of is job_layout]
    stages = list(dict.fromkeys(resolved.stage for resolved in same))
    args = [report_args(job_layout, stages.index(each.stage) + 1, each) for each in same]
    _, raw_results, ahead = await steps.step(job_layout, "report", stages, args)
    results: list[Reported | Exception] = []
    for resolved, result in zip(same, raw_results, strict=True):
        k = stages.index(resolved.stage)
        reported = read_result(job_layout, resolved, result, ahead=bool(ahead[k]))
        if isinstance(reported, Reported):
            note_left(resolved, reported)
        results.append(reported)
    in_turn = iter(results)
    return [next(in_turn) if of is job_layout else LayoutChangedError() for of, _ in batch]


async def commit(steps: Steps, job: str, commit: Commit) -> Committed:
    """Run the step `LiveStore.commit`."""
    return await steps.with_layout(job, lambda job_layout: _commit(steps, job_layout, commit))


async def _commit(steps: Steps, job_layout: JobLayout, commit: Commit) -> Committed:
    stages = list(commit.stages)
    for name in stages:
        if name not in job_layout.pipeline.stages:
            raise refusals.unknown_stage(job_layout.job, name)
    committed = [commit.stages[name] for name in stages]
    observed = [each.observed_input for each in committed]
    code, *values = await steps.step(
        job_layout,
        "commit",
        stages,
        [
            str(commit.run),
            schema.epoch_text(commit.epoch),
            [False if value is None else float(value) for value in observed],
            [_idle_after(job_layout, name) for name in stages],
            [False if cap is None else float(cap) for cap in (each.cap for each in committed)],
            [
                False if each.kept is None else msgspec.json.encode(each.kept).decode()
                for each in committed
            ],
            [float(each.late) for each in committed],
            [float(each.corrections) for each in committed],
            float(commit.evidence_age_ms),
        ],
    )
    if code == "ok":
        applied, unrecorded = schema.read_list(values[1]), schema.read_list(values[2])
        return Committed(
            applied=dict(zip(stages, map(int, applied), strict=True)),
            unrecorded=[stages[int(k) - 1] for k in unrecorded],
            incarnation=int(values[0]),
            generation=job_layout.generation,
        )
    k = int(values[0]) - 1
    if code == "stale-run":
        raise refusals.stale_run(stages[k], int(values[1]), commit.run)
    if code == "stale-epoch":
        raise refusals.stale_epoch(stages[k], commit.epoch, int(values[1]))
    if code == "input-ahead":
        published = schema.read_view(values[1]).watermark.input
        raise refusals.input_ahead(stages[k], observed[k] or 0, published)
    raise refusals.uncapped(stages[k], commit.epoch)


def _batcher(steps: Steps, job: str) -> Batcher[tuple[JobLayout, ResolvedReport], Reported]:
    cached = steps.cache(job)
    if cached.reports is None:
        cached.reports = Batcher(
            partial(_report_all, steps), lambda request: request[1].lookup.count, _MAX_CALLS
        )
    return cached.reports


def _idle_after(job_layout: JobLayout, stage: str) -> float | bool:
    policy = job_layout.pipeline.stages[stage].policy.idle
    return False if policy is None else float(policy.after_ms)
