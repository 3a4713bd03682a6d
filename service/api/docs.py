"""The documentation: Swagger UI at `/docs`, from this service alone, without inline scripts."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from importlib.resources import files
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response

from service.api.bulk import Bulk
from service.api.exchange import state
from service.api.web import check_browser

_PAGE: Final = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>tidegauge</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/swagger-ui.css">
<div id="docs"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</html>
"""

_START: Final = b"""SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null,
});
"""

_HEADERS: Final = {
    # Swagger UI sets styles on its elements. No script but these files runs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
}


class _File:
    """What is served as it is. It is made and compressed once, at the first request, in a thread."""

    def __init__(self, media_type: str, make: Callable[[], bytes]) -> None:
        self._media_type = media_type
        self._make = make
        self._made: tuple[bytes, bytes] | None = None
        self._making = asyncio.Lock()

    async def __call__(self, request: Request) -> Response:
        """Answer a request. Raises `GuardError`."""
        check_browser(request.scope, state(request).hosts)
        small = "gzip" in request.headers.get("accept-encoding", "")
        body = (self._made or await self._make_once())[small]
        headers = {**_HEADERS, "Vary": "Accept-Encoding"}
        if small:
            headers["Content-Encoding"] = "gzip"
        response = Response(body, headers=headers, media_type=self._media_type)
        # These are open to everyone. What is shared takes no memory for each who asks.
        return Bulk(request, response, shared=True)

    async def _make_once(self) -> tuple[bytes, bytes]:
        async with self._making:
            if self._made is None:
                plain = await asyncio.to_thread(self._make)
                self._made = plain, await asyncio.to_thread(gzip.compress, plain)
            return self._made


def mount(app: FastAPI) -> None:
    """Serve the page, its files and the OpenAPI document."""
    static = files("fastapi_offline") / "static"
    found = {
        "/docs": _File("text/html", lambda: _PAGE),
        "/docs/start.js": _File("text/javascript", lambda: _START),
        "/openapi.json": _File("application/json", lambda: msgspec.json.encode(app.openapi())),
    }
    for name, kind in (("swagger-ui.css", "text/css"), ("swagger-ui-bundle.js", "text/javascript")):
        found[f"/docs/{name}"] = _File(kind, (static / name).read_bytes)
    for path, file in found.items():
        app.add_route(path, file.__call__, include_in_schema=False)
