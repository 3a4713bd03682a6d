"""What a source's rows show, in columns."""

from __future__ import annotations

import pyarrow as pa

from spark_agent.arrow import NewestTimes, count_older_than, newest_times
from spark_agent.client import MAX_MS
from spark_agent.strategies import EARLIEST_MS, Ascending, BoundedOutOfOrderness

FAR_MS = 1_000_000


def show(
    rows: list[tuple[str | None, int | None]], late_before_ms: int | None = None
) -> NewestTimes:
    return newest_times(
        pa.array([shard for shard, _ in rows], pa.string()),
        pa.array([time_us for _, time_us in rows], pa.timestamp("us", "Europe/Berlin")),
        shards=frozenset({"a", "b"}),
        late_before_ms=late_before_ms,
        horizon_ms=FAR_MS,
    )


def test_the_newest_of_each_shard_rounded_down() -> None:
    found = show([("a", 5_999), ("b", -1), ("a", 3_000)])
    assert found.by_shard_ms == {"a": 5, "b": -1}, (
        "down, not towards zero: a promise is never early"
    )


def test_rows_without_a_time_say_nothing() -> None:
    assert show([("a", None), ("b", 7_000)]) == NewestTimes({"b": 7})


def test_rows_of_nobody_known_are_counted() -> None:
    found = show([("c", 1_000), (None, 1_000), ("a", 1_000)])
    assert (found.by_shard_ms, found.unknown_shard_rows) == ({"a": 1}, 2)


def test_the_far_future_is_counted_and_moves_nothing() -> None:
    found = show([("a", 1_000), ("a", FAR_MS * 1_000 + 1), ("b", FAR_MS * 1_000)])
    assert (found.by_shard_ms, found.far_future_rows) == ({"a": 1, "b": FAR_MS}, 1)


def test_rows_behind_the_promise_are_late() -> None:
    rows: list[tuple[str | None, int | None]] = [("a", 1_999), ("b", 2_000), ("a", None)]
    assert show(rows, late_before_ms=2).late_rows == 1
    assert show(rows).late_rows == 0


def test_nothing_is_late_to_a_source_that_never_promised_and_all_to_a_final_one() -> None:
    """A source that is final has promised the end of time, which no number of microseconds holds."""
    rows: list[tuple[str | None, int | None]] = [("a", 1_999), ("b", FAR_MS * 1_000), ("a", None)]
    assert show(rows, late_before_ms=MAX_MS).late_rows == 2


def test_rows_before_1970_are_counted() -> None:
    found = show([("a", -1), ("a", 0), ("b", None)])
    assert (found.rows_before_1970, found.late_rows) == (1, 0)


def test_the_oldest_of_those_that_are_older() -> None:
    times = pa.array([4_999, None, 3_001, 5_000], pa.timestamp("us", "UTC"))
    assert count_older_than(times, 5) == (2, 3)
    assert count_older_than(times, 3) == (0, None)
    assert count_older_than(pa.array([None], pa.timestamp("us", "UTC")), 5) == (0, None)


def test_no_rows() -> None:
    assert show([]) == NewestTimes({})


def test_strategies() -> None:
    assert BoundedOutOfOrderness("2 s").promise_ms(5_000) == 3_000
    assert BoundedOutOfOrderness("1 day").promise_ms(EARLIEST_MS) == EARLIEST_MS
    assert Ascending().promise_ms(5_000) == 5_000
