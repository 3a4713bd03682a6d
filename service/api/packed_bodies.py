"""Decoding packed reports of the most common form, without an object for each of their numbers.

A packed report may carry ten thousand numbers. To make an integer of each, and an array of those, takes
longer than all else that is done with the report. simdjson copies them from the text into the array.

What has another form, or any fault, is left to msgspec, which reads every form and names the fault. So
nothing may be accepted here that it would refuse: where it is not plain that a body is right, the answer
is None.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeVar, cast

import msgspec
import numpy as np
import simdjson

from service.api.exchange import Body
from service.api.requests import KeyedReport, SourceColumns, SourceReport, WorkColumns

R = TypeVar("R", KeyedReport, SourceReport)
Times = tuple[int | None, ...]

_LARGEST: Final = 2**20
"""The parser keeps as much memory as the largest body needs that it has read."""
_MOST_HOLDS: Final = 16
_LONGEST_NAME: Final = 128

# For one thread: what it has parsed is let go before the next body comes.
_parser = simdjson.Parser()


def decode_columns(report: type[R], body: Body) -> R | None:
    """Decode a packed report that has only holds or, for a source, only watermarks; None: it has more,
    or a fault. Its column is an array. What the numbers mean is not checked.
    """
    if len(body) > _LARGEST or not body.startswith(b"{") or b"\\" in body:
        # With a name that has NUL in it, written as an escape, simdjson finds another member, whose name
        # ends there. And it takes a byte order mark, which is no JSON.
        return None
    try:
        members = _members(_parser.parse(body))
        columns = _members(members.pop("columns"))
        if report is SourceReport:
            watermark = _column(columns.pop("watermark"))
            decoded, count = SourceColumns(watermark=watermark), 1
        else:
            holds = {name: _column(each) for name, each in _members(columns.pop("holds")).items()}
            decoded, count = WorkColumns(holds=holds), len(holds)
            _check_names(holds)
        if columns or _has_more_arrays(body, count):
            return None
        return msgspec.structs.replace(msgspec.convert(members, report), columns=decoded)
    except (KeyError, TypeError, ValueError, RuntimeError):
        # What simdjson raises for what is no JSON or of another type (the last one for what it has no
        # other error for, such as a number of twenty digits), and msgspec for what does not fit.
        return None


def _members(value: object) -> dict[str, object]:
    """Return the members of an object. Raises `TypeError`; `ValueError` if two have the same name."""
    if not isinstance(value, simdjson.Object):
        raise TypeError
    names = list(value.keys())
    # Not `items()`, which makes Python's objects of all that is below.
    members: dict[str, object] = {name: value[name] for name in names}
    if len(members) < len(names):
        raise ValueError
    return members


def _column(value: object) -> Times:
    """Return an array's numbers. Raises `TypeError` or `ValueError` if they are not 64-bit integers."""
    if not isinstance(value, simdjson.Array):
        raise TypeError
    # What reads it takes it for a sequence of numbers, which it is, but for its type.
    return cast("Times", np.frombuffer(value.as_buffer(of_type="i"), dtype=np.int64))


def _has_more_arrays(body: Body, count: int) -> bool:
    """Whether a body may have more arrays than these. simdjson would flatten a column of columns."""
    at = -1
    for _ in range(count):
        at = body.find(b"[", at + 1)
    # Not `count()`, which takes many times as long as a search.
    return body.find(b"[", at + 1) >= 0


def _check_names(holds: Collection[str]) -> None:
    if len(holds) > _MOST_HOLDS or not all(0 < len(name) <= _LONGEST_NAME for name in holds):
        raise ValueError
