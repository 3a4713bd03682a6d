"""Checkpoints of a stage's ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from service.frontier.columns import Int64s
from service.frontier.ranges import Layout, inherit, staying
from service.frontier.timestamps import MIN

CHUNK = 4_096
"""Ranges in one `CheckpointChunk`: one changed promise adds 32 KiB for each column to a checkpoint."""

COLUMNS: Final[Mapping[str, int]] = {
    "promises": MIN,
    "raised_at_ms": 0,
    "unfinished": 0,
    "retired": 0,
}
"""The columns of a checkpoint, each with the value of a range without one. The ledger's
table and rows follow from this. Each live store saves the columns of these names, and begins with them.
`unfinished` is 1 for a range that has reported unfinished work (`Facts.is_unfinished`): after a loss of
the live store such a range must not count as quiet. `retired` is 1 for a range that is waited for no
longer; its promise is the one that it has kept.
"""

Columns = Mapping[str, Int64s]
"""Columns over a stage's ranges, by name."""


@dataclass(frozen=True, slots=True)
class CheckpointChunk:
    """Saved columns of consecutive ranges of a stage."""

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
    returned: Mapping[str, str] = field(default_factory=dict[str, str])
    """Ranges whose retirement has ended, while its end is not saved: for the audit. By name, the holder
    that has reported; empty: unknown."""


def packed_column(column: Int64s) -> bytes:
    """Pack a column as little-endian signed 64-bit integers.

    >>> packed_column(np.array([1, 2])).hex()
    '01000000000000000200000000000000'
    """
    return column.astype("<i8").tobytes()


def packed_flags(indices: Iterable[int]) -> bytes:
    """Pack a column that is 1 at these indices of its chunk, and 0 elsewhere. Mostly it is empty.

    >>> packed_flags([1]) == packed_column(np.array([0, 1])), packed_flags([])
    (True, b'')
    """
    at = np.fromiter(indices, dtype=np.int64)
    flags = np.zeros(int(at.max()) + 1 if len(at) else 0, dtype=np.int64)
    flags[at] = 1
    return packed_column(flags)


def chunk_numbers(size: int) -> range:
    """Return the numbers of the chunks of `size` ranges.

    >>> chunk_numbers(4_097)
    range(0, 2)
    """
    return range(-(-size // CHUNK))


def packed_columns(columns: Columns, chunk: int) -> Mapping[str, bytes]:
    """Pack one chunk of the columns over all of a stage's ranges: the inverse of `joined_columns`.

    >>> columns = joined_columns(2, [(0, {"unfinished": packed_flags([1])})])
    >>> {name: len(packed) for name, packed in packed_columns(columns, 0).items()}
    {'promises': 16, 'raised_at_ms': 16, 'unfinished': 16, 'retired': 16}
    """
    part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
    return {name: packed_column(column[part]) for name, column in columns.items()}


def inherited_columns(old: Layout, columns: Columns, new: Layout) -> Columns:
    """Carry the columns of a stage's ranges over to its next layout: promises by `inherit`, and the rest
    with the ranges that stay.

    >>> from service.frontier.ranges import ShardLayout
    >>> old, new = ShardLayout.of("ab"), ShardLayout.of("bc")
    >>> before = joined_columns(2, [(0, {"unfinished": packed_flags([1])})])
    >>> inherited_columns(old, before, new)["unfinished"].tolist()
    [1, 0]
    """
    from_, to = staying(old, new)
    inherited = {name: np.full(len(new), empty) for name, empty in COLUMNS.items()}
    for name, column in inherited.items():
        column[to] = columns[name][from_]
    return inherited | {"promises": inherit(old, columns["promises"], new)}


def join_readings(one: Columns, other: Columns) -> Columns:
    """Join two readings of the columns of the same ranges, either of which may be the newer one.

    Promises and moments only rise. A range that has unfinished work, or reports again, in one of the two
    is not quiet, or not retired: the watermark would pass its rows.

    >>> newer = joined_columns(1, [(0, {"promises": packed_column(np.array([7]))})])
    >>> older = joined_columns(1, [(0, {"retired": packed_flags([0])})])
    >>> found = join_readings(older, newer)
    >>> found["promises"].tolist(), found["retired"].tolist()
    ([7], [0])
    """
    joined = {name: np.maximum(column, other[name]) for name, column in one.items()}
    return joined | {"retired": np.minimum(one["retired"], other["retired"])}


def joined_columns(size: int, chunks: Iterable[tuple[int, Mapping[str, bytes | None]]]) -> Columns:
    """Return the columns over all of a stage's ranges, from the saved ones by chunk number.

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
