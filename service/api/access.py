"""Access: which key a request is sent with, and whether it may be sent with it."""

from __future__ import annotations

from fastapi import Request

from service.api.exchange import state
from service.model.audit import Actor
from service.model.keys import Key, Role

_LONGEST = 300
"""No secret is longer. What is longer is not even hashed."""


def admit(request: Request, needed: Role | None) -> Key | None:
    """Return the key of a request. None: the endpoint is open to everyone.

    Raises `UnauthenticatedError`, `ForbiddenError`. It is called before anything else is looked at, so a
    refusal says nothing about what there is.
    """
    if needed is None:
        return None
    keys = state(request).aggregator.keys
    return keys.admit(_secret(request), needed, request.path_params.get("job"))


def confirm(request: Request, key: Key | None) -> None:
    """Check that the key of a request that takes long has not been revoked, and has not expired.

    Raises `UnauthenticatedError`.
    """
    if key is not None:
        state(request).aggregator.keys.confirm(key)


def actor(request: Request, key: Key | None) -> Actor:
    """Return who sent a request, for the audit."""
    client = request.client
    return Actor("" if key is None else key.name, "unknown" if client is None else client.host)


def _secret(request: Request) -> str | None:
    """Read `Authorization: Bearer …` (RFC 6750). None: there is no such header."""
    given = request.headers.get("authorization")
    if given is None or len(given) > _LONGEST:
        return None
    scheme, _, secret = given.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None
