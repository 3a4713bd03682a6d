"""Sketches of what is pending: checked before they are read, and percentiles against exact ones."""

from __future__ import annotations

import random
from typing import Any

import datasketches
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.frontier.errors import InvalidSketchError
from service.frontier.sketches import check_sketch, quantiles
from service.frontier.timestamps import EARLIEST, LATEST
from tests.support.sketches import sketch_of

times = st.integers(EARLIEST, LATEST)
parts = st.lists(st.lists(times, max_size=40), min_size=1, max_size=8)


def exact(pending: list[int], percentage: int) -> int:
    """The largest time such that at least so much is at it or later."""
    largest = -(-percentage * len(pending) // 100)
    return sorted(pending, reverse=True)[largest - 1]


@given(parts, st.lists(st.integers(1, 99), min_size=1, max_size=5, unique=True))
def test_percentiles_of_few_are_exact_however_they_are_spread(
    spread: list[list[int]], percentages: list[int]
) -> None:
    pending = [time for part in spread for time in part]
    found = quantiles(map(sketch_of, spread), percentages)
    if not pending:
        assert found is None
    elif len(pending) <= 200:
        assert found == [exact(pending, percentage) for percentage in percentages]


@given(parts)
def test_percentiles_are_ordered(spread: list[list[int]]) -> None:
    found = quantiles(map(sketch_of, spread), [1, 33, 66, 99])
    assert found is None or found == sorted(found, reverse=True)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_percentiles_of_many_are_within_the_error_of_the_sketch(seed: int, ranges: int) -> None:
    rng = random.Random(seed)
    pending = [rng.randrange(10**9) for _ in range(20_000)]
    spread = [pending[k::ranges] for k in range(ranges)]
    found = quantiles(map(sketch_of, spread), [10, 33, 66, 90])
    assert found is not None
    for percentage, at in zip([10, 33, 66, 90], found, strict=True):
        share = sum(time >= at for time in pending) / len(pending)
        # The error that the library states for k = 200 with 99 % confidence is 1.33 %.
        assert abs(share - percentage / 100) < 2 * 0.0133


@pytest.mark.parametrize("k", [8, 200, 4_096])
@pytest.mark.parametrize("count", [0, 1, 2, 8, 200, 1_000, 5_000])
def test_every_sketch_of_the_library_is_accepted(k: int, count: int) -> None:
    sketch: Any = datasketches.kll_doubles_sketch(k)  # pyright: ignore[reportAttributeAccessIssue]
    for time in range(count):
        sketch.update(float(time))
    assert check_sketch(sketch.serialize()) == count


@settings(max_examples=500)
@given(
    st.sampled_from([0, 1, 2, 50, 500, 3_000]),
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 40),
)
def test_damaged_bytes_are_refused_or_harmless(
    count: int, changes: list[tuple[int, int]], cut: int
) -> None:
    """The library ends the process over damaged bytes: what is accepted must be safe to read."""
    packed = bytearray(sketch_of(range(count)))
    for at, value in changes:
        packed[at % len(packed)] = value
    damaged = bytes(packed[: len(packed) - cut % len(packed)])
    try:
        check_sketch(damaged)
    except InvalidSketchError:
        return
    quantiles([damaged, sketch_of([1, 2, 3])], [33, 66])
