"""Health: of stages, and the problems of jobs, from one observation of their ranges.

Every read of a watermark includes the health, so it must cost nearly nothing while all is well: the
counts that the stores keep are sufficient then. Single ranges are examined only where the counts
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from service.aggregator.holders import following, holding
from service.aggregator.late_ranges import count_late_ranges
from service.aggregator.throttling import Throttling
from service.aggregator.troubles import (
    Trouble,
    TroubledRanges,
    end_trouble,
    no_worker_trouble,
    silent_since_ms,
    silent_trouble,
    stalled_trouble,
    unpublished_trouble,
    with_range,
)
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import InvalidRequestError, UnavailableError, UnknownStageError
from service.frontier.columns import column_agreement
from service.frontier.explain import Reason
from service.frontier.graph import StageWatermark
from service.frontier.health import (
    SEVERITIES,
    Health,
    Outcome,
    Severity,
    Vitals,
    badness,
    counted_ranges,
    healths,
    holds_back,
    holds_back_next,
    silent_ranges,
    stalled_ranges,
    waiting_stages,
    worst,
)
from service.frontier.ranges import KeyLayout
from service.frontier.timestamps import MAX
from service.model.jobs import JobView
from service.model.observations import Instant, StageObservation
from service.model.reports import RangeView

_STALLED = frozenset({Reason.STALLED, Reason.WAITING_FOR_COMMIT})
"""The reasons of a range that is stalled by its facts."""

_CHECKED = 20
"""Number of apparently stalled ranges that are examined singly."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A root cause: a stage that holds itself back, with the reason."""

    job: str
    stage: str
    health: Health
    since_ms: int | None
    """On the wall clock; None: unknown."""
    ranges: int
    examples: Sequence[str]
    """Some of these ranges, the lowest promises first."""
    holds_back: Sequence[str]
    """The downstream stages that wait for it, in the pipeline's order."""
    holds_back_next: Sequence[str]
    """The downstream stages that do not wait for it yet. See `service.frontier.health`."""
    because: str
    remedy: str
    """The next thing to do."""

    @property
    def severity(self) -> Severity:
        """The severity of its health."""
        return SEVERITIES[self.health]

    @property
    def cause(self) -> str:
        """Its sentence, with the name of a single range."""
        return with_range(self.because, self.ranges, self.examples)


@dataclass(frozen=True, slots=True)
class JobHealth:
    """A job, and all its problems."""

    view: JobView
    stages: Mapping[str, Health]
    problems: Sequence[Problem]
    """Every root cause, the worst first."""
    is_steady: bool = False
    """True if all of them stay as they are while the job does not change."""
    late_ranges: int = 0
    """Number of the late ranges of its final stages."""

    @property
    def health(self) -> Health:
        """The worst health of its stages."""
        return worst(self.stages.values())


