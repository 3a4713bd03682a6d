"""A shortcut to the hot routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from service.api.counting import Responses
from service.api.head import as_get
from service.api.problems import fail, refuse
from service.api.routing import DirectRoute
from service.errors import ProblemError


class Application(FastAPI):
    """FastAPI that runs the endpoints of hot routes directly; other requests take the usual way.

    That is a stack of middlewares and a search through all routes: more than half of the cost of a
    report for one range. The routes are those of the application, so checks, logs, responses and
    documentation are the same.
    """

    def __init__(self, responses: Responses, **options: Any) -> None:  # noqa: ANN401  (FastAPI's own)
        super().__init__(**options)
        self._responses = responses
        self._lanes: list[tuple[str, Any, DirectRoute]] = []

    def open_lanes(self, routes: Iterable[DirectRoute]) -> None:
        """Serve these routes by the shortcut, and no others."""
        self._lanes = [
            (method, route.path_regex.match, route)
            for route in routes
            for method in sorted(route.methods or ())
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] == "http":
            if scope["method"] == "HEAD":
                scope, receive, send = as_get(scope, receive, send)
            for method, match, route in self._lanes:
                if scope["method"] == method and (found := match(scope["path"])) is not None:
                    scope["app"] = self
                    scope["path_params"] = found.groupdict()
                    scope["route"] = route
                    await self._run(route, scope, receive, send)
                    return
            # Around all else: the response to an unexpected error comes from the outermost middleware.
            send = self._responses.counted(scope, send)
        await super().__call__(scope, receive, send)

    async def _run(self, route: DirectRoute, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        response: Response
        try:
            response = await route.endpoint(request)
        except ProblemError as error:
            response = refuse(request, error)
        except Exception as error:  # noqa: BLE001 - as on the usual way
            response = fail(request, error)
        await self._responses.give(response, scope, receive, send)
