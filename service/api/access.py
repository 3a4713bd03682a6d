"""Access: which key a request is sent with, and whether it may be sent with it."""

from __future__ import annotations

from ipaddress import ip_address

from fastapi import Request

from service.aggregator.keys import ANYONE
from service.api.exchange import state
from service.model.audit import Actor
from service.model.keys import Key, Role

_SCHEME = b"bearer "
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
    if keys.open:
        return ANYONE
    return keys.admit(_secret(request), needed, request.path_params.get("job"))


def confirm(request: Request, key: Key | None) -> None:
    """Check that the key of a request that takes long has not been revoked, and has not expired.

    Raises `UnauthenticatedError`.
    """
    if key is not None:
        state(request).aggregator.keys.confirm(key)


def actor(request: Request, key: Key | None) -> Actor:
    """Return who sent a request, for the audit."""
    host = "" if request.client is None else request.client.host
    try:
        # A proxy hands on whatever its client says.
        ip_address(host)
    except ValueError:
        host = "unknown"
    return Actor("" if key is None else key.name, host)


def _secret(request: Request) -> bytes | None:
    """Read `Authorization: Bearer …` (RFC 6750). None: there is no such header."""
    # As the server hands it over, in lower case and bytes: this is on the way of every report.
    for name, value in request.scope["headers"]:
        if name == b"authorization":
            if len(value) > _LONGEST or value[:7].lower() != _SCHEME:
                return None
            return value[7:].strip()
    return None
