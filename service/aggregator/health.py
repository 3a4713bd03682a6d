"""Health: of stages, and the problems of jobs, from one observation of their ranges.

Every read of a watermark includes the health, so it must cost nearly nothing while all is well: the
counts that the stores keep are sufficient then. Single ranges are examined only where the counts
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from service.aggregator.holders import following, holding
from service.aggregator.remedies import remedy
from service.aggregator.throttling import Throttling
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import InvalidRequestError, UnavailableError, UnknownStageError
from service.frontier.columns import Int64s, lowest
from service.frontier.durations import moment_text
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
    past,
    silent_ranges,
    stalled_ranges,
    waiting_stages,
    worst,
)
from service.frontier.ranges import KeyLayout
from service.frontier.timestamps import MAX, MIN
from service.model.jobs import JobView, StageView
from service.model.observations import Instant, StageObservation
from service.model.reports import RangeView
from service.model.runs import RunEnd

EXAMPLES = 5
"""Number of ranges that a problem names."""

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
    because: str
    remedy: str
    """The next thing to do."""

    @property
    def severity(self) -> Severity:
        """The severity of its health."""
        return SEVERITIES[self.health]


@dataclass(frozen=True, slots=True)
class JobHealth:
    """A job, and all its problems."""

    view: JobView
    stages: Mapping[str, Health]
    problems: Sequence[Problem]
    """Every root cause, the worst first."""
    is_steady: bool = False
    """True if all of them stay as they are while the job does not change."""

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
        for name, each in vitals.items():
            if each.stalled:
                vitals[name] = replace(
                    each, stalled=len(await self._stalled(job, name, observed[name], now))
                )
        return _healths(job, stages, observed, vitals)

    async def job(self, job: str) -> JobHealth:
        """Examine a whole job. Raises `UnknownJobError`, `UnavailableError`."""
        view, _ = await self._live.snapshot(job)
        now, observed = await self._live.observe(job, view.pipeline.order)
        # Another layout may have come in between.
        observed = {name: seen for name, seen in observed.items() if name in view.stages}
        found = await self.healths(view, view.pipeline.order, observed, now)
        watermarks = {name: each.watermark for name, each in view.stages.items()}
        least = _least(view, observed, watermarks)
        waiting = waiting_stages(view.pipeline, watermarks, found, least)
        problems: list[Problem] = []
        for name, seen in observed.items():
            if found[name] is Health.FINAL:
                continue
            for trouble in await self.troubles(view, name, seen, now):
                below = holds_back(view.pipeline, name, watermarks, waiting)
                problems.append(
                    Problem(
                        view.name,
                        name,
                        trouble.health,
                        trouble.since_ms,
                        trouble.ranges,
                        trouble.examples,
                        below,
                        trouble.because,
                        trouble.remedy,
                    )
                )
        steady = are_steady(observed.values())
        return JobHealth(view, found, sorted(problems, key=worst_first), steady)

    async def troubles(
        self, job: JobView, stage: str, seen: StageObservation, now: Instant
    ) -> Sequence[Trouble]:
        """Return the causes by which a stage holds itself back, the worst first."""
        found = _Ranges(stage, seen, now)
        if seen.end is not None and seen.end.outcome is not Outcome.FINISHED:
            return [_of_run(found, seen.end)]
        troubles: list[Trouble] = []
        vitals = _vitals(seen, now.wall_ms)
        if vitals.no_worker:
            troubles.append(_no_worker(found))
        if vitals.silent:
            troubles.append(_silent(found, _silent_since_ms(job.stages[stage])))
        if vitals.stalled:
            stalled = await self._stalled(job, stage, seen, now)
            if stalled:
                troubles.append(_stalled(found, stalled))
        return troubles

    async def stalled(self, job: str, stage: str, views: Sequence[RangeView]) -> frozenset[str]:
        """Return the names of those ranges whose oldest work ages, and that should not pause."""
        # Mostly none has work, and then nothing more is read.
        if all(each.facts is None or each.facts.oldest_work_ms is None for each in views):
            return frozenset()
        now, _ = await self._live.observe(job, ())
        found = {each.name for each in views if each.stalls(now.wall_ms)}
        if not found:
            return frozenset()
        advice = (await self._throttling.read(job)).shards.get(stage, {})
        return frozenset(name for name in found if name not in advice or not advice[name].pause)

    async def _stalled(
        self, job: JobView, stage: str, seen: StageObservation, now: Instant
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
            throttle = await self._throttling.read(job.name)
            advice = throttle.shards.get(stage, {})
            views = await self._live.range_views(job.name, stage, found[:_CHECKED])
            stays = [
                index
                for index, view in zip(found, views, strict=False)
                if holding(view, None, None, advice, now.wall_ms).reason in _STALLED
            ]
            return [*stays, *found[_CHECKED:]] if stays else []
        return found


def are_steady(observed: Iterable[StageObservation]) -> bool:
    """Return whether the health of these stages stays as it is while their job does not change.

    Work that is unfinished may be taken for stalled by the passage of time alone.
    """
    return all(each.oldest_work_ms is None for seen in observed for each in seen.facts.values())


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reasons for which a stage holds itself back."""

    health: Health
    since_ms: int | None
    ranges: int
    examples: Sequence[str]
    because: str
    lowest: int
    """The least promise of these ranges."""
    remedy: str
    """The next thing to do."""


