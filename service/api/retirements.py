"""Retirement of ranges that are gone for good."""

from __future__ import annotations

from service.api.endpoints import Call, Endpoints, json_body
from service.api.responses.retirements import RetiringBody, retiring_body
from service.api.run_requests import Retire
from service.errors import (
    UnavailableError,
    UnknownJobError,
    UnknownRangeError,
    UnknownStageError,
)
from service.model.keys import Role

endpoints = Endpoints("watermarks")


@endpoints.post(
    "/v1/jobs/{job}/stages/{stage}/ranges/{range}/retire",
    json_body(Retire),
    role=Role.ADMIN,
    gives=RetiringBody,
    errors=(UnknownJobError, UnknownStageError, UnknownRangeError, UnavailableError),
)
async def retire_range(call: Call[Retire]) -> RetiringBody:
    """Retire a shard or key range that is gone for good: it counts as final until its next report.

    From that report on it holds its stage again, from where it is. Other ranges keep their promises. The
    retirement is in the audit and in explanations.
    """
    job, stage, name = call.job, call.stage, call.request.path_params["range"]
    retirements, body = call.aggregator.retirements, call.body
    if body.dry_run:
        found = await retirements.preview(job, stage, name)
    else:
        found = await retirements.retire(job, stage, name, body.because, call.by)
    return retiring_body(job, stage, found, dry_run=body.dry_run)
