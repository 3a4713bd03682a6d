"""Strategies: the vectors of Flink's documents, in this project's watermark, and their properties."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.arrow import ShardRows, rows_by_shard
from spark_agent.client.client import Client
from spark_agent.client.reports import RangeReport
from spark_agent.driver.ingress_clock import IngressClock
from spark_agent.exceptions import StrategyError
from spark_agent.executor.digests import TaskDigests
from spark_agent.executor.tally import Tallies, Tally
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.strategies import (
    EARLIEST_MS,
    AnyStrategy,
    Ascending,
    BoundedOutOfOrderness,
    Expression,
    IngressTime,
    NoWatermarks,
    Punctuated,
    Rows,
    WallClock,
)
from spark_agent.strategies.protocols import merged
from spark_agent.strategies.resolved import Summary, TaskPromise, promised_ms, resolved
from spark_agent.supervision.clock_promises import ClockPromises
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.shard_states import ShardStates
from spark_agent.times import MAX_MS
from tests.unit.agent.answers import Answer, Answers, FakeClock
from tests.unit.agent.queries import source, started

FLINK_MS = 1
"""A watermark here is Flink's + 1 ms: W allows a row at W, and Flink's allows one after its own."""


def after_each(strategy: object, rows: Iterable[int]) -> list[int | None]:
    """The shard's promise after each row: the service keeps the greatest."""
    promise = resolved(strategy).promise
    found: list[int | None] = []
    latest: int | None = None
    for row in rows:
        here = promise(row)
        latest = here if latest is None else max(latest, latest if here is None else here)
        found.append(latest)
    return found


def test_flink_ascending_timestamps() -> None:
    """`AscendingTimestampsWatermarks`: the greatest timestamp, less 1 ms; `forMonotonousTimestamps`."""
    flink = [0, 999, 999, 1_999]
    assert after_each(Ascending(), [1, 1_000, 1_000, 2_000]) == [w + FLINK_MS for w in flink]


def test_flink_bounded_out_of_orderness() -> None:
    """`BoundedOutOfOrdernessWatermarks`: the greatest timestamp, less the bound and 1 ms."""
    flink = [12_345 - 10 - 1, 12_345 - 10 - 1, 22_222 - 10 - 1]
    found = after_each(BoundedOutOfOrderness("10 ms"), [12_345, 12_340, 22_222])
    assert found == [w + FLINK_MS for w in flink]


def test_no_watermarks() -> None:
    assert after_each(NoWatermarks(), [5, 9]) == [None, None]


def rows(marks: list[int | None], times: list[int]) -> int | None:
    """The newest mark of a shard's rows in a batch."""
    found = rows_by_shard(
        pa.array(["a"] * len(times)),
        pa.array([at * 1_000 for at in times], pa.timestamp("us", "UTC")),
        pa.array([at and at * 1_000 for at in marks], pa.timestamp("us", "UTC")),
        is_declared=frozenset({"a"}).__contains__,
        late_before_ms=None,
        horizon_ms=1_000_000,
    )
    return found.by_shard["a"].mark_ms if "a" in found.by_shard else None


def test_punctuated_with_a_marker_that_comes_late() -> None:
    """A marker older than the one before moves nothing, and neither do rows without one."""
    promise = resolved(Punctuated(when="is_marker", bound="1 s")).promise
    assert promised_ms(promise, rows([None, None], [5_000, 9_000])) is None
    assert promised_ms(promise, rows([None, 4_000, None], [9_000, 4_000, 8_000])) == 3_000
    assert promised_ms(promise, rows([2_000, None], [2_000, 9_000])) == 1_000, (
        "the service keeps 3,000"
    )


def test_the_greatest_value_of_an_expression() -> None:
    promise = resolved(Expression("at - INTERVAL 1 SECOND")).promise
    assert promised_ms(promise, rows([4_000, 7_000, None], [5_000, 8_000, 1_000])) == 7_000


def test_a_mark_too_far_ahead_of_the_clock_moves_nothing() -> None:
    assert rows([4_000, 1_000_001], [5_000, 6_000]) == 4_000
    assert rows([1_000_001], [5_000]) is None


