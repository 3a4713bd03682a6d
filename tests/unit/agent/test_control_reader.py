"""The control source: offsets come from the driver, rows have every column of the data."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_agent.sources.control import ControlReader
from spark_agent.sources.driver_link import LinkClient, LinkServer, Offset
from tests.unit.agent.answers import FakeClock

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
    server = LinkServer("secret", lambda _control, _reader, at, _until_ms: Offset(9, at.turn + 1))
    link = LinkClient(server.port, "secret", timeout_ms=5_000)
    following = reader(link)
    assert following.read(following.initialOffset())[1] == offset(9, 1)
    server.close()
    rows, end = following.read(offset(9, 1))
    assert (list(rows), end) == ([], offset(9, 1))
    link.close()


@pytest.mark.parametrize("ends_when_idle", [False, True])
def test_an_idle_query_asks_the_driver_no_more_often_than_it_may(*, ends_when_idle: bool) -> None:
    """But a run that ends at the first trigger without news must hear of it at once."""
    asked: list[Offset] = []

    def answer(control: str, reader: str, at: Offset, until_ms: int) -> Offset:
        asked.append(at)
        return at

    server, clock = LinkServer("secret", answer), FakeClock()
    link = LinkClient(server.port, "secret", timeout_ms=5_000)
    following = reader(link, clock=clock)
    if ends_when_idle:
        following.prepareForTriggerAvailableNow()
    for _ in range(20):
        assert following.read(offset(5, 1))[1] == offset(5, 1)
        clock.now_ms += 10
    link.close()
    server.close()
    assert len(asked) == (20 if ends_when_idle else 2)


def test_a_clock_that_has_gone_back_is_asked_about_at_once() -> None:
    """A batch planned now would be dated before the latest poll, which sources have promised."""
    asked: list[Offset] = []

    def answer(control: str, reader: str, at: Offset, until_ms: int) -> Offset:
        asked.append(at)
        return at

    class Clock(FakeClock):
        back_ms = 0

        def wall_ms(self) -> int:
            return self.now_ms - self.back_ms

    server, clock = LinkServer("secret", answer), Clock()
    link = LinkClient(server.port, "secret", timeout_ms=5_000)
    following = reader(link, clock=clock)
    for back_ms in (0, 0, 1_000, 1_000):
        clock.back_ms = back_ms
        following.read(offset(5, 1))
    link.close()
    server.close()
    assert len(asked) == 2


@pytest.mark.parametrize("delay_ms", [0, 250])
def test_a_watermark_that_moves_is_one_row_of_nulls(delay_ms: int) -> None:
    server = LinkServer("secret", lambda _control, _reader, at, _until_ms: Offset(9, at.turn + 1))
    link = LinkClient(server.port, "secret", timeout_ms=5_000)
    following = reader(link, delay_ms)
    rows, end = following.read(offset(5, 1))
    link.close()
    server.close()
    # A restart repeats the rows that were read the first time.
    for [row] in (list(rows), list(following.readBetweenOffsets(offset(5, 1), end))):
        assert row.column("at").cast("int64").to_pylist() == [(9 + delay_ms) * 1_000]
        assert row.column("key").to_pylist() == row.column("inner").to_pylist() == [None]


def test_a_turn_without_a_watermark_is_no_row() -> None:
    following = reader(LinkClient(1, "secret", timeout_ms=100))
    assert list(following.readBetweenOffsets(offset(None, 0), offset(None, 1))) == []
    assert list(following.readBetweenOffsets(offset(5, 1), offset(5, 1))) == []


def test_a_row_is_made_without_pandas() -> None:
    """Every start of a query waits for the process that makes it."""
    made = f"""
import json, sys
from pyspark.sql.types import StructType
from spark_agent.sources.control import ControlReader
reader = ControlReader(None, control="3", schema=StructType.fromJson(json.loads({SCHEMA.json()!r})),
    event_time="at", delay_ms=0, poll_ms=100, clock=None)
[row] = reader.readBetweenOffsets({offset(None, 0)}, {offset(9, 1)})
print(row.num_rows, sorted({{"pandas", "pyarrow.compute"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["1", "[]\n"]
