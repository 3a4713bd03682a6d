"""Times in RFC 3339 in the bodies of reports and commits, read as ms.

Bodies with ms are decoded at once. Only a body that does not fit its type is searched for such times, so
they cost nothing where they are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from service.frontier.timestamps import from_iso

Members = Mapping[str, Any]
Times = Callable[[Members], Members]
"""Returns the members of a body with ms in place of RFC 3339. Raises `ValueError`."""

_LOOKS_LIKE_ONE: Final = re.compile(r"[0-9]{4}-")


def report_in_ms(report: Members) -> Members:
    """Return a report with its times in ms. Raises `ValueError`, naming the member.

    >>> report_in_ms({"ranges": {"a": "1970-01-01T00:00:05Z", "b": {"watermark": 4000}}})
    {'ranges': {'a': 5000, 'b': {'watermark': 4000}}}
    >>> report_in_ms({"columns": {"watermark": ["1970-01-01T00:00:05Z", None], "idle": "AAE="}})
    {'columns': {'watermark': [5000, None], 'idle': 'AAE='}}
    """
    found = _with(report, "input_watermark", _time)
    found = _with(found, "ranges", _each(lambda where, of: _range(where, _time(where, of))))
    return _with(found, "columns", _columns)


def commit_in_ms(commit: Members) -> Members:
    """Return a commit with its times in ms. Raises `ValueError`, naming the member.

    >>> commit_in_ms({"stages": {"k": {"input_watermark": "1970-01-01T00:00:05Z", "late": 1}}})
    {'stages': {'k': {'input_watermark': 5000, 'late': 1}}}
    """
    return _with(commit, "stages", _each(_stage))


Reader = Callable[[str, Any], Any]
"""Reads a value at a place."""


def _stage(where: str, value: Any) -> Any:  # noqa: ANN401  (JSON)
    if not isinstance(value, dict):
        return value
    found = _with(cast("Members", value), "input_watermark", _time, where)
    return _with(found, "holds", _each(_time), where)


def _range(where: str, value: Any) -> Any:  # noqa: ANN401  (JSON)
    if not isinstance(value, dict):
        return value
    found = _with(cast("Members", value), "watermark", _time, where)
    found = _with(found, "oldest_work", _time, where)
    return _with(found, "holds", _each(_time), where)


def _columns(where: str, value: Any) -> Any:  # noqa: ANN401  (JSON)
    if not isinstance(value, dict):
        return value
    found = _with(cast("Members", value), "watermark", _column, where)
    found = _with(found, "oldest_work", _column, where)
    return _with(found, "holds", _each(_column), where)


def _column(where: str, value: Any) -> Any:  # noqa: ANN401  (JSON)
    """Read an array. A string in place of an array has bytes."""
    if not isinstance(value, list):
        return value
    return [_time(f"{where}[{i}]", each) for i, each in enumerate(cast("list[Any]", value))]


def _time(where: str, value: Any) -> Any:  # noqa: ANN401  (JSON)
    if not isinstance(value, str) or _LOOKS_LIKE_ONE.match(value) is None:
        return value
    try:
        return from_iso(value)
    except ValueError as error:
        raise ValueError(f"{where} is {value[:40]!r}: {error}") from None


def _with(members: Members, name: str, read: Reader, where: str = "") -> Members:
    if name not in members:
        return members
    return {**members, name: read(f"{where}.{name}".removeprefix("."), members[name])}


def _each(read: Reader) -> Reader:
    def read_each(where: str, value: Any) -> Any:  # noqa: ANN401  (JSON)
        if not isinstance(value, dict):
            return value
        members = cast("Members", value)
        return {name: read(f"{where}.{name}", each) for name, each in members.items()}

    return read_each
