"""Bounds that are learned from lateness: their error, their state, their rise and fall, their limits."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterable
from datetime import timedelta
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.strategies import EARLIEST_MS, LearnedLateness, Rows
from spark_agent.strategies import lateness as counted
from spark_agent.strategies.learned_lateness import surprising
from tests.support.server import ROOT

DAY_MS = 86_400_000
NEWEST_MS = 1_767_225_600_000

lateness_lists = st.one_of(
    st.lists(st.integers(0, 300), min_size=1, max_size=300),
    st.lists(st.integers(0, 40 * DAY_MS), min_size=1, max_size=300),
    st.builds(
        lambda seed, size: (
            (np.random.default_rng(seed).pareto(1.1, size) * 1e4).astype(int).tolist()
        ),
        st.integers(0, 2**32),
        st.integers(1, 5_000),
    ),
)


def rows_of(strategy: LearnedLateness, *tasks: Iterable[int]) -> Rows:
    """Return a batch as the agent passes it on: the event times of each task."""
    times_ms = [np.array(list(each), np.int64) for each in tasks]
    every = np.concatenate(times_ms)
    return Rows(
        count=len(every),
        oldest_ms=int(every.min()),
        newest_ms=int(every.max()),
        read_at_ms=0,
        digests=tuple(strategy.digest(each) for each in times_ms),
    )


def split(values: list[int], cuts: Iterable[int]) -> list[list[int]]:
    places = [0, *sorted(each % (len(values) + 1) for each in cuts), len(values)]
    return [values[start:end] for start, end in pairwise(places)]


def greatest(values: list[int], rank: int) -> int:
    """Return the value of this rank, exactly: 1 is the greatest; 0 if there are fewer."""
    return sorted(values, reverse=True)[rank - 1] if rank <= len(values) else 0


@given(lateness_lists, st.lists(st.integers(0, 5_000), max_size=6), st.data())
def test_any_split_gives_each_rank_within_the_stated_error(
    lateness_ms: list[int], cuts: list[int], data: st.DataObject
) -> None:
    tasks = split([NEWEST_MS - each for each in lateness_ms], cuts)
    packed = [counted.pack(np.array(each, np.int64)) for each in tasks]
    counts = counted.count_rows([counted.unpack(each) for each in packed if each], NEWEST_MS)
    assert counts.sum() == len(lateness_ms)
    rank = data.draw(st.integers(1, len(lateness_ms)))
    found = counted.at_rank(counts, rank)
    assert found >= greatest(lateness_ms, rank)
    earlier = ceil(Fraction(rank) / (1 + Fraction(1, counted.RANK_STEP)))
    assert found <= greatest(lateness_ms, earlier) * (1 + 1 / 64)


@given(
    st.lists(st.integers(0, 10 * DAY_MS), max_size=300), st.integers(1, 400), st.integers(1, 400)
)
def test_counts_that_are_kept_are_read_as_too_great_at_most(
    lateness_ms: list[int], rows: int, most: int
) -> None:
    counts = np.zeros(counted.BUCKETS, np.int64)
    if lateness_ms:
        packed = counted.pack(NEWEST_MS - np.array(lateness_ms))
        counts = counted.count_rows([counted.unpack(packed)], NEWEST_MS)
    pairs = counted.sparse(counts, rows, most)
    kept = counted.dense(json.loads(json.dumps(pairs)))
    assert kept.sum() == counts.sum()
    assert len(pairs) <= 2 * most
    for rank in range(1, len(lateness_ms) + 1):
        assert counted.at_rank(kept, rank) >= counted.at_rank(counts, rank)
        if rank <= rows and len(pairs) < 2 * most:
            assert counted.at_rank(kept, rank) == counted.at_rank(counts, rank)


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.9, 0.99, 0.999]),
    st.lists(st.integers(0, 20_000), max_size=5),
)
@settings(max_examples=30, deadline=None)
def test_the_first_bound_is_the_quantile_for_any_split(
    seed: int, quantile: float, cuts: list[int]
) -> None:
    strategy = LearnedLateness(quantile)
    random = np.random.default_rng(seed)
    lateness_ms = (random.pareto(1.5, 15_000) * 10_000).astype(int).tolist()
    state = strategy.update(None, rows_of(strategy, [NEWEST_MS]))
    # A batch whose newest row is newer than the newest one before: its digests are placed by the latter.
    tasks = split([NEWEST_MS - each for each in lateness_ms], cuts)
    state = strategy.update(state, rows_of(strategy, *tasks, [NEWEST_MS + DAY_MS]))
    bound_ms = strategy.bound_ms(state)
    assert bound_ms is not None
    rank = floor((1 - quantile) * (len(lateness_ms) + 1)) + 1
    assert bound_ms >= greatest(lateness_ms, rank)
    assert bound_ms <= greatest(lateness_ms, ceil(rank / (1 + 1 / 32))) * (1 + 1 / 64)
    assert strategy.promise(state) == NEWEST_MS + DAY_MS - bound_ms


@given(lateness_lists, st.integers(1, 100))
def test_thin_counts_are_within_the_stated_error(lateness_ms: list[int], step: int) -> None:
    packed = counted.pack(NEWEST_MS - np.array(lateness_ms))
    counts = counted.count_rows([counted.unpack(packed)], NEWEST_MS)
    exact, thinned = counts[::-1].cumsum(), counted.thin(counts, step)[::-1].cumsum()
    assert (thinned >= exact).all()
    assert (thinned <= np.maximum(exact + step, exact * (1 + 1 / 16))).all()


def test_a_heavy_tail_of_many_rows_has_its_quantile() -> None:
    strategy = LearnedLateness(0.99)
    random = np.random.default_rng(0)
    state, newest_ms = None, NEWEST_MS
    for _ in range(70):
        late_by_ms = (random.pareto(1.5, 30_000) * 10_000).astype(np.int64)
        times_ms = np.append(newest_ms - late_by_ms, newest_ms + 3_600_000)
        newest_ms += 3_600_000
        state = strategy.update(state, rows_of(strategy, times_ms))
        assert len(json.dumps(state)) < 8_000
    exact_ms = 10_000 * (0.01 ** (-1 / 1.5) - 1)
    assert 0.97 * exact_ms < (strategy.bound_ms(state) or 0) < 1.1 * exact_ms


def test_a_digest_is_small_and_its_times_are_exact() -> None:
    random = np.random.default_rng(0)
    times_ms = NEWEST_MS - (random.pareto(1.5, 1_000_000) * 10_000).astype(np.int64)
    packed = counted.pack(times_ms)
    assert len(packed) < 2_000
    digest = counted.unpack(packed)
    assert digest.counts.sum() == digest.rows == len(times_ms)
    assert digest.oldest_ms[:64].tolist() == np.sort(times_ms)[:64].tolist()
    assert digest.newest_ms == times_ms.max()


class Feed:
    """Batches of a shard with random lateness, and the strategy's state after each."""

    def __init__(self, strategy: LearnedLateness, *, rows: int = 1_000, seed: int = 0) -> None:
        self.strategy = strategy
        self.rows = rows
        self.random = np.random.default_rng(seed)
        self.state: Any = None
        self.newest_ms = NEWEST_MS
        self.promise_ms: int | None = None
        self.late = 0
        self.counted = 0

    def batch(self, mean_ms: float) -> Rows:
        """Return rows whose lateness is exponential, and a newest row that is five minutes newer."""
        late_by_ms = self.random.exponential(mean_ms, self.rows).astype(np.int64)
        times_ms = np.append(self.newest_ms - late_by_ms, self.newest_ms + 300_000)
        self.newest_ms += 300_000
        if self.promise_ms is not None:
            self.late += int((times_ms < self.promise_ms).sum())
            self.counted += len(times_ms)
        return rows_of(self.strategy, times_ms)

    def read(self, mean_ms: float) -> int | None:
        self.state = self.strategy.update(self.state, self.batch(mean_ms))
        found_ms = self.strategy.promise(self.state)
        if found_ms is not None:
            self.promise_ms = max(found_ms, self.promise_ms or EARLIEST_MS)
        return self.strategy.bound_ms(self.state)

    def read_many(self, batches: int, mean_ms: float) -> list[int]:
        return [self.read(mean_ms) or 0 for _ in range(batches)]

    @property
    def share(self) -> float:
        return self.late / self.counted


