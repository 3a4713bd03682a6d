"""The link between a query's control sources and the driver: loopback, one line each way.

Spark plans a Python source in a process of its own beside the driver. All that decides what Spark
is to be told lies in the driver (see `spark_agent.feed`), so the source asks there.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hmac import compare_digest
from secrets import token_hex
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, Final
from weakref import WeakSet

_LONGEST_LINE: Final = 4_096


class LinkError(Exception):
    """The driver does not answer."""


class NotStartedError(Exception):
    """A query goes through a stage, but was not started with `Pipeline.start`."""

    def __init__(self, stage: str) -> None:
        super().__init__(
            f"tidegauge: a query through stage {stage!r} was not started with Pipeline.start(), so "
            f"nobody would commit its batches, and its watermark would stand for ever: hand "
            f"frame.writeStream… to pipeline.start(), in place of calling its own start()"
        )
        self.stage = stage


@dataclass(frozen=True, slots=True)
class Offset:
    """Where a control source is, in Spark's checkpoint.

    `watermark_ms` is the newest watermark that it has handed to Spark, in Spark's terms; None:
    none yet. `turn` counts the batches that it has asked for.
    """

    watermark_ms: int | None
    turn: int

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Offset:
        """Take it from the form that Spark logs."""
        return cls(stored["watermark"], stored["turn"])

    def to_dict(self) -> dict[str, Any]:
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
    """The control source's end: one connection, kept. Spark asks a source from one thread only."""

    def __init__(self, port: int, token: str, *, timeout_ms: int) -> None:
        self._port = port
        self._token = token
        self._timeout_ms = timeout_ms
        # One control source may be in a plan twice (a stream joined with itself).
        self._reader = token_hex(8)
        self._link: socket.socket | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection behind: Spark pickles the source for `read`, which asks nobody."""
        return {**self.__dict__, "_link": None}

    def next(self, control: str, at: Offset) -> Offset:
        """Ask the driver where to go from an offset. Raises `LinkError`, `NotStartedError`."""
        request = _Request(self._token, control, self._reader, at.watermark_ms, at.turn)
        try:
            link = self._link or self._connect()
            link.sendall(json.dumps(asdict(request)).encode() + b"\n")
            answer = json.loads(_line(link))
            if "not_started" in answer:
                raise NotStartedError(answer["not_started"])
            return Offset.from_dict(answer["offset"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise LinkError(str(error)) from error

    def close(self) -> None:
        """Hang up; the next request connects again."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _connect(self) -> socket.socket:
        address = ("127.0.0.1", self._port)
        self._link = socket.create_connection(address, timeout=self._timeout_ms / 1_000)
        return self._link


def _line(link: socket.socket) -> bytes:
    """Read the one line that an answer is. Raises `ValueError` if the link ends before it does."""
    found = b""
    while not found.endswith(b"\n"):
        part = link.recv(_LONGEST_LINE)
        if not part:
            raise ValueError("the driver hung up")
        found += part
    return found


class LinkServer:
    """The driver's end. `answer` is given a control source's id, its reader's and its offset; each
    reader has a thread of its own.
    """

    def __init__(self, token: str, answer: Callable[[str, str, Offset], Offset]) -> None:
        links: WeakSet[socket.socket] = WeakSet()

        def answered(request: _Request, at: Offset) -> dict[str, Any]:
            try:
                return {"offset": answer(request.control, request.reader, at).to_dict()}
            except NotStartedError as error:
                return {"not_started": error.stage}

        class Handler(StreamRequestHandler):
            """Answers one reader."""

            def handle(self) -> None:
                """Answer line by line; hang up on whoever does not know the token."""
                links.add(self.connection)
                with suppress(OSError, ValueError, TypeError, LinkError):
                    while line := self.rfile.readline(_LONGEST_LINE):
                        request = _Request(**json.loads(line))
                        if not compare_digest(request.token, token):
                            return
                        at = Offset(request.watermark_ms, request.turn)
                        self.wfile.write(json.dumps(answered(request, at)).encode() + b"\n")

        self._links = links
        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, name="tidegauge-link", daemon=True
        ).start()

    def close(self) -> None:
        """Hang up on all readers."""
        self._server.shutdown()
        self._server.server_close()
        for link in list(self._links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
