"""Alignment: a group whose shards obey never spreads by more than its drift and one report."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from service.frontier.throttle import ShardAt, limit_of, must_pause, slowest
from service.frontier.timestamps import MAX, MIN

REPORT_MS = 500
"""The furthest that one report moves a shard."""

ops = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(st.integers(0, REPORT_MS), st.sampled_from(["hear", "final"])),
    ),
    max_size=120,
)


@given(drift_ms=st.integers(0, 2_000), ops=ops)
@example(drift_ms=0, ops=[(0, 500), (1, 0), (0, 500), (1, 500), (2, 0), (0, 1)])
def test_throttled_group_spread(drift_ms: int, ops: list[tuple[int, int | str]]) -> None:
    """Each shard goes by the last answer that *it* has heard, however old that is by now.

    The limit only rises, as the least promise does. So who was not asked to pause is not ahead of
    the newest limit either, and moves by one report before it hears again.
    """
    promises = dict.fromkeys(range(4), MIN)
    heard: dict[int, int | None] = dict.fromkeys(range(4))
    started = False
    for shard, op in ops:
        if op == "final":
            promises[shard] = MAX
        elif op != "hear":
            assert isinstance(op, int)
            # Alignment begins with the shards that are there: all of them start at 0.
            if promises[shard] == MIN:
                promises[shard] = 0 if not started else max(0, _least(promises))
                started = True
            elif promises[shard] != MAX and not must_pause(promises[shard], heard[shard]):
                promises[shard] += op
        heard[shard] = _limit(promises, drift_ms)
        at = [each for each in promises.values() if MIN < each < MAX]
        if at:
            assert max(at) - min(at) <= drift_ms + REPORT_MS


def _least(promises: dict[int, int]) -> int:
    return min((each for each in promises.values() if MIN < each < MAX), default=0)


def _limit(promises: dict[int, int], drift_ms: int) -> int | None:
    held_by = slowest(ShardAt("s", str(shard), promise) for shard, promise in promises.items())
    return None if held_by is None else limit_of(held_by.promise, drift_ms)
