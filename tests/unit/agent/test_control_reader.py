"""The control source: offsets come from the driver, rows have every column of the data."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import (
    ArrayType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_agent.control_source import ControlReader
from spark_agent.link import LinkClient, LinkServer, Offset
from tests.unit.agent.answers import FakeClock

ALL = ReadAllAvailable()
SCHEMA = StructType(
    [
        StructField("key", StringType()),
        StructField("at", TimestampType()),
        StructField("inner", StructType([StructField("n", ArrayType(LongType()))])),
    ]
)


def reader(link: LinkClient, delay_ms: int = 0, clock: FakeClock | None = None) -> ControlReader:
    return ControlReader(
        link,
        control="3",
        schema=SCHEMA,
        event_time="at",
        delay_ms=delay_ms,
        poll_ms=100,
        clock=clock or FakeClock(),
    )


def offset(watermark: int | None, turn: int) -> dict[str, Any]:
    return {"watermark": watermark, "turn": turn}


def test_a_driver_that_does_not_answer_costs_news_and_nothing_else() -> None:
    server = LinkServer("secret", lambda _control, _reader, at: Offset(9, at.turn + 1))
    following = reader(LinkClient(server.port, "secret", timeout_ms=5_000))
    assert following.latestOffset(following.initialOffset(), ALL) == offset(9, 1)
    server.close()
    assert following.latestOffset(offset(9, 1), ALL) == offset(9, 1)
    following.stop()


@pytest.mark.parametrize("ends_when_idle", [False, True])
def test_an_idle_query_asks_the_driver_no_more_often_than_it_may(*, ends_when_idle: bool) -> None:
    """But a run that ends at the first trigger without news must hear of it at once."""
    asked: list[Offset] = []

    def answer(control: str, reader: str, at: Offset) -> Offset:
        asked.append(at)
        return at

    server, clock = LinkServer("secret", answer), FakeClock()
    following = reader(LinkClient(server.port, "secret", timeout_ms=5_000), clock=clock)
    if ends_when_idle:
        following.prepareForTriggerAvailableNow()
    for _ in range(20):
        assert following.latestOffset(offset(5, 1), ALL) == offset(5, 1)
        clock.now_ms += 10
    following.stop()
    server.close()
    assert len(asked) == (20 if ends_when_idle else 2)


@pytest.mark.parametrize("delay_ms", [0, 250])
def test_a_watermark_that_moves_is_one_row_of_nulls(delay_ms: int) -> None:
    following = reader(LinkClient(1, "secret", timeout_ms=100), delay_ms)
    [part] = following.partitions(offset(5, 1), offset(9, 2))
    [row] = pickle.loads(pickle.dumps(following)).read(part)
    assert row.column("at").cast("int64").to_pylist() == [(9 + delay_ms) * 1_000]
    assert row.column("key").to_pylist() == row.column("inner").to_pylist() == [None]


def test_a_turn_without_a_watermark_is_no_row() -> None:
    following = reader(LinkClient(1, "secret", timeout_ms=100))
    assert following.partitions(offset(None, 0), offset(None, 1)) == []
    assert following.partitions(offset(5, 1), offset(5, 1)) == []
