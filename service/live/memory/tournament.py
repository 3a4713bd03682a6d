"""The least of many integers that change one at a time, or many at once."""

from __future__ import annotations

import numpy as np

from service.frontier.columns import Int64s, lowest

_BULK = 64
"""From this many changes on, array operations are cheaper than a walk for each change."""

_DENSE = 8
"""If more than one weight in this many changes, between the first and the last of them, rebuilding the
tree above those is cheaper still."""


class Tournament:
    """A tournament tree: each inner node is the lesser of its two children, the root the least of all.

    A change walks from its leaf towards the root and stops where the winner stays the same, so it costs
    at most log2(n) steps and mostly two or three. Kept in one array, 16 bytes an entry.

    >>> tree = Tournament(np.array([5, 3, 9], dtype=np.int64))
    >>> tree.least
    3
    >>> tree.put(1, 7)
    >>> tree.least, tree.lowest(2)
    (5, [0, 1])
    """

    __slots__ = ("_count", "_leaves", "_nodes", "_view")

    def __init__(self, weights: Int64s) -> None:
        self._count = len(weights)
        self._leaves = 1 << (self._count - 1).bit_length()
        self._nodes = np.full(2 * self._leaves, np.iinfo(np.int64).max, dtype=np.int64)
        self._nodes[self._leaves : self._leaves + self._count] = weights
        # A memoryview reads and writes single numbers in a third of the array's time.
        self._view = self._nodes.data
        self._rebuild(0, self._count - 1)

    @property
    def least(self) -> int:
        """The least weight."""
        return self._view[1]

    def put(self, index: int, weight: int) -> None:
        """Change one weight."""
        at = self._leaves + index
        self._view[at] = weight
        self._replay(at)

    def _replay(self, at: int) -> None:
        """Replay what lies above one node, as far up as winners change."""
        nodes = self._view
        while at > 1:
            left = nodes[at & ~1]
            right = nodes[at | 1]
            winner = min(right, left)
            at >>= 1
            if nodes[at] == winner:
                return
            nodes[at] = winner

    def put_many(self, indices: Int64s | slice, weights: Int64s) -> None:
        """Change many weights: at these indices, none of them twice, or at all of a slice."""
        if isinstance(indices, slice):
            first, last = indices.start, indices.stop - 1
            self._nodes[self._leaves + first : self._leaves + last + 1] = weights
            self._rebuild(first, last)
            return
        if len(indices) < _BULK:
            for index, weight in zip(indices.tolist(), weights.tolist(), strict=True):
                self.put(index, weight)
            return
        self._nodes[indices + self._leaves] = weights
        first, last = int(indices.min()), int(indices.max())
        if len(indices) * _DENSE > last - first:
            self._rebuild(first, last)
        else:
            self._climb(indices + self._leaves)

    def _climb(self, at: Int64s) -> None:
        """Replay what lies above some leaves, as far up as winners change."""
        nodes = self._nodes
        while len(at) and at[0] > 1:
            at = at >> 1
            winners = np.minimum(nodes[2 * at], nodes[2 * at + 1])
            # Two changes that meet in one parent compute the same winner, so it does not matter
            # which of them writes it, nor that both go on.
            moved = winners != nodes[at]
            at = at[moved]
            nodes[at] = winners[moved]

    def _rebuild(self, first: int, last: int) -> None:
        """Replay all that lies above the leaves of the weights from `first` to `last`."""
        nodes = self._nodes
        low, high = (self._leaves + first) >> 1, (self._leaves + last) >> 1
        while low < high:
            below = nodes[2 * low : 2 * high + 2]
            np.minimum(below[0::2], below[1::2], out=nodes[low : high + 1])
            low, high = low >> 1, high >> 1
        if low:
            # From here on there is one node a level, for which an array operation takes too long.
            self._replay(2 * low)

    def lowest(self, count: int) -> list[int]:
        """Return the indices of the least weights, the least first, equal ones in their order."""
        return lowest(self._nodes[self._leaves : self._leaves + self._count], count).tolist()
