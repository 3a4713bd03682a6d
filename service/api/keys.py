"""Keys, and the audit of changes made with them."""

from __future__ import annotations

from fastapi import Response

from service.aggregator import ANYONE
from service.api.descriptions import query
from service.api.endpoints import Call, Endpoints, json_body
from service.api.exchange import answer, check_name, integer
from service.api.paging import PAGE_BY_NAME, page_by_name
from service.api.requests import CreateKey
from service.api.responses.keys import (
    AuditBody,
    KeysBody,
    NewKeyBody,
    WhoAmIBody,
    audit_line,
    key_line,
    new_key_body,
)
from service.errors import (
    FirstKeyError,
    InvalidRequestError,
    KeyExistsError,
    OverloadedError,
    UnavailableError,
    UnknownKeyError,
)
from service.model.keys import Role
from service.model.pipeline_spec import NAME_PATTERN

endpoints = Endpoints("keys")

DEFAULT_LIMIT, MAX_LIMIT = 100, 1_000


@endpoints.post(
    "/v1/keys",
    json_body(CreateKey),
    role=Role.ADMIN,
    gives=NewKeyBody,
    status=201,
    errors=(KeyExistsError, FirstKeyError, UnavailableError),
)
async def create_key(call: Call[CreateKey]) -> Response:
    """Create a key. Its secret is in this response, and nowhere else."""
    body = call.body
    key, secret = await call.aggregator.keys.create(
        body.name, body.role, body.jobs, body.expires_in_ms, call.by
    )
    # Caches must not keep it.
    return answer(new_key_body(key, secret), 201)


@endpoints.get(
    "/v1/keys",
    role=Role.ADMIN,
    gives=KeysBody,
    errors=(InvalidRequestError, UnavailableError, OverloadedError),
    parameters=PAGE_BY_NAME,
)
async def list_keys(call: Call[None]) -> KeysBody:
    """List the keys by name, without their secrets."""
    async with call.turn():
        keys = await call.aggregator.keys.all()
        page, following = page_by_name(call.request, keys, lambda key: key.name)
        return KeysBody([key_line(key) for key in page], following)


@endpoints.delete(
    "/v1/keys/{key}", role=Role.ADMIN, status=204, errors=(UnknownKeyError, UnavailableError)
)
async def revoke_key(call: Call[None]) -> Response:
    """Revoke a key. Its name may be used again."""
    await call.aggregator.keys.revoke(call.request.path_params["key"], call.by)
    return Response(status_code=204)


@endpoints.get(
    "/v1/audit",
    role=Role.ADMIN,
    gives=AuditBody,
    errors=(InvalidRequestError, UnavailableError, OverloadedError),
    parameters=(
        query(
            "limit",
            "Number of records",
            {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        ),
        query(
            "before",
            "Only records with a lower number: the next page",
            {"type": "integer", "minimum": 1, "maximum": 2**53},
        ),
        query("job", "Only records about this job", {"type": "string", "pattern": NAME_PATTERN}),
    ),
)
async def get_audit(call: Call[None]) -> AuditBody:
    """Show the changes with their authors, addresses and times, the newest first."""
    request = call.request
    limit = integer(request, "limit", 1, MAX_LIMIT, DEFAULT_LIMIT) or DEFAULT_LIMIT
    before = integer(request, "before", 1, 2**53, None)
    job = request.query_params.get("job")
    if job is not None:
        check_name("job", job)
    async with call.turn():
        records = await call.aggregator.keys.audit(limit, before, job)
        return AuditBody([audit_line(record) for record in records])


@endpoints.get("/v1/whoami", role=Role.READ, gives=WhoAmIBody)
async def who_am_i(call: Call[None]) -> WhoAmIBody:
    """Show the permissions of the key of this request."""
    key = call.key or ANYONE
    name = None if key is ANYONE else key.name
    return WhoAmIBody(name, key.role, key.jobs, call.aggregator.now_ms())
