"""Columns of packed reports as bytes, as workers send them."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterable


def as_bytes(times: Iterable[int | None]) -> str:
    """Write times; null is -2^63."""
    return b64encode(
        b"".join(struct.pack("<q", -(2**63) if time is None else time) for time in times)
    ).decode()


def as_flags(flags: Iterable[bool]) -> str:
    return b64encode(bytes(flags)).decode()
