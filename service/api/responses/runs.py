"""Responses about runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from service.api.requests import Number, Run
from service.api.responses.common import Instant, Next
from service.frontier.health import Outcome
from service.frontier.timestamps import iso
from service.model.runs import RunEnd, RunRecord


class RunBody(Struct, frozen=True):
    """A run that has begun."""

    run: Run


class EndedBody(Struct, frozen=True):
    """A run that has ended."""

    run: Run
    outcome: Outcome
    because: Annotated[str | None, Meta(description="The program's reason; null: not given")]
    ended_at: Annotated[Instant, Meta(description="Instant of the first end")]


class RunLine(Struct, frozen=True):
    """A run in the list of runs."""

    run: Run
    stages: Annotated[
        list[str],
        Meta(description="The stages it was opened for; newer runs may have taken them over"),
    ]
    holder: str
    program: str | None
    links: dict[str, str]
    started_at: Annotated[
        Instant | None, Meta(description="null: the run is older than the release that stores it")
    ]
    ended_at: Annotated[
        Instant | None,
        Meta(description="Also of a run that a reset has `fenced`, without an outcome"),
    ]
    outcome: Annotated[
        Outcome | None,
        Meta(description="null: it continues, its program died, or it is `fenced`"),
    ]
    because: str | None
    epoch: Annotated[Number | None, Meta(description="The last epoch of its commits")]
    fenced: Annotated[
        bool | UnsetType,
        Meta(
            description="True if each of its stages belongs to a newer run, or to none since a reset"
        ),
    ] = UNSET


class RunsBody(Struct, frozen=True):
    """The runs of a job, newest first."""

    runs: list[RunLine]
    next: Next = UNSET


def ended_body(end: RunEnd) -> EndedBody:
    """Return a run that has ended."""
    return EndedBody(end.run, end.outcome, end.because or None, iso(end.at_ms))


def runs_body(found: Sequence[RunRecord], following: str | UnsetType) -> RunsBody:
    """Return the runs of a job, and the cursor of the next page."""
    return RunsBody([_line(each) for each in found], following)


def _line(run: RunRecord) -> RunLine:
    opened, end = run.opened, run.end or run.fencing
    return RunLine(
        run.run,
        list(opened.stages),
        opened.holder,
        opened.program,
        dict(opened.links),
        None if run.started_at_ms is None else iso(run.started_at_ms),
        None if end is None else iso(end.at_ms),
        None if run.end is None else run.end.outcome,
        None if end is None else end.because or None,
        run.epoch,
        run.is_fenced or UNSET,
    )
