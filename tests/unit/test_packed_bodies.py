"""The short way to decode packed reports: it gives what msgspec gives, or nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.api.packed_bodies import decode_columns
from service.api.requests import KeyedReport, SourceReport

REPORTS = [KeyedReport, SourceReport]
numbers = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5)
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
    st.lists(st.one_of(st.none(), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=2))),
    st.dictionaries(st.text(max_size=2), st.integers(0, 9), max_size=2),
)
holds = st.dictionaries(st.text(min_size=1, max_size=3), st.one_of(numbers, odd), max_size=3)
columns = st.fixed_dictionaries(
    {},
    optional={"holds": st.one_of(holds, odd), "watermark": st.one_of(numbers, odd), "idle": odd},
)
bodies = st.fixed_dictionaries(
    {"token": st.one_of(st.text(min_size=1, max_size=3), odd), "columns": st.one_of(columns, odd)},
    optional={"epoch": odd, "input_watermark": odd, "ranges": odd, "other": odd},
)


def shown(report: Any) -> object:
    """A report as plain values."""
    plain = {name: getattr(report, name) for name in report.__struct_fields__}
    found = plain["columns"]
    if found is not None:
        members = {name: getattr(found, name) for name in found.__struct_fields__}
        members["holds"] = {name: list(map(int, each)) for name, each in found.holds.items()}
        if members.get("watermark") is not None:
            members["watermark"] = list(map(int, members["watermark"]))
        plain["columns"] = members
    return plain


@pytest.mark.parametrize("report", REPORTS)
@given(body=bodies)
@example(body={"token": "t", "columns": {"holds": {"state": [[1, 2], []]}}})
@example(body={"token": "t", "columns": {"watermark": [[1], 2]}})
@example(body={"token": "[", "columns": {"watermark": [1, 2]}})
@example(body={"token": "t", "columns": {"holds": {"a": [9], "a\0": [5]}}})
@example(body={"token": "t", "columns": {"watermark": [9], "watermark\0": [5]}})
@example(body={"token": "t", "token\0": "u", "columns": {"watermark": [9]}})
@example(body={"token": "t", "epoch": 5.0, "columns": {"watermark": [1]}})
def test_what_it_accepts_msgspec_reads_alike(report: Any, body: Mapping[str, object]) -> None:
    text = json.dumps(body).encode()
    read = decode_columns(report, text)
    if read is not None:
        assert shown(read) == shown(msgspec.json.decode(text, type=report))


@pytest.mark.parametrize(
    ("report", "sent"),
    [
        (KeyedReport, {"input_watermark": 7, "columns": {"holds": {"a": [1, 2], "b": [3, 4]}}}),
        (KeyedReport, {"epoch": 3, "columns": {"holds": {"a": [2**63 - 1]}}}),
        (SourceReport, {"epoch": 3, "columns": {"watermark": [1, -2]}}),
    ],
)
def test_plain_columns_become_arrays(report: Any, sent: Mapping[str, object]) -> None:
    read = decode_columns(report, json.dumps({"token": "t", **sent}).encode())
    assert read is not None
    assert read.columns is not None
    watermark = getattr(read.columns, "watermark", None)
    arrays = list(read.columns.holds.values()) if watermark is None else [watermark]
    assert arrays
    assert all(isinstance(each, np.ndarray) for each in arrays)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"token":"t","columns":{"watermark":[1]}} x',
        b'\xef\xbb\xbf{"token":"t","columns":{"watermark":[1]}}',
        b'{"token":"t","columns":{"watermark":[1]}}\0',
        b'{"token":"\0","columns":{"watermark":[1]}}',
        b'{"token":"t","columns":{"watermark":[1],"watermark":[2]}}',
        b'{"token":"t","token":"u","columns":{"watermark":[1]}}',
        b'{"token":"t","columns":{"watermark":[1]},"columns":{"watermark":[2]}}',
        b'{"token":"\xff","columns":{"watermark":[1]}}',
        b'{"token":"t","columns":{"watermark":[1.5]}}',
        b'{"token":"t","columns":{"watermark":[9223372036854775808]}}',
        b'{"token":"t","columns":{"watermark":[1180591620717411303424]}}',
        b'{"token":"t","columns":{"watermark":[1],"records":[1]}}',
    ],
)
def test_the_rest_is_left_to_msgspec(text: bytes) -> None:
    assert decode_columns(SourceReport, text) is None


def test_a_body_that_failed_leaves_nothing_behind() -> None:
    """The parser refuses to read on while something refers to what it has read before."""
    for _ in range(3):
        assert decode_columns(SourceReport, b'{"token":"t","columns":{"watermark":["x"]}}') is None
        assert (
            decode_columns(SourceReport, b'{"token":"t","columns":{"watermark":[1]}}') is not None
        )


def test_many_holds_are_left_to_msgspec() -> None:
    many = {f"h{i}": [1] for i in range(17)}
    text = json.dumps({"token": "t", "columns": {"holds": many}}).encode()
    assert decode_columns(KeyedReport, text) is None
    fewer = re.sub(rb'"h16": \[1\]', b'"": [1]', text)
    assert decode_columns(KeyedReport, fewer) is None
