"""The ranges of a stage, for which workers report, and the inheritance of promises by a new layout.

A keyed stage owns the whole 32-bit key space, cut into ranges `[start, end)` that *tile* it: a hole
would be keys without a report, an overlap keys with two reports. A source has named shards. In both
cases a stage's ranges are a `Layout`: a sequence of names, in a fixed order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, cast, overload

import numpy as np

from service.frontier.columns import Int64s
from service.frontier.errors import InvalidRangeError
from service.frontier.timestamps import MAX, MIN

KEY_SPACE: Final = 2**32
"""Keys are hashed to `0 … 2^32`, end excluded."""

MAX_TILES: Final = 2**20
"""The largest number of ranges that tile the key space evenly."""

_INDEXED: Final = 2**16
"""Key ranges up to this number are indexed by a dictionary."""

_MANY: Final = 1_000
"""Names from this number on are read as an array."""

_ID_LENGTH: Final = 17
_DIGIT: Final = np.full(256, -1, dtype=np.int64)
_DIGIT[list(b"0123456789abcdef")] = range(16)
_PLACES: Final = 16 ** np.arange(7, -1, -1, dtype=np.int64)

_ID: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8}|100000000)")


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """The keys from `start` up to, not including, `end`.

    >>> KeyRange(0, 2**30).id
    '00000000-40000000'
    >>> KeyRange(2**31, 2**32).id
    '80000000-100000000'
    >>> KeyRange(5, 5)
    Traceback (most recent call last):
    service.frontier.errors.InvalidRangeError: invalid key range [5, 5): 0 ≤ start < end ≤ 4294967296
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= KEY_SPACE:
            raise InvalidRangeError(
                f"invalid key range [{self.start}, {self.end}): 0 ≤ start < end ≤ {KEY_SPACE}"
            )

    @property
    def id(self) -> str:
        """The name: the bounds as hex digits, the end exclusive."""
        return range_id(self.start, self.end)

    @classmethod
    def parse(cls, name: str) -> KeyRange:
        """Parse a name.

        >>> KeyRange.parse("80000000-100000000") == KeyRange(2**31, 2**32)
        True
        >>> KeyRange.parse("x")
        Traceback (most recent call last):
        service.frontier.errors.InvalidRangeError: invalid key range 'x': write it like 00000000-40000000
        """
        match = _ID.fullmatch(name)
        if match is None:
            raise InvalidRangeError(f"invalid key range {name!r}: write it like 00000000-40000000")
        return cls(int(match[1], 16), int(match[2], 16))


def range_id(start: int, end: int) -> str:
    """Name the key range `[start, end)`.

    >>> range_id(0, 2**32)
    '00000000-100000000'
    """
    return f"{start:08x}-{end:08x}"


