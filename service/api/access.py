"""Access: which key a request is sent with, and whether it may be sent with it."""

from __future__ import annotations

from ipaddress import ip_address

from fastapi import Request

from service.aggregator.keys import ANYONE
from service.api.exchange import state
from service.model.audit import Actor
from service.model.keys import Key, Role


def admit(request: Request, authorization: bytes | None, needed: Role | None) -> Key | None:
    """Return the key of a request with this header. None: the endpoint is open to everyone.

    Raises `UnauthenticatedError`, `ForbiddenError`. It is called before anything else is looked at, so a
    refusal says nothing about what there is.
    """
    if needed is None:
        return None
    keys = state(request).aggregator.keys
    if keys.open:
        return ANYONE
    return keys.admit(authorization, needed, request.path_params.get("job"))


def confirm(request: Request, key: Key | None, version: int = -1) -> None:
    """Check that the key of a request that takes long has not been revoked, and has not expired.

    `version` is that of the table when the key was admitted; if it still stands, so does the key. Raises
    `UnauthenticatedError`.
    """
    keys = state(request).aggregator.keys
    if key is not None and not keys.stands(version):
        keys.confirm(key)


def actor(request: Request, key: Key | None) -> Actor:
    """Return who sent a request, for the audit."""
    host = "" if request.client is None else request.client.host
    try:
        # A proxy hands on whatever its client says.
        ip_address(host)
    except ValueError:
        host = "unknown"
    return Actor("" if key is None else key.name, host)
