"""The scripts: one for each step, assembled from the files in `lua/`."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from service.live.redis.schema import lua_header

LUA = Path(__file__).parent / "lua"
_SHARED = ("base", "stages", "ranges", "leases", "epochs", "runs", "views")
"""Files with which every script begins, in this order: each file uses those before it."""

RIGHTS = "rights"
"""Not a step: it finds out which commands the user may run, with nothing before it."""


@cache
def script(step: str) -> tuple[str, str]:
    """Return the source of a step's script and its digest."""
    parts = ("rules", *(f"shared/{name}" for name in _SHARED), step)
    if step == RIGHTS:
        parts = (step,)
    header = "" if step == RIGHTS else lua_header()
    source = header + "".join((LUA / f"{part}.lua").read_text() for part in parts)
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
