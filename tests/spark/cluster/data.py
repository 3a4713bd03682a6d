"""The rows that a cluster's queries read, and what a batch job makes of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import groupby, product
from pathlib import Path
from typing import Final

START_S: Final = 1_700_000_000
SHARDS: Final = ("left", "right")
KEYS: Final = ("a", "b", "c")
FILE_S: Final = 10
"""Seconds of event time in each file."""
LATE_S: Final = 3
"""So many seconds the right shard is behind the left one, and behind its own newest rows."""
BOUND: Final = "6 seconds"
WINDOW_S: Final = 15
GAP_S: Final = 4
APART_S: Final = 7
"""Delay of a pair's right side, at most."""

VIEWS: Final = "views"
CLICKS: Final = "clicks"

Lines = Counter[tuple[str | int, ...]]
"""Rows of an output, each with how often it is there."""


class Shape(StrEnum):
    """Operators between the sources and the file sink."""

    TUMBLING = "tumbling windows"
    SESSIONS = "session windows"
    JOIN = "an interval join"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its sources."""
        return (VIEWS, CLICKS) if self is Shape.JOIN else (VIEWS,)


@dataclass(frozen=True)
class Row:
    """One row: its number within its source, and when it was, in seconds from START_S."""

    number: int
    shard: str
    key: str
    second: int


def files(source: str, count: int) -> list[list[Row]]:
    """The rows of a source, file by file; each file has rows of all shards.

    Keys come and go, so that there are sessions, and each shard's rows are out of order.
    """
    made: list[list[Row]] = []
    number = 0
    for index in range(count):
        rows: list[Row] = []
        for second, shard, key in product(range(FILE_S), SHARDS, KEYS):
            at = index * FILE_S + second
            at -= LATE_S * (shard == "right") + LATE_S * (second % 4 == 1)
            if at < 0 or _quiet(source, key, at):
                continue
            rows.append(Row(number, shard, key, at))
            number += 1
        made.append(rows)
    return made


def _quiet(source: str, key: str, second: int) -> bool:
    every, shift = (17, 5 * KEYS.index(key)) if source == VIEWS else (5, KEYS.index(key))
    return (second + shift) % every >= every - (9 if source == VIEWS else 4)


def land(folder: Path, rows: Iterable[list[Row]]) -> None:
    """Put a source's files into its folder, the oldest first."""
    folder.mkdir()
    for index, each in enumerate(rows):
        lines = [
            json.dumps({"number": r.number, "shard": r.shard, "key": r.key, "at": _iso(r.second)})
            for r in each
        ]
        path = folder / f"{index:04d}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (START_S + index, START_S + index))


def answer(shape: Shape, inputs: dict[str, list[Row]]) -> Lines:
    """Return a batch job's result for all rows."""
    match shape:
        case Shape.TUMBLING:
            return _tumbling(inputs[VIEWS])
        case Shape.SESSIONS:
            return _sessions(inputs[VIEWS])
        case Shape.JOIN:
            return _pairs(inputs[VIEWS], inputs[CLICKS])


def _tumbling(rows: list[Row]) -> Lines:
    first = START_S // WINDOW_S * WINDOW_S - START_S  # Spark counts windows from 1970 on
    counted = Counter((r.key, (r.second - first) // WINDOW_S) for r in rows)
    return Counter(
        (key, _iso(first + (index + 1) * WINDOW_S), count)
        for (key, index), count in counted.items()
    )


def _sessions(rows: list[Row]) -> Lines:
    found: Lines = Counter()
    ordered = sorted(rows, key=lambda r: (r.key, r.second))
    for key, some in groupby(ordered, key=lambda r: r.key):
        count, end = 0, 0
        for row in some:
            if count and row.second >= end:
                found[key, _iso(end), count] += 1
                count = 0
            count, end = count + 1, row.second + GAP_S
        found[key, _iso(end), count] += 1
    return found


def _pairs(views: list[Row], clicks: list[Row]) -> Lines:
    by_key: dict[str, list[Row]] = {key: [r for r in clicks if r.key == key] for key in KEYS}
    return Counter(
        (view.number, _iso(view.second), click.number)
        for view in views
        for click in by_key[view.key]
        if 0 <= click.second - view.second <= APART_S
    )


COLUMNS: Final = {
    Shape.TUMBLING: ("key", "ended_at", "rows"),
    Shape.SESSIONS: ("key", "ended_at", "rows"),
    Shape.JOIN: ("view", "at", "click"),
}
"""The columns of each output; the second is its event time."""


def parse(shape: Shape, lines: Counter[str]) -> Lines:
    """Read rows that a file sink has written."""
    found: Lines = Counter()
    for line, count in lines.items():
        row = json.loads(line)
        first, at, last = (row[column] for column in COLUMNS[shape])
        found[first, datetime.fromisoformat(at).isoformat(), last] += count
    return found


def _iso(second: int) -> str:
    return datetime.fromtimestamp(START_S + second, UTC).isoformat()
