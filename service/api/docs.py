"""The documentation: Swagger UI at `/docs`, from this service alone, without inline scripts.

Its addresses are relative: a proxy may serve it below a path of its own.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response

from service.api.exchange import state
from service.api.openapi import without_keys
from service.api.static import StaticFile

_PAGE: Final = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>tidegauge</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="docs"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""

_START: Final = b"""SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null,
});
"""

_HEADERS: Final = {
    "Cache-Control": "no-store",
    # Swagger UI sets styles on its elements. No script but these files runs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
}


def mount(app: FastAPI) -> None:
    """Serve the page, its files and the OpenAPI document."""
    static = files("fastapi_offline") / "static"
    file = partial(StaticFile, headers=_HEADERS)
    found = {
        "/docs": file("text/html", lambda: _PAGE),
        "/docs/start.js": file("text/javascript", lambda: _START),
    }
    for name, kind in (("swagger-ui.css", "text/css"), ("swagger-ui-bundle.js", "text/javascript")):
        found[f"/docs/{name}"] = file(kind, (static / name).read_bytes)
    for path, served in found.items():
        app.add_route(path, served.__call__, include_in_schema=False)
    keyed = file("application/json", lambda: msgspec.json.encode(app.openapi()))
    keyless = file("application/json", lambda: msgspec.json.encode(without_keys(app.openapi())))

    async def document(request: Request) -> Response:
        # The first key may be created, and the last one revoked, at any time.
        is_open = state(request).aggregator.keys.open
        return await (keyless if is_open else keyed)(request)

    app.add_route("/openapi.json", document, include_in_schema=False)
