"""Additions to each response: counts by route and status, its duration, and headers for browsers."""

from __future__ import annotations

from typing import Final

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from service.api.exchange import JsonResponse
from service.api.web import with_browser_headers
from service.telemetry.durations import RouteDurations
from service.telemetry.metrics import Metrics

WAITS: Final = "tidegauge.waits"
"""Member of the scope of a request that waits on purpose: its duration is not counted."""


class Responses:
    """Counts responses and adds to their headers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def durations(self, method: str, path: str) -> RouteDurations:
        """Return the durations of a route, to which requests may be added."""
        return self._metrics.durations.of(method, path)

    def time(self, scope: Scope, seconds: float) -> None:
        """Count the duration of a request."""
        if WAITS not in scope:
            self.durations(scope["method"], _path(scope)).add(seconds)

    async def give(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a response."""
        if isinstance(response, JsonResponse):
            # The usual case, for which a wrapper around `send` would cost more than its work.
            self._count(scope, response.status_code)
            response.raw_headers = with_browser_headers(response.raw_headers)
            await response(scope, receive, send)
        else:
            await response(scope, receive, self.counted(scope, send))

    def counted(self, scope: Scope, send: Send) -> Send:
        """Wrap the `send` of a request."""

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
                message["headers"] = with_browser_headers(message["headers"])
            await send(message)

        return counting_send

    def _count(self, scope: Scope, status: int) -> None:
        self._metrics.answered[scope["method"], _path(scope), status] += 1


def _path(scope: Scope) -> str:
    """Return the path of a request's route; all requests without one have the same."""
    return getattr(scope.get("route"), "path", "none")
