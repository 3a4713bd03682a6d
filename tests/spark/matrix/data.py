"""Data of the matrix: four days of views and clicks, in minutes, out of order within a bound.

Two files a day. Every rule about a watermark speaks of what lies exactly at it, so the rows at the
edges are put there on purpose: see `_edges`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

DAYS: Final = 4
FILES_A_DAY: Final = 2
FILES: Final = DAYS * FILES_A_DAY
SHARDS: Final = ("left", "right")
KEYS: Final = ("x", "y", "z", None)
SCHEMA: Final = "shard string, key string, id long, at timestamp"

START: Final = datetime(2024, 3, 1, tzinfo=UTC)
MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
START_MS: Final = int(START.timestamp()) * 1_000

BOUND_MIN: Final = 90
"""Delay of a row behind newer ones of its shard, at most."""
GAP_MIN: Final = 60
"""The gap of sessions, the interval of joins, and how far apart duplicates are."""
_FILE_MIN: Final = 24 * 60 // FILES_A_DAY
_CLICKS_BEHIND_MIN: Final = 6 * 60
_WRITTEN_S: Final = 1_709_251_200


@dataclass(frozen=True)
class Event:
    """A view or a click: `minute` is counted from START."""

    shard: str
    key: str | None
    id: int
    minute: int

    def line(self) -> str:
        """Return the line of the file; a key that is null is left out, as by Spark."""
        row = {"shard": self.shard, "key": self.key, "id": self.id, "at": iso(self.at_ms)}
        return json.dumps({name: value for name, value in row.items() if value is not None})

    @property
    def at_ms(self) -> int:
        """When it was, in ms since 1970."""
        return START_MS + self.minute * MINUTE_MS


@dataclass(frozen=True)
class Log:
    """One source: its rows by file, in the order in which the files come."""

    name: str
    bound_min: int
    files: Sequence[Sequence[Event]]

    def promised_ms(self, day: int) -> int:
        """Return its promise once the files of that day (the first is 0) have been read."""
        seen = [event for file in self.files[: (day + 1) * FILES_A_DAY] for event in file]
        return START_MS + MINUTE_MS * min(newest(seen, shard) - self.bound_min for shard in SHARDS)

    def write(self, folder: Path, day: int) -> None:
        """Put that day's files into the folder, each at once and as a whole."""
        for number in range(day * FILES_A_DAY, (day + 1) * FILES_A_DAY):
            hidden = folder / f".{number}"
            hidden.write_text("\n".join(event.line() for event in self.files[number]))
            os.utime(hidden, (_WRITTEN_S + number, _WRITTEN_S + number))
            hidden.rename(folder / f"{number}.json")


def newest(events: Iterable[Event], shard: str) -> int:
    """The newest minute of a shard."""
    return max(event.minute for event in events if event.shard == shard)


def iso(ms: int) -> str:
    """A time as Spark writes it in JSON."""
    found = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@cache
def logs(*, ascending: bool = False) -> dict[str, Log]:
    """The views and the clicks. Clicks are six hours behind; each is on a view of the hour before.

    Out of order, a row comes up to BOUND_MIN minutes after it happened. In ascending order a
    minute's rows may still be spread over two files.
    """
    random, ids = Random(7), count(1)
    bound = 0 if ascending else BOUND_MIN
    views = list(_views(random, ids))
    clicks = [
        Event(random.choice(SHARDS), view.key, next(ids), view.minute + after)
        for view in views
        if (after := random.choice((0, 7, 30, GAP_MIN, GAP_MIN + 1, None))) is not None
    ]
    click_files = _arranged(random, clicks, bound, _CLICKS_BEHIND_MIN)
    for number, shard, promise in list(_borders(click_files, bound)):
        # At the watermark itself comes a click, on a view that is as old as the join allows.
        key = f"edge-{shard}-{number}"
        views.append(Event(shard, key, next(ids), promise - GAP_MIN))
        click_files[number].append(Event(shard, key, next(ids), promise))
    view_files = _arranged(random, _repeated(random, views), bound, 0)
    _edges(view_files, bound, ids)
    if ascending:
        for file in (*view_files, *click_files):
            file.sort(key=lambda event: event.minute)
    return {
        "views": Log("views", bound, view_files),
        "clicks": Log("clicks", bound, click_files),
    }


def _views(random: Random, ids: Iterable[int]) -> Iterable[Event]:
    """Some 36 a day; a third at the full hour, where windows end, and most minutes more than once."""
    minutes = [
        day * 24 * 60 + random.choice((60 * random.randrange(24), 15 * random.randrange(96)))
        for day in range(DAYS)
        for _ in range(36)
    ]
    for minute, number in zip(minutes, ids, strict=False):
        yield Event(random.choice(SHARDS), random.choice(KEYS), number, minute)


def _repeated(random: Random, events: Sequence[Event]) -> list[Event]:
    """Some of them come twice: as they were, or again within the hour."""
    again = [
        replace(event, minute=event.minute + random.choice((0, 0, 1, GAP_MIN)))
        for event in events
        if random.random() < 0.3
    ]
    return [*events, *again]


def _arranged(
    random: Random, events: Iterable[Event], bound: int, behind: int
) -> list[list[Event]]:
    files: list[list[Event]] = [[] for _ in range(FILES)]
    for event in events:
        comes = event.minute + random.randint(0, bound) + behind
        files[min(comes // _FILE_MIN, FILES - 1)].append(event)
    return files


def _borders(files: Sequence[Sequence[Event]], bound: int) -> Iterable[tuple[int, str, int]]:
    """Yield each shard's promise before each file but the first, in minutes."""
    for number in range(1, FILES):
        before = [event for file in files[:number] for event in file]
        for shard in SHARDS:
            yield number, shard, newest(before, shard) - bound


def _edges(files: Sequence[list[Event]], bound: int, ids: Iterable[int]) -> None:
    """Check the watermark W after a file: rows at W are on time, and they count.

    One row at W is new. One has been there already, in the file before. One joins the session that
    a row a gap before W has opened, and that seems to end at W.
    """
    number_of = iter(ids)
    for number, shard, promise in list(_borders(files, bound)):
        new, twice = next(number_of), next(number_of)
        session = f"edge-{shard}-{number}"
        files[number].append(Event(shard, "new", new, promise))
        files[number - 1].append(Event(shard, "twice", twice, promise))
        files[number].append(Event(shard, "twice", twice, promise))
        files[number - 1].append(Event(shard, session, next(number_of), promise - GAP_MIN))
        files[number].append(Event(shard, session, next(number_of), promise))
