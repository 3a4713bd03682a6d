"""Runs: the executions of a program for some stages, from their start to their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from service.frontier.health import Outcome

MAX_NUMBER = 2**53
"""The highest number of a run: JSON's numbers are exact up to here."""

MAX_RUNS = 1_000
"""Number of runs of a job that are kept, besides those that still have a stage: the newest."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run to be opened."""

    stages: Sequence[str]
    holder: str
    program: str | None = None
    """The name of the program, for display."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Addresses of its pages, by name."""


class RunEnd(Struct, frozen=True):
    """The end of a run."""

    run: int
    outcome: Outcome
    at_ms: int
    because: str = ""
    """The reason from the program; empty: not given."""
    holder: str = ""
    """The holder of the run; empty: the run has ended under an older version."""


@dataclass(frozen=True, slots=True)
class Fencing:
    """The moment at which a reset has fenced a run, with the reason."""

    at_ms: int
    because: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run in the ledger."""

    run: int
    opened: NewRun
    started_at_ms: int | None
    """None: the run is older than this record."""
    end: RunEnd | None
    """None: its end was not reported."""
    epoch: int | None
    """The last epoch that it committed."""
    is_fenced: bool = False
    """True if its end was not reported, and each of its stages belongs to a newer run, or to none."""
    fencing: Fencing | None = None
    """None: not fenced, or by a newer run, or before its record had the moment."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended, and the stages that still belong to it."""

    end: RunEnd
    stages: Sequence[str]
