"""Parses durations as people write them: `12 hours`, `4h`, `250 ms`."""

from __future__ import annotations

import re
from datetime import timedelta
from types import MappingProxyType
from typing import Final

Duration = str | int | timedelta
"""A duration: text such as `12 hours`, a `timedelta`, or whole milliseconds."""

_UNITS_MS: Final = MappingProxyType(
    {
        "ms": 1,
        "millisecond": 1,
        "s": 1_000,
        "sec": 1_000,
        "second": 1_000,
        "m": 60_000,
        "min": 60_000,
        "minute": 60_000,
        "h": 3_600_000,
        "hour": 3_600_000,
        "d": 86_400_000,
        "day": 86_400_000,
        "w": 604_800_000,
        "week": 604_800_000,
    }
)
_PART: Final = re.compile(r"(\d+)\s*([a-z]+)\s*")


def duration_ms(value: Duration, *, name: str = "duration") -> int:
    """Convert a duration to whole milliseconds; `name` is what an error calls it.

    Raises `ValueError` for anything that is not a duration of zero or more.

    >>> duration_ms("12 hours"), duration_ms("4h"), duration_ms("1 day 30 min"), duration_ms(250)
    (43200000, 14400000, 88200000, 250)
    >>> duration_ms("soon", name="bound")
    Traceback (most recent call last):
    ValueError: bound 'soon' is no duration: write it like '12 hours', '4h' or '250 ms'
    """
    milliseconds = _milliseconds(value)
    if milliseconds is None or milliseconds < 0:
        raise ValueError(
            f"{name} {value!r} is no duration: write it like '12 hours', '4h' or '250 ms'"
        )
    return milliseconds


def _milliseconds(value: object) -> int | None:
    match value:
        case timedelta():
            return value // timedelta(milliseconds=1)
        case int() if not isinstance(value, bool):
            return value
        case str():
            return _parse(value.strip().lower())
        case _:
            return None


def _parse(text: str) -> int | None:
    total, position = 0, 0
    while position < len(text):
        part = _PART.match(text, position)
        unit = part and _unit_ms(part[2])
        if part is None or unit is None:
            return None
        total += int(part[1]) * unit
        position = part.end()
    return total if text else None


def _unit_ms(unit: str) -> int | None:
    return _UNITS_MS.get(unit) or _UNITS_MS.get(unit.removesuffix("s"))