def test_a_mark_of_a_row_without_an_event_time_moves_nothing() -> None:
    found = rows_by_shard(
        pa.array(["a", "a"]),
        pa.array([None, 5_000], pa.timestamp("us", "UTC")),
        pa.array([9_000, 1_000], pa.timestamp("us", "UTC")),
        is_declared=frozenset({"a"}).__contains__,
        late_before_ms=None,
        horizon_ms=1_000_000,
    )
    assert found.by_shard["a"].mark_ms == 1
    assert found.undated_rows == 1


@pytest.mark.parametrize("given", [5, None, Ascending, object(), b"at"])
def test_what_is_not_a_strategy_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="invalid strategy"):
        resolved(given)


def test_an_attribute_named_mark_is_not_a_mark() -> None:
    class Daily:
        mark = 5

        def promise_ms(self, newest_ms: int) -> int:
            return newest_ms

    assert resolved(Daily()).mark is None


@pytest.mark.parametrize("when", [None, True, 1, int])
def test_a_condition_that_is_not_one_is_refused(when: Any) -> None:
    with pytest.raises(ValueError, match="invalid condition"):
        Punctuated(when)


@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_sql_is_refused(empty: str) -> None:
    with pytest.raises(ValueError, match="invalid expression"):
        resolved(empty)
    with pytest.raises(ValueError, match="invalid condition"):
        Punctuated(empty)


def test_a_wall_clock_does_not_promise_before_all_time() -> None:
    assert WallClock("1000000 days").promise_at(0) == EARLIEST_MS


@pytest.mark.parametrize("strategy", [Ascending(), Expression("at"), Punctuated("true")])
def test_a_row_from_before_the_calendar_is_no_error_of_a_strategy(strategy: AnyStrategy) -> None:
    """A shard whose only row of a batch is a date that was read wrongly had failed the query."""
    promise = resolved(strategy).promise
    assert promised_ms(promise, -(2**63) // 1_000) == EARLIEST_MS


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=1), min_size=1))
def test_rows_of_several_tasks_are_merged(parts: list[list[int]]) -> None:
    found = merged(Rows(len(part), min(part), max(part)) for part in parts)
    every = [at for part in parts for at in part]
    assert (found.count, found.oldest_ms, found.newest_ms) == (len(every), min(every), max(every))


# States in the driver.


class Notes:
    """A checkpoint's notes."""

    def __init__(self) -> None:
        self.texts: dict[str, tuple[int, str]] = {}

    def states(self, stage: str) -> tuple[int, str] | None:
        return self.texts.get(stage)

    def note_states(self, stage: str, epoch: int, states: str) -> None:
        self.texts[stage] = epoch, states


def make_promise(found: object) -> Callable[[int], object]:
    def promise(newest_ms: int) -> object:
        return found

    return promise


class Summing:
    """Promises by the sum of what it was given: each batch counts once, in order."""

    def update(self, state: list[int] | None, rows: Rows) -> list[int]:
        return [*(state or []), rows.count]

    def promise(self, state: list[int]) -> int | None:
        return sum(state) or None


def tally(rows_of: Mapping[str, int]) -> Tally:
    return Tally(rows={shard: {0: Rows(count, 0, 0)} for shard, count in rows_of.items()})


def states(notes: Notes, tallies: Tallies, strategy: Any = None) -> ShardStates:
    query = started([source("s")], stateful={"s": strategy or Summing()})
    return ShardStates(query, notes, tallies)


def batch(epoch: int) -> CommittedBatch:
    return CommittedBatch(epoch, 0, triggered_ms=1_000 * epoch)


def test_each_batch_is_counted_once_in_order_also_after_a_restart() -> None:
    notes, tallies = (
        Notes(),
        {("q", "s", 0): tally({"a": 3}), ("q", "s", 1): tally({"a": 1, "b": 2})},
    )
    first = states(notes, tallies)
    assert first.update(batch(0)) == {"s": {"a": 3}}
    assert first.update(batch(1)) == {"s": {"a": 4, "b": 2}}
    assert first.update(batch(1)) == {"s": {}}
    again = states(notes, tallies)
    assert again.update(batch(1)) == {"s": {"a": 4, "b": 2}}, "counted already, and promised again"
    tallies["q", "s", 2] = tally({"b": 5})
    assert again.update(batch(2)) == {"s": {"b": 7}}
    assert json.loads(notes.texts["s"][1])["states"] == {"a": [3, 1], "b": [2, 5]}


