"""Points in event time: integer milliseconds since the Unix epoch, UTC.

Event time is totally ordered, with two ends that are not instants: `MIN` (-∞, *no watermark yet*) and
`MAX` (the end of time, *nothing more will come*). Both are integers, so that `min` and `max` are the
whole arithmetic of watermarks.

>>> min(MIN, 1_000, MAX) == MIN, max(MIN, 1_000) == 1_000
(True, True)
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

MIN: Final = -(2**63)
"""No watermark yet: below every instant. On the wire: `null`."""

MAX: Final = 2**63 - 1
"""The end of time: nothing more will come. On the wire: `9223372036854775807`."""

EARLIEST: Final = -62_135_596_800_000
"""0001-01-01T00:00:00Z, the first instant that is accepted."""

LATEST: Final = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z, the last instant that is accepted."""


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def is_timestamp(value: int) -> bool:
    """Return whether a worker may report the value: an instant of the years 0001 to 9999, or `MAX`.

    >>> is_timestamp(0), is_timestamp(LATEST), is_timestamp(LATEST + 1), is_timestamp(MAX)
    (True, True, False, True)
    """
    return EARLIEST <= value <= LATEST or value == MAX


def from_wire(value: int | None) -> int:
    """Decode a watermark from JSON, where `null` is *no watermark yet*.

    >>> from_wire(None) == MIN, from_wire(12)
    (True, 12)
    """
    return MIN if value is None else value


def to_wire(value: int) -> int | None:
    """Encode a watermark for JSON.

    >>> to_wire(MIN), to_wire(12)
    (None, 12)
    """
    return None if value == MIN else value


def data_lag_ms(watermark: int, now_ms: int) -> int | None:
    """Return the lag of a watermark behind the clock; None: not yet. At the end of time: 0.

    >>> data_lag_ms(400, now_ms=1_000), data_lag_ms(MAX, now_ms=1_000), data_lag_ms(MIN, now_ms=1_000)
    (600, 0, None)
    """
    if watermark == MIN:
        return None
    return 0 if watermark == MAX else now_ms - watermark


def understood(value: int) -> str:
    """Write an instant of a request, for a header of the answer.

    >>> understood(1_767_225_600), understood(MAX)
    ('1970-01-21T10:53:45.600Z', '9223372036854775807')
    """
    return str(value) if value == MAX else iso(value)


@lru_cache(maxsize=4_096)
def iso(at_ms: int) -> str:
    """Write an instant as text.

    >>> iso(1767225603120)
    '2026-01-01T00:00:03.120Z'
    >>> iso(EARLIEST)
    '0001-01-01T00:00:00.000Z'
    """
    at = _EPOCH + timedelta(milliseconds=at_ms)
    return f"{at:%Y-%m-%dT%H:%M:%S}".rjust(19, "0") + f".{at_ms % 1_000:03d}Z"


_RFC_3339: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)


def from_iso(text: str) -> int:
    """Read an instant in RFC 3339: with its offset, and in whole milliseconds.

    Raises `ValueError` for another text. A part of a millisecond is rejected: rounded down, a wait for
    the instant could end too early, and rounded up, a promise could be too late.

    >>> from_iso("2026-01-01T00:00:03.12Z"), from_iso("2026-01-01T01:00:03+01:00")
    (1767225603120, 1767225603000)
    >>> from_iso("2026-01-01T00:00:03.000100Z")
    Traceback (most recent call last):
    ValueError: a part of a millisecond is not read
    """
    found = _RFC_3339.fullmatch(text)
    if found is None:
        raise ValueError("RFC 3339 is like 2026-01-01T00:00:00Z")
    day, time, fraction, offset = found.groups("")
    if fraction[3:].strip("0"):
        raise ValueError("a part of a millisecond is not read")
    try:
        at = datetime.fromisoformat(f"{day}T{time}{offset.upper()}")
        return (at - _EPOCH) // timedelta(milliseconds=1) + int(fraction[:3].ljust(3, "0"))
    except ValueError as error:
        raise ValueError(f"this is not an instant: {error}") from None


def time_text(at_ms: int) -> str:
    """Write an event time as text.

    >>> time_text(0), time_text(MAX)
    ('1970-01-01T00:00:00Z', 'the end of time')
    """
    return "the end of time" if at_ms == MAX else iso(at_ms).replace(".000Z", "Z")