@dataclass(frozen=True, eq=False)
class KeyLayout:
    """Key ranges that tile the key space: range i is `[bounds[i], bounds[i + 1])`.

    The layout keeps bounds only, because a stage may have a million ranges.

    >>> list(KeyLayout.tile(4).names)[1:3]
    ['40000000-80000000', '80000000-c0000000']
    """

    bounds: Int64s
    """Read-only."""

    @classmethod
    def tile(cls, count: int) -> KeyLayout:
        """Split the key space into `count` ranges, as evenly as integers allow.

        >>> KeyLayout.tile(3).bounds.tolist()
        [0, 1431655765, 2863311530, 4294967296]
        """
        if not 1 <= count <= MAX_TILES:
            raise InvalidRangeError(
                f"{count} ranges cannot tile the key space: 1 to {MAX_TILES} can"
            )
        return cls(_read_only(np.arange(count + 1, dtype=np.int64) * KEY_SPACE // count))

    @classmethod
    def of(cls, ranges: Iterable[KeyRange]) -> KeyLayout:
        """Check that `ranges`, in any order, tile the key space.

        >>> KeyLayout.of([KeyRange(2**31, 2**32), KeyRange(0, 2**31)]) == KeyLayout.tile(2)
        True
        >>> KeyLayout.of([KeyRange(0, 16), KeyRange(32, 2**32)])
        Traceback (most recent call last):
        service.frontier.errors.InvalidRangeError: the keys 16 to 31 are in no range
        >>> KeyLayout.of([KeyRange(0, 16), KeyRange(8, 2**32)])
        Traceback (most recent call last):
        service.frontier.errors.InvalidRangeError: the keys 8 to 15 are in two ranges
        """
        ordered = sorted(ranges)
        ends = [0, *(r.end for r in ordered)]
        starts = [*(r.start for r in ordered), KEY_SPACE]
        for end, start in zip(ends, starts, strict=True):
            if end < start:
                raise InvalidRangeError(f"the keys {end} to {start - 1} are in no range")
            if end > start:
                raise InvalidRangeError(f"the keys {start} to {end - 1} are in two ranges")
        return cls.at(starts)

    @classmethod
    def at(cls, bounds: Sequence[int]) -> KeyLayout:
        """Return the layout with these bounds, which rise from 0 to `KEY_SPACE`."""
        return cls(_read_only(np.array(bounds, dtype=np.int64)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyLayout):
            return NotImplemented
        return self is other or np.array_equal(self.bounds, other.bounds)

    def __hash__(self) -> int:
        return hash(self.bounds.tobytes())

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def name(self, index: int) -> str:
        """Name the range at `index`.

        >>> KeyLayout.tile(2).name(1)
        '80000000-100000000'
        """
        return range_id(int(self.bounds[index]), int(self.bounds[index + 1]))

    @property
    def names(self) -> Iterator[str]:
        """The ids of the ranges, in order."""
        return (range_id(start, end) for start, end in pairwise(self.bounds.tolist()))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The index of each range, by name.

        >>> KeyLayout.tile(2).index["80000000-100000000"]
        1
        """
        if len(self) <= _INDEXED:
            return {name: i for i, name in enumerate(self.names)}
        return _KeyIndex(self)

    def find(self, names: Sequence[str]) -> Int64s:
        """Return the index of each name, -1 for an unknown one.

        >>> KeyLayout.tile(4).find(["40000000-80000000", "40000000-80000001", "shard"]).tolist()
        [1, -1, -1]
        """
        if len(names) < _MANY or len(self) <= _INDEXED:
            return _look_up(self.index, names)
        found = np.full(len(names), -1, dtype=np.int64)
        # All but the last range have names of one length, which are read as one table of digits.
        regular = [k for k, name in enumerate(names) if len(name) == _ID_LENGTH and name.isascii()]
        text = "".join([names[k] for k in regular]).encode()
        digits = _DIGIT[np.frombuffer(text, dtype=np.uint8).reshape(-1, _ID_LENGTH)]
        starts, ends = digits[:, :8] @ _PLACES, digits[:, 9:] @ _PLACES
        at = np.minimum(np.searchsorted(self.bounds, starts), len(self) - 1)
        there = (digits >= 0).sum(axis=1) == _ID_LENGTH - 1
        there &= np.frombuffer(text, dtype=np.uint8).reshape(-1, _ID_LENGTH)[:, 8] == ord("-")
        there &= (self.bounds[at] == starts) & (self.bounds[at + 1] == ends)
        found[regular] = np.where(there, at, -1)
        others = np.setdiff1d(np.arange(len(names)), regular)
        found[others] = _look_up(self.index, [names[int(k)] for k in others])
        return found


class _KeyIndex(Mapping[str, int]):
    """Index of ranges by bisection: slower than a dictionary, but saves a hundred bytes for each range.

    >>> index = _KeyIndex(KeyLayout.tile(4))
    >>> index["40000000-80000000"], "40000000-80000001" in index, "shard" in index, len(index)
    (1, False, False, 4)
    """

    def __init__(self, layout: KeyLayout) -> None:
        self._layout = layout

    def __getitem__(self, name: str) -> int:
        bounds = self._layout.bounds
        try:
            wanted = KeyRange.parse(name)
        except InvalidRangeError:
            raise KeyError(name) from None
        index = int(np.searchsorted(bounds, wanted.start))
        if index >= len(self) or self._layout.name(index) != name:
            raise KeyError(name)
        return index

    def __iter__(self) -> Iterator[str]:
        return self._layout.names

    def __len__(self) -> int:
        return len(self._layout)


@dataclass(frozen=True)
class ShardLayout:
    """The named shards of a source, in alphabetical order.

    >>> ShardLayout.of(["log-2", "log-1"]) == ShardLayout.of(["log-1", "log-2"])
    True
    """

    shards: tuple[str, ...]

    @classmethod
    def of(cls, shards: Iterable[str]) -> ShardLayout:
        """Check that there is a shard, and none twice.

        >>> ShardLayout.of(["a", "a"])
        Traceback (most recent call last):
        service.frontier.errors.InvalidRangeError: shard 'a' is named twice
        """
        ordered = tuple(sorted(shards))
        if not ordered:
            raise InvalidRangeError("a source has at least one shard")
        for one, next_one in pairwise(ordered):
            if one == next_one:
                raise InvalidRangeError(f"shard {one!r} is named twice")
        return cls(ordered)

    def __len__(self) -> int:
        return len(self.shards)

    def name(self, index: int) -> str:
        """Name the shard at `index`."""
        return self.shards[index]

    @property
    def names(self) -> Iterator[str]:
        """The names of the shards, in order."""
        return iter(self.shards)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The index of each shard, by name."""
        return {name: i for i, name in enumerate(self.shards)}

    def find(self, names: Sequence[str]) -> Int64s:
        """Return the index of each name, -1 for an unknown one."""
        return _look_up(self.index, names)


Layout = KeyLayout | ShardLayout


def _look_up(index: Mapping[str, int], names: Sequence[str]) -> Int64s:
    return np.fromiter((index.get(name, -1) for name in names), np.int64, len(names))


class RangeNames(Sequence[str]):
    """The names of some ranges of a layout, made on access: there may be a million.

    >>> list(RangeNames(KeyLayout.tile(4), np.array([0, 3])))
    ['00000000-40000000', 'c0000000-100000000']
    """

    def __init__(self, layout: Layout, indices: Int64s) -> None:
        self.layout = layout
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> RangeNames: ...
    def __getitem__(self, at: int | slice) -> str | RangeNames:
        if isinstance(at, slice):
            return RangeNames(self.layout, self.indices[at])
        return self.layout.name(int(self.indices[at]))

    def __iter__(self) -> Iterator[str]:
        return map(self.layout.name, self.indices.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(cast("Sequence[str]", other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def staying(old: Layout, new: Layout) -> tuple[Int64s, Int64s]:
    """Return the indices, in the old layout and in the new one, of the ranges that are in both.

    >>> old, new = staying(KeyLayout.tile(4), KeyLayout.at([0, 2**30, 2**31, 2**32]))
    >>> old.tolist(), new.tolist()
    ([0, 1], [0, 1])
    >>> [each.tolist() for each in staying(ShardLayout.of("ab"), ShardLayout.of("bc"))]
    [[1], [0]]
    """
    if isinstance(old, KeyLayout) and isinstance(new, KeyLayout):
        starts, ends = new.bounds[:-1], new.bounds[1:]
        at = np.minimum(np.searchsorted(old.bounds, starts), len(old) - 1)
        same = (old.bounds[at] == starts) & (old.bounds[at + 1] == ends)
        return at[same], np.flatnonzero(same)
    if isinstance(old, ShardLayout) and isinstance(new, ShardLayout):
        both = [(old.index[s], i) for i, s in enumerate(new.shards) if s in old.index]
        pairs = np.array(both, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]
    return _NONE, _NONE


def inherit(old: Layout, promises: Sequence[int] | Int64s, new: Layout) -> Int64s:
    """Carry promises over to a new layout; return one promise for each range of `new`.

    A promise holds for each key of its range, so the parts of a split range inherit it, and a merged
    range takes the minimum. A range without a promise stays at `MIN`. A new shard starts at `MIN`, so
    the stage waits for it.

    >>> inherit(KeyLayout.tile(2), [10, 20], KeyLayout.tile(4)).tolist()
    [10, 10, 20, 20]
    >>> inherit(KeyLayout.tile(4), [10, 20, 30, 40], KeyLayout.tile(2)).tolist()
    [10, 30]
    >>> inherit(ShardLayout.of("ab"), [10, 20], ShardLayout.of("bc")).tolist() == [20, MIN]
    True
    """
    column = np.asarray(promises, dtype=np.int64)
    if isinstance(old, KeyLayout) and isinstance(new, KeyLayout):
        first = np.searchsorted(old.bounds, new.bounds[:-1], side="right") - 1
        end = np.searchsorted(old.bounds, new.bounds[1:], side="left")
        # Every other one of the results is the minimum from `first` up to `end`; MAX stands for the
        # place behind the last range.
        spans = np.stack((first, end), axis=1).ravel()
        return np.minimum.reduceat(np.append(column, MAX), spans)[::2]
    inherited = np.full(len(new), MIN, dtype=np.int64)
    from_, to = staying(old, new)
    inherited[to] = column[from_]
    return inherited


def _read_only(bounds: Int64s) -> Int64s:
    bounds.flags.writeable = False
    return bounds


_NONE: Int64s = np.zeros(0, dtype=np.int64)
