"""Joining a report here, with the promises that are expected in Redis.

In the script, each range of a report takes several instructions of Lua's interpreter, and meanwhile
Redis does nothing else. But what is there is mostly what the lease's last report has left. Then the next
one can be joined here, with array operations. The script compares what is there with what was expected.
If it is something else, by another replica's report, a commit or a restore, the script joins the report
itself. So an expectation may be wrong, and nothing is lost but time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from service.frontier.columns import Bools
from service.frontier.timestamps import MAX
from service.live.redis.job_layout import Runs
from service.live.redis.packing import blob
from service.live.redis.schema import BLOCK, NOTHING, Floats
from service.model.reports import Report, Reported

_MAX_RUNS: Final = 16
"""Runs of ranges up to which a report is joined here: each takes several array operations."""


@dataclass(frozen=True, slots=True)
class Promises:
    """The promises of some ranges, in the order of their layout."""

    column: Floats
    packed: bytes
    """As Redis has them."""

    @classmethod
    def of(cls, column: Floats) -> Promises:
        """Pack a column."""
        return cls(column, column.astype("<f8", copy=False).tobytes())


def join(expected: Promises, reported: Promises, runs: Runs) -> list[Any] | None:
    """Return what `report.lua` reads: what is expected, and what the report makes of each run of ranges.

    None: a range would be behind, or the ranges are in too many places.
    """
    if len(runs) > 2 * _MAX_RUNS:
        return None
    raised = reported.column > expected.column
    is_everywhere = np.count_nonzero(raised) == len(raised)
    if not is_everywhere and np.count_nonzero(reported.column < expected.column):
        return None
    found: list[list[Any]] = []
    start = 0
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        part = slice(start, start + count)
        found.append(
            [
                first,
                count,
                _raised_runs(raised[part], first),
                _minima(reported.column[part], first),
                _newly_final(expected.column[part], reported.column[part]),
            ]
        )
        start += count
    return [blob(expected.packed), found]


def _raised_runs(raised: Bools, first: int) -> list[int]:
    """Return where promises move, given the index of the first range."""
    count, start = int(np.count_nonzero(raised)), int(raised.argmax())
    if np.count_nonzero(raised[start : start + count]) == count:
        # Mostly all of them move, or all but the slowest.
        return [first + start, count] if count else []
    edges = (np.flatnonzero(raised[1:] != raised[:-1]) + 1).tolist()
    bounds = [0, *edges, len(raised)]
    starts = range(0 if raised[0] else 1, len(bounds) - 1, 2)
    return [n for k in starts for n in (first + bounds[k], bounds[k + 1] - bounds[k])]


def _minima(promises: Floats, first: int) -> list[float]:
    """Return the least promise in each block, given the index of the first range."""
    starts = np.arange(-(first % BLOCK), len(promises), BLOCK)
    starts[0] = 0
    return np.minimum.reduceat(promises, starts).tolist()


def _newly_final(expected: Floats, reported: Floats) -> int:
    if reported.max() < MAX:
        return 0
    return int(np.count_nonzero(reported == MAX) - np.count_nonzero(expected == MAX))


def left_by(report: Report, reported: Reported, promises: Promises) -> Promises | None:
    """Return the promises of a report's ranges after it was applied, as far as they are known here.

    `promises` are the report's own. None: they are not known, or were not applied yet. Each of them
    is a promise: a range that promises nothing keeps its earlier promise.
    """
    applied = report.epoch is None and not reported.behind and not reported.rejected
    return promises if applied and bool(promises.column.min() > NOTHING) else None
