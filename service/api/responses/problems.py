"""Responses about what is wrong, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from service.aggregator import JobHealth, Problem
from service.api.responses.common import Count, Instant
from service.frontier.health import Health, Severity
from service.frontier.timestamps import iso


class ProblemLine(Struct, frozen=True):
    """A root cause: a stage that holds itself back."""

    job: str
    stage: str
    health: Annotated[
        Health, Meta(description="One of `failed`, `no_worker`, `silent` and `stalled`")
    ]
    severity: Annotated[
        Severity,
        Meta(
            description="`critical`: `failed` and `no_worker`, as nobody is there who could move the"
            " watermark; `warning`: `silent` and `stalled`, which may pass by themselves"
        ),
    ]
    since: Annotated[Instant | None, Meta(description="null: it is not known")]
    ranges: Annotated[int, Meta(ge=0, description="How many of the stage it concerns")]
    examples: Annotated[
        list[str], Meta(description="At most five of them: those that hold the stage back most")
    ]
    holds_back: Annotated[list[str], Meta(description="The stages below that wait for it")]
    because: Annotated[str, Meta(description="All of that in one sentence. Its times are UTC")]


class JobProblemsBody(Struct, frozen=True):
    """Problems of a job: every root cause, the worst first."""

    job: str
    health: Annotated[
        Health,
        Meta(
            description="The worst of its stages: `failed`, `no_worker`, `silent`, `stalled`,"
            " `waiting`, `ok`, `idle`, `ended`, `final`"
        ),
    ]
    problems: list[ProblemLine]


class ProblemsBody(Struct, frozen=True):
    """Problems of all jobs that the key may read, the worst first."""

    problems: list[ProblemLine]
    total: Annotated[Count, Meta(description="How many there are, listed or not")]


def job_problems_body(found: JobHealth) -> JobProblemsBody:
    """Return what is wrong with a job."""
    return JobProblemsBody(found.view.name, found.health, list(map(_line, found.problems)))


def problems_body(found: Sequence[Problem], total: int) -> ProblemsBody:
    """Return what is wrong with all jobs."""
    return ProblemsBody(list(map(_line, found)), total)


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
    )
