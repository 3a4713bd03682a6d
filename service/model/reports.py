"""What is reported and committed, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from service.model.jobs import StageView
from service.model.leases import LostReason

Column = Sequence[int] | npt.NDArray[np.int64]
"""Integers, a great many of them as an array: the report path must not touch each one for itself."""


RangeOrder = Literal["range", "promise"]


class RangeNote(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a range's last report said beside its promise, kept for people to see.

    The stores keep it as one value and never look into it: another member needs nothing of them.
    """

    holds: dict[str, int] = msgspec.field(default_factory=dict[str, int])

    def __bool__(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self.holds)


NOTHING_NOTED = RangeNote()


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says, folded by the rules of `service.frontier.promises`."""

    token: str
    ranges: Sequence[str]
    """No range twice. The columns below go with it."""
    promises: Column
    """With `capped_at_commit`, only the least of the holds: the commit brings the input."""
    idle: Sequence[bool] | None = None
    """None: nobody is."""
    notes: Sequence[RangeNote | None] | None = None
    """None: there are none."""
    epoch: int | None = None
    observed_input: int | None = None
    """The input watermark that the worker says it has observed; checked against the published one."""
    capped_at_commit: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """What became of a report."""

    accepted: int
    behind: Sequence[str]
    rejected: Sequence[tuple[str, LostReason]]
    expires_in_ms: int
    view: StageView
    advances: bool
    """The stage's agreement is ahead of what is published: somebody must publish it."""


@dataclass(frozen=True, slots=True)
class StageCommit:
    """The input watermark that an epoch ran with; None: said in the reports, or there is none."""

    observed_input: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The word that an epoch is done."""

    run: int
    """0: of no run."""
    epoch: int
    stages: Mapping[str, StageCommit]


@dataclass(frozen=True, slots=True)
class Committed:
    """How many ranges of each stage were applied, and of which stages the ledger has yet to hear."""

    applied: Mapping[str, int]
    unrecorded: Sequence[str]
    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class RangeView:
    """One range, for people: who holds it, and what holds it back."""

    name: str
    promise: int
    idle: bool
    note: RangeNote
    holder: str | None
    fence: int | None
    expires_in_ms: int | None
    reported_at_ms: int | None
