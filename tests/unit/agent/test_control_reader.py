"""The control source's offsets: they rise, they survive, and nothing that happens can stop a query."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from spark_agent.client import MAX_MS, Client
from spark_agent.control_source import END_MS, ControlReader
from tests.unit.agent.answers import Answer, Answers, FakeClock

ALL = ReadAllAvailable()


def at(input_ms: int | None, version: int = 1) -> Answer:
    body = {"input_watermark": input_ms, "output_watermark": None, "status": "unknown"}
    return Answer(200, body, {"ETag": f'"1-{version}"'})


def reader(server: Answers, clock: FakeClock) -> ControlReader:
    asking = Client(server.url, patience_ms=100, clock=clock, jitter=lambda: 1.0)
    return ControlReader(asking, "j", "s", 100, clock)


def offset(watermark: int | None, turn: int) -> dict[str, Any]:
    return {"watermark": watermark, "turn": turn}


def test_each_start_takes_one_turn_and_then_waits_for_news() -> None:
    clock = FakeClock()
    with Answers(at(None)) as server:
        following = reader(server, clock)
        start = following.initialOffset()
        first = following.latestOffset(start, ALL)
        assert first == offset(None, 1)
        assert following.partitions(start, first) == [], "no watermark, no row"
        clock.now_ms += 1_000
        assert following.latestOffset(first, ALL) == first


def test_a_watermark_that_moves_is_one_row() -> None:
    clock = FakeClock()
    with Answers(at(5), at(9, 2)) as server:
        following = reader(server, clock)
        first = following.latestOffset(offset(None, 0), ALL)
        clock.now_ms += 100
        second = following.latestOffset(first, ALL)
        assert (first, second) == (offset(5, 1), offset(9, 2))
        [part] = following.partitions(first, second)
        [row] = pickle.loads(pickle.dumps(following)).read(part)
    assert row.column("watermark").cast("int64").to_pylist() == [9_000]


def test_the_end_of_time_is_a_time_that_spark_can_count_to() -> None:
    with Answers(at(MAX_MS)) as server:
        following = reader(server, FakeClock())
        [part] = following.partitions(offset(5, 1), offset(MAX_MS, 2))
        [row] = following.read(part)
    assert row.column("watermark").cast("int64").to_pylist() == [END_MS * 1_000]


def test_it_never_goes_back() -> None:
    """The job was reset, or the service restored from an old backup; the query is further."""
    clock = FakeClock()
    with Answers(at(5), at(None, 2)) as server:
        following = reader(server, clock)
        restarted = following.latestOffset(offset(70, 8), ALL)
        assert restarted == offset(70, 9), "the first turn repeats what was known"
        clock.now_ms += 100
        assert following.latestOffset(restarted, ALL) == restarted


def test_it_asks_no_more_often_than_it_may() -> None:
    clock = FakeClock()
    with Answers(at(5)) as server:
        following = reader(server, clock)
        here = following.latestOffset(offset(None, 0), ALL)
        for _ in range(50):
            clock.now_ms += 10
            following.latestOffset(here, ALL)
    assert len(server.asked) == 6


@pytest.mark.parametrize("failure", [Answer(503), Answer(404, {"type": "/problems/unknown-job"})])
def test_a_service_that_fails_costs_news_and_nothing_else(failure: Answer) -> None:
    clock = FakeClock()
    with Answers(at(5), failure) as server:
        following = reader(server, clock)
        here = following.latestOffset(offset(None, 0), ALL)
        before = clock.now_ms
        while clock.now_ms < before + 60_000:
            clock.now_ms += 10
            assert following.latestOffset(here, ALL) == here
    assert len(server.asked) < 60, "asked less and less often"
