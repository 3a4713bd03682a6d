"""Summary of a stage's ranges: a few hundred buckets of neighbours, and single ranges.

A stage may have a million ranges, more than a page can draw. So neighbours are counted together here,
from one observation of all of them, and every range is in the counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from service.aggregator.columns import Columns, on_columns
from service.aggregator.conditions import CONDITIONS, Condition, conditions_of
from service.aggregator.health import Examiner
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import InvalidRequestError, UnknownStageError
from service.frontier.columns import Bools, Int64s, lowest
from service.frontier.leases import held_since
from service.frontier.ranges import Layout
from service.frontier.timestamps import MAX, MIN
from service.model.observations import Instant
from service.model.reports import RangeView

_NOT_WAITED_FOR = tuple(
    CONDITIONS.index(each) for each in (Condition.FINAL, Condition.RETIRED, Condition.IDLE)
)

SLOWEST = "slowest"
"""Listing of the ranges that the stage waits for, the lowest promise first."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring ranges, counted together."""

    index: int
    """Index of the first range."""
    size: int
    lowest: int
    """The least promise of ranges that the stage waits for; `MAX`: none."""
    highest: int
    """The greatest one; `MIN`: none, or none has promised."""
    counts: Mapping[Condition, int]


@dataclass(frozen=True, slots=True)
class ListedRange:
    """A single range."""

    index: int
    view: RangeView
    condition: Condition
    held_since_ms: int | None
    """Begin of its leases without a gap, to any workers; None: without a lease."""
    is_stalled: bool
    """See `Examiner.stalled`."""


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """The ranges of a stage, or a window of them."""

    layout: Layout | None
    """None: the stage has no ranges."""
    counts: Mapping[Condition, int]
    """Counts of the whole window."""
    buckets: Sequence[Bucket]
    listed: Sequence[ListedRange]
    matching: int
    """Number of ranges to list."""
    lowest: int = MAX
    """The least promise of all ranges that the stage waits for.

    `MIN`: one of them has never promised; `MAX`: the stage waits for none.
    """


@dataclass(frozen=True, slots=True)
class Window:
    """Window of a stage's ranges, by their index, and its resolution."""

    start: int
    end: int | None
    """Excluded; None: up to the last range."""
    buckets: int
    show: Condition | str | None
    """Ranges to list: `SLOWEST`, those of a condition, or None: all."""
    limit: int


class RangeSummaries:
    """Summaries of the ranges of stages."""

    def __init__(self, live: RecoveringLiveStore, examiner: Examiner) -> None:
        self._live = live
        self._examiner = examiner

    async def read(self, job: str, stage: str, window: Window) -> RangeSummary:
        """Summarise a window of a stage's ranges. Raises `UnknownStageError`, `InvalidRequestError`."""
        pipeline = await self._live.pipeline(job, stage)
        if stage not in pipeline.stages:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        now, observed = await self._live.observe(job, (stage,))
        seen = observed.get(stage)
        if seen is None:
            return RangeSummary(None, dict.fromkeys(Condition, 0), [], [], 0)
        # Before the columns change with the next `await`.
        waited_for = ~seen.idle | (not pipeline.stages[stage].is_source)
        least = int(seen.promises.min(initial=MAX, where=waited_for))
        start, end = _bounds(window, len(seen.layout))
        digest = partial(_digest, start=start, window=window, now=now)
        found = await on_columns(digest, seen, start, end)
        indices = [start + k for k in found.chosen]
        views = await self._live.range_views(job, stage, indices)
        stalled = await self._examiner.stalled(job, stage, views)
        listed = [
            ListedRange(index, view, kind, held, view.name in stalled)
            for index, view, kind, held in zip(
                indices, views, found.conditions, found.held_since_ms, strict=False
            )
            # The layout may have changed in between.
            if view.name == seen.layout.name(index)
        ]
        counts = {each: sum(bucket.counts[each] for bucket in found.buckets) for each in Condition}
        return RangeSummary(seen.layout, counts, found.buckets, listed, found.matching, least)


@dataclass(frozen=True, slots=True)
class _Digest:
    buckets: Sequence[Bucket]
    chosen: Sequence[int]
    """The ranges to list, by their index within the window; the columns below are of these."""
    conditions: Sequence[Condition]
    held_since_ms: Sequence[int | None]
    matching: int


def _digest(columns: Columns, *, start: int, window: Window, now: Instant) -> _Digest:
    conditions = conditions_of(columns.promises, columns.idle, columns.retired, columns.owners)
    chosen, matching = _listed(conditions, columns.promises, window)
    return _Digest(
        _buckets(conditions, columns.promises, start, window.buckets),
        chosen,
        [CONDITIONS[int(conditions[k])] for k in chosen],
        [_held_since(columns, k, now) for k in chosen],
        matching,
    )


def _bounds(window: Window, total: int) -> tuple[int, int]:
    end = total if window.end is None else min(window.end, total)
    if window.start >= end:
        raise InvalidRequestError(
            f"from is {window.start} and to is {end}, and the stage has {total} ranges: from must be"
            " less than both"
        )
    return window.start, end


def _buckets(
    conditions: npt.NDArray[np.uint8], promises: Int64s, start: int, wanted: int
) -> list[Bucket]:
    count = min(wanted, len(promises))
    edges = np.arange(count + 1, dtype=np.int64) * len(promises) // count
    firsts = edges[:-1]
    counts = [
        np.add.reduceat(conditions == place, firsts, dtype=np.int64).tolist()
        for place in range(len(CONDITIONS))
    ]
    waited_for = _are_waited_for(conditions)
    lows = np.minimum.reduceat(np.where(waited_for, promises, MAX), firsts).tolist()
    highs = np.maximum.reduceat(np.where(waited_for, promises, MIN), firsts).tolist()
    sizes = np.diff(edges).tolist()
    return [
        Bucket(
            start + first,
            sizes[k],
            lows[k],
            highs[k],
            {each: counts[place][k] for place, each in enumerate(CONDITIONS)},
        )
        for k, first in enumerate(firsts.tolist())
    ]


def _are_waited_for(conditions: npt.NDArray[np.uint8]) -> Bools:
    return np.logical_and.reduce([conditions != each for each in _NOT_WAITED_FOR])


def _listed(
    conditions: npt.NDArray[np.uint8], promises: Int64s, window: Window
) -> tuple[list[int], int]:
    if window.show is None:
        return list(range(min(window.limit, len(promises)))), len(promises)
    if window.show == SLOWEST:
        fitting = np.flatnonzero(_are_waited_for(conditions))
    else:
        fitting = np.flatnonzero(conditions == CONDITIONS.index(Condition(window.show)))
    if not len(fitting):
        return [], 0
    return fitting[lowest(promises.take(fitting), window.limit)].tolist(), len(fitting)


def _held_since(seen: Columns, index: int, now: Instant) -> int | None:
    if not seen.owners[index]:
        return None
    # Leases have a clock of their own.
    return now.wall_ms - (now.lease_ms - held_since(int(seen.held_since_ms[index])))
