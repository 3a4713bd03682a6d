"""Unchanged files, served to everyone: the page, and the documentation."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastapi import Request, Response

from service.api.bulk import Bulk
from service.api.exchange import entity_tags, state
from service.api.web import check_browser, checked_headers


@dataclass(frozen=True)
class _Made:
    plain: bytes
    compressed: bytes
    etag: str


class StaticFile:
    """One file. It is made and compressed once, at the first request, in a thread."""

    def __init__(
        self, media_type: str, make: Callable[[], bytes], headers: Mapping[str, str]
    ) -> None:
        self._media_type = media_type
        self._make = make
        self._headers = {"Vary": "Accept-Encoding", "Cache-Control": "no-cache", **headers}
        self._made: _Made | None = None
        self._making = asyncio.Lock()

    async def __call__(self, request: Request) -> Response:
        """Answer a request. Raises `GuardError`."""
        check_browser(request.method, checked_headers(request.scope), state(request).hosts)
        made = self._made or await self._make_once()
        headers = {**self._headers, "ETag": f'"{made.etag}"'}
        if made.etag in (entity_tags(request.headers.get("if-none-match")) or ()):
            return Response(status_code=304, headers=headers)
        body = made.plain
        if "gzip" in request.headers.get("accept-encoding", ""):
            body = made.compressed
            headers["Content-Encoding"] = "gzip"
        response = Response(body, headers=headers, media_type=self._media_type)
        # Everyone may read these files. A shared body takes no memory for each request.
        return Bulk(request, response, shared=True)

    async def _make_once(self) -> _Made:
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(_compressed, self._make)
            return self._made


def _compressed(make: Callable[[], bytes]) -> _Made:
    plain = make()
    return _Made(plain, gzip.compress(plain), hashlib.sha256(plain).hexdigest()[:16])
