"""Durations and moments as text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ((86_400_000, "d", 24), (3_600_000, "h", 60), (60_000, "min", 60))


def moment_text(at_ms: int, now_ms: int) -> str:
    """Write a moment of the wall clock, UTC: without its day, if that is today.

    >>> moment_text(60_000, now_ms=86_399_000), moment_text(60_000, now_ms=86_400_000)
    ('00:01Z', '1970-01-01 00:01Z')
    """
    at, now = (datetime.fromtimestamp(each // 1_000, UTC) for each in (at_ms, now_ms))
    return f"{at:%H:%M}Z" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M}Z"


def duration_text(duration_ms: float) -> str:
    """Write a duration in its two largest units.

    >>> duration_text(250), duration_text(7_300), duration_text(12_000), duration_text(90_000)
    ('250 ms', '7.3 s', '12 s', '1 min 30 s')
    >>> duration_text(7_200_000), duration_text(93_600_000), duration_text(59_999)
    ('2 h', '1 d 2 h', '1 min')
    """
    if duration_ms < 1_000:
        return f"{duration_ms:.0f} ms"
    seconds = round(duration_ms / 1_000)
    if seconds < 60:
        return f"{seconds} s" if seconds >= 10 else f"{duration_ms / 1_000:.2g} s"
    for number, (unit_ms, unit, parts) in enumerate(_UNITS):
        whole, rest = divmod(round(duration_ms * parts / unit_ms), parts)
        if whole:
            smaller = _UNITS[number + 1][1] if number + 1 < len(_UNITS) else "s"
            return f"{whole} {unit} {rest} {smaller}" if rest else f"{whole} {unit}"
    raise AssertionError
