"""Members that a JSON object has twice.

msgspec takes the last of them, as most decoders do. A shard that a report names twice would promise the
second watermark alone, which may be the greater one.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

_LARGEST: Final = 2 * 2**20
"""The largest body that is checked: a report of as many ranges as it may have, with some holds. Other
clients would notice the time that the check of a larger one takes."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class _RepeatedError(Exception):
    """An object has a member twice."""


def repeated_member(body: bytes | bytearray) -> str | None:
    """Return the name of a member that an object of this JSON has twice; None: there is none.

    A member has one colon outside of strings. So if the text has as many colons as the decoded value
    written anew, which has each member once, then nothing was dropped.

    >>> repeated_member(b'{"ranges": {"a": 5, "b": 6}, "position": "1:2"}')
    >>> repeated_member(b'{"ranges": {"a": 5, "a": 6}}')
    'a'
    """
    if len(body) > _LARGEST:
        return None
    # An escaped colon is written anew as a colon.
    if b"\\" not in body and _encode(_decode(body)).count(b":") == body.count(b":"):
        return None
    try:
        json.loads(body, object_pairs_hook=_check)
    except _RepeatedError as found:
        return str(found)
    except RecursionError:
        # The types of bodies are not nested as deeply.
        return None
    return None


def _check(pairs: list[tuple[str, Any]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise _RepeatedError(name)
        names.add(name)
