"""The application: a shortcut to the hot routes, and HEAD as the corresponding GET."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import Message, Receive, Scope, Send

from service.api.counting import WAITS, Responses
from service.api.problems import fail, refuse
from service.api.routing import DirectRoute
from service.errors import ProblemError
from service.telemetry.durations import RouteDurations

_GONE: Message = {"type": "http.disconnect"}


class Application(FastAPI):
    """FastAPI that runs the endpoints of hot routes directly.

    Other requests pass a stack of middlewares and a search through all routes, which is more than half
    of the cost of a report for one range. The hot routes are those of the application, so checks, logs,
    responses and documentation are the same.
    """

    def __init__(self, responses: Responses, **options: Any) -> None:  # noqa: ANN401  (FastAPI's own)
        super().__init__(**options)
        self._responses = responses
        self._lanes: list[tuple[str, Any, DirectRoute, RouteDurations]] = []

    def open_lanes(self, routes: Iterable[DirectRoute]) -> None:
        """Serve only these routes by the shortcut."""
        self._lanes = [
            (method, route.path_regex.match, route, self._responses.durations(method, route.path))
            for route in routes
            for method in sorted(route.methods or ())
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        began_s = perf_counter()
        if scope["method"] == "HEAD":
            scope, receive, send = _as_get(scope, receive, send)
        for method, match, route, durations in self._lanes:
            if scope["method"] == method and (found := match(scope["path"])) is not None:
                scope["app"] = self
                scope["path_params"] = found.groupdict()
                scope["route"] = route
                await self._run(route, scope, receive, send)
                if WAITS not in scope:
                    durations.add(perf_counter() - began_s)
                return
        try:
            # The outermost wrapper: even the outermost middleware responds to unexpected errors.
            await super().__call__(scope, receive, self._responses.counted(scope, send))
        finally:
            self._responses.time(scope, perf_counter() - began_s)

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


def _as_get(scope: Scope, receive: Receive, send: Send) -> tuple[Scope, Receive, Send]:
    """Return a HEAD request as the corresponding GET. The server leaves out the body (RFC 9110,
    section 9.3.2).

    Once the header is sent, the client counts as disconnected: else an event stream would never end.
    """
    answered = asyncio.Event()

    async def receive_until_answered() -> Message:
        receiving = asyncio.ensure_future(receive())
        answering = asyncio.ensure_future(answered.wait())
        try:
            await asyncio.wait((receiving, answering), return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else _GONE
        finally:
            receiving.cancel()
            answering.cancel()

    async def send_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body"})
            answered.set()

    return {**scope, "method": "GET"}, receive_until_answered, send_header
