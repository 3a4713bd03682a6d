"""The tree against the plain minimum."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.live.memory.minimum_tree import MinimumTree


@given(st.data())
def test_it_knows_the_least_whatever_changes(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    weights = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=size, max_size=size)))
    tree = MinimumTree(weights)
    for _ in range(data.draw(st.integers(1, 5))):
        some = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
        values = data.draw(st.lists(st.integers(-9, 9), min_size=len(some), max_size=len(some)))
        weights[some] = values
        tree.put_many(np.array(some), np.array(values))
        assert tree.least == weights.min()
        # Equal ones in their order.
        ordered = sorted(range(size), key=lambda index: (weights[index], index))
        count = data.draw(st.integers(1, size + 1))
        assert tree.lowest(count) == ordered[:count]


@given(st.lists(st.integers(-9, 9), min_size=2_000, max_size=2_000), st.data())
def test_a_few_changes_among_many(weights: list[int], data: st.DataObject) -> None:
    column = np.array(weights)
    tree = MinimumTree(column)
    some = data.draw(st.lists(st.integers(0, 1_999), min_size=64, max_size=120, unique=True))
    values = np.arange(len(some)) - 30
    column[some] = values
    tree.put_many(np.array(some), values)
    assert tree.least == column.min()
    [first] = tree.lowest(1)
    assert column[first] == column.min()


@given(st.integers(64, 300), st.integers(0, 1_700), st.data())
def test_neighbours_change_together(count: int, first: int, data: st.DataObject) -> None:
    """As those of one lease do: only what lies above them is replayed."""
    column = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=2_000, max_size=2_000)))
    tree = MinimumTree(column)
    values = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=count, max_size=count)))
    column[first : first + count] = values
    tree.put_many(np.arange(first, first + count), values)
    assert tree.least == column.min()
