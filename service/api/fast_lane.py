"""A shortcut to the hot routes."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import refuse
from service.api.routing import DirectRoute
from service.errors import ProblemError


class FastLane:
    """Runs the endpoint of a hot route directly; other requests take the usual way.

    That is a stack of middlewares and a search through all routes: more than half of the cost of a
    report for one range. The routes are those of the application, so checks, logs, responses and
    documentation are the same.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[DirectRoute]) -> None:
        self._app = app
        self._lanes = [
            (method, route.path_regex.match, route)
            for route in routes
            for method in sorted(route.methods or ())
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] == "http":
            for method, match, route in self._lanes:
                if scope["method"] == method and (found := match(scope["path"])) is not None:
                    scope["path_params"] = found.groupdict()
                    scope["route"] = route
                    await self._run(route, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _run(self, route: DirectRoute, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await route.endpoint(request)
        except ProblemError as error:
            response = refuse(request, error)
        await response(scope, receive, send)
