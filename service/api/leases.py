"""Leases: the rights to report for ranges, until a deadline."""

from __future__ import annotations

from service.api.endpoints import Call, Endpoints, json_body
from service.api.range_names import written
from service.api.requests import ClaimBody, Tokens
from service.api.responses.leases import (
    GrantBody,
    LostBody,
    ReleasedBody,
    RenewalBody,
    RenewedBody,
    grant_body,
)
from service.errors import (
    LeaseConflictError,
    StaleRunError,
    UnknownJobError,
    UnknownStageError,
)
from service.model.keys import Role

endpoints = Endpoints("leases")

_MAX_CLAIM = 128 * 2**20


@endpoints.post(
    "/v1/jobs/{job}/stages/{stage}/leases",
    json_body(ClaimBody, limit=_MAX_CLAIM),
    role=Role.REPORT,
    gives=GrantBody,
    status=201,
    errors=(UnknownJobError, UnknownStageError, StaleRunError, LeaseConflictError),
)
async def claim(call: Call[ClaimBody]) -> GrantBody:
    """Claim ranges. A range is granted if it is free, expired, the same holder's or outranked.

    New shards join a dynamic source: from this answer on it waits for them.
    """
    ranges = None if call.body.ranges == "all" else call.body.ranges
    grant = await call.aggregator.claim(call.job, call.stage, call.body.claim(ranges))
    return await grant_body(grant)


@endpoints.post(
    "/v1/jobs/{job}/leases/renew",
    json_body(Tokens),
    role=Role.REPORT,
    gives=RenewedBody,
    errors=(UnknownJobError,),
)
async def renew_leases(call: Call[Tokens]) -> RenewedBody:
    """Renew leases. An expired lease is never renewed."""
    renewed, lost = await call.aggregator.renew(call.job, call.body.tokens)
    return RenewedBody(
        [RenewalBody(r.token, r.expires_in_ms, await written(r.ranges)) for r in renewed],
        [LostBody(one.token, one.reason) for one in lost],
    )


@endpoints.post(
    "/v1/jobs/{job}/leases/release",
    json_body(Tokens),
    role=Role.REPORT,
    gives=ReleasedBody,
    errors=(UnknownJobError,),
)
async def release_leases(call: Call[Tokens]) -> ReleasedBody:
    """Release leases."""
    return ReleasedBody(await call.aggregator.release(call.job, call.body.tokens))
