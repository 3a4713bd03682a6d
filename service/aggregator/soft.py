"""Soft values: processing and percentile watermarks, and counts, computed at requests.

They follow from the facts that ranges last reported, so each report may change them, and nothing waits
for them to be recorded. Values that were returned once are joined in the live store, so that no reader
gets lower ones while its state lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from service.aggregator.conditions import Condition, count_conditions
from service.aggregator.health import Examiner, are_steady, least_promises
from service.aggregator.late_ranges import count_late_ranges
from service.clock import Clock
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError, UnknownStageError
from service.frontier.facts import (
    UNKNOWN,
    Counts,
    all_report_pending,
    join_work,
    processing_watermark,
    work_since,
)
from service.frontier.health import Health, Outcome, stages_below_ended
from service.frontier.sketches import quantiles
from service.frontier.timestamps import MAX, MIN
from service.model.jobs import JobView
from service.model.observations import Marks, StageObservation

_FRESH_MS = 100
"""Time for which values are reused without a change here: other replicas accept reports, too."""

_REST = 20
"""The ratio of the age of values of more ranges to the time of their computation."""

_MANY = 20_000
"""Number of ranges up to which values are computed after each report."""

_LONGEST_MS = 1_000

_NONE_SHOWN: Mapping[str, Marks] = {}

_NO_RANGES: Mapping[Condition, int] = dict.fromkeys(Condition, 0)

_KEPT = 1_000
"""Number of sets of stages whose values are kept."""

_PROCESSING = "processing"
_RECORDS = "records"
_LATE = "late"
_CORRECTIONS = "corrections"


@dataclass(frozen=True, slots=True)
class SoftState:
    """The soft values of a stage."""

    processing_ms: int | None
    """The processing watermark; None: a range has never reported."""
    counts: Counts
    percentiles: Mapping[int, int | None]
    """By percentage; None: a range has not reported its rows in flight."""
    health: Health
    conditions: Mapping[Condition, int] | None
    """Number of ranges of each condition. See `count_conditions`."""
    input_ended: bool = False
    """True if it waits for an input that has ended. See `stages_below_ended`."""
    late_ranges: int = 0
    """Ranges of a final stage that report again: all their rows are late."""


_Key = tuple[str, tuple[int, int, int], frozenset[str]]
"""A job, its layout, and some of its stages."""


@dataclass(slots=True)
class _Cached:
    changes: int
    """Number of changes of the job by this process before the computation."""
    view: JobView
    """The job before the computation."""
    is_steady: bool
    """True if the values stay as they are while the job does not change."""
    at_ms: int
    took_ms: int
    ranges: int
    """Number of ranges of these stages and all upstream ones."""
    states: dict[str, SoftState] = field(default_factory=dict[str, SoftState])


class SoftStates:
    """The soft values of stages, computed at once for all concurrent requests.

    While other replicas share the live store, each request gets values that were joined there after its
    begin: else a client that changes replicas could get lower values.
    """

    def __init__(
        self, live: RecoveringLiveStore, examiner: Examiner, clock: Clock, *, shared: bool
    ) -> None:
        self._live = live
        self._examiner = examiner
        self._clock = clock
        self._shared = shared
        self._cached: dict[_Key, _Cached] = {}
        self._next: dict[_Key, asyncio.Task[_Cached]] = {}
        """The rounds that have not begun, which requests may still join."""
        self._running: dict[_Key, asyncio.Task[_Cached]] = {}

    async def read(self, job: JobView, stages: Iterable[str]) -> Mapping[str, SoftState]:
        """Return the values of these stages; empty while the live store is unavailable."""
        layout = (job.incarnation, job.generation, job.layout_version)
        key = (job.name, layout, frozenset(stages))
        found = self._cached.get(key)
        is_usual = not self._examiner.has_failure(job.name)
        if is_usual and found is not None and found.is_steady and job.is_as(found.view):
            # They were joined when they were computed, and no replica has got others since.
            return found.states
        found = None if self._shared else self._still_good(key)
        if found is not None:
            # Another request may have got higher values, together with other stages.
            await self._join(key, found.states)
        else:
            joined = self._next.get(key)
            if joined is None:
                joined = self._next[key] = asyncio.create_task(self._round(key, job))
                # If all requests were cancelled, the exception is not retrieved otherwise.
                joined.add_done_callback(lambda done: done.cancelled() or done.exception())
            # Shielded: a cancelled request must not cancel the round for others.
            found = await asyncio.shield(joined)
        return found.states

    async def _round(self, key: _Key, view: JobView) -> _Cached:
        before = self._running.get(key)
        if before is not None:
            await asyncio.wait((before,))
        # From here on, requests begin the next round.
        self._running[key] = self._next.pop(key)
        try:
            found = self._still_good(key)
            if found is not None:
                is_whole = await self._join(key, found.states)
                found.is_steady = found.is_steady and is_whole
                if is_whole or found.ranges > _MANY:
                    return found
            return await self._compute(key, view)
        finally:
            del self._running[key]

    async def _shown(
        self, key: _Key, above: Collection[str], observed: Mapping[str, StageObservation]
    ) -> Mapping[str, Marks]:
        """Return the values of these stages that readers have: the joined processing watermark of an
        upstream also counts for its downstream stages.
        """
        job, (_, generation, _), _ = key
        shown = {n: seen.marks for n, seen in observed.items() if seen.generation == generation}
        others: Mapping[str, Marks] = {name: {} for name in above if name not in observed}
        if others:
            shown |= await self._live.raise_marks(job, generation, others)
        return shown

    async def _join(
        self,
        key: _Key,
        states: dict[str, SoftState],
        shown: Mapping[str, Marks] = _NONE_SHOWN,
    ) -> bool:
        """Join values with earlier ones, returned here or by other replicas. Values that cannot be
        joined are dropped: they may be lower than earlier ones, while a store rejects writes but can be
        read. `shown`: values that readers have, as observed after the requests for these began.

        Returns whether every earlier value is still present. If not, the values must be computed again;
        then a value is missing only because a range has joined.
        """
        marks = {name: _marks(state) for name, state in states.items()}
        joined = {
            name: shown[name] for name, own in marks.items() if _are_shown(own, shown.get(name))
        }
        higher = {name: own for name, own in marks.items() if name not in joined}
        if higher:
            with suppress(UnavailableError, UnknownStageError):
                job, (_, generation, _), _ = key
                joined |= await self._live.raise_marks(job, generation, higher)
        is_whole = True
        for name, state in list(states.items()):
            found = joined.get(name)
            if found is None:
                del states[name]
                is_whole = False
                continue
            is_whole = is_whole and not found.keys() & _missing(state)
            states[name] = _joined(state, found)
        return is_whole

    def _still_good(self, key: _Key) -> _Cached | None:
        cached = self._cached.get(key)
        if cached is None:
            return None
        age_ms = self._clock.steady_ms() - cached.at_ms
        if cached.ranges > _MANY:
            return cached if age_ms < min(_REST * cached.took_ms, _LONGEST_MS) else None
        unchanged = cached.changes == self._live.changes_of(key[0])
        return cached if unchanged and age_ms < _FRESH_MS else None

    async def _compute(self, key: _Key, view: JobView) -> _Cached:
        job, _, wanted = key
        pipeline = view.pipeline
        changes, began_ms = self._live.changes_of(job), self._clock.steady_ms()
        above = pipeline.ancestors(wanted)
        states: dict[str, SoftState] = {}
        steady = False
        try:
            now, observed = await self._live.observe(job, above)
            shown = await self._shown(key, above, observed)
            healths = await self._examiner.healths(view, above, observed, now)
            states = _derive(view, above, observed, shown, wanted, healths, now.wall_ms)
            steady = are_steady(observed.values()) and not _follow_clock(states, now.wall_ms)
            steady = steady and not self._examiner.has_failure(job)
            steady = await self._join(key, states, shown) and steady
        except (UnavailableError, UnknownStageError):
            # The layout may have changed since the job was read. Soft values may be missing.
            pass
        ended_ms = self._clock.steady_ms()
        layouts = [pipeline.stages[name].layout for name in above]
        ranges = sum(len(layout) for layout in layouts if layout is not None)
        took_ms = ended_ms - began_ms
        cached = _Cached(changes, view, steady, ended_ms, took_ms, ranges, states)
        self._cached.pop(key, None)
        self._cached[key] = cached
        self._drop_old(ended_ms)
        return cached

    def _drop_old(self, now_ms: int) -> None:
        if len(self._cached) > _KEPT:
            self._cached = {
                key: cached
                for key, cached in self._cached.items()
                if now_ms - cached.at_ms < _LONGEST_MS
            }


def _follow_clock(states: Mapping[str, SoftState], now_ms: int) -> bool:
    """Return whether a processing watermark is the clock's: no work is left that could hold it."""
    return any(state.processing_ms == now_ms for state in states.values())


