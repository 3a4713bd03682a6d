"""Responses with changes of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from service.api.requests import Run
from service.api.responses.common import Instant, Next
from service.frontier.health import Outcome, past
from service.frontier.timestamps import iso
from service.model.audit import Action, shortened
from service.model.changes import Change

_OF_JOB: Final = {
    Action.CREATE_JOB: "the job was created",
    Action.RESET_JOB: "the job was reset: its next generation began",
    Action.DELETE_JOB: "the job was deleted",
}


class ChangeLine(Struct, frozen=True):
    """A change of a job, without its author."""

    at: Instant
    action: Annotated[Action, Meta(description="As in the audit; not an action on a key")]
    stages: Annotated[
        list[str] | None,
        Meta(
            description="The stages of the run, of the range, or of the change of the specification;"
            " null: the whole job"
        ),
    ]
    run: Run | None
    outcome: Annotated[
        Outcome | None,
        Meta(description="The outcome of a run that has ended; null: a reset has fenced it"),
    ]
    range: Annotated[str | None, Meta(description="The range that was retired, or reports again")]
    detail: Annotated[str, Meta(description="The change in words")]
    because: Annotated[
        str | None, Meta(description="The reason from the program or the operator; null: not given")
    ]
    holder: Annotated[
        str | UnsetType,
        Meta(description="The holder of the lease on a range that reports again. Absent: unknown"),
    ] = UNSET


class ChangesBody(Struct, frozen=True):
    """The changes of a job, newest first."""

    changes: list[ChangeLine]
    next: Next = UNSET


def changes_body(found: Sequence[Change], following: str | None) -> ChangesBody:
    """Return a page of the changes of a job, and the cursor of the next page."""
    return ChangesBody([_line(each) for each in found], UNSET if following is None else following)


def _line(change: Change) -> ChangeLine:
    return ChangeLine(
        iso(change.at_ms),
        change.action,
        None if change.stages is None else list(change.stages),
        change.run,
        change.outcome,
        change.range,
        in_words(change),
        change.because,
        UNSET if change.range is None else change.holder or UNSET,
    )


def in_words(change: Change) -> str:
    """Describe a change.

    >>> in_words(Change(5, Action.CHANGE_JOB, ["v"], specification="layout 3; v: new"))
    'the specification changed: layout 3; v: new'
    >>> in_words(Change(5, Action.END_RUN, ["taps"], 7, outcome=Outcome.STOPPED))
    'run 7 was stopped'
    >>> in_words(Change(5, Action.END_RUN, ["taps"], 7))
    'run 7 was fenced'
    """
    stages = ", ".join(change.stages or ())
    match change.action:
        case Action.OPEN_RUN:
            return f"run {change.run} of {stages} was opened by {change.holder}"
        case Action.END_RUN:
            return f"run {change.run} {past(change.outcome) if change.outcome else 'was fenced'}"
        case Action.RETIRE_RANGE:
            return f"range {change.range} of {stages} was retired"
        case Action.RETURN_RANGE:
            by = f", by {change.holder}" if change.holder else ""
            return f"range {change.range} of {stages} reports again{by}: its retirement has ended"
        case Action.CHANGE_JOB:
            named = change.specification and f": {shortened(change.specification)}"
            return f"the specification changed{named}"
        case _:
            return _OF_JOB[change.action]
