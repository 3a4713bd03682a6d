"""Problems of one job, and of all jobs."""

from __future__ import annotations

from service.api.descriptions import query
from service.api.endpoints import Call, Endpoints
from service.api.exchange import integer
from service.api.responses.problems import (
    JobProblemsBody,
    ProblemsBody,
    job_problems_body,
    problems_body,
)
from service.errors import InvalidRequestError, OverloadedError, UnavailableError, UnknownJobError
from service.model.keys import Role

endpoints = Endpoints("problems")

DEFAULT_PROBLEMS, MAX_PROBLEMS = 100, 10_000


@endpoints.get(
    "/v1/jobs/{job}/problems",
    role=Role.READ,
    gives=JobProblemsBody,
    errors=(UnknownJobError, UnavailableError, OverloadedError),
)
async def get_job_problems(call: Call[None]) -> JobProblemsBody:
    """Show every root cause of stages that stand still in a job, the worst first."""
    async with call.turn():
        return job_problems_body(await call.aggregator.examiner.job(call.job))


@endpoints.get(
    "/v1/problems",
    role=Role.READ,
    gives=ProblemsBody,
    errors=(InvalidRequestError, UnavailableError, OverloadedError),
    parameters=(
        query(
            "limit",
            "Number of problems",
            {"type": "integer", "minimum": 1, "maximum": MAX_PROBLEMS, "default": DEFAULT_PROBLEMS},
        ),
    ),
)
async def get_problems(call: Call[None]) -> ProblemsBody:
    """Show the problems of all jobs that the key may read, the worst first.

    With very many jobs the answer may be up to 15 seconds old.
    """
    limit = integer(call.request, "limit", 1, MAX_PROBLEMS, DEFAULT_PROBLEMS) or DEFAULT_PROBLEMS
    async with call.turn():
        return problems_body(await call.aggregator.problems.of_all(call.may_read, limit))
