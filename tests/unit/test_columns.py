"""The rules over columns say what the scalar ones say of each range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.frontier.agreement import weight
from service.frontier.columns import are_behind, join_promises, weights
from service.frontier.reports import is_behind, join_report
from service.frontier.timestamps import MAX, MIN

times = st.one_of(st.just(MIN), st.integers(-3, 3), st.just(MAX))
ranges = st.lists(st.tuples(times, times, st.booleans()), max_size=20)


@given(ranges)
def test_columns_say_what_scalars_say(some: list[tuple[int, int, bool]]) -> None:
    promises = np.array([promise for promise, _, _ in some], dtype=np.int64)
    reported = np.array([each for _, each, _ in some], dtype=np.int64)
    idle = np.array([each for _, _, each in some], dtype=np.bool_)
    assert join_promises(promises, reported).tolist() == [
        join_report(promise, each, idle=is_idle)[0] for promise, each, is_idle in some
    ]
    assert are_behind(promises, reported).tolist() == [
        is_behind(promise, each) for promise, each, _ in some
    ]
    assert weights(promises, idle).tolist() == [
        weight(promise, idle=is_idle) for promise, _, is_idle in some
    ]