class _Ranges:
    """The ranges of a stage, for the text of a problem."""

    def __init__(self, stage: str, seen: StageObservation, now: Instant) -> None:
        self.stage = stage
        self.seen = seen
        self.now = now

    def counted(self) -> Int64s:
        """Return the indices of the ranges that have reported and count."""
        seen = self.seen
        return np.flatnonzero(counted_ranges(seen.promises, seen.idle, seen.reported_at_ms))

    def silent(self) -> Int64s:
        """Return the indices of the ranges that have never reported."""
        seen = self.seen
        return np.flatnonzero(silent_ranges(seen.promises, seen.idle, seen.reported_at_ms))

    def departed(self, indices: Int64s) -> Sequence[str]:
        """Return the last holders of some of them, whose leases have run out: those that are kept."""
        freed_ms = self.seen.held_since_ms[indices]
        holders = (who for at_ms, who in self.seen.departed if bool((freed_ms == at_ms).any()))
        return list(dict.fromkeys(holders))

    def trouble(
        self,
        health: Health,
        indices: Int64s,
        since_ms: int | None,
        because: str,
        departed: Sequence[str] = (),
    ) -> Trouble:
        """Return the trouble of some of them. `departed`: their last holders."""
        chosen = indices[lowest(self.seen.promises[indices], EXAMPLES)]
        names = [self.seen.layout.name(index) for index in chosen.tolist()]
        least = int(self.seen.promises[indices].min(initial=MAX))
        is_keyed = isinstance(self.seen.layout, KeyLayout)
        cure = remedy(health, is_keyed=is_keyed, departed=departed)
        return Trouble(health, since_ms, len(indices), names, because, least, cure)

    def some(self, indices: Int64s) -> str:
        """Write the number of these ranges."""
        return f"{len(indices):,} of {len(self.seen.promises):,} ranges of {self.stage}"

    def moment(self, at_ms: int) -> str:
        """Write a moment of the wall clock."""
        return moment_text(at_ms, self.now.wall_ms)


def ended_text(end: RunEnd, now_ms: int) -> str:
    """Write the end of the last run of a stage.

    >>> ended_text(RunEnd(1, Outcome.FAILED, 60_000, "out of memory"), 120_000)
    'failed at 00:01Z: out of memory'
    """
    cause = f": {end.because}" if end.because else ""
    return f"{past(end.outcome)} at {moment_text(end.at_ms, now_ms)}{cause}"


def _of_run(of: _Ranges, end: RunEnd) -> Trouble:
    left = np.flatnonzero(of.seen.promises != MAX)
    if end.outcome is Outcome.FAILED:
        because = f"the last run of {of.stage} {ended_text(end, of.now.wall_ms)}"
        return of.trouble(Health.FAILED, left, end.at_ms, because)
    cause = f": {end.because}" if end.because else ""
    because = (
        f"{of.some(left)} {_have(left)} no worker since {of.moment(end.at_ms)}"
        f" ({_their(left)} last run was stopped{cause})"
    )
    return of.trouble(Health.NO_WORKER, left, end.at_ms, because)


def _no_worker(of: _Ranges) -> Trouble:
    counted = of.counted()
    free = counted[of.seen.owners[counted] == 0]
    moments = of.seen.held_since_ms[free]
    known = moments[moments > 0]
    if not len(known):
        because = (
            f"{of.some(free)} {_have(free)} no worker (not held by a lease since the service, its live"
            " store or the range began)"
        )
        return of.trouble(Health.NO_WORKER, free, None, because)
    # Leases run by a clock of their own.
    since_ms = of.now.wall_ms - (of.now.lease_ms - int(known.min()))
    leases = "its lease has run out" if len(free) == 1 else "their leases have run out"
    because = f"{of.some(free)} {_have(free)} no worker since {of.moment(since_ms)} ({leases})"
    return of.trouble(Health.NO_WORKER, free, since_ms, because, of.departed(free))


def _silent(of: _Ranges, since_ms: int | None) -> Trouble:
    silent = of.silent()
    without_owner = not bool(of.seen.owners[silent].any())
    who = f", and {_are(silent)} not held by a lease" if without_owner else ""
    because = f"{of.some(silent)} {_have(silent)} never reported{who}"
    return of.trouble(Health.SILENT, silent, since_ms, because)


def _silent_since_ms(stage: StageView) -> int | None:
    """Return the moment since which a stage has been without an output watermark; None: it has one."""
    return stage.advanced_at_ms if stage.watermark.output == MIN else None


def _stalled(of: _Ranges, stalled: Sequence[int]) -> Trouble:
    indices = np.array(stalled, dtype=np.int64)
    oldest = min(
        each.oldest_work_ms
        for index in stalled
        if (each := of.seen.facts[index]).oldest_work_ms is not None
    )
    since_ms = int(of.seen.raised_at_ms[indices].min()) or None
    keeps, their = ("keeps", "its") if len(stalled) == 1 else ("keep", "their")
    because = (
        f"{of.some(indices)} {keeps} reporting, while {their} oldest work has been waiting since"
        f" {of.moment(oldest)}"
    )
    return of.trouble(Health.STALLED, indices, since_ms, because)


def _have(of: Int64s) -> str:
    return "has" if len(of) == 1 else "have"


def _their(of: Int64s) -> str:
    return "its" if len(of) == 1 else "their"


def _are(of: Int64s) -> str:
    return "is" if len(of) == 1 else "are"


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
    return healths(job.pipeline, there, watermarks, vitals, _least(job, observed, watermarks))


def _least(
    job: JobView,
    observed: Mapping[str, StageObservation],
    watermarks: Mapping[str, StageWatermark],
) -> Callable[[str], int | None]:
    """Return the function that returns a stage's least promise (None: without ranges)."""

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
