"""Readings of open sessions: seldom, beside the batches, and once more at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from spark_agent.jvm.progress import CommittedBatch
from spark_agent.soundness.output_times import OpenSessions
from spark_agent.sources.control import END_MS
from spark_agent.supervision.session_readings import SessionReadings
from tests.support.binaries import wait_until
from tests.unit.agent.answers import FakeClock
from tests.unit.agent.queries import started


@dataclass
class State:
    """Spark's state, whose earliest session is a number of the batch."""

    batches: list[int] = field(default_factory=list[int])
    fails: bool = False
    takes_ms: int = 100
    clock: FakeClock = field(default_factory=FakeClock)

    def read(self, batch: int) -> int | None:
        self.batches.append(batch)
        self.clock.now_ms += self.takes_ms
        if self.fails:
            raise ValueError("the file is gone\nat Spark")
        return 1_000 + batch


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def readings(state: State) -> Iterator[SessionReadings]:
    found = SessionReadings(started(open_sessions=state.read), state.clock)
    yield found
    found.close()


def batch(epoch: int, watermark_ms: int = 5_000, *, keeps_nothing: bool = False) -> CommittedBatch:
    return CommittedBatch(epoch, watermark_ms, keeps_nothing=keeps_nothing)


def comes(readings: SessionReadings, *, at_end: bool = False) -> None:
    wait_until(lambda: readings.poll(at_end=at_end), "a reading")


def settled(reads: Callable[[], bool]) -> None:
    wait_until(reads, "the reading")


def test_a_reading_is_of_the_newest_batch(readings: SessionReadings, state: State) -> None:
    assert not readings.poll(at_end=False)
    readings.add(batch(3))
    readings.add(batch(4, 6_000))
    comes(readings)
    assert readings.newest == OpenSessions(4, 6_000, 1_004)
    assert state.batches == [4]
    assert not readings.is_due


def test_readings_take_a_sixth_of_the_time(readings: SessionReadings, state: State) -> None:
    state.takes_ms = 1_000
    readings.add(batch(0))
    comes(readings)
    readings.add(batch(1))
    state.clock.now_ms += 4_999
    assert not readings.poll(at_end=False)
    assert (readings.is_due, state.batches) == (True, [0])
    state.clock.now_ms += 1
    comes(readings)
    assert state.batches == [0, 1]


def test_the_end_does_not_pause(readings: SessionReadings, state: State) -> None:
    readings.add(batch(0))
    comes(readings)
    readings.add(batch(1))
    comes(readings, at_end=True)
    assert state.batches == [0, 1]


def test_a_reading_that_fails_is_repeated_but_not_at_the_end(
    readings: SessionReadings, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    state.fails = True
    readings.add(batch(0))
    assert not readings.poll(at_end=False)
    settled(lambda: "cannot be read from Spark's state" in caplog.text)
    assert "at Spark" not in caplog.text
    settled(lambda: not readings.poll(at_end=False) and readings.is_due)
    state.clock.now_ms += 2_000
    settled(lambda: not readings.poll(at_end=False) and len(state.batches) == 2)
    settled(lambda: not readings.poll(at_end=True) and not readings.is_due)
    assert readings.newest is None


def test_a_batch_after_which_not_a_row_is_kept_is_not_read(
    readings: SessionReadings, state: State
) -> None:
    readings.add(batch(2, 7_000, keeps_nothing=True))
    assert readings.newest == OpenSessions(2, 7_000, None)
    assert not readings.is_due
    assert not state.batches


def test_rows_that_spark_does_not_count_are_read(state: State) -> None:
    query = started(open_sessions=state.read, counts_state=False)
    readings = SessionReadings(query, state.clock)
    readings.add(batch(2, 7_000, keeps_nothing=True))
    assert readings.is_due


@pytest.mark.parametrize("watermark_ms", [0, END_MS, END_MS - 1])
def test_the_beginning_and_the_end_of_time_are_not_read(
    readings: SessionReadings, watermark_ms: int
) -> None:
    readings.add(batch(0))
    readings.add(batch(1, watermark_ms))
    assert not readings.is_due
