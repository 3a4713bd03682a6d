"""Survey of all stages of all jobs for the metrics, within limits.

A scrape comes every few seconds to every replica, at any load. So the survey covers no more stages than
the operator has set, the facts of ranges only where they are few, and a few jobs at a time, so that
other requests run in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from service.aggregator.conditions import EXAMINED, Condition, conditions_by_census
from service.aggregator.reader import Reader
from service.aggregator.states import StageState
from service.aggregator.throttling import Throttling
from service.errors import UnavailableError, UnknownJobError
from service.frontier.throttle import Advice
from service.model.jobs import JobView
from service.telemetry.stage_metrics import Survey, SurveyedStage, Work

_AT_ONCE = 8
_LABELS = {Condition.EXPIRED: "unleased"}
"""Labels that differ from the condition: a range without a lease may never have had one."""
_RANGES = EXAMINED
"""The largest number of ranges whose facts one scrape covers. Other jobs are shown without them."""


async def survey(reader: Reader, throttling: Throttling, limit: int) -> Survey:
    """Return the first `limit` stages, by the names of their jobs: the same at each scrape.

    Raises `UnavailableError` if neither store answers.
    """
    jobs = sorted(await reader.readable_jobs(), key=lambda job: job.name)
    chosen: list[tuple[JobView, Sequence[str], bool]] = []
    left, ranges_left = limit, _RANGES
    for job in jobs:
        if left == 0:
            break
        stages = list(job.stages)[:left]
        left -= len(stages)
        ranges = _ranges(job)
        reads_soft = ranges <= ranges_left
        ranges_left -= ranges if reads_soft else 0
        chosen.append((job, stages, reads_soft))
    found: list[SurveyedStage] = []
    for start in range(0, len(chosen), _AT_ONCE):
        some = chosen[start : start + _AT_ONCE]
        # With the embedded stores, nothing below yields to other requests.
        await asyncio.sleep(0)
        for stages in await asyncio.gather(
            *(_stages_of(reader, throttling, *each) for each in some)
        ):
            found.extend(stages)
    return Survey(found, sum(len(job.stages) for job in jobs) - (limit - left))


async def _stages_of(
    reader: Reader, throttling: Throttling, job: JobView, stages: Collection[str], reads_soft: bool
) -> list[SurveyedStage]:
    try:
        states = await reader.snapshot(job.name, stages, soft=reads_soft)
        advice = (await throttling.read(job.name)).shards if job.pipeline.throttle else None
    except UnknownJobError:
        return []
    except UnavailableError:
        return [SurveyedStage(job.name, name, job.stages[name]) for name in stages]
    return [_surveyed(job.name, state, advice) for state in states.values()]


def _surveyed(
    job: str, state: StageState, advice: Mapping[str, Mapping[str, Advice]] | None
) -> SurveyedStage:
    soft = state.soft
    is_source = state.job.pipeline.stages[state.name].is_source
    return SurveyedStage(
        job,
        state.name,
        state.view,
        state.census,
        _conditions(state),
        None if soft is None else Work(soft.processing_ms, soft.counts),
        None if soft is None else soft.health,
        None if soft is None else soft.late_ranges,
        None if advice is None or not is_source else _throttled(advice.get(state.name, {})),
    )


def _conditions(state: StageState) -> Mapping[str, int] | None:
    soft = state.soft
    counts = conditions_by_census(state.census) if soft is None else soft.conditions
    if counts is None:
        return None
    return {_LABELS.get(each, each.value): count for each, count in counts.items()}


def _throttled(advice: Mapping[str, Advice]) -> int:
    return sum(each.pause or each.rate < 1 for each in advice.values())


def _ranges(job: JobView) -> int:
    layouts = (stage.layout for stage in job.pipeline.stages.values())
    return sum(len(layout) for layout in layouts if layout is not None)