@pytest.mark.parametrize("quantile", [0.95, 0.99, 0.999])
@pytest.mark.parametrize("seed", range(3))
def test_the_share_of_late_rows_is_the_quantile_s(quantile: float, seed: int) -> None:
    feed = Feed(LearnedLateness(quantile), seed=seed)
    feed.read_many(400, 60_000)
    assert 0.8 < feed.share / (1 - quantile) < 1.2


def test_the_share_holds_while_lateness_changes() -> None:
    feed = Feed(LearnedLateness(0.99), rows=200)
    for _ in range(5):
        feed.read_many(150, 10_000)
        feed.read_many(150, 100_000)
    assert 0.7 < feed.share / 0.01 < 1.2


def test_nothing_is_promised_before_enough_rows() -> None:
    feed = Feed(LearnedLateness(0.999), rows=499)
    # The rows of the first batch have no lateness. The next 19 batches have 9,500 rows.
    assert feed.read_many(20, 10_000) == [0] * 20
    assert feed.promise_ms is None
    assert feed.strategy.bound_ms(feed.state) is None
    assert feed.read(10_000) is not None
    assert feed.promise_ms is not None


def test_the_bound_is_at_most_before_enough_rows() -> None:
    feed = Feed(LearnedLateness(0.999, at_most="1 hour"), rows=499)
    assert feed.strategy.bound_ms(None) == 3_600_000
    assert feed.read_many(20, 10_000) == [3_600_000] * 20
    assert feed.promise_ms == feed.newest_ms - 3_600_000
    assert (feed.read(10_000) or 0) < 200_000


