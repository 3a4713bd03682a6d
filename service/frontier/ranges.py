"""The ranges of a stage, for which workers report, and how promises survive a change of layout.

A keyed stage owns the whole 32-bit key space, cut into ranges `[start, end)` that *tile* it: a hole
would be keys that nobody reports for, an overlap keys that two ranges report for. A source has named
shards. Either way a stage's ranges are a `Layout`: a sequence of names, in a fixed order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from service.frontier.errors import InvalidRangeError
from service.frontier.timestamps import MIN

KEY_SPACE: Final = 2**32
"""Keys are hashed to `0 … 2^32`, end excluded."""

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
    service.frontier.errors.InvalidRangeError: [5, 5) is no key range: 0 ≤ start < end ≤ 4294967296
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= KEY_SPACE:
            raise InvalidRangeError(
                f"[{self.start}, {self.end}) is no key range: 0 ≤ start < end ≤ {KEY_SPACE}"
            )

    @property
    def id(self) -> str:
        """Its name: the bounds as hex digits, the end exclusive."""
        return range_id(self.start, self.end)

    @classmethod
    def parse(cls, name: str) -> KeyRange:
        """Read a name back.

        >>> KeyRange.parse("80000000-100000000") == KeyRange(2**31, 2**32)
        True
        >>> KeyRange.parse("zero-one")
        Traceback (most recent call last):
        service.frontier.errors.InvalidRangeError: 'zero-one' is no key range, as 00000000-40000000 is
        """
        match = _ID.fullmatch(name)
        if match is None:
            raise InvalidRangeError(f"{name!r} is no key range, as 00000000-40000000 is")
        return cls(int(match[1], 16), int(match[2], 16))


def range_id(start: int, end: int) -> str:
    """Name the key range `[start, end)`.

    >>> range_id(0, 2**32)
    '00000000-100000000'
    """
    return f"{start:08x}-{end:08x}"


@dataclass(frozen=True)
class KeyLayout:
    """Key ranges that tile the key space: range i is `[bounds[i], bounds[i + 1])`.

    Kept as bounds, because a stage may have a million of them.

    >>> list(KeyLayout.tile(4).names)[1:3]
    ['40000000-80000000', '80000000-c0000000']
    """

    bounds: tuple[int, ...]

    @classmethod
    def tile(cls, count: int) -> KeyLayout:
        """Split the key space into `count` ranges, as even as integers allow.

        >>> KeyLayout.tile(3).bounds
        (0, 1431655765, 2863311530, 4294967296)
        """
        if not 1 <= count <= KEY_SPACE:
            raise InvalidRangeError(f"{count} ranges cannot tile the key space")
        return cls(tuple(i * KEY_SPACE // count for i in range(count + 1)))

    @classmethod
    def of(cls, ranges: Iterable[KeyRange]) -> KeyLayout:
        """Check that `ranges`, in any order, tile the key space.

        >>> KeyLayout.of([KeyRange(2**31, 2**32), KeyRange(0, 2**31)]) == KeyLayout.tile(2)
        True
        >>> KeyLayout.of([KeyRange(0, 16), KeyRange(32, 2**32)])
        Traceback (most recent call last):
        service.frontier.errors.InvalidRangeError: no range holds the keys 16 to 31
        >>> KeyLayout.of([KeyRange(0, 16), KeyRange(8, 2**32)])
        Traceback (most recent call last):
        service.frontier.errors.InvalidRangeError: two ranges hold the keys 8 to 15
        """
        ordered = sorted(ranges)
        ends = [0, *(r.end for r in ordered)]
        starts = [*(r.start for r in ordered), KEY_SPACE]
        for end, start in zip(ends, starts, strict=True):
            if end < start:
                raise InvalidRangeError(f"no range holds the keys {end} to {start - 1}")
            if end > start:
                raise InvalidRangeError(f"two ranges hold the keys {start} to {end - 1}")
        return cls(tuple(starts))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def names(self) -> Iterator[str]:
        """The ids of the ranges, in order."""
        return (range_id(start, end) for start, end in pairwise(self.bounds))


@dataclass(frozen=True)
class ShardLayout:
    """The named shards of a source. Their order has no meaning, so it is fixed.

    >>> ShardLayout.of(["log-2", "log-1"]) == ShardLayout.of(["log-1", "log-2"])
    True
    """

    shards: tuple[str, ...]

    @classmethod
    def of(cls, shards: Iterable[str]) -> ShardLayout:
        """Check that no shard is named twice and that there is one.

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

    @property
    def names(self) -> Iterator[str]:
        """The names of the shards, in order."""
        return iter(self.shards)

    @cached_property
    def index(self) -> dict[str, int]:
        """The index of each shard, by name."""
        return {name: i for i, name in enumerate(self.shards)}


Layout = KeyLayout | ShardLayout


def inherit(old: Layout, promises: Sequence[int], new: Layout) -> list[int]:
    """Carry promises over to a new layout; return one promise for each range of `new`.

    A promise holds for each key of its range, so the parts of a split range inherit it and a merged
    range takes the minimum. A range that never promised stays at `MIN`, and a new shard starts there:
    the stage then waits for it.

    >>> inherit(KeyLayout.tile(2), [10, 20], KeyLayout.tile(4))
    [10, 10, 20, 20]
    >>> inherit(KeyLayout.tile(4), [10, 20, 30, 40], KeyLayout.tile(2))
    [10, 30]
    >>> inherit(ShardLayout.of("ab"), [10, 20], ShardLayout.of("bc")) == [20, MIN]
    True
    """
    if isinstance(old, KeyLayout) and isinstance(new, KeyLayout):
        return [
            min(promises[bisect_right(old.bounds, start) - 1 : bisect_left(old.bounds, end)])
            for start, end in pairwise(new.bounds)
        ]
    if isinstance(old, ShardLayout) and isinstance(new, ShardLayout):
        return [promises[old.index[s]] if s in old.index else MIN for s in new.shards]
    return [MIN] * len(new)
