"""The least of many integers that change one at a time, or many at once."""

from __future__ import annotations

from typing import Final

import numpy as np

from service.frontier.columns import Int64s, lowest

_CHILDREN: Final = 32
"""Few, so that a node is soon computed again; many, so that there are few levels, each of which costs
an array operation when many weights change at once."""

_BULK: Final = 64
"""From this many changes on, array operations are cheaper than a walk for each change."""

_DENSE: Final = 64
"""If more than one weight in this many changes, between the first and the last of them, it is cheapest
to compute all the nodes above those again."""

_LARGEST: Final = np.iinfo(np.int64).max


class MinimumTree:
    """Each node is the least of its children, and the root the least of all.

    A change walks from its leaf towards the root and stops where the least stays the same, so it costs
    at most log(n) steps and mostly one.

    >>> tree = MinimumTree(np.array([5, 3, 9], dtype=np.int64))
    >>> tree.least
    3
    >>> tree.put(1, 7)
    >>> tree.least, tree.lowest(2)
    (5, [0, 1])
    """

    __slots__ = ("_children", "_count", "_levels", "_views")

    def __init__(self, weights: Int64s) -> None:
        self._count = len(weights)
        self._levels = [_padded(weights)]
        while len(self._levels[-1]) > _CHILDREN:
            self._levels.append(_padded(_least_of(self._levels[-1])))
        self._levels.append(_least_of(self._levels[-1]))
        self._children = [level.reshape(-1, _CHILDREN) for level in self._levels[:-1]]
        """Children of each node, a row; the lowest level first."""
        # A memoryview reads and writes single numbers in a third of the array's time.
        self._views = [level.data for level in self._levels]

    @property
    def least(self) -> int:
        """The least weight."""
        return self._views[-1][0]

    def put(self, index: int, weight: int) -> None:
        """Change one weight."""
        view = self._views[0]
        before = view[index]
        view[index] = weight
        for above in self._views[1:]:
            index //= _CHILDREN
            least = above[index]
            if weight > least:
                if before > least:
                    return
                # It may have been the only one that was as low.
                weight = min(view[index * _CHILDREN : (index + 1) * _CHILDREN])
            if weight == least:
                return
            above[index] = weight
            view, before = above, least

    def put_many(self, indices: Int64s | slice, weights: Int64s) -> None:
        """Change many weights: at these indices, none of them twice, or at all of a slice."""
        if isinstance(indices, slice):
            self._levels[0][indices] = weights
            self._update(indices.start, indices.stop - 1)
            return
        if len(indices) < _BULK:
            for index, weight in zip(indices.tolist(), weights.tolist(), strict=True):
                self.put(index, weight)
            return
        self._levels[0][indices] = weights
        first, last = int(indices.min()), int(indices.max())
        if len(indices) * _DENSE > last - first:
            self._update(first, last)
        else:
            self._climb(indices)

    def _update(self, first: int, last: int) -> None:
        """Compute all the nodes above the weights from `first` to `last`."""
        for level, children in enumerate(self._children):
            first, last = first // _CHILDREN, last // _CHILDREN
            if first == last:
                above = self._views[level + 1]
                least = min(self._views[level][first * _CHILDREN : (first + 1) * _CHILDREN])
                if least == above[first]:
                    return
                above[first] = least
            else:
                nodes = slice(first, last + 1)
                np.minimum.reduce(children[nodes], axis=1, out=self._levels[level + 1][nodes])

    def _climb(self, indices: Int64s) -> None:
        """Compute the nodes above some weights, as far up as anything changes."""
        for children, above in zip(self._children, self._levels[1:], strict=True):
            parents = indices // _CHILDREN
            least = children[parents].min(axis=1)
            moved = least != above[parents]
            # Two weights may have one parent: it is computed twice, and written twice alike.
            indices = parents[moved]
            above[indices] = least[moved]

    def lowest(self, count: int) -> list[int]:
        """Return the indices of the least weights, the least first, equal ones in their order."""
        return lowest(self._levels[0][: self._count], count).tolist()


def _padded(weights: Int64s) -> Int64s:
    padded = np.full(-(-len(weights) // _CHILDREN) * _CHILDREN, _LARGEST, dtype=np.int64)
    padded[: len(weights)] = weights
    return padded


def _least_of(weights: Int64s) -> Int64s:
    return weights.reshape(-1, _CHILDREN).min(axis=1)
