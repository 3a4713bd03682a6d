"""Reports and commits, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from service.frontier.facts import Facts, ReportedFacts
from service.frontier.promises import keyed_promise
from service.frontier.timestamps import MAX
from service.model.jobs import StageView
from service.model.leases import Claim, Grant, LostReason

Column = Sequence[int] | npt.NDArray[np.int64]
"""Integers. Many of them are an array, so that the hot path has no loop over single ones."""


RangeOrder = Literal["range", "promise"]

MAX_REPORTED = 10_000
"""The largest number of ranges in one report."""


class RangeNote(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Note of a range's last report beside its promise, kept for display.

    The stores keep it as one opaque value, so a new member needs no change to them.
    """

    holds: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    position: str = ""
    """A shard: where its reader is, in the source's own words."""


NOTHING_NOTED = RangeNote()


def noted(notes: Sequence[RangeNote]) -> Sequence[RangeNote | None]:
    """Return the notes of a report: None in place of empty ones.

    >>> noted([RangeNote({"state": 5}), RangeNote()])
    [RangeNote(holds={'state': 5}, position=''), None]
    """
    return [note if note.holds or note.position else None for note in notes]


class CommittedHolds(msgspec.Struct, frozen=True, gc=False):
    """The holds of a stage's last commit for all of its ranges, kept for display."""

    observed_input: int
    """The input watermark that the epoch ran with."""
    holds: dict[str, int]

    def note(self, own: RangeNote, promise: int) -> RangeNote:
        """Return the note of a range with this promise. The range's own note takes precedence. If the
        promise differs from the commit's, another cause than the commit holds the range.

        >>> kept = CommittedHolds(90, {"join": 30})
        >>> [kept.note(NOTHING_NOTED, promise).holds for promise in (20, 30, 40)]
        [{}, {'join': 30}, {}]
        """
        cap = keyed_promise(self.observed_input, self.holds.values())
        return own if own.holds or promise != cap else RangeNote(self.holds)


HoldColumns = Mapping[str, npt.NDArray[np.int64]]
"""By component, the hold of each range of a packed report; `MAX`: without a hold."""


def holds_at(columns: HoldColumns, row: int) -> dict[str, int]:
    """Return the holds of one range.

    >>> holds_at({"state": np.array([5, MAX])}, 0), holds_at({"state": np.array([5, MAX])}, 1)
    ({'state': 5}, {})
    """
    found = ((name, int(column[row])) for name, column in columns.items())
    return {name: hold for name, hold in found if hold != MAX}


class Report(msgspec.Struct, frozen=True):
    """A worker's report, reduced to promises by the rules of `service.frontier.promises`."""

    token: str
    """Token of a lease. With a claim, the store makes the token."""
    ranges: Sequence[str] | None
    """Distinct ranges. None: all ranges of the lease. The columns below are in the same order."""
    promises: Column | int
    """Promise of each range, or one for all. With `capped_at_commit`, only the least of the holds: the
    commit adds the input.
    """
    idle: Sequence[bool] | None = None
    """None: none is idle."""
    notes: Sequence[RangeNote | None] | None = None
    """See `noted`. None: without notes."""
    epoch: int | None = None
    observed_input: int | None = None
    """The input watermark that the worker has observed; checked against the published one."""
    capped_at_commit: bool = False
    facts: Sequence[ReportedFacts | None] | None = None
    """None: without facts."""
    hold_columns: HoldColumns | None = None
    """Columns of holds of a packed report, in place of notes."""
    claim: Claim | None = None
    """Claim of the report's own ranges, in the same step. None: the report is under `token`."""
    releases: bool = False
    """True if the claimed lease is released in the same step, once the report is applied."""


def column(report: Report) -> Column:
    """Return the promises of a report, one for each of its ranges."""
    if isinstance(report.promises, int):
        return [report.promises] * len(report.ranges or ())
    return report.promises


class Reported(msgspec.Struct, frozen=True):
    """The result of a report."""

    accepted: int
    behind: Sequence[str]
    rejected: Sequence[tuple[str, LostReason]]
    expires_in_ms: int
    view: StageView
    advances: bool
    """True if the stage's agreement is ahead of its published watermark, and so must be published."""
    ranges: Sequence[str]
    """The ranges of the report, by name."""
    grant: Grant | None = None
    """The lease that the report has claimed. None: without a claim."""
    ends_retirement: bool = False
    """True if a range of the report was retired, and the end of its retirement is not saved yet."""
    returned: bool = False
    """True if a range of the stage has returned, and the answer must wait (see `awaits_revision`)."""


@dataclass(frozen=True, slots=True)
class StageCommit:
    """Commit of an epoch for one stage."""

    observed_input: int | None = None
    """The input watermark that it ran with; None: in the reports, or not for this stage."""
    holds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Holds of all its ranges; only with an input watermark."""
    late: int = 0
    """Late rows that no report counts; only of a stage that has ranges."""
    corrections: int = 0
    """Values that correct emitted ones; only of a stage that has ranges."""

    @property
    def cap(self) -> int | None:
        """Upper bound of the promises of the epoch's ranges; None: as reported."""
        if self.observed_input is None:
            return None
        return keyed_promise(self.observed_input, self.holds.values())

    @property
    def kept(self) -> CommittedHolds | None:
        """Holds for display; None: without holds."""
        if self.observed_input is None or not self.holds:
            return None
        return CommittedHolds(self.observed_input, dict(self.holds))


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of an epoch."""

    run: int
    """0: without a run."""
    epoch: int
    stages: Mapping[str, StageCommit]
    evidence_age_ms: int = 0
    """Time since its batch was planned (see `service.frontier.idleness.Commits`)."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Number of each stage's applied ranges, and the stages for which the ledger has yet to record
    them.
    """

    applied: Mapping[str, int]
    unrecorded: Sequence[str]
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class RangeView:
    """One range, for display: its holder, and its holds."""

    name: str
    promise: int
    idle: bool
    note: RangeNote
    holder: str | None
    fence: int | None
    expires_in_ms: int | None
    reported_at_ms: int | None
    """Instant of its last applied report."""
    raised_at_ms: int | None
    """Instant of the last move of its promise."""
    facts: Facts | None
    retired: bool = False
    waiting_promise: int | None = None
    """The greatest promise in an epoch that is not committed; only of `range_views`."""