def test_a_batch_without_rows_changes_nothing() -> None:
    notes = Notes()
    assert states(notes, {}).update(batch(0)) == {"s": {}}
    assert not notes.texts


def test_a_retried_task_is_counted_once() -> None:
    both = tally({"a": 3}) + tally({"a": 3})
    assert states(Notes(), {("q", "s", 0): both}).update(batch(0)) == {"s": {"a": 3}}


def test_rows_that_are_counted_are_not_kept() -> None:
    """The tallies of batches that the service has not taken are kept, perhaps for hours."""
    tallies = {("q", "s", 0): replace(tally({"a": 3}), counts={0: {"late_rows": 1}})}
    states(Notes(), tallies).update(batch(0))
    assert tallies == {("q", "s", 0): Tally(counts={0: {"late_rows": 1}})}


def test_a_partition_that_is_first_read_in_part_counts_as_a_whole() -> None:
    """`foreachBatch` may look at a first row, and then write all."""
    part, whole = tally({"a": 1}), tally({"a": 3})
    for both in (part + whole, whole + part):
        assert states(Notes(), {("q", "s", 0): both}).update(batch(0)) == {"s": {"a": 3}}


def test_states_of_another_strategy_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Summing):
        pass

    notes, tallies = Notes(), {("q", "s", 0): tally({"a": 3})}
    states(notes, tallies).update(batch(0))
    tallies["q", "s", 1] = tally({"a": 1})
    assert states(notes, tallies, Other()).update(batch(1)) == {"s": {"a": 1}}
    assert "has states of Summing" in caplog.text


@pytest.mark.parametrize(
    "promise",
    [1.5, True, "5", 10**4_000, MAX_MS, EARLIEST_MS - 1],
    ids=type,
)
def test_a_promise_that_is_not_a_time_is_an_error(promise: object) -> None:
    with pytest.raises(StrategyError, match=r"promise\(7\) has returned .*: return milliseconds"):
        promised_ms(cast("TaskPromise", make_promise(promise)), 7)

    class Wrong(Summing):
        def promise(self, state: list[int]) -> Any:
            return promise

    with pytest.raises(StrategyError, match=r"stage 's', shard 'a': .*return milliseconds"):
        states(Notes(), {("q", "s", 0): tally({"a": 1})}, Wrong()).update(batch(0))


class Failing(Summing):
    """Fails as a user's class may, or returns what cannot be kept."""

    def __init__(self, error: BaseException | None = None, state: object = None) -> None:
        self._error = error
        self._state = state

    def update(self, state: list[int] | None, rows: Rows) -> Any:
        if self._error is not None:
            raise self._error
        return self._state


