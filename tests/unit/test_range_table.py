"""Ranges of a lease that are neighbours are written as a slice: with the same result as one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.frontier.ranges import KeyLayout, Layout, ShardLayout
from service.frontier.timestamps import MAX, MIN
from service.live.memory.range_table import RangeTable, Rows
from service.live.memory.rows import neighbours

SIZE = 300
promises = st.one_of(st.integers(0, 9), st.sampled_from([MIN, MAX]))


def state(table: RangeTable) -> object:
    views = [table.view(index, None, None) for index in range(len(table))]
    saved = sorted(number for number, _ in table.changed.unsaved())
    return views, saved, table.agreement, table.idle, table.final, table.promised


@given(
    st.sampled_from([KeyLayout.tile(SIZE), ShardLayout.of([f"s{i}" for i in range(SIZE)])]),
    st.lists(
        st.tuples(
            st.integers(0, 200), st.integers(64, 100), st.lists(promises, min_size=1), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_neighbours_are_applied_as_single_ones(
    layout: Layout, reports: Sequence[tuple[int, int, list[int], bool]]
) -> None:
    one_by_one, together = RangeTable(layout), RangeTable(layout)
    for turn, (first, count, values, idle) in enumerate(reports):
        at = np.arange(first, first + count)
        reported = np.resize(np.array(values, dtype=np.int64), count)
        words = (
            [True, False] * (count // 2) + [False] * (count % 2)
            if idle and MAX not in values
            else None
        )
        answers: list[set[int]] = []
        for table, rows in ((one_by_one, at), (together, neighbours(at))):
            behind = _apply(table, rows, reported, words, turn + 1)
            answers.append(set(behind))
        assert answers[0] == answers[1]
    assert isinstance(neighbours(np.arange(5, 9)), slice)
    assert state(one_by_one) == state(together)


def _apply(
    table: RangeTable, rows: Rows, reported: np.ndarray, words: list[bool] | None, wall_ms: int
) -> list[int]:
    if isinstance(rows, slice):
        table.notes.put_columns(rows, {"state": reported})
        table.keep_facts(rows, None, now_ms=wall_ms, wall_ms=wall_ms)
        return table.apply(rows, reported, words, wall_ms=wall_ms)
    found: list[int] = []
    for k, index in enumerate(np.asarray(rows).tolist()):
        only = np.array([index])
        table.notes.put_columns(only, {"state": reported[k : k + 1]})
        table.keep_facts(only, None, now_ms=wall_ms, wall_ms=wall_ms)
        word = None if words is None else [words[k]]
        found += table.apply(only, reported[k : k + 1], word, wall_ms=wall_ms)
    return found
