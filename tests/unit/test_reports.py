"""Reading a report: a great many ranges at once are read as each one would be."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.report_bodies import read_report
from service.errors import InvalidReportError
from service.frontier.graph import Stage
from service.frontier.promises import keyed_promise
from service.frontier.ranges import KeyLayout, ShardLayout
from service.frontier.timestamps import EARLIEST, LATEST, MAX
from service.model.reports import Report, column

SOURCE = Stage((), ShardLayout.of(["0"]))
KEYED = Stage(("s",), KeyLayout.tile(1))
times = st.one_of(st.integers(EARLIEST, LATEST), st.just(MAX))
holds = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"a": times}),
    st.fixed_dictionaries({"a": times, "b": times}),
)


def body(**members: object) -> bytes:
    return json.dumps({"token": "t", **members}).encode()


def read(stage: Stage, text: bytes) -> Report:
    return asyncio.run(read_report("s", stage, text))


@given(st.lists(times, min_size=1, max_size=200))
def test_watermarks_of_a_source_are_its_promises(watermarks: list[int]) -> None:
    ranges = {str(i): watermark for i, watermark in enumerate(watermarks)}
    report = read(SOURCE, body(ranges=ranges))
    assert dict(zip(report.ranges or (), map(int, column(report)), strict=True)) == ranges


@given(
    times,
    st.one_of(
        st.lists(holds, min_size=1, max_size=150),
        st.lists(st.fixed_dictionaries({"a": times, "b": times}), min_size=60, max_size=150),
    ),
)
def test_promises_of_key_ranges_are_capped(observed: int, kept: list[dict[str, int]]) -> None:
    ranges = {str(i): {"holds": one} for i, one in enumerate(kept)}
    report = read(KEYED, body(ranges=ranges, input_watermark=observed))
    expected = [keyed_promise(observed, one.values()) for one in kept]
    assert list(map(int, column(report))) == expected


@pytest.mark.parametrize("wrong", [LATEST + 1, MAX - 1, MAX + 1, 2**70, EARLIEST - 1, -(2**63)])
@pytest.mark.parametrize("count", [1, 100])
def test_what_is_no_time_is_named(wrong: int, count: int) -> None:
    ranges: dict[str, int] = {f"r{i}": 5 for i in range(count)} | {"bad": wrong}
    with pytest.raises(InvalidReportError, match=rf"bad is {wrong}"):
        read(SOURCE, body(ranges=ranges))
    kept = {name: {"holds": {"x": value}} for name, value in ranges.items()}
    with pytest.raises(InvalidReportError, match=rf"bad\.holds\.x is {wrong}"):
        read(KEYED, body(ranges=kept, input_watermark=5))
