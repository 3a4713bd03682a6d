"""Responses with the problems of jobs."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from service.aggregator import FoundProblems, JobHealth, Problem
from service.api.responses.common import Count, HoldsBackNext, Instant
from service.frontier.health import Health, Severity
from service.frontier.timestamps import iso


class ProblemLine(Struct, frozen=True):
    """A root cause: a stage that holds itself back."""

    job: str
    stage: str
    health: Annotated[
        Health,
        Meta(description="One of `unpublished`, `failed`, `no_worker`, `silent` and `stalled`"),
    ]
    severity: Annotated[
        Severity,
        Meta(
            description="`critical`: `unpublished`, `failed` and `no_worker`: the stage has no store, or"
            " no worker, that could move it; `warning`: `silent` and `stalled`, which may pass by"
            " themselves"
        ),
    ]
    since: Annotated[Instant | None, Meta(description="null: unknown")]
    ranges: Annotated[
        int, Meta(ge=0, description="Number of affected ranges of the stage; 0: not by its ranges")
    ]
    examples: Annotated[
        list[str], Meta(description="At most five of them, the lowest promises first")
    ]
    holds_back: Annotated[list[str], Meta(description="The downstream stages that wait for it")]
    because: Annotated[str, Meta(description="The problem in one sentence, with times in UTC")]
    remedy: Annotated[str, Meta(description="The next thing to do, for the person on call")]
    holds_back_next: HoldsBackNext = UNSET


class JobProblemsBody(Struct, frozen=True):
    """Problems of a job: every root cause, the worst first."""

    job: str
    health: Annotated[
        Health,
        Meta(
            description="The worst of its stages: `unpublished`, `failed`, `no_worker`, `silent`,"
            " `stalled`, `waiting`, `ok`, `idle`, `ended`, `final`"
        ),
    ]
    problems: list[ProblemLine]
    late_ranges: Annotated[
        Count | UnsetType,
        Meta(description="Late ranges of its final stages, which are not a problem; absent: 0"),
    ] = UNSET


class ProblemsBody(Struct, frozen=True):
    """Problems of all jobs that the key may read, the worst first."""

    problems: list[ProblemLine]
    total: Annotated[Count, Meta(description="Number of problems, listed or not")]
    late_ranges: Annotated[
        dict[str, Count] | UnsetType,
        Meta(description="Late ranges of final stages, by job; absent: none has such ranges"),
    ] = UNSET


def job_problems_body(found: JobHealth) -> JobProblemsBody:
    """Return the problems of a job."""
    return JobProblemsBody(
        found.view.name,
        found.health,
        list(map(_line, found.problems)),
        found.late_ranges or UNSET,
    )


def problems_body(found: FoundProblems) -> ProblemsBody:
    """Return the problems of all jobs."""
    late = dict(found.late_ranges) or UNSET
    return ProblemsBody(list(map(_line, found.problems)), found.total, late)


def _line(problem: Problem) -> ProblemLine:
    return ProblemLine(
        problem.job,
        problem.stage,
        problem.health,
        problem.severity,
        None if problem.since_ms is None else iso(problem.since_ms),
        problem.ranges,
        list(problem.examples),
        list(problem.holds_back),
        problem.because,
        problem.remedy,
        list(problem.holds_back_next) or UNSET,
    )