class Examiner:
    """Examines stages."""

    def __init__(self, live: RecoveringLiveStore, throttling: Throttling) -> None:
        self._live = live
        self._throttling = throttling

    async def healths(
        self,
        job: JobView,
        stages: Iterable[str],
        observed: Mapping[str, StageObservation],
        now: Instant,
    ) -> Mapping[str, Health]:
        """Return the health of these stages, given after all of their inputs."""
        vitals = {name: _vitals(seen, now.wall_ms) for name, seen in observed.items()}
        for name in self._unpublished(job, observed):
            vitals[name] = replace(vitals[name], is_unpublished=True)
        for name, each in vitals.items():
            if each.stalled:
                vitals[name] = replace(
                    each, stalled=len(await self._stalled(job.name, name, observed[name], now))
                )
        return _healths(job, stages, observed, vitals)

    def has_failure(self, job: str) -> bool:
        """Return whether advances of a job cannot be published: its health may differ then, although the
        job has not changed.
        """
        return self._live.publish_failure(job) is not None

    async def job(self, job: str) -> JobHealth:
        """Examine a whole job. Raises `UnknownJobError`, `UnavailableError`."""
        view, _ = await self._live.snapshot(job)
        now, observed = await self._live.observe(job, view.pipeline.order)
        # Another layout may have come in between.
        observed = {name: seen for name, seen in observed.items() if name in view.stages}
        found = await self.healths(view, view.pipeline.order, observed, now)
        watermarks = {name: each.watermark for name, each in view.stages.items()}
        least = least_promises(view, observed, watermarks)
        waiting = waiting_stages(view.pipeline, watermarks, found, least)
        problems: list[Problem] = []
        for name, seen in observed.items():
            if found[name] is Health.FINAL:
                continue
            for trouble in await self.troubles(view, name, seen, now):
                below = holds_back(view.pipeline, name, watermarks, waiting)
                later = holds_back_next(view.pipeline, name, watermarks, below)
                problems.append(
                    Problem(
                        view.name,
                        name,
                        trouble.health,
                        trouble.since_ms,
                        trouble.ranges,
                        trouble.examples,
                        below,
                        later,
                        trouble.because,
                        trouble.remedy,
                    )
                )
        steady = are_steady(observed.values()) and not self.has_failure(job)
        late = sum(count_late_ranges(view.stages[name], seen) for name, seen in observed.items())
        return JobHealth(view, found, sorted(problems, key=worst_first), steady, late)

    async def troubles(
        self, job: JobView, stage: str, seen: StageObservation, now: Instant
    ) -> Sequence[Trouble]:
        """Return the causes by which a stage holds itself back, the worst first."""
        found = TroubledRanges(stage, seen, now)
        troubles: list[Trouble] = []
        failure = self._live.publish_failure(job.name)
        if failure is not None and self._unpublished(job, {stage: seen}):
            troubles.append(unpublished_trouble(found, failure))
        if seen.end is not None and seen.end.outcome is not Outcome.FINISHED:
            return [*troubles, end_trouble(found, seen.end)]
        vitals = _vitals(seen, now.wall_ms)
        if vitals.no_worker:
            troubles.append(no_worker_trouble(found))
        if vitals.silent:
            troubles.append(silent_trouble(found, silent_since_ms(job.stages[stage])))
        if vitals.stalled:
            stalled = await self._stalled(job.name, stage, seen, now)
            if stalled:
                troubles.append(stalled_trouble(found, stalled))
        return troubles

    async def stalled(self, job: str, stage: str, views: Sequence[RangeView]) -> frozenset[str]:
        """Return the names of those ranges that are stalled, as the stage's problem counts them."""
        # Mostly none has work, and then nothing more is read.
        if all(each.facts is None or each.facts.oldest_work_ms is None for each in views):
            return frozenset()
        now, observed = await self._live.observe(job, (stage,))
        seen = observed.get(stage)
        if seen is None:
            return frozenset()
        layout = seen.layout
        return frozenset(map(layout.name, await self._stalled(job, stage, seen, now)))

    def _unpublished(
        self, job: JobView, observed: Mapping[str, StageObservation]
    ) -> Collection[str]:
        """Return the stages whose ranges have moved on, while their advances cannot be published.

        Without a failure, an advance that is not visible yet is on its way.
        """
        return unpublished_stages(job, observed) if self.has_failure(job.name) else ()

    async def _stalled(
        self, job: str, stage: str, seen: StageObservation, now: Instant
    ) -> Sequence[int]:
        """Return the stalled ranges: the apparently stalled ones, except those that should pause.

        A range whose reports wait for their commit is stalled like one that has yet to report: both
        belong to a batch that does not end.
        """
        found = stalled_ranges(seen.promises, seen.idle, seen.raised_at_ms, seen.facts, now.wall_ms)
        if not found:
            return found
        # The layout may have changed since: then all count as stalled.
        with suppress(UnknownStageError, InvalidRequestError, UnavailableError):
            throttle = await self._throttling.read(job)
            advice = throttle.shards.get(stage, {})
            views = await self._live.range_views(job, stage, found[:_CHECKED])
            stays = [
                index
                for index, view in zip(found, views, strict=False)
                if holding(view, None, None, advice, now.wall_ms).reason in _STALLED
            ]
            return [*stays, *found[_CHECKED:]] if stays else []
        return found


def unpublished_stages(job: JobView, observed: Mapping[str, StageObservation]) -> frozenset[str]:
    """Return the stages whose ranges, as observed, have moved on from their published watermarks."""
    agreements = {
        name: column_agreement(
            seen.promises, seen.idle, is_keyed=isinstance(seen.layout, KeyLayout)
        )
        for name, seen in observed.items()
        if name in job.stages
    }
    published = {name: each.watermark for name, each in job.stages.items()}
    return job.pipeline.unpublished(published, agreements)


def are_steady(observed: Iterable[StageObservation]) -> bool:
    """Return whether the health of these stages stays as it is while their job does not change.

    Work that is unfinished may be taken for stalled by the passage of time alone.
    """
    return all(each.oldest_work_ms is None for seen in observed for each in seen.facts.values())


def _vitals(seen: StageObservation, now_ms: int) -> Vitals:
    outcome = None if seen.end is None else seen.end.outcome
    census = seen.census
    silent = no_worker = 0
    if census is None or census.reported < census.total or census.leased < census.total:
        of = seen.promises, seen.idle, seen.reported_at_ms
        silent = int(np.count_nonzero(silent_ranges(*of)))
        if outcome is None:
            no_worker = int(np.count_nonzero(counted_ranges(*of) & (seen.owners == 0)))
    stalled = stalled_ranges(seen.promises, seen.idle, seen.raised_at_ms, seen.facts, now_ms)
    return Vitals(silent, no_worker, len(stalled), outcome)


def _healths(
    job: JobView,
    stages: Iterable[str],
    observed: Mapping[str, StageObservation],
    vitals: Mapping[str, Vitals],
) -> Mapping[str, Health]:
    there = [name for name in stages if name in job.stages]
    watermarks = {name: job.stages[name].watermark for name in there}
    return healths(
        job.pipeline, there, watermarks, vitals, least_promises(job, observed, watermarks)
    )


def least_promises(
    job: JobView,
    observed: Mapping[str, StageObservation],
    watermarks: Mapping[str, StageWatermark],
) -> Callable[[str], int | None]:
    """Return the function that returns a stage's least promise (None: without ranges), or its input, if
    it waits for nothing else.
    """

    def least(stage: str) -> int | None:
        seen = observed.get(stage)
        if seen is None or not len(seen.promises):
            return None
        promise = int(seen.promises.min())
        follows = following(job.pipeline, {stage: seen}, observed, watermarks, {stage: promise})
        return follows.get(stage, promise)

    return least


def worst_first(of: Problem) -> tuple[int, int, int, str, str]:
    """Order problems: the worst first, of equal ones what most stages wait for, then the oldest."""
    return badness(of.health), -len(of.holds_back), of.since_ms or MAX, of.job, of.stage
