"""Instants as people read them."""

from __future__ import annotations

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
