"""The page at `/`: plain modules, without inline code or parts from other hosts.

The page has no data, so it needs no key. It reads data from the API, with the key of its user.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fastapi import FastAPI

from service.api.static import StaticFile

SITE: Final = "site"

_TYPES: Final = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "json": "application/json",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}

_IMPORT_MAP: Final = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


def mount(app: FastAPI) -> None:
    """Serve the page and its files."""
    root = files("service.api") / SITE
    page = (root / "index.html").read_bytes()
    headers = {"Content-Security-Policy": policy(page)}
    app.add_route(
        "/", StaticFile("text/html", lambda: page, headers).__call__, include_in_schema=False
    )
    for path, file in _walk(root, SITE):
        kind = _TYPES.get(path.rpartition(".")[2])
        if kind is None:  # a file of an editor or a file manager
            continue
        served = StaticFile(kind, partial(file.read_bytes), {})
        app.add_route(f"/{path}", served.__call__, include_in_schema=False)


def policy(page: bytes) -> str:
    """Return the page's Content-Security-Policy.

    Its import map, which defines `preact`, must be inline for browsers, so the policy allows it by its
    digest.
    """
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(found).digest()).decode()}'"
        for found in _IMPORT_MAP.findall(page)
    ]
    return (
        f"default-src 'none'; script-src 'self' {' '.join(digests)}; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _walk(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        below = f"{path}/{each.name}"
        if each.is_dir():
            yield from _walk(each, below)
        elif each.name != "index.html":
            yield below, each
