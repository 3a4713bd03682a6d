"""Durations as text, in the service and in the agent, by the vectors of `tests/data/durations.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.frontier import durations
from spark_agent import times

TEXTS = json.loads((Path(__file__).parent.parent / "data" / "durations.json").read_text())["texts"]


@pytest.mark.parametrize("vector", TEXTS, ids=lambda vector: vector["text"])
def test_a_duration_has_one_text_everywhere(vector: dict[str, int | str]) -> None:
    length_ms = int(vector["ms"])
    assert durations.duration_text(length_ms) == vector["text"]
    assert times.duration_text(length_ms) == vector["text"]


def test_a_part_of_a_millisecond_is_cut() -> None:
    assert durations.duration_text(250.9) == "250 ms"
