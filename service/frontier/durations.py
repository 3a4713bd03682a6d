"""Durations and moments as text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def moment_text(at_ms: int, now_ms: int) -> str:
    """Write a moment of the wall clock, UTC: without its day, if that is today.

    >>> moment_text(60_000, now_ms=86_399_000), moment_text(60_000, now_ms=86_400_000)
    ('00:01Z', '1970-01-01 00:01Z')
    """
    at, now = (datetime.fromtimestamp(each // 1_000, UTC) for each in (at_ms, now_ms))
    return f"{at:%H:%M}Z" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M}Z"


def duration_text(duration_ms: float) -> str:
    """Write a duration in its two largest units at most, cut and not rounded.

    >>> duration_text(250), duration_text(7_290), duration_text(12_999), duration_text(90_000)
    ('250 ms', '7.2 s', '12 s', '1 min 30 s')
    >>> duration_text(3_600_000), duration_text(183_600_000), duration_text(1_000), duration_text(0)
    ('1 h', '2 d 3 h', '1 s', '0 s')
    """
    left_ms = int(duration_ms)
    if 0 < left_ms < 1_000:
        return f"{left_ms} ms"
    tenths = left_ms // 100
    if tenths < 100 and tenths % 10:
        return f"{tenths // 10}.{tenths % 10} s"
    counts: list[tuple[int, str]] = []
    for size_ms, unit in _UNITS:
        count, left_ms = divmod(left_ms, size_ms)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count:,} {unit}" for count, unit in counts[:2] if count) or "0 s"
