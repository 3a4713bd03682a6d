"""Runs: the executions of a program for some stages, from their start to their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from service.frontier.health import Outcome

MAX_NUMBER = 2**53
"""The highest number of a run: JSON's numbers are exact up to here."""

MAX_RUNS = 1_000
"""Runs of a job that are kept: the newest, and those that still have a stage."""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run that is to be opened."""

    stages: Sequence[str]
    holder: str
    program: str | None = None
    """The name of the program, for people."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Addresses where more is shown of it, by name."""


class RunEnd(Struct, frozen=True):
    """The end of a run."""

    run: int
    outcome: Outcome
    at_ms: int
    because: str = ""
    """The program's own words. Empty: it said nothing."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run, as the ledger has it."""

    run: int
    opened: NewRun
    started_at_ms: int | None
    """None: it was opened before this was recorded."""
    end: RunEnd | None
    """None: its program has not said that it ended."""
    epoch: int | None
    """The last epoch that it committed."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended, and the stages that still belong to it."""

    end: RunEnd
    stages: Sequence[str]
