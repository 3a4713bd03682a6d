"""The documentation at `/docs`: Swagger UI from this service alone, without inline scripts."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse

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

_TYPES: Final = {".css": "text/css", ".js": "text/javascript"}


def mount(app: FastAPI) -> None:
    """Serve the page and its files."""
    static = files("fastapi_offline") / "static"

    async def page(_: Request) -> Response:
        return Response(_PAGE, headers=_HEADERS, media_type="text/html")

    async def file(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        kind = _TYPES[name[name.rindex(".") :]]
        if name == "start.js":
            return Response(_START, headers=_HEADERS, media_type=kind)
        # Only two others are routed here. They are read as fast as the client reads them: they are
        # large, and open to everyone.
        return FileResponse(str(static / name), headers=_HEADERS, media_type=kind)

    app.add_route("/docs", page, include_in_schema=False)
    for name in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js"):
        app.add_route(f"/docs/{name}", file, include_in_schema=False)
