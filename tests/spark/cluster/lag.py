"""The closing lag of a query, read from what Spark itself has noted in its checkpoint and its sink.

That is the batch whose commit shows a window in the sink, less the batch that first read a row
which lets the window close: one that is so much newer than the window's end as rows may be late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlparse

from tests.spark.matrix.observer import stamp_ms

_OFFSET: Final = "logOffset"


@dataclass(frozen=True)
class Lag:
    """Delay of one shown window."""

    end_ms: int
    batches: int
    seconds: float
    """From when the batch that read the row was planned, until the window was in the sink's log."""


class Read(Protocol):
    """Rows that a query has read."""

    def newest_ms(self, checkpoint: Path) -> Mapping[int, int]:
        """The newest event time that each batch has read, by batch."""
        ...


@dataclass(frozen=True)
class JsonFiles:
    """Rows of JSON files. Spark notes in the checkpoint which batch has read a file."""

    stamp: str
    """The event time of a row."""

    def newest_ms(self, checkpoint: Path) -> dict[int, int]:
        found: dict[int, int] = {}
        batches = self._batches(checkpoint)
        for position, path in self._paths(checkpoint):
            # The source notes what it will read before the batch is planned.
            if (batch := batches.get(position)) is None:
                continue
            for line in _lines(path):
                if (row_ms := stamp_ms(line, self.stamp)) is not None:
                    found[batch] = max(row_ms, found.get(batch, row_ms))
        return found

    def _batches(self, checkpoint: Path) -> dict[int, int]:
        """The batch in which each position of the source's own log was read."""
        found: dict[int, int] = {}
        for batch, lines in _offsets(checkpoint):
            offsets = [json.loads(line) for line in lines if _OFFSET in line]
            for position in range(len(found), offsets[0][_OFFSET] + 1 if offsets else 0):
                found[position] = batch
        return found

    def _paths(self, checkpoint: Path) -> set[tuple[int, Path]]:
        """The files that were read, with their positions in the source's log."""
        return {
            (entry["batchId"], _path(entry))
            for log in checkpoint.glob("sources/*/[0-9]*")
            for entry in _entries(log)
        }


@dataclass(frozen=True)
class TopicRows:
    """Rows of a topic of Kafka. Spark notes in the checkpoint up to which offset a batch reads."""

    topic: str
    times_ms: Mapping[int, Sequence[int]]
    """The event times of each partition's rows, in the order of their offsets, which begin at 0."""

    def newest_ms(self, checkpoint: Path) -> dict[int, int]:
        found: dict[int, int] = {}
        begun = dict.fromkeys(self.times_ms, 0)
        for batch, lines in _offsets(checkpoint):
            for ends in (
                json.loads(line)[self.topic] for line in lines if f'"{self.topic}":' in line
            ):
                for partition, end in ends.items():
                    read = self.times_ms[int(partition)][begun[int(partition)] : end]
                    begun[int(partition)] = end
                    if read:
                        found[batch] = max(*read, found.get(batch, read[0]))
        return found


@dataclass(frozen=True)
class Trail:
    """Trail of a query to JSON files."""

    checkpoint: Path
    output: Path
    read: Read
    shown_stamp: str
    """The column of its output that is the end of a window."""
    delay_ms: int
    """Delay of rows, at most."""

    def lags(self) -> list[Lag]:
        """One for each window that a row lets close and that is in the sink, the earliest first."""
        newest_ms = self.read.newest_ms(self.checkpoint)
        found: list[Lag] = []
        for end_ms, shown in sorted(self._shown().items()):
            closing = [batch for batch, ms in newest_ms.items() if ms - self.delay_ms >= end_ms]
            if closing:
                read = min(closing)
                seconds = _made_s(_entry(self._log, shown)) - _made_s(self._planned / str(read))
                found.append(Lag(end_ms, shown - read, seconds))
        return found

    @property
    def _planned(self) -> Path:
        return self.checkpoint / "offsets"

    @property
    def _log(self) -> Path:
        return self.output / "_spark_metadata"

    def _shown(self) -> dict[int, int]:
        """The batch that shows a window, the last of its rows, by the window's end in ms."""
        first: dict[Path, int] = {}
        for log in sorted(self._log.glob("[0-9]*"), key=lambda log: int(log.stem)):
            for entry in _entries(log):
                first.setdefault(_path(entry), int(log.stem))
        found: dict[int, int] = {}
        for path, batch in first.items():
            for line in _lines(path):
                end_ms = stamp_ms(line, self.shown_stamp)
                assert end_ms is not None
                found[end_ms] = max(batch, found.get(end_ms, batch))
        return found


def _offsets(checkpoint: Path) -> list[tuple[int, list[str]]]:
    """Return each planned batch, in order, with the lines of its sources' offsets."""
    planned = checkpoint / "offsets"
    batches = sorted(int(each.name) for each in planned.glob("[0-9]*"))
    return [(each, (planned / str(each)).read_text().splitlines()[2:]) for each in batches]


def _entries(log: Path) -> list[dict[str, Any]]:
    """Return the entries of a log of Spark's: after its version, a line for each file."""
    return [json.loads(line) for line in log.read_text().splitlines()[1:]]


def _path(entry: dict[str, Any]) -> Path:
    return Path(unquote(urlparse(entry["path"]).path))


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line]


def _entry(log: Path, batch: int) -> Path:
    plain = log / str(batch)
    return plain if plain.exists() else log / f"{batch}.compact"


def _made_s(path: Path) -> float:
    return path.stat().st_mtime
