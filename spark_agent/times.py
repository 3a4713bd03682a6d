"""Instants as people read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from spark_agent.client import MAX_MS

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def instant_text(time_ms: int | None) -> str:
    """Write an instant (ms, UTC) in ISO 8601.

    >>> instant_text(1_357_041_600_250), instant_text(None), instant_text(MAX_MS)
    ('2013-01-01T12:00:00.250Z', 'none yet', 'the end of time')
    """
    if time_ms is None:
        return "none yet"
    if time_ms == MAX_MS:
        return "the end of time"
    try:
        instant = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_instant_ms(text: str, *, name: str) -> int:
    """Read an instant as people write it: ISO 8601, in UTC unless it says otherwise, or milliseconds.

    `name` is what an error calls it. Raises `ValueError`.

    >>> read_instant_ms("2013-01-01T12:00Z", name="T"), read_instant_ms("2013-01-01", name="T")
    (1357041600000, 1356998400000)
    >>> read_instant_ms("2013-01-01T13:00:00.250+01:00", name="T"), read_instant_ms("-5", name="T")
    (1357041600250, -5)
    >>> read_instant_ms("tomorrow", name="--until")
    Traceback (most recent call last):
    ValueError: --until 'tomorrow' is no time: write it like 2026-01-01T00:00:00Z, or in ms since 1970
    """
    if re.fullmatch(r"-?[0-9]{1,19}", text):
        return int(text)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} {text!r} is no time: write it like 2026-01-01T00:00:00Z, or in ms since 1970"
        ) from None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return (instant - _EPOCH) // timedelta(milliseconds=1)
