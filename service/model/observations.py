"""What a live store knows of a stage's ranges, read at one instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.frontier.columns import Bools, Int64s
from service.frontier.facts import Counts, Facts

Marks = Mapping[str, int]
"""Soft values of a stage, by name, that only rise within an incarnation."""


@dataclass(frozen=True, slots=True)
class StageObservation:
    """A stage's ranges: columns in the order of the layout. They may be the store's own: read them before
    the next `await`, and do not write to them.
    """

    promises: Int64s
    idle: Bools
    reported_at_ms: Int64s
    """When each range's last report was applied; 0: it has none."""
    raised_at_ms: Int64s
    """When the promise of each moved last; 0: not since the state began."""
    facts: Mapping[int, Facts]
    """Of the ranges that have reported any, by index."""
    counts: Counts
