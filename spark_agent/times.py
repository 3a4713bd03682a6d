"""Instants and durations: their text forms, and milliseconds."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final

from spark_agent.exceptions import WrongInstant

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
    """Convert a duration to whole milliseconds; `name` is its name in an error.

    Raises `ValueError` for anything that is not a duration of zero or more.

    >>> duration_ms("12 hours"), duration_ms("4h"), duration_ms("1 day 30 min"), duration_ms(250)
    (43200000, 14400000, 88200000, 250)
    >>> duration_ms("soon", name="bound")
    Traceback (most recent call last):
    ValueError: invalid bound 'soon': write it like '12 hours', '4h' or '250 ms'
    """
    milliseconds = _milliseconds(value)
    if milliseconds is None or milliseconds < 0:
        raise ValueError(f"invalid {name} {value!r}: write it like '12 hours', '4h' or '250 ms'")
    return milliseconds


def _milliseconds(value: object) -> int | None:
    match value:
        case timedelta():
            # The base class divides: a subclass, such as pendulum's, may not divide by a plain one.
            whole, rest = timedelta.__divmod__(value, timedelta(milliseconds=1))
            return None if rest else whole
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


Instant = datetime | str | int
"""A point in time: a `datetime`, text such as `2026-01-01T00:00:00Z`, or milliseconds since 1970."""

INSTANT_FORMS: Final = "such as 2026-01-01T00:00:00Z, 1767225600s or 1767225600000ms"
"""Examples, for the help of a command."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_NUMBER: Final = re.compile(r"(?P<ms>-?[0-9]{1,19})(?P<unit> ?ms)?|(?P<seconds>[0-9]{1,19}) ?s")
_SECONDS: Final = re.compile(r"-?[0-9]{9,11}")
"""Seconds of the years 1973 to 5138. As milliseconds they are instants of 1970 to 1973."""
_BARE_DATE: Final = re.compile(
    r"20[0-9]{2}((0[1-9]|1[0-2])((0[1-9]|[12][0-9]|3[01])([0-9]{4}([0-9]{2})?)?)?)?"
)


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


def read_instant_ms(value: Instant, *, name: str, now_ms: int | None = None) -> int:
    """Return an instant in ms since 1970, UTC. `name` is its name in an error.

    Text is ISO 8601, `1767225600s`, `1767225600000ms`, bare ms, `now`, or a distance from now. ISO text
    and a `datetime` without an offset are UTC. `now_ms` stands in for the clock. A bare number that may
    be seconds or a date is rejected: as milliseconds it is an instant of 1970, which every watermark has
    reached. Raises `WrongInstant`.

    >>> read_instant_ms("2013-01-01T12:00Z", name="T"), read_instant_ms("2013-01-01", name="T")
    (1357041600000, 1356998400000)
    >>> read_instant_ms("2013-01-01T13:00:00.250+01:00", name="T"), read_instant_ms("-5", name="T")
    (1357041600250, -5)
    >>> read_instant_ms(datetime(1970, 1, 2), name="T"), read_instant_ms("86400s", name="T")
    (86400000, 86400000)
    >>> [read_instant_ms(text, name="T", now_ms=7_200_000) for text in ("-2h", "now", "+1 day")]
    [0, 7200000, 93600000]
    >>> read_instant_ms("20260101", name="T")
    Traceback (most recent call last):
    spark_agent.exceptions.WrongInstant: T '20260101' may be a date: write it like 2026-01-01, or \
20260101ms for milliseconds
    >>> [read_instant_ms(text, name="T") for text in ("2026ms", "2000", "20260", "1767225600000")]
    [2026, 2000, 20260, 1767225600000]
    >>> read_instant_ms(1767225600, name="T")
    Traceback (most recent call last):
    spark_agent.exceptions.WrongInstant: T 1767225600 is ambiguous: write 1767225600s for seconds \
(2026-01-01T00:00:00Z), 1767225600ms for milliseconds (1970-01-21T10:53:45.600Z), or ISO 8601
    >>> read_instant_ms("tomorrow", name="--until")
    Traceback (most recent call last):
    spark_agent.exceptions.WrongInstant: invalid --until 'tomorrow': write it like \
2026-01-01T00:00:00Z, in ms since 1970, or like -2h
    """
    match value:
        case datetime():
            return _since_epoch_ms(value)
        case str():
            return _read_text_ms(value, name, now_ms)
        case int() if not isinstance(value, bool):
            _reject_ambiguous(value, str(value), name)
            return value
        case _:
            raise _invalid(value, name)


