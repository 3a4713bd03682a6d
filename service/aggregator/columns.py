"""Work on the columns of very many ranges, without delaying other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from service.frontier.columns import Bools, Int64s
from service.model.observations import StageObservation
from service.tasks import aside

R = TypeVar("R")

_SLICE: Final = 100_000
"""Number of ranges that are copied at once, in about a millisecond."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of ranges that no longer change."""

    promises: Int64s
    idle: Bools
    retired: Bools
    raised_at_ms: Int64s
    owners: Int64s
    held_since_ms: Int64s

    @classmethod
    def empty(cls, size: int) -> Columns:
        """Return columns of `size` ranges, to be filled."""
        return cls(
            _int64s(size),
            np.empty(size, dtype=np.bool_),
            np.zeros(size, dtype=np.bool_),
            *(_int64s(size) for _ in range(3)),
        )

    def fill(self, seen: StageObservation, start: int, chosen: slice) -> None:
        """Copy some ranges of a stage; the columns begin with its range `start`."""
        into = slice(chosen.start - start, chosen.stop - start)
        self.promises[into] = seen.promises[chosen]
        self.idle[into] = seen.idle[chosen]
        self.retired[[i - start for i in seen.retired if chosen.start <= i < chosen.stop]] = True
        self.raised_at_ms[into] = seen.raised_at_ms[chosen]
        self.owners[into] = seen.owners[chosen]
        self.held_since_ms[into] = seen.held_since_ms[chosen]


async def on_columns(
    work: Callable[[Columns], R], seen: StageObservation, start: int = 0, end: int | None = None
) -> R:
    """Do work on a copy of a stage's columns, or of a window of them; many in a thread.

    The columns may be the store's own, and change between two slices. So each range is copied at one
    instant, but the next one may be copied a few milliseconds later.
    """
    stop = len(seen.layout) if end is None else end
    columns = Columns.empty(stop - start)
    for at in range(start, stop, _SLICE):
        if at != start:
            await asyncio.sleep(0)
        columns.fill(seen, start, slice(at, min(at + _SLICE, stop)))
    return await aside(lambda: work(columns), stop - start)


def _int64s(size: int) -> Int64s:
    return np.empty(size, dtype=np.int64)
