"""Rows of a source, in columns."""

from __future__ import annotations

import pyarrow as pa

from spark_agent.arrow import ShardRows, SourceRows, count_older_than, rows_by_shard
from spark_agent.strategies import EARLIEST_MS, Ascending, BoundedOutOfOrderness
from spark_agent.times import MAX_MS

FAR_MS = 1_000_000


def show(
    rows: list[tuple[str | None, int | None]], late_before_ms: int | None = None
) -> SourceRows:
    return rows_by_shard(
        pa.array([shard for shard, _ in rows], pa.string()),
        pa.array([time_us for _, time_us in rows], pa.timestamp("us", "Europe/Berlin")),
        is_declared=frozenset({"a", "b"}).__contains__,
        late_before_ms=late_before_ms,
        horizon_ms=FAR_MS,
    )


def newest(found: SourceRows) -> dict[str, int]:
    return {shard: rows.newest_ms for shard, rows in found.by_shard.items()}


def test_the_newest_of_each_shard_rounded_down() -> None:
    found = show([("a", 5_999), ("b", -1), ("a", 3_000)])
    assert newest(found) == {"a": 5, "b": -1}, "down, not towards zero: a promise is never early"


def test_rows_of_nobody_known_are_counted() -> None:
    found = show([("c", 1_000), (None, 1_000), ("a", 1_000)])
    assert (newest(found), found.unknown_shard_rows) == ({"a": 1}, 2)


def test_the_far_future_is_counted_and_moves_nothing() -> None:
    found = show([("a", 1_000), ("a", FAR_MS * 1_000 + 1), ("b", FAR_MS * 1_000)])
    assert (newest(found), found.far_future_rows) == ({"a": 1, "b": FAR_MS}, 1)


def test_rows_behind_the_promise_are_late() -> None:
    rows: list[tuple[str | None, int | None]] = [("a", 1_999), ("b", 2_000), ("a", None)]
    found = show(rows, late_before_ms=2)
    assert found.late_rows == 1
    assert found.by_shard == {
        "a": ShardRows(1, 1, 1, late_rows=1, mark_ms=1),
        "b": ShardRows(2, 2, 1, mark_ms=2),
    }
    assert show(rows).late_rows == 0


def test_nothing_is_late_to_a_source_that_never_promised_and_all_to_a_final_one() -> None:
    """A source that is final has promised the end of time, which no number of microseconds holds."""
    rows: list[tuple[str | None, int | None]] = [("a", 1_999), ("b", FAR_MS * 1_000), ("a", None)]
    assert show(rows, late_before_ms=MAX_MS).late_rows == 2


def test_rows_before_1970_are_counted() -> None:
    found = show([("a", -1), ("a", 0), ("b", None)])
    assert (found.rows_before_1970, found.late_rows) == (1, 0)


def test_rows_without_an_event_time_are_counted_and_move_nothing() -> None:
    found = show([("a", None), ("b", 7_000), (None, None)])
    assert found == SourceRows({"b": ShardRows(7, 7, 1, mark_ms=7)}, undated_rows=2)


def test_the_oldest_of_those_that_are_older() -> None:
    times = pa.array([4_999, None, 3_001, 5_000], pa.timestamp("us", "UTC"))
    assert count_older_than(times, 5) == (2, 3)
    assert count_older_than(times, 3) == (0, None)
    assert count_older_than(pa.array([None], pa.timestamp("us", "UTC")), 5) == (0, None)


def test_no_rows() -> None:
    assert show([]) == SourceRows({})


def test_strategies() -> None:
    assert BoundedOutOfOrderness("2 s").promise_ms(5_000) == 3_000
    assert BoundedOutOfOrderness("1 day").promise_ms(EARLIEST_MS) == EARLIEST_MS
    assert Ascending().promise_ms(5_000) == 5_000