def _read_text_ms(text: str, name: str, now_ms: int | None) -> int:
    if (found := _NUMBER.fullmatch(text)) is not None:
        if found["seconds"] is not None:
            return 1_000 * int(found["seconds"])
        if found["unit"] is None:
            _reject_ambiguous(text, text, name)
        return int(found["ms"])
    try:
        relative = _relative_ms(text)
        if relative is not None:
            return (time.time_ns() // 1_000_000 if now_ms is None else now_ms) + relative
        return _since_epoch_ms(datetime.fromisoformat(text))
    except ValueError:
        raise _invalid(text, name) from None


def _since_epoch_ms(instant: datetime) -> int:
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    # The base class divides: the difference of a subclass, such as pendulum's, may not do so.
    return datetime.__sub__(instant, _EPOCH) // timedelta(milliseconds=1)


def _invalid(value: object, name: str) -> WrongInstant:
    return WrongInstant(
        f"invalid {name} {value!r}: write it like 2026-01-01T00:00:00Z, in ms since 1970, or"
        " like -2h"
    )


def _reject_ambiguous(given: str | int, digits: str, name: str) -> None:
    """Reject a bare number that may be a date or seconds. Raises `WrongInstant`."""
    if _may_be_date(digits):
        raise WrongInstant(
            f"{name} {given!r} may be a date: write it like 2026-01-01, or {digits}ms for milliseconds"
        )
    if _SECONDS.fullmatch(digits) is not None:
        seconds = instant_text(1_000 * int(digits)).replace(".000Z", "Z")
        # A sign makes `-5s` a distance from now.
        as_seconds = seconds if digits.startswith("-") else f"{digits}s"
        raise WrongInstant(
            f"{name} {given!r} is ambiguous: write {as_seconds} for seconds ({seconds}), {digits}ms for"
            f" milliseconds ({instant_text(int(digits))}), or ISO 8601"
        )


def _may_be_date(digits: str) -> bool:
    """Return whether digits alone may be a year, month, day or minute of this century.

    As milliseconds, the digits would be an instant of 1970 or one in the far future. A wait for the
    former would return at once.

    >>> [_may_be_date(text) for text in ("2026", "202601", "20260101", "202601011200")]
    [True, True, True, True]
    >>> [_may_be_date(text) for text in ("2000", "202613", "20260140", "1767225600000")]
    [False, False, False, False]
    """
    return digits != "2000" and _BARE_DATE.fullmatch(digits) is not None


def _relative_ms(text: str) -> int | None:
    """Read the distance of an instant from now; None: the text has another form. Raises `ValueError`."""
    if text == "now":
        return 0
    if text[:1] not in {"-", "+"}:
        return None
    away = duration_ms(text[1:])
    return -away if text.startswith("-") else away


_TEXT_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def duration_text(length_ms: int | None) -> str:
    """Write a duration in its two largest units at most, cut and not rounded, as the service does.

    None: empty. A negative one counts as zero.

    >>> [duration_text(ms) for ms in (None, -5, 250, 7_290, 61_000, 3_600_000, 183_600_000)]
    ['', '0 s', '250 ms', '7.2 s', '1 min 1 s', '1 h', '2 d 3 h']
    """
    if length_ms is None:
        return ""
    left_ms = max(length_ms, 0)
    if 0 < left_ms < 1_000:
        return f"{left_ms} ms"
    tenths = left_ms // 100
    if tenths < 100 and tenths % 10:
        return f"{tenths // 10}.{tenths % 10} s"
    counts: list[tuple[int, str]] = []
    for size_ms, unit in _TEXT_UNITS:
        count, left_ms = divmod(left_ms, size_ms)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count:,} {unit}" for count, unit in counts[:2] if count) or "0 s"


MAX_MS: Final = 9_223_372_036_854_775_807
"""The end of time: nothing more will come."""

_AHEAD_MS: Final = 1_000
"""Clocks of machines differ by less."""


def lag_text(watermark_ms: int | None, lag_ms: int | None) -> str:
    """Write how far a watermark is behind the clock, or ahead of it. The end of time is neither.

    >>> lag_text(5, 61_000), lag_text(5, -61_000), lag_text(MAX_MS, -61_000), lag_text(None, None)
    ('1 min 1 s', '1 min 1 s ahead', '', '')
    """
    if watermark_ms == MAX_MS or lag_ms is None:
        return ""
    return f"{duration_text(-lag_ms)} ahead" if lag_ms <= -_AHEAD_MS else duration_text(lag_ms)
