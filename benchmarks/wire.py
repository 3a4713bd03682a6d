"""Just enough HTTP/1.1 for a load generator that must not be slower than what it measures."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

NOT_MODIFIED = 304
"""Status of an answer without a body and without a length."""


class Connection:
    """One keep-alive connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> Connection:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24))

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        if status == NOT_MODIFIED:
            return status, b""
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at < 0:
            raise ValueError(f"an answer without a length: {head!r}")
        length = int(lower[at + 15 : lower.index(b"\r\n", at)])
        return status, await self._reader.readexactly(length)

    async def stream(self, request: bytes) -> asyncio.StreamReader:
        """Send, and hand over the answer's body, chunk marks and all."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if head[9:12] != b"200":
            raise ValueError(f"no stream: {head!r}")
        return self._reader

    def close(self) -> None:
        self._writer.close()


def encode(method: str, url: str, body: bytes, key: str = "", etag: str = "") -> bytes:
    """One request as it goes over the wire."""
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    known = f"If-None-Match: {etag}\r\n" if etag else ""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}{known}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
