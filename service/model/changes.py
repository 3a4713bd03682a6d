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
    """The stages of the run, or of the range; None: all stages of the job."""
    run: int | None = None
    holder: str | None = None
    """The holder of the run that was opened, or of the lease on the range that reports again."""
    outcome: Outcome | None = None
    range: str | None = None
    layout_version: int | None = None
    """The layout that a change of the specification has made."""
    because: str | None = None
    """The reason from the program or the operator."""
