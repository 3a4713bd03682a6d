"""Indices of ranges, in the forms that reports bring them in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.frontier.columns import Bools
from service.live.memory.minimum_tree import Int64s
from service.model.reports import Column

Rows = Column | slice
"""Indices of ranges, or all from one index to another: arrays take a slice in a third of the time."""


def neighbours(indices: Int64s) -> Int64s | slice:
    """Return rising indices as a slice, if none is missing between the first and the last of them.

    >>> neighbours(np.array([4, 5, 6])), neighbours(np.array([4, 6])).tolist()
    (slice(4, 7, None), [4, 6])
    """
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first == len(indices) - 1 else indices


def as_list(rows: Rows) -> Sequence[int]:
    """Return indices, or another column, as Python's own integers."""
    if isinstance(rows, slice):
        return range(rows.start, rows.stop)
    return rows.tolist() if isinstance(rows, np.ndarray) else rows


def among(at: Int64s | slice, chosen: Bools) -> Int64s:
    """Return the indices of the chosen ones."""
    if isinstance(at, slice):
        return np.flatnonzero(chosen) + at.start
    return at[chosen]
