"""Observations of a stage's ranges in the live store, read at one instant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.frontier.columns import Bools, Int64s
from service.frontier.facts import Counts, Facts
from service.frontier.idleness import Commits, is_void
from service.frontier.ranges import Layout
from service.frontier.timestamps import MIN
from service.model.jobs import Census
from service.model.reports import CommittedHolds
from service.model.runs import RunEnd

Marks = Mapping[str, int]
"""Soft values of a stage, by name, that only rise within an incarnation."""


def without(facts: Mapping[int, Facts], retired: Collection[int]) -> Mapping[int, Facts]:
    """Return the facts of ranges that are not retired.

    >>> without({1: Facts(0, None, None, None, 0, 0)}, {1, 2})
    {}
    """
    return {i: each for i, each in facts.items() if i not in retired} if retired else facts


@dataclass(frozen=True, slots=True)
class StageObservation:
    """A stage's ranges: columns in the order of the layout. The columns may be the store's own: they
    change with the next `await`, and must not be written to.
    """

    layout: Layout
    """The ranges of the columns: an index has no meaning in any other layout."""
    promises: Int64s
    """As they count: see `counted_promise`."""
    idle: Bools
    reported_at_ms: Int64s
    """Instant of each range's last applied report; 0: never."""
    raised_at_ms: Int64s
    """Instant of the last move of each promise, as it counts; 0: unknown."""
    facts: Mapping[int, Facts]
    """Facts about the ranges that have reported any, by index; without retired ranges, whose work is not
    waited for either."""
    counts: Counts
    owners: Int64s
    """The fence of the lease on each range; 0: without a lease."""
    held_since_ms: Int64s
    """Instant since which each range has been under leases without a gap, or without a lease, on the
    clock of leases; 0: without a lease since its state began. Of an unwatched lease, the complement: see
    `held_moment`."""
    idle_by_policy: Collection[int]
    """The ranges that are idle by policy, by index."""
    retired: Collection[int]
    """The retired ranges, by index."""
    commits: Commits | None
    """The stage's commits; kept only if it has a policy for idleness."""
    kept: CommittedHolds | None = None
    """The holds of its last commit."""
    end: RunEnd | None = None
    """The end of its run; None: the run continues, or the stage has none."""
    census: Census | None = None
    """The counts of its ranges at the same instant."""
    marks: Marks = field(default_factory=dict[str, int])
    """Its soft values as far as they have been returned to readers."""
    generation: int = 0
    """Generation of its job."""
    departed: Sequence[tuple[int, str]] = ()
    """The last leases on it that have run out, the newest first: the deadline of each, which is the
    moment in `held_since_ms` of its ranges, and its holder."""

    def is_ahead_of(self, lease_ms: int) -> bool:
        """Return whether a moment of it is ahead of the clock of leases, which was set back."""
        held_since_ms = np.maximum(self.held_since_ms, ~self.held_since_ms)
        return (
            is_void(self.commits, lease_ms)
            or bool((held_since_ms > lease_ms).any())
            or any(facts.quiet_since_ms > lease_ms for facts in self.facts.values())
        )


@dataclass(frozen=True, slots=True)
class Instant:
    """One instant on two clocks."""

    wall_ms: int
    lease_ms: int
    """On the clock of leases."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision about a quiet range. It counts only if the range is unchanged since the observation."""

    index: int
    fence: int
    """Fence of the lease on it; 0: without a lease."""
    quiet_since_ms: int | None
    """From its facts; None: without facts. Records since the observation have changed it."""
    idle: bool
    promise: int
    """`MIN`: unchanged."""

    @property
    def lets_pass(self) -> bool:
        """True if the watermark may pass the range by it. Such a decision does not count for a range
        that has left something unfinished since the observation.
        """
        return self.idle or self.promise != MIN
