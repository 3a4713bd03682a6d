"""What a checkpoint keeps of a stage's ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.frontier.columns import Int64s
from service.frontier.timestamps import MIN

CHUNK = 4_096
"""Ranges in one `CheckpointChunk`: one changed promise adds 32 KiB for each column to a checkpoint."""

COLUMNS: Final[Mapping[str, int]] = {"promises": MIN, "raised_at_ms": 0}
"""The columns of a checkpoint, each with the value of a range of which nothing is kept. The ledger's
table and rows follow from this. Each live store saves the columns of these names, and begins with them.
"""

Columns = Mapping[str, Int64s]
"""Columns over a stage's ranges, by name."""


@dataclass(frozen=True, slots=True)
class CheckpointChunk:
    """What is kept of consecutive ranges of a stage."""

    job: str
    stage: str
    incarnation: int
    generation: int
    layout_since: int
    chunk: int
    stamp: int
    """Rises with each change of the chunk within an incarnation. The ledger keeps the newest chunk."""
    columns: Mapping[str, bytes]
    """By name, in the order of the layout: see `packed_column`. Ranges after the end of a column have
    its default."""


def packed_column(column: Int64s) -> bytes:
    """Pack a column as little-endian signed 64-bit integers.

    >>> packed_column(np.array([1, 2])).hex()
    '01000000000000000200000000000000'
    """
    return column.astype("<i8").tobytes()


def chunk_numbers(size: int) -> range:
    """Return the numbers of the chunks of so many ranges.

    >>> chunk_numbers(4_097)
    range(0, 2)
    """
    return range(-(-size // CHUNK))


def joined_columns(size: int, chunks: Iterable[tuple[int, Mapping[str, bytes | None]]]) -> Columns:
    """Return the columns over all of a stage's ranges, given what is saved of them, by chunk number.

    >>> found = joined_columns(2, [(0, {"promises": packed_column(np.array([7]))})])
    >>> found["promises"].tolist() == [7, MIN], found["raised_at_ms"].tolist()
    (True, [0, 0])
    """
    columns = {name: np.full(size, empty, dtype=np.int64) for name, empty in COLUMNS.items()}
    for number, saved in chunks:
        for name, column in columns.items():
            part = np.frombuffer(saved.get(name) or b"", dtype="<i8")
            start = number * CHUNK
            column[start : start + len(part)] = part
    return columns