def _derive(
    job: JobView,
    above: Collection[str],
    observed: Mapping[str, StageObservation],
    shown: Mapping[str, Mapping[str, int]],
    wanted: Collection[str],
    healths: Mapping[str, Health],
    now_ms: int,
) -> dict[str, SoftState]:
    since: dict[str, int] = {}
    states: dict[str, SoftState] = {}
    watermarks = {name: job.stages[name].watermark for name in above}
    least = least_promises(job, observed, watermarks)
    below_ended = stages_below_ended(job.pipeline, watermarks, healths, least)
    for name in above:
        stage, seen = job.pipeline.stages[name], observed.get(name)
        upstream = [since.get(up, UNKNOWN) for up in stage.inputs]
        own = [] if seen is None else [_work_since(seen, is_final=watermarks[name].output == MAX)]
        found = join_work([*own, *upstream])
        # The earlier value stays, unless a range has joined that has not reported yet.
        mark = shown.get(name, {}).get(_PROCESSING, UNKNOWN)
        since[name] = found if found == UNKNOWN else max(found, mark)
        if name in wanted:
            states[name] = SoftState(
                processing_watermark(since[name], now_ms),
                Counts() if seen is None else seen.counts,
                {} if seen is None else _percentiles(stage.policy.percentiles, seen),
                healths[name],
                _NO_RANGES if seen is None else count_conditions(seen),
                name in below_ended,
                0 if seen is None else count_late_ranges(job.stages[name], seen),
            )
    return states


