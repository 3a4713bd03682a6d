"""Columns as bytes mean what the same columns mean as arrays, and no other string is one."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.api import byte_columns
from service.api.byte_columns import FLAG_BYTES, TIME_BYTES, entries, flags
from service.api.report_bodies import read_report
from service.api.requests import SourceColumns
from service.errors import InvalidReportError, PayloadTooLargeError
from service.frontier.graph import Stage
from service.frontier.ranges import KeyLayout, ShardLayout
from service.frontier.timestamps import EARLIEST, LATEST, MAX, MIN
from service.model.reports import Report
from tests.support.byte_columns import as_bytes, as_flags

STAGES = [Stage((), ShardLayout.of(["0"])), Stage(("s",), KeyLayout.tile(1))]
IDS = ["source", "keyed"]
FLAGS = ("idle", "final")
Columns = Mapping[str, Any]

time = st.one_of(
    st.none(), st.just(MAX), st.sampled_from([EARLIEST, LATEST, 0]), st.integers(EARLIEST, LATEST)
)
any_time = st.one_of(time, st.sampled_from([EARLIEST - 1, LATEST + 1, MIN + 1, MAX - 1]))


@st.composite
def packed(draw: st.DrawFn) -> Columns:
    """Columns as arrays, mostly of one length, and mostly of times that are accepted."""
    # From 64 on, arrays are read in another way.
    rows = draw(st.one_of(st.integers(0, 4), st.integers(62, 66)))
    times = st.one_of(time, time, any_time)

    def column(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        exact = st.lists(of, min_size=rows, max_size=rows)
        return st.one_of(exact, exact, exact, st.lists(of, max_size=rows + 1))

    names = st.sampled_from(["state", "out", "a\0", "é"])
    holds = st.dictionaries(names, column(times), max_size=2)
    optional = {
        "watermark": column(times),
        "oldest_work": column(times),
        "idle": column(st.booleans()),
        "final": column(st.booleans()),
        "records": column(st.integers(0, 3)),
    }
    return draw(st.fixed_dictionaries({}, optional={"holds": holds, **optional}))


def turned(columns: Columns, choose: Any) -> Columns:
    """The same with those columns as bytes that are chosen."""
    found = dict(columns)
    for name, column in columns.items():
        if name == "holds":
            found[name] = {
                one: as_bytes(each) if choose() else each for one, each in column.items()
            }
        elif name != "records" and choose():
            found[name] = as_flags(column) if name in FLAGS else as_bytes(column)
    return found


def read(stage: Stage, columns: Columns, **members: Any) -> Report:
    body = {"token": "t", "columns": columns} | members
    return asyncio.run(read_report("s", stage, json.dumps(body).encode()))


def outcome(stage: Stage, columns: Columns, members: Mapping[str, Any]) -> object:
    """The report as plain values, or the type of the error."""
    try:
        report = read(stage, columns, **members)
    except InvalidReportError as error:
        return type(error)
    plain = {name: getattr(report, name) for name in report.__struct_fields__}
    assert report.hold_columns is not None
    assert all(each.dtype == np.int64 for each in report.hold_columns.values())
    return plain | {
        "promises": np.asarray(report.promises).tolist(),
        "idle": report.idle if report.idle is None else list(report.idle),
        "facts": report.facts if report.facts is None else list(report.facts),
        "hold_columns": {name: each.tolist() for name, each in report.hold_columns.items()},
    }


@pytest.mark.parametrize("stage", STAGES, ids=IDS)
@given(
    columns=packed(),
    members=st.sampled_from([{"epoch": 3}, {"input_watermark": 7}]),
    data=st.data(),
)
@example(columns={"holds": {"state": [MAX]}, "idle": [True]}, members={"epoch": 3}, data=None)
@example(columns={"holds": {"state": [None]}, "idle": [True]}, members={"epoch": 3}, data=None)
def test_bytes_and_arrays_mean_the_same(
    stage: Stage, columns: Columns, members: Mapping[str, Any], data: Any
) -> None:
    members = {} if stage.is_source and "input_watermark" in members else members
    expected = outcome(stage, columns, members)
    assert outcome(stage, turned(columns, lambda: True), members) == expected
    if data is not None:
        some = turned(columns, lambda: data.draw(st.booleans()))
        assert outcome(stage, some, members) == expected


@pytest.mark.parametrize("stage", STAGES, ids=IDS)
def test_the_comparison_sees_accepted_reports(stage: Stage) -> None:
    """If both forms were always refused, it would show nothing."""
    columns = {"holds": {"state": [5, None, MAX]}, "oldest_work": [None, 3, 4]}
    columns |= {"watermark": [7, MAX, None]} if stage.is_source else {}
    report = read(stage, turned(columns, lambda: True), epoch=3)
    assert np.asarray(report.promises).tolist() == (
        [5, MAX, MIN] if stage.is_source else [5, MAX, MAX]
    )
    assert [fact and fact.oldest_work_ms for fact in report.facts or ()] == [None, 3, 4]


def test_null_of_bytes_is_not_a_number_of_an_array() -> None:
    with pytest.raises(InvalidReportError, match=r"columns\.watermark\.0 is -9223372036854775808"):
        read(STAGES[0], {"watermark": [MIN]})
    assert list(read(STAGES[0], {"watermark": as_bytes([None])}).promises) == [MIN]  # type: ignore[arg-type]


def test_holds_are_decoded_once_also_where_ranges_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[str] = []
    times = byte_columns.times

    def counted(where: str, text: str, missing: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        found.append(where)
        return times(where, text, missing)

    monkeypatch.setattr(byte_columns, "times", counted)
    holds = {"state": as_bytes([5, None, MAX]), "out": as_bytes([6, None, 4])}
    report = read(STAGES[1], {"holds": holds, "idle": "AAEA"}, input_watermark=7)
    assert found == ["columns.holds.state", "columns.holds.out"]
    assert np.asarray(report.promises).tolist() == [5, 7, 4]
    assert report.hold_columns is not None
    assert report.hold_columns["state"].tolist() == [5, MAX, MAX]


@pytest.mark.parametrize("time", [5, MAX])
def test_an_idle_range_that_keeps_a_hold_is_named(time: int) -> None:
    holds = {"out": as_bytes([None, None]), "state": as_bytes([None, time])}
    with pytest.raises(
        InvalidReportError, match=rf"columns, entry 1 is idle, and keeps a hold 'state' at {time}:"
    ):
        read(STAGES[1], {"holds": holds, "idle": "AAE="}, epoch=1)


def decoded(text: str) -> bytes | None:
    """Return the bytes of standard base64, which encodes back to the same text; None: other text."""
    try:
        octets = b64decode(text)
    except ValueError:
        return None
    return octets if b64encode(octets).decode() == text else None


near = st.tuples(
    st.binary(max_size=20).map(lambda octets: b64encode(octets).decode()),
    st.integers(0, 30),
    st.sampled_from(["", "=", "==", "\n", " ", "-", "_", "A", "/", "\0", "é", "\u2028", "AAAA"]),
    st.integers(0, 2),
).map(lambda made: made[0][: made[1]] + made[2] + made[0][made[1] + made[3] :])


@given(st.one_of(st.text(max_size=12), near))
@example("AB==")
@example("AAB=")
@example("AA==AA==")
@example("AAAA\n")
@example("====")
@example("AA-_")
@example("\uff21" * 4)
def test_only_standard_base64_of_flags_is_accepted(text: str) -> None:
    expected = decoded(text)
    is_right = expected is not None and set(expected) <= {0, 1}
    if not is_right:
        with pytest.raises(InvalidReportError, match=r"^columns\.idle"):
            flags("columns.idle", text)
        return
    found = flags("columns.idle", text)
    assert bytes(found) == expected
    assert entries("columns.idle", text, FLAG_BYTES) == len(found)


@pytest.mark.parametrize("stage", STAGES, ids=IDS)
@given(text=st.one_of(st.text(max_size=12), near))
def test_no_string_is_an_error_of_the_service(stage: Stage, text: str) -> None:
    for name in ("watermark", "idle", "final", "oldest_work", "records", "pending"):
        outcome(stage, {name: text}, {"epoch": 3})
    outcome(stage, {"holds": {text: text}}, {"epoch": 3})


SHORT = as_bytes([1])[:-4]
REFUSED = {
    ("watermark", "AA-_"): 'columns.watermark is "AA-_": it must be standard base64',
    (
        "watermark",
        SHORT,
    ): f'columns.watermark is "{SHORT}", 6 bytes: it must be 8 bytes for each range',
    (
        "watermark",
        "A" * 99,
    ): f'columns.watermark is "{"A" * 60}"… (99 characters): it must be standard',
    ("watermark", as_bytes([1, 2**62])): f"columns.watermark.1 is {2**62}: it must be milliseconds",
    (
        "oldest_work",
        as_bytes([2**62]),
    ): f"columns.oldest_work.0 is {2**62}: it must be milliseconds",
    ("idle", "AAEC"): "columns.idle.2 is the byte 2: it must be 0 or 1",
    ("final", "A"): 'columns.final is "A": it must be standard base64',
    ("watermark", ""): "columns.watermark is empty",
}


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_an_error_names_the_column_the_value_and_what_is_right(name: str, text: str) -> None:
    columns = {"watermark": as_bytes([1])} if name == "oldest_work" else {}
    with pytest.raises(InvalidReportError) as caught:
        read(STAGES[0], columns | {name: text})
    assert str(caught.value).startswith(REFUSED[name, text])


def test_a_hold_is_named_by_its_component() -> None:
    with pytest.raises(
        InvalidReportError, match=r'^columns\.holds\.state is "x": it must be standard'
    ):
        read(STAGES[1], {"holds": {"state": "x"}}, epoch=1)


def test_columns_of_two_lengths_are_both_named() -> None:
    with pytest.raises(
        InvalidReportError, match=r"columns\.watermark has 1 entries and columns\.idle"
    ):
        read(STAGES[0], {"watermark": as_bytes([1]), "idle": "AAA="})


def test_far_too_many_entries_are_not_decoded() -> None:
    with pytest.raises(PayloadTooLargeError, match="10001 entries"):
        read(STAGES[0], {"watermark": "?" * (len(as_bytes([0] * 10_001)) - 2) + "=="})


def test_a_count_by_length_alone() -> None:
    assert [entries("x", as_bytes([0] * n), TIME_BYTES) for n in range(7)] == list(range(7))


def test_the_documentation_has_both_forms_and_its_examples_are_right() -> None:
    _, components = msgspec.json.schema_components((SourceColumns,))
    members = components["SourceColumns"]["properties"]
    [times] = [form for form in members["oldest_work"]["anyOf"] if form["type"] == "string"]
    [bits] = [form for form in members["idle"]["anyOf"] if form["type"] == "string"]
    for member in (members["holds"]["additionalProperties"], members["watermark"]["anyOf"][0]):
        assert [form["type"] for form in member["anyOf"]] == ["array", "string"]
    columns = {"watermark": times["examples"][0], "idle": bits["examples"][0]}
    report = read(STAGES[0], columns)
    assert np.asarray(report.promises).tolist() == [1_767_225_600_000, 1_767_225_660_000, MIN]
    assert report.idle == [False, False, True]
