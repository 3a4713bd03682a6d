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

ALL = ReadAllAvailable()
SCHEMA = StructType(
    [
        StructField("key", StringType()),
        StructField("at", TimestampType()),
        StructField("inner", StructType([StructField("n", ArrayType(LongType()))])),
    ]
)


def reader(link: LinkClient, delay_ms: int = 0) -> ControlReader:
    return ControlReader(link, control="3", schema=SCHEMA, event_time="at", delay_ms=delay_ms)


def offset(watermark: int | None, turn: int) -> dict[str, Any]:
    return {"watermark": watermark, "turn": turn}


def test_a_driver_that_does_not_answer_costs_news_and_nothing_else() -> None:
    server = LinkServer("secret", lambda _control, _reader, at: Offset(9, at.turn + 1))
    following = reader(LinkClient(server.port, "secret", timeout_ms=5_000))
    assert following.latestOffset(following.initialOffset(), ALL) == offset(9, 1)
    server.close()
    assert following.latestOffset(offset(9, 1), ALL) == offset(9, 1)


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