def test_the_bound_rises_after_the_first_batch_of_a_jump() -> None:
    feed = Feed(LearnedLateness(0.999))
    calm_ms = feed.read_many(200, 10_000)[-1]
    assert 50_000 < calm_ms < 100_000
    jumped_ms = feed.read(100_000) or 0
    # The quantile after the jump is 690 s. Nine of the 1,001 rows are enough to prove a greater one.
    assert jumped_ms > 4 * calm_ms
    # The newest row has advanced by five minutes, the bound by more: the promise is not taken back.
    assert feed.promise_ms is not None
    assert feed.promise_ms > feed.newest_ms - jumped_ms


@pytest.mark.parametrize("rows", [20, 1_000, 20_000])
def test_a_jump_makes_few_batches_of_any_size_late(rows: int) -> None:
    feed = Feed(LearnedLateness(0.99), rows=rows)
    feed.read_many(max(200, 20_000 // rows), 10_000)
    calm_ms = feed.read(10_000) or 0
    rise_ms = feed.read_many(ceil(20 / rows), 1_000_000)[-1]
    assert rise_ms > 10 * calm_ms


def test_a_slow_rise_is_followed() -> None:
    feed = Feed(LearnedLateness(0.99), rows=100)
    feed.read_many(100, 10_000)
    feed.late = feed.counted = 0
    for step in range(500):
        feed.read(10_000 * 1.005**step)
    assert feed.share < 0.015


def test_a_jump_is_forgotten() -> None:
    feed = Feed(LearnedLateness(0.999))
    calm_ms = feed.read_many(200, 10_000)[-1]
    feed.read_many(64, 1_000_000)
    fall = feed.read_many(16 * 64 + 80, 10_000)
    # The rows of the jump are remembered for 64 batches, and no longer than for 16 times as many.
    assert min(fall[:48]) > 20 * calm_ms
    assert fall[-1] < 1.3 * calm_ms


def test_a_jump_that_made_few_rows_late_is_forgotten_with_its_rows() -> None:
    feed = Feed(LearnedLateness(0.99))
    calm_ms = feed.read_many(200, 10_000)[-1]
    feed.read_many(5, 30_000)
    fall = feed.read_many(160, 10_000)
    assert fall[0] > 1.5 * calm_ms
    assert fall[-1] < 1.2 * calm_ms


@pytest.mark.parametrize("mean_ms", [10, 10_000, 10_000_000])
def test_no_bound_is_beyond_the_limits(mean_ms: float) -> None:
    feed = Feed(LearnedLateness(0.99, at_least="20 s", at_most=timedelta(minutes=2)))
    for _ in range(60):
        bound_ms = feed.read(mean_ms)
        assert bound_ms is not None
        assert 20_000 <= bound_ms <= 120_000
        assert feed.strategy.promise(feed.state) == feed.newest_ms - bound_ms


def test_rows_beyond_at_most_are_not_made_up_for() -> None:
    feed = Feed(LearnedLateness(0.99, at_most="1 s"))
    feed.read_many(100, 10_000)
    assert feed.state["debt"] <= 0
    assert feed.read_many(80, 10)[-1] < 200


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=40), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_restart_continues_identically(means_ms: list[int], seed: int) -> None:
    strategy = LearnedLateness(0.95, at_least="5 ms")
    feed = Feed(strategy, rows=100, seed=seed)
    batches = [feed.batch(mean_ms) for mean_ms in means_ms]
    once: Any = None
    restarted: Any = None
    for rows in batches:
        once = strategy.update(once, rows)
        again: LearnedLateness = pickle.loads(pickle.dumps(strategy))
        restarted = again.update(json.loads(json.dumps(restarted)), rows)
        assert json.dumps(restarted) == json.dumps(once)
        assert again.promise(json.loads(json.dumps(restarted))) == strategy.promise(once)


def test_an_update_leaves_the_state_before_it_as_it_was() -> None:
    feed = Feed(LearnedLateness(0.9))
    feed.read_many(30, 1_000)
    kept = json.dumps(feed.state)
    feed.strategy.update(feed.state, feed.batch(1_000))
    assert json.dumps(feed.state) == kept


def test_the_state_of_a_shard_is_small() -> None:
    feed = Feed(LearnedLateness(0.99), rows=3_000)
    for number in range(200):
        # Lateness of all magnitudes, which no real shard has.
        feed.read(10.0 ** (1 + number % 9))
        assert len(json.dumps(feed.state)) < 8_000


def test_rows_without_a_digest_move_the_newest_time_alone() -> None:
    feed = Feed(LearnedLateness(0.9))
    feed.read_many(10, 1_000)
    before = feed.state
    for digests in ((), (b"",), (b"", feed.strategy.digest(np.array([], np.int64)))):
        later_ms = feed.newest_ms + 5_000
        after = feed.strategy.update(before, Rows(1, later_ms, later_ms, 0, digests=digests))
        assert after["newest"] == later_ms
        assert after["windows"] == before["windows"]
        assert feed.strategy.bound_ms(after) == feed.strategy.bound_ms(before)
        assert feed.strategy.promise(after) == later_ms - (feed.strategy.bound_ms(after) or 0)


def test_a_digest_twice_counts_twice() -> None:
    strategy = LearnedLateness(0.9)
    state = strategy.update(None, rows_of(strategy, [NEWEST_MS]))
    once = strategy.update(state, rows_of(strategy, [NEWEST_MS - 5] * 200))
    twice = strategy.update(state, rows_of(strategy, *[[NEWEST_MS - 5] * 200] * 2))
    assert strategy.bound_ms(once) == strategy.bound_ms(twice) == 5


def test_a_batch_of_old_rows_does_not_lower_the_newest_time() -> None:
    strategy = LearnedLateness(0.9, at_most="1 day")
    state = strategy.update(None, rows_of(strategy, [NEWEST_MS]))
    state = strategy.update(state, rows_of(strategy, [NEWEST_MS - 60_000] * 200))
    assert state["newest"] == NEWEST_MS
    assert 60_000 <= (strategy.bound_ms(state) or 0) <= 61_000


def test_a_promise_is_not_before_the_first_year() -> None:
    strategy = LearnedLateness(0.9, at_most="200 days")
    state = strategy.update(None, rows_of(strategy, [EARLIEST_MS + DAY_MS]))
    assert strategy.promise(state) == EARLIEST_MS


@pytest.mark.parametrize("at_most", [None, "1 hour"])
def test_a_row_from_before_the_calendar_counts_as_very_late(at_most: str | None) -> None:
    """Spark reads the year -290308, and one such row of a billion had failed the query."""
    strategy = LearnedLateness(0.9, at_most=at_most)
    state = strategy.update(None, rows_of(strategy, [NEWEST_MS]))
    first_of_spark_ms = -(2**63) // 1_000
    oldest = [first_of_spark_ms, NEWEST_MS - (1 << 50), NEWEST_MS - (1 << 50) + 1]
    state = strategy.update(state, rows_of(strategy, [NEWEST_MS - 5] * 200 + oldest))
    assert strategy.bound_ms(state) == 5
    assert strategy.promise(state) == NEWEST_MS - 5


@pytest.mark.parametrize("quantile", [0.5, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9999])
def test_a_bound_is_learned_from_as_many_rows_as_are_documented(quantile: float) -> None:
    strategy, rows = LearnedLateness(quantile), round(10 / (1 - quantile))
    first = strategy.update(None, rows_of(strategy, [NEWEST_MS]))
    enough = strategy.update(first, rows_of(strategy, [NEWEST_MS - 5] * rows))
    assert strategy.bound_ms(enough) == 5
    too_few = strategy.update(first, rows_of(strategy, [NEWEST_MS - 5] * (rows - 1)))
    assert strategy.bound_ms(too_few) is None


@pytest.mark.parametrize("expected", [1e-9, 0.01, 0.7, 3.0, 50.0, 1e4, 1e9])
def test_a_surprise_is_more_than_expected_and_not_more_than_necessary(expected: float) -> None:
    def improbable(count: int) -> bool:
        return count * np.log(count / expected) - count + expected >= np.log(10_000)

    found = surprising(expected)
    assert found > expected
    assert improbable(found)
    assert found - 1 <= expected or not improbable(found - 1)


@pytest.mark.parametrize("quantile", [0, 1, -0.5, 99.9, float("nan"), "0.99", None, True])
def test_a_quantile_is_a_share(quantile: Any) -> None:
    with pytest.raises(ValueError, match=r"write a share between 0 and 1, such as 0\.999"):
        LearnedLateness(quantile)


def test_limits_are_durations_in_order() -> None:
    with pytest.raises(ValueError, match="invalid at_least 'soon'"):
        LearnedLateness(at_least="soon")
    with pytest.raises(ValueError, match="invalid at_most -1"):
        LearnedLateness(at_most=-1)
    with pytest.raises(ValueError, match="at_most, 1 min, is less than at_least, 1 h"):
        LearnedLateness(at_least="1 hour", at_most="1 minute")
    assert LearnedLateness(at_least="1 hour", at_most="1 hour").bound_ms(None) == 3_600_000


def test_the_driver_loads_numpy_for_digests_alone() -> None:
    code = (
        "import sys; from spark_agent.strategies import LearnedLateness;"
        " LearnedLateness(0.99); print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
