"""The checker of the job that is changed all the time: what it must refuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.changes import check_changes, new_history
from tests.chaos.history import Action, Exchange

SPEC = {"generation": 2, "layout_version": 3, "stages": {"s": {"shards": ["0"]}}}
SHOWN = {
    "stage": "s",
    "generation": 2,
    "version": 5,
    "input_watermark": None,
    "output_watermark": 10,
    "status": "active",
}


def violations(*told: tuple[Action, dict[str, Any], str]) -> list[str]:
    history = new_history()
    for at, (action, answer, etag) in enumerate(told):
        history.add(
            Exchange(
                who="c", replica="a", action=action, job="job", start_ns=10 * at, end_ns=10 * at + 5,
                stage="s" if action == "watermark" else None, status=200, answer=answer, etag=etag,
            )
        )  # fmt: skip
    return [violation.rule for violation in check_changes(history)]


def test_what_is_right_is_not_refused():
    later = {**SPEC, "layout_version": 1, "generation": 3}
    higher = {**SHOWN, "version": 6, "output_watermark": 11}
    lower = {**SHOWN, "generation": 3, "version": 1, "output_watermark": 3}
    told: list[tuple[Action, dict[str, Any], str]] = [
        ("define", SPEC, "2-3"), ("spec", SPEC, "2-3"), ("watermark", SHOWN, "2-5"),
        ("watermark", higher, "2-6"), ("reset", later, "3-1"), ("watermark", lower, "3-1"),
    ]  # fmt: skip
    assert violations(*told) == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [({"layout_version": 2}, "numbers rise"), ({"generation": 1}, "numbers rise")],
)
def test_a_layout_that_goes_back_is_refused(change: dict[str, int], rule: str):
    assert rule in violations(("spec", SPEC, "2-3"), ("spec", {**SPEC, **change}, "other"))


def test_two_specifications_under_one_etag_are_refused():
    other = {**SPEC, "stages": {"s": {"shards": ["1"]}}}
    assert violations(("spec", SPEC, "2-3"), ("spec", other, "2-3")) == ["one value each"]


def test_two_watermarks_under_one_etag_are_refused():
    other = {**SHOWN, "output_watermark": 11}
    told = violations(("watermark", SHOWN, "2-5"), ("watermark", other, "2-5"))
    assert "one value each" in told


def test_a_watermark_that_goes_back_within_a_generation_is_refused():
    lower = {**SHOWN, "version": 6, "output_watermark": 9}
    told = violations(("watermark", SHOWN, "2-5"), ("watermark", lower, "2-6"))
    assert "no step back" in told
