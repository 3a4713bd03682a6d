"""Writing the names of many ranges, off the event loop: there may be a million in one response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import numpy as np
import numpy.typing as npt

from service.frontier.columns import Int64s
from service.frontier.ranges import KeyLayout, RangeNames

SHORT: Final = 2_000
"""The largest number of names that are written at once, in about a millisecond."""

_SLICE: Final = 10_000
_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_ROW = np.frombuffer(b'"00000000-00000000",', dtype=np.uint8)


async def written(names: Sequence[str]) -> list[str]:
    """Return names as a member of a body: a list or, for many names, JSON that is already written."""
    if len(names) <= SHORT or not isinstance(names, RangeNames):
        return list(names)
    # In a thread: numpy's loops and short slices of other work hardly delay the event loop.
    raw = await asyncio.to_thread(_json, names)
    # msgspec copies it into the body as it is.
    return cast("list[str]", msgspec.Raw(raw))


def _json(names: RangeNames) -> bytes:
    layout = names.layout
    parts: list[bytes] = []
    for start in range(0, len(names), _SLICE):
        part = names[start : start + _SLICE]
        if isinstance(layout, KeyLayout):
            parts.append(_keys(layout, part.indices))
        else:
            parts.append(msgspec.json.encode(list(part))[1:-1])
    return b"[" + b",".join(parts) + b"]"


def _keys(layout: KeyLayout, indices: Int64s) -> bytes:
    """Write key ranges, separated by commas.

    >>> _keys(KeyLayout.tile(4), np.array([1, 3]))
    b'"40000000-80000000","c0000000-100000000"'
    """
    rows = np.tile(_ROW, (len(indices), 1))
    _write_hex(layout.bounds[indices], rows[:, 1:9])
    ends = layout.bounds[indices + 1]
    _write_hex(ends, rows[:, 10:18])
    text = rows.tobytes()[:-1]
    # The end of the very last range has nine digits, and only eight are written so far.
    at = np.flatnonzero(ends == layout.bounds[-1])
    if len(at):
        digit = int(at[0]) * len(_ROW) + 10
        text = text[:digit] + b"1" + text[digit:]
    return text


def _write_hex(values: Int64s, into: npt.NDArray[np.uint8]) -> None:
    for place in range(8):
        into[:, place] = _DIGITS[(values >> (28 - 4 * place)) & 15]
