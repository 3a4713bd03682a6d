"""Errors on the wire: RFC 9457 problems, from one hierarchy and through one handler."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol, cast

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from service.api.exchange import state
from service.api.responses.leases import denied_bodies
from service.api.web import check_browser, checked_headers
from service.errors import (
    GuardError,
    InvalidRequestError,
    LeaseConflictError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    ProblemError,
)
from service.model.leases import Denied

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1


class Refusals(Protocol):
    """Counter and log of rejected connections and requests: `service.server.http_protocol`."""

    def count(self, reason: str, detail: str) -> None:
        """Count a refusal."""
        ...


def problem_response(
    error: ProblemError, headers: dict[str, str] | None = None, status: int | None = None
) -> Response:
    """Return an error as a problem, with its own status unless another one is given."""
    status = status or error.status
    members = dict(error.members)
    if isinstance(error, LeaseConflictError):
        members["denied"] = denied_bodies(cast("Iterable[Denied]", members["denied"]))
    body = {
        "type": f"/problems/{error.slug}",
        "title": error.title(),
        "status": status,
        "detail": error.detail,
        **members,
    }
    headers = dict(headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Response(msgspec.json.encode(body), status, headers, MEDIA_TYPE)


def install_handlers(app: FastAPI) -> None:
    """Turn every error, of the service or of the framework, into a problem."""
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


def refuse(request: Request, error: ProblemError) -> Response:
    """Return the problem for a request, and log it unless it is the client's fault."""
    if isinstance(error, GuardError):
        # Counted, and logged now and then: a rejected client may retry thousands of times.
        guard: Refusals = request.app.state.guard
        guard.count(error.slug, f"{request.method} {_path(request)}: {error.detail}")
    elif error.status >= 500:
        log.warning("%s %s: %s", request.method, _path(request), error.detail)
    return problem_response(error)


async def _problem(request: Request, raised: Exception) -> Response:
    return refuse(request, cast(ProblemError, raised))


async def _http(request: Request, raised: Exception) -> Response:
    error = cast("HTTPException", raised)
    try:
        # The request has not been checked by an endpoint.
        check_browser(request.method, checked_headers(request.scope), state(request).hosts)
    except GuardError as refusal:
        return refuse(request, refusal)
    headers = dict(error.headers or {})
    detail = f"{request.method} {_path(request)}"
    match error.status_code:
        case 404:
            return problem_response(
                NotFoundError(f"{detail}: see /docs for the addresses"), headers
            )
        case 405:
            allowed = _allowed(request)
            return problem_response(
                MethodNotAllowedError(f"{detail}: the path allows {allowed}"), {"Allow": allowed}
            )
        case 413:
            return problem_response(PayloadTooLargeError(str(error.detail)), headers)
        case _:
            problem = InvalidRequestError(str(error.detail))
            return problem_response(problem, headers, error.status_code)


def _allowed(request: Request) -> str:
    """Return the methods of a path. Starlette returns those of its first route alone."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    found = {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return ", ".join(sorted(found | ({"HEAD"} if "GET" in found else set())))


async def _unexpected(request: Request, error: Exception) -> Response:
    return fail(request, error)


def fail(request: Request, error: Exception) -> Response:
    """Return the problem for an unexpected error, and log it."""
    log.error("%s %s failed", request.method, _path(request), exc_info=error)
    return problem_response(ProblemError("an unexpected error: see the log of the service"))


def _path(request: Request) -> str:
    # In a log, a newline in the path could forge a line.
    path = str(request.scope["path"])
    return path[:300] if path.isprintable() else repr(path[:300])
