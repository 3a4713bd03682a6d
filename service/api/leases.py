"""Leases: who may report for which ranges, until when."""

from __future__ import annotations

import msgspec
from fastapi import Request, Response

from service.api import routing
from service.api.bodies import (
    ClaimBody,
    GrantBody,
    LostBody,
    ReleasedBody,
    RenewalBody,
    RenewedBody,
    Tokens,
    grant_body,
)
from service.api.exchange import aggregator, answer, decode, describe, name, read
from service.errors import (
    LeaseConflictError,
    StaleRunError,
    UnknownJobError,
    UnknownStageError,
)
from service.frontier.leases import Rank
from service.model.leases import Claim

router = routing.router("leases")
_claim = msgspec.json.Decoder(ClaimBody)
_tokens = msgspec.json.Decoder(Tokens)


@router.post(
    "/v1/jobs/{job}/stages/{stage}/leases",
    **describe(
        path=("job", "stage"),
        body=(ClaimBody,),
        gives=GrantBody,
        status=201,
        errors=(UnknownJobError, UnknownStageError, StaleRunError, LeaseConflictError),
    ),
)
async def claim(request: Request) -> Response:
    """Claim ranges. Granted is what is free, run out, the same holder's or outranked."""
    job, stage = name(request, "job"), name(request, "stage")
    body = decode(_claim, await read(request, limit=128 * 2**20))
    grant = await aggregator(request).claim(
        job,
        stage,
        Claim(
            ranges=None if body.ranges == "all" else body.ranges,
            holder=body.holder,
            ttl_ms=body.ttl_ms,
            rank=Rank(body.run or 0, body.epoch or 0, body.attempt or 0),
        ),
    )
    return answer(grant_body(grant), 201)


@router.post(
    "/v1/jobs/{job}/leases/renew",
    **describe(path=("job",), body=(Tokens,), gives=RenewedBody, errors=(UnknownJobError,)),
)
async def renew(request: Request) -> Response:
    """Renew leases. One that has run out is lost for ever."""
    job = name(request, "job")
    body = decode(_tokens, await read(request))
    renewed, lost = await aggregator(request).renew(job, body.tokens)
    return answer(
        RenewedBody(
            [RenewalBody(r.token, r.expires_in_ms, list(r.ranges)) for r in renewed],
            [LostBody(one.token, one.reason) for one in lost],
        )
    )


@router.post(
    "/v1/jobs/{job}/leases/release",
    **describe(path=("job",), body=(Tokens,), gives=ReleasedBody, errors=(UnknownJobError,)),
)
async def release(request: Request) -> Response:
    """Release leases."""
    job = name(request, "job")
    body = decode(_tokens, await read(request))
    return answer(ReleasedBody(await aggregator(request).release(job, body.tokens)))
