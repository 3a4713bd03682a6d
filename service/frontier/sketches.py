"""Sketches of event times in flight, in the format of Apache DataSketches' KLL *doubles* sketch.

Spark's `kll_sketch_agg_double` and every DataSketches library write the same bytes. The library
that reads them here is in C++ and does not check its input: damaged bytes end the process. So the bytes
are checked first, completely, against the published layout of the format (Karnin, Lang and Liberty,
*Optimal Quantile Approximation in Streams*, FOCS 2016, for the sketch):

| bytes | contain |
|---|---|
| 0, 1, 2 | preamble in words of four bytes, version, family (15) |
| 3 | flags: 1 empty, 2 level zero is sorted, 4 a single item |
| 4 to 7 | `k` (two bytes), `m`, nothing |
| 8 to 19 | `n` (eight bytes), least `k` (two), number of levels, nothing |
| from 20 | begin of each level (four bytes each), least and greatest item, items |

An item of level `h` stands for 2^h event times.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import datasketches
import numpy as np

from service.frontier.errors import InvalidSketchError
from service.frontier.timestamps import EARLIEST, LATEST


class Sketch(Protocol):
    """The used part of the library's sketch; the library is not typed."""

    n: int

    def update(self, item: float) -> None:
        """Add an item."""
        ...

    def merge(self, other: Sketch) -> None:
        """Add all items of another sketch."""
        ...

    def get_quantile(self, rank: float, inclusive: bool) -> float:
        """Return the item at a rank of 0 to 1."""
        ...

    def serialize(self) -> bytes:
        """Pack the sketch."""
        ...


class _Sketches(Protocol):
    def __call__(self, k: int) -> Sketch: ...
    def deserialize(self, packed: bytes) -> Sketch: ...


_sketches = cast("_Sketches", datasketches.kll_doubles_sketch)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def new_sketch() -> Sketch:
    """Return an empty sketch.

    >>> sketch = new_sketch()
    >>> sketch.update(5.0)
    >>> sketch.n
    1
    """
    return _sketches(200)


MAX_SKETCH = 65_536
"""The largest sketch that is read, in bytes."""

_FAMILY = 15
_EMPTY, _SINGLE = 1, 4
_MIN_K, _MAX_K = 8, 65_535
_MAX_LEVELS = 48
_HEAD = struct.Struct("<BBBBHBB")
_FULL = struct.Struct("<QHBB")
_EXACT = 2**53


def check_sketch(packed: bytes) -> int:
    """Check a packed sketch; return the number of its event times. Raises `InvalidSketchError`.

    >>> sketch = new_sketch()
    >>> check_sketch(sketch.serialize())
    0
    >>> sketch.update(1_000.0)
    >>> check_sketch(sketch.serialize())
    1
    >>> check_sketch(b"not a sketch")
    Traceback (most recent call last):
    service.frontier.errors.InvalidSketchError: it is not a KLL sketch
    """
    if len(packed) > MAX_SKETCH:
        raise InvalidSketchError(f"it has {len(packed)} bytes, and the limit is {MAX_SKETCH}")
    if len(packed) < _HEAD.size or packed[2] != _FAMILY:
        raise InvalidSketchError("it is not a KLL sketch")
    words, version, _, flags, k, m, _ = _HEAD.unpack_from(packed)
    if not _MIN_K <= k <= _MAX_K or m != 8:
        raise InvalidSketchError(f"its parameters are k={k} and m={m}: k is 8 to 65535, m is 8")
    if flags & _EMPTY:
        _check_head(packed, (words, version), (2, 1), 8)
        return 0
    if flags & _SINGLE:
        _check_head(packed, (words, version), (2, 2), 16)
        _check_items(np.frombuffer(packed, "<f8", offset=8))
        return 1
    _check_head(packed, (words, version), (5, 1), None)
    return _check_levels(packed, k, m)


def _check_head(
    packed: bytes, head: tuple[int, int], expected: tuple[int, int], size: int | None
) -> None:
    if head != expected or (size is not None and len(packed) != size):
        raise InvalidSketchError("it is damaged: its header does not match its length")


def _check_levels(packed: bytes, k: int, m: int) -> int:
    damaged = InvalidSketchError("it is damaged: its levels do not match its length")
    start = _HEAD.size + _FULL.size
    if len(packed) < start:
        raise damaged
    n, least_k, count, _ = _FULL.unpack_from(packed, _HEAD.size)
    if not 1 <= count <= _MAX_LEVELS or len(packed) < start + 4 * count or least_k > k:
        raise damaged
    levels = np.frombuffer(packed, "<u4", count, start).astype(np.int64)
    levels = np.append(levels, _capacity(k, m, count))
    sizes = np.diff(levels)
    if bool((sizes < 0).any()) or len(packed) != start + 4 * count + 8 * (2 + int(sizes.sum())):
        raise damaged
    if n >= _EXACT or n != sum(size << level for level, size in enumerate(sizes.tolist())):
        raise InvalidSketchError("it is damaged: its number of items does not match its header")
    ends_and_items = np.frombuffer(packed, "<f8", offset=start + 4 * count)
    _check_items(ends_and_items)
    ends, items = ends_and_items[:2], ends_and_items[2:]
    # Level zero may be unsorted; the others are sorted, and a merge relies on it.
    first = int(sizes[0])
    falls = np.diff(items[first:]) < 0
    falls[(levels[2:-1] - levels[1] - 1)[sizes[2:] > 0]] = False
    if bool(falls.any()) or ends[0] > items.min() or ends[1] < items.max():
        raise InvalidSketchError("it is damaged: its items are out of order")
    return n


def _check_items(items: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    whole = (items >= EARLIEST) & (items <= LATEST) & (np.floor(items) == items)
    if not bool(whole.all()):
        wrong = items[~whole][0]
        raise InvalidSketchError(
            f"it has an item {wrong}: event times are whole milliseconds within the years 0001 to 9999"
        )


def _capacity(k: int, m: int, levels: int) -> int:
    """Return the number of items that a sketch of these levels has room for, by the format."""
    return sum(max(m, _level_capacity(k, levels - 1 - level)) for level in range(levels))


def _level_capacity(k: int, depth: int) -> int:
    if depth > 30:
        half = depth // 2
        return _level_capacity(_level_capacity(k, half), depth - half)
    return (((2 * k) << depth) // 3**depth + 1) >> 1


def quantiles(sketches: Iterable[bytes], percentages: Sequence[int]) -> list[int] | None:
    """Return, for each percentage p, the largest t such that at least p % of the pending times are at t
    or later; None: nothing is pending. The sketches must have passed `check_sketch`.

    >>> one, other = new_sketch(), new_sketch()
    >>> for at in (10, 20, 30, 40): one.update(at)
    >>> for at in (50, 60): other.update(at)
    >>> quantiles([one.serialize(), other.serialize()], [33, 66, 99])
    [50, 30, 10]
    >>> quantiles([], [33]) is None
    True
    """
    merged = new_sketch()
    for packed in sketches:
        merged.merge(_sketches.deserialize(packed))
    n = merged.n
    if not n:
        return None
    found: list[int] = []
    for percentage in percentages:
        # The m-th largest: at least p % are at or above it.
        largest = -(-percentage * n // 100)
        # Half of one below, so that rounding cannot lead to the next one.
        rank = (n - largest + 0.5) / n
        found.append(int(merged.get_quantile(rank, True)))
    return found
