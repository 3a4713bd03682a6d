"""HTTP gateways on loopback, before a service, that drop or hold requests."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from tests.support.loopback import Loopback

_TIMEOUT_S = 120
_HOP_HEADERS = frozenset(
    {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
)

Drops = Callable[[str, Any], bool]
"""Returns whether to drop a request, given its path and its JSON."""


class Gateway(Loopback):
    """Forwards each request, unless `drops` says otherwise: then its connection is closed."""

    def __init__(self, url: str, drops: Drops) -> None:
        super().__init__()
        self._target = urlsplit(url).netloc
        self._drops = drops
        self.dropped: list[Any] = []

    @override
    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        read = json.loads(body) if body else None
        if self._drops(request.path, read):
            self.dropped.append(read)
            request.close_connection = True
            return
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        connection = http.client.HTTPConnection(self._target, timeout=_TIMEOUT_S)
        try:
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_HEADERS | {"date", "server"}:
                request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


class Holding(Gateway):
    """Holds the first request to open a run until it is released, and forwards all others."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lambda *_: False)
        self.released = threading.Event()
        self._holds = True

    @override
    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        if self._holds and request.command == "POST" and request.path.endswith("/runs"):
            self._holds = False
            self.released.wait()
        # A client closes the connection of a request that it has given up.
        with suppress(OSError):
            super().answer(request, body)
