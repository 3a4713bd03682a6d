"""Additions to each response: a count by route and status, and headers for browsers."""

from __future__ import annotations

from fastapi import Response
from prometheus_client import Counter
from starlette.types import Message, Receive, Scope, Send

from service.api.exchange import JsonResponse
from service.api.web import with_browser_headers
from service.telemetry.metrics import Metrics


class Responses:
    """Counts responses and adds to their headers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # The search for a labelled counter takes a lock and a hash of strings; there are a few dozen.
        self._counters: dict[tuple[str, str, int], Counter] = {}

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
        route = scope.get("route")
        key = (scope["method"], getattr(route, "path", "none"), status)
        counter = self._counters.get(key)
        if counter is None:
            method, path, _ = key
            counter = self._metrics.requests.labels(method, path, str(status))
            self._counters[key] = counter
        counter.inc()