def _work_since(seen: StageObservation, *, is_final: bool) -> int:
    # Not aged between two nights: a program that has finished has done all work that it does not name.
    finished = seen.end is not None and seen.end.outcome is Outcome.FINISHED
    # All ranges of a final stage count as final: a late one holds nothing back, nor does one that a lost
    # live store has left without its last report.
    promises = np.full_like(seen.promises, MAX) if is_final else seen.promises
    return work_since(seen.reported_at_ms, promises, seen.idle, seen.facts, finished=finished)


def _percentiles(percentages: tuple[int, ...], seen: StageObservation) -> dict[int, int | None]:
    if not percentages:
        return {}
    if not all_report_pending(seen.promises, seen.idle, seen.facts):
        return dict.fromkeys(percentages)
    found = quantiles((each.pending for each in seen.facts.values() if each.pending), percentages)
    # Without pending rows it is the output watermark, which is joined at the response.
    values = [MIN] * len(percentages) if found is None else found
    return dict(zip(percentages, values, strict=True))


def _marks(state: SoftState) -> dict[str, int]:
    marks = {f"p{p}": value for p, value in state.percentiles.items() if value is not None}
    counts = state.counts
    marks |= {_RECORDS: counts.records, _LATE: counts.late, _CORRECTIONS: counts.corrections}
    if state.processing_ms is not None:
        marks[_PROCESSING] = state.processing_ms
    return marks


def _are_shown(marks: Marks, shown: Marks | None) -> bool:
    """Return whether readers have these values, or higher ones."""
    return shown is not None and all(
        mark in shown and shown[mark] >= own for mark, own in marks.items()
    )


def _missing(state: SoftState) -> set[str]:
    missing = {f"p{p}" for p, value in state.percentiles.items() if value is None}
    return missing | ({_PROCESSING} if state.processing_ms is None else set())


def _joined(state: SoftState, marks: Mapping[str, int]) -> SoftState:
    counts = state.counts
    return replace(
        state,
        processing_ms=None
        if state.processing_ms is None
        else marks.get(_PROCESSING, state.processing_ms),
        counts=Counts(
            marks.get(_RECORDS, counts.records),
            marks.get(_LATE, counts.late),
            marks.get(_CORRECTIONS, counts.corrections),
        ),
        percentiles={
            p: None if value is None else marks.get(f"p{p}", value)
            for p, value in state.percentiles.items()
        },
    )
