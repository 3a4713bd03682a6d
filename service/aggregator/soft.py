"""Soft values: processing and percentile watermarks, and counts. They are computed when somebody reads.

They follow from what ranges last said of their work, so each report may change them, and nobody waits
for them to be recorded. What was shown once is joined in the live store, so that no reader sees them go
back while its state lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from service.aggregator.health import Examiner
from service.clock import Clock
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError, UnknownStageError
from service.frontier.facts import (
    UNKNOWN,
    Counts,
    all_said_pending,
    join_work,
    processing_watermark,
    work_since,
)
from service.frontier.graph import Pipeline
from service.frontier.health import Health
from service.frontier.sketches import quantiles
from service.frontier.timestamps import MIN
from service.model.jobs import JobView
from service.model.observations import Marks, StageObservation

_FRESH_MS = 100
"""Time for which values are reused if nothing has changed here: other replicas take reports, too."""

_REST = 20
"""Values of more ranges are computed again after so many times as long as it took."""

_MANY = 20_000
"""Up to so many ranges, values are computed after each report."""

_LONGEST_MS = 1_000

_PROCESSING = "processing"
_RECORDS = "records"
_LATE = "late"


@dataclass(frozen=True, slots=True)
class SoftState:
    """The soft values of a stage."""

    processing_ms: int | None
    """The processing watermark; None: some range has never reported."""
    counts: Counts
    percentiles: Mapping[int, int | None]
    """By percentage; None: some range has not said what it has in flight."""
    health: Health


_Key = tuple[str, tuple[int, int, int], frozenset[str]]
"""A job, its layout, and stages of it."""


@dataclass(slots=True)
class _Known:
    changes: int
    """Number of changes of the job that this process had made when these were computed."""
    at_ms: int
    took_ms: int
    ranges: int
    """Number of ranges of these stages and all above them."""
    states: dict[str, SoftState] = field(default_factory=dict[str, SoftState])


class SoftStates:
    """Computes the soft values of stages, for all readers that ask at the same time at once.

    While other replicas share the live store, each reader gets values that were joined there after it
    asked: else one that turns from replica to replica could see them go back.
    """

    def __init__(
        self, live: RecoveringLiveStore, examiner: Examiner, clock: Clock, *, shared: bool
    ) -> None:
        self._live = live
        self._examiner = examiner
        self._clock = clock
        self._shared = shared
        self._known: dict[_Key, _Known] = {}
        self._next: dict[_Key, asyncio.Task[_Known]] = {}
        """The rounds that have not begun, which readers may still join."""
        self._running: dict[_Key, asyncio.Task[_Known]] = {}

    async def read(self, job: JobView, stages: Iterable[str]) -> Mapping[str, SoftState]:
        """Return the values of these stages; of none, while the live store is unavailable."""
        layout = (job.incarnation, job.generation, job.layout_version)
        key = (job.name, layout, frozenset(stages))
        found = None if self._shared else self._still_good(key)
        if found is not None:
            # Another reader may have been shown more, of other stages along with these.
            await self._join(key, found.states)
        else:
            joined = self._next.get(key)
            if joined is None:
                joined = self._next[key] = asyncio.create_task(self._round(key, job))
                # If all its readers have gone, nobody asks for its exception.
                joined.add_done_callback(lambda done: done.cancelled() or done.exception())
            # Shielded: a reader that gives up must not cancel what others wait for.
            found = await asyncio.shield(joined)
        return found.states

    async def _round(self, key: _Key, view: JobView) -> _Known:
        before = self._running.get(key)
        if before is not None:
            await asyncio.wait((before,))
        # From here on, whoever asks begins the next round.
        self._running[key] = self._next.pop(key)
        try:
            found = self._still_good(key)
            if found is not None:
                is_whole = await self._join(key, found.states)
                if is_whole or found.ranges > _MANY:
                    return found
            return await self._compute(key, view)
        finally:
            del self._running[key]

    async def _join(self, key: _Key, states: dict[str, SoftState]) -> bool:
        """Join values with what was shown before, here or by other replicas. Those that cannot be joined
        are dropped: they may be behind what was shown, while a store refuses writes but can be read.

        Returns whether nothing is missing that was shown before: else it is time to compute them again,
        and what is missing then is so because a range has joined.
        """
        marks = {name: _marks(state) for name, state in states.items()}
        joined: Mapping[str, Marks] = {}
        with suppress(UnavailableError, UnknownStageError):
            job, (_, generation, _), _ = key
            joined = await self._live.raise_marks(job, generation, marks)
        is_whole = True
        for name, state in list(states.items()):
            shown = joined.get(name)
            if shown is None:
                del states[name]
                is_whole = False
                continue
            is_whole = is_whole and not shown.keys() & _missing(state)
            states[name] = _joined(state, shown)
        return is_whole

    def _still_good(self, key: _Key) -> _Known | None:
        known = self._known.get(key)
        if known is None:
            return None
        age_ms = self._clock.steady_ms() - known.at_ms
        if known.ranges > _MANY:
            return known if age_ms < min(_REST * known.took_ms, _LONGEST_MS) else None
        unchanged = known.changes == self._live.changes_of(key[0])
        return known if unchanged and age_ms < _FRESH_MS else None

    async def _compute(self, key: _Key, view: JobView) -> _Known:
        job, _, wanted = key
        pipeline = view.pipeline
        changes, began_ms = self._live.changes_of(job), self._clock.steady_ms()
        above = pipeline.ancestors(wanted)
        states: dict[str, SoftState] = {}
        try:
            now, observed = await self._live.observe(job, above)
            # The shown processing watermark of an upstream counts for the stages behind it, too.
            shown = await self._live.raise_marks(job, key[1][1], {name: {} for name in above})
            healths = await self._examiner.healths(view, above, observed, now)
            states = _derive(pipeline, above, observed, shown, wanted, healths, now.wall_ms)
            await self._join(key, states)
        except (UnavailableError, UnknownStageError):
            # The layout may have changed since the reader looked. What is soft may be missing.
            pass
        ended_ms = self._clock.steady_ms()
        layouts = [pipeline.stages[name].layout for name in above]
        ranges = sum(len(layout) for layout in layouts if layout is not None)
        known = _Known(changes, ended_ms, ended_ms - began_ms, ranges, states)
        self._known[key] = known
        self._drop_old(ended_ms)
        return known

    def _drop_old(self, now_ms: int) -> None:
        if len(self._known) > 1_000:
            self._known = {
                key: known
                for key, known in self._known.items()
                if now_ms - known.at_ms < _LONGEST_MS
            }


def _derive(
    pipeline: Pipeline,
    above: Collection[str],
    observed: Mapping[str, StageObservation],
    shown: Mapping[str, Mapping[str, int]],
    wanted: Collection[str],
    healths: Mapping[str, Health],
    now_ms: int,
) -> dict[str, SoftState]:
    since: dict[str, int] = {}
    states: dict[str, SoftState] = {}
    for name in above:
        stage, seen = pipeline.stages[name], observed.get(name)
        upstream = [since.get(up, UNKNOWN) for up in stage.inputs]
        own = [] if seen is None else [_work_since(seen)]
        found = join_work([*own, *upstream])
        # The shown value stands, unless a range has joined that has not reported yet.
        mark = shown.get(name, {}).get(_PROCESSING, UNKNOWN)
        since[name] = found if found == UNKNOWN else max(found, mark)
        if name in wanted:
            states[name] = SoftState(
                processing_watermark(since[name], now_ms),
                Counts() if seen is None else seen.counts,
                {} if seen is None else _percentiles(stage.policy.percentiles, seen),
                healths[name],
            )
    return states


def _work_since(seen: StageObservation) -> int:
    return work_since(seen.reported_at_ms, seen.promises, seen.idle, seen.facts)


def _percentiles(percentages: tuple[int, ...], seen: StageObservation) -> dict[int, int | None]:
    if not percentages:
        return {}
    if not all_said_pending(seen.promises, seen.idle, seen.facts):
        return dict.fromkeys(percentages)
    found = quantiles((each.pending for each in seen.facts.values() if each.pending), percentages)
    # With nothing pending it is the output watermark, which is joined when it is shown.
    values = [MIN] * len(percentages) if found is None else found
    return dict(zip(percentages, values, strict=True))


def _marks(state: SoftState) -> dict[str, int]:
    marks = {f"p{p}": value for p, value in state.percentiles.items() if value is not None}
    marks |= {_RECORDS: state.counts.records, _LATE: state.counts.late}
    if state.processing_ms is not None:
        marks[_PROCESSING] = state.processing_ms
    return marks


def _missing(state: SoftState) -> set[str]:
    missing = {f"p{p}" for p, value in state.percentiles.items() if value is None}
    return missing | ({_PROCESSING} if state.processing_ms is None else set())


def _joined(state: SoftState, marks: Mapping[str, int]) -> SoftState:
    return SoftState(
        None if state.processing_ms is None else marks.get(_PROCESSING, state.processing_ms),
        Counts(marks.get(_RECORDS, state.counts.records), marks.get(_LATE, state.counts.late)),
        {
            p: None if value is None else marks.get(f"p{p}", value)
            for p, value in state.percentiles.items()
        },
        state.health,
    )
