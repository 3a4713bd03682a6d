"""Observations of a stage's ranges in the live store, read at one instant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from service.frontier.columns import Bools, Int64s
from service.frontier.facts import Counts, Facts
from service.frontier.idleness import Commits
from service.frontier.ranges import Layout
from service.model.jobs import Census
from service.model.reports import CommittedHolds
from service.model.runs import RunEnd

Marks = Mapping[str, int]
"""Soft values of a stage, by name, that only rise within an incarnation."""


@dataclass(frozen=True, slots=True)
class StageObservation:
    """A stage's ranges: columns in the order of the layout. They may be the store's own: they
    change with the next `await`, and nobody may write to them.
    """

    layout: Layout
    """The ranges that the columns are of: an index means nothing in any other layout."""
    promises: Int64s
    idle: Bools
    reported_at_ms: Int64s
    """When each range's last report was applied; 0: it has none."""
    raised_at_ms: Int64s
    """When the promise of each moved last; 0: it is not known."""
    facts: Mapping[int, Facts]
    """Facts about the ranges that have reported any, by index."""
    counts: Counts
    owners: Int64s
    """The fence of the lease on each range; 0: there is none."""
    held_since_ms: Int64s
    """Since when each range has been under one lease or another without a gap, or under none, on the
    clock of leases; 0: under none since its state began."""
    idle_by_policy: Collection[int]
    """The ranges that the service has decided to be idle, by index."""
    commits: Commits | None
    """The stage's commits; kept only if it has a policy for idleness."""
    kept: CommittedHolds | None = None
    """The holds that its last commit brought."""
    end: RunEnd | None = None
    """The end of its run; None: that goes on, or there is none."""
    census: Census | None = None
    """The counts of its ranges at the same instant."""


@dataclass(frozen=True, slots=True)
class Instant:
    """One instant on two clocks."""

    wall_ms: int
    lease_ms: int
    """On the clock that leases run by."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A decision about a quiet range. It counts only if the range is still as it was observed."""

    index: int
    fence: int
    """Fence of the lease on it; 0: there was none."""
    quiet_since_ms: int | None
    """As its facts have it; None: it has none. Whatever has brought records since has changed it."""
    idle: bool
    promise: int
    """`MIN`: as it is."""
