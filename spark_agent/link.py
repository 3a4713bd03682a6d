"""The link between a query's control sources and the driver: loopback, one line each way.

Spark plans a Python source in a process of its own beside the driver. All that decides what Spark
is to be told lies in the driver (see `spark_agent.feed`), so the source asks there.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hmac import compare_digest
from secrets import token_hex
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, Final

_LONGEST_LINE: Final = 4_096


class LinkError(Exception):
    """The driver does not answer, or says that it has no such query."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Where a control source is, in Spark's checkpoint.

    `watermark_ms` is the newest watermark that it has handed to Spark, in Spark's terms; None:
    none yet. `turn` counts the batches that it has asked for.
    """

    watermark_ms: int | None
    turn: int

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Offset:
        """Take it from the form that Spark logs."""
        return cls(stored["watermark"], stored["turn"])

    def stored(self) -> dict[str, Any]:
        """Write it in the form that Spark logs."""
        return {"watermark": self.watermark_ms, "turn": self.turn}


@dataclass(frozen=True, slots=True)
class _Request:
    token: str
    control: str
    reader: str
    watermark_ms: int | None
    turn: int


class LinkClient:
    """The control source's end. Not for two threads at once; Spark asks a source from one."""

    def __init__(self, port: int, token: str, *, timeout_ms: int) -> None:
        self._port = port
        self._token = token
        self._timeout_ms = timeout_ms
        # One control source may be in a plan twice (a stream joined with itself).
        self._reader = token_hex(8)

    def next(self, control: str, at: Offset) -> Offset:
        """Ask the driver where to go from an offset. Raises `LinkError`."""
        request = _Request(self._token, control, self._reader, at.watermark_ms, at.turn)
        try:
            with socket.create_connection(
                ("127.0.0.1", self._port), timeout=self._timeout_ms / 1_000
            ) as link:
                link.sendall(json.dumps(asdict(request)).encode() + b"\n")
                line = link.makefile("rb").readline()
            answer = json.loads(line)
            return Offset.read(answer["offset"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LinkError(str(error)) from error


class LinkServer:
    """The driver's end. `answer` is given a control source's id, its reader's and its offset; it is
    called in a thread of its own for each request.
    """

    def __init__(self, token: str, answer: Callable[[str, str, Offset], Offset]) -> None:
        class Handler(StreamRequestHandler):
            """Answers one request."""

            def handle(self) -> None:
                """Read a line, write a line; say nothing to whoever does not know the token."""
                try:
                    request = _Request(**json.loads(self.rfile.readline(_LONGEST_LINE)))
                    if not compare_digest(request.token, token):
                        return
                    at = Offset(request.watermark_ms, request.turn)
                    found = answer(request.control, request.reader, at)
                except (ValueError, TypeError, LinkError):
                    return
                self.wfile.write(json.dumps({"offset": found.stored()}).encode() + b"\n")

        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, name="tidegauge-link", daemon=True
        ).start()

    def close(self) -> None:
        """Take no more requests."""
        self._server.shutdown()
        self._server.server_close()