class Unwritable:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise OSError


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Failing(KeyError("litres")), "Failing.update has failed with KeyError: 'litres'"),
        (Failing(SystemExit(3)), "Failing.update has failed with SystemExit: 3"),
        (Failing(KeyboardInterrupt()), "Failing.update has failed with KeyboardInterrupt"),
        (Failing(state=10**5_000), "has returned an int, which JSON cannot keep"),
        (Failing(state=Unwritable()), "has returned an Unwritable, which JSON cannot keep"),
        (Failing(state=deep()), "which JSON cannot keep"),
        (Failing(state=[Rows(1, 2, 3)]), "has returned .Rows.*, which JSON cannot keep"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_whatever_a_strategy_does_is_an_error_in_words(strategy: Failing, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        states(Notes(), {("q", "s", 0): tally({"a": 1})}, strategy).update(batch(0))


def test_states_that_cannot_be_read_are_an_error_that_names_their_folder() -> None:
    notes = Notes()
    notes.texts["s"] = 4, "{"
    with pytest.raises(StrategyError, match="folder tidegauge/states/s, cannot be read"):
        states(notes, {}).update(batch(5))


def test_integers_of_numpy_are_times() -> None:
    found = promised_ms(cast("TaskPromise", make_promise(np.int64(5))), 7)
    assert (found, type(found)) == (5, int)


def test_a_digest_that_is_not_bytes_is_an_error() -> None:
    def digest(times_ms: Any) -> Any:
        return "5"

    digests = TaskDigests(Summary(digest=digest))
    found = {"a": ShardRows(5, 5, 1, mark_ms=5)}
    digests.add(pa.array(["a"]), pa.array([5_000], pa.timestamp("us")), found)
    with pytest.raises(StrategyError, match="digest has returned '5': return bytes"):
        digests.rows(found)


# The clock in the driver.

NOW = 1_700_000_000_000


def watermark(output_ms: int | None) -> Answer:
    body = {"input_watermark": None, "output_watermark": output_ms, "status": "active"}
    return Answer(200, {"watermarks": {"s": body | {"generation": 1, "version": 1}}})


def ingress(url: str) -> IngressClock:
    query = started([source("s")], clocks={"s": IngressTime()})
    return IngressClock(query, Client(url, patience_ms=3_000, clock=FakeClock()))


def test_a_batch_waits_while_the_clock_is_behind_what_was_promised() -> None:
    with Answers(watermark(NOW)) as server:
        clock = ingress(server.url)
        shown = datetime.fromtimestamp(NOW / 1_000, UTC).strftime("%Y-%m-%dT%H:%M")
        assert shown in (clock.reason_to_wait(NOW - 3_600_000) or "")
        assert clock.reason_to_wait(NOW) is None
        assert clock.reason_to_wait(NOW + 5) is None
        assert "has promised not to have a row before" in (clock.reason_to_wait(NOW + 4) or "")
        assert clock.reason_to_wait(NOW + 5) is None


def test_a_first_batch_waits_for_the_service_whose_promise_it_needs() -> None:
    with Answers(*[Answer(503)] * 30, watermark(None)) as server:
        clock = ingress(server.url)
        reasons = [clock.reason_to_wait(NOW) for _ in range(31)]
    assert "the service has not answered" in (reasons[0] or "")
    assert reasons[-1] is None


def test_a_source_that_is_final_has_no_clock_to_wait_for() -> None:
    with Answers(watermark(MAX_MS)) as server:
        assert ingress(server.url).reason_to_wait(NOW) is None


class Reporter:
    """Takes reports of shards that a task does not hold."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.held: set[str] = set()
        self.taken: list[dict[str, int | None]] = []

    def report_shards(self, stage: str, reports: Mapping[str, RangeReport]) -> list[str]:
        granted = {shard: each for shard, each in reports.items() if shard not in self.held}
        if granted:
            self.taken.append({shard: each.watermark_ms for shard, each in granted.items()})
        return list(granted)


def test_the_driver_promises_by_the_clock_for_shards_that_are_not_held() -> None:
    query, clock = started([source("s")], clocks={"s": WallClock("1 s")}), FakeClock(NOW)
    read = ReadThrough(query, NOW)
    not_final = {"s": {"a", "b"}}
    promises = ClockPromises(query, read, not_final, clock)
    reporter: Any = Reporter(-1)
    read.note_poll("gate", NOW, None)
    read.note_batch(CommittedBatch(0, 0, triggered_ms=NOW + 10))
    promises.report(reporter, at_end=False)
    assert not reporter.taken, "it would outrank the tasks of the first batch"
    reporter.epoch = 0
    reporter.held = {"b"}
    promises.report(reporter, at_end=False)
    promises.report(reporter, at_end=False)
    assert reporter.taken == [{"a": NOW - 990}], "not more often than once a second"
    reporter.held.clear()
    clock.now_ms += 1_000
    promises.report(reporter, at_end=False)
    assert reporter.taken[1:] == [{"b": NOW - 990}], "and only what has advanced"
    not_final["s"].remove("a")
    read.note_poll("gate", NOW + 2_000, CommittedBatch(1, 0, triggered_ms=NOW + 1_500))
    promises.report(reporter, at_end=True)
    assert reporter.taken[2:] == [{"b": NOW + 500}], "a final shard has promised everything"
