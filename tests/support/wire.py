"""HTTP by hand, over one socket: for what no well-behaved client would send."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit


def request(
    method: str, path: str, *headers: str, body: bytes = b"", host: str = "127.0.0.1"
) -> bytes:
    """One request, as it goes over the wire. Its length is given if it has a body."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Answer:
    """One answer."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json", self.headers
        found = json.loads(self.body)
        assert found["status"] == self.status
        return found

    @property
    def slug(self) -> str:
        return str(self.problem["type"]).rpartition("/")[2]


class Wire:
    """A connection to the service."""

    def __init__(self, url: str, *, timeout_s: float = 60) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout_s)
        self._read = bytearray()

    def send(self, data: bytes) -> None:
        """Send, as far as the other side still reads."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def answer(self) -> Answer:
        """Read one answer with a length."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        length = int(headers.get("content-length", "0"))
        while len(self._read) < length:
            self._more()
        body = bytes(self._read[:length])
        del self._read[:length]
        return Answer(int(status_line.split()[1]), headers, body)

    def _more(self) -> None:
        received = self.socket.recv(65_536)
        if not received:
            raise EOFError(f"closed after {bytes(self._read)!r}")
        self._read += received

    def closed(self, within_s: float = 60) -> bool:
        """Return whether the other side closes, whatever it still sends."""
        end = time.monotonic() + within_s
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                if not self.socket.recv(65_536):
                    return True
            except TimeoutError:
                return False
            except ConnectionError:
                return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def ask(url: str, data: bytes) -> Answer:
    """Send on a connection of its own, and read the first answer."""
    with Wire(url) as wire:
        wire.send(data)
        return wire.answer()
