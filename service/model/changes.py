"""Changes of a job that explain the course of its watermarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.frontier.health import Outcome
from service.model.audit import Action


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a job. Without its author: readers of a job are not admins."""

    at_ms: int
    action: Action
    stages: Sequence[str] | None = None
    """The stages of the run, of the range, or of the specification's change; None: all of the job."""
    run: int | None = None
    holder: str | None = None
    """The holder of the run that was opened, or of the lease on the range that reports again."""
    outcome: Outcome | None = None
    range: str | None = None
    specification: str = ""
    """The layout of a changed specification, and the differences of its stages, in a few words."""
    because: str | None = None
    """The reason from the program or the operator."""
