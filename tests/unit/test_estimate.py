"""Estimates, against simulated pipelines that can be asked what came true."""

from __future__ import annotations

import time

import numpy as np
import pytest

from service.frontier.estimate import (
    Expected,
    NoEstimate,
    Observation,
    Trace,
    estimate,
)
from service.frontier.timestamps import EARLIEST, LATEST, MAX, MIN
from tests.support.pipelines import PIPELINES, questions


@pytest.mark.parametrize("name", PIPELINES)
def test_the_truth_lies_in_the_interval_as_often_as_it_says(name: str) -> None:
    """World and question are drawn by seed: the test passes always, or never."""
    asked = questions(name, worlds=20, each=40)
    covered: list[bool] = []
    for question in asked:
        found = question.run.estimate(question.now_ms, question.target)
        if isinstance(found, Expected):
            low_ms, high_ms = found.between_ms
            assert question.now_ms <= low_ms <= found.at_ms <= high_ms
            covered.append(low_ms <= question.reached_ms <= high_ms)
    assert len(covered) >= 0.85 * len(asked), "what says nothing is never wrong"
    assert 0.75 <= np.mean(covered) <= 0.90


def trace(*points: tuple[int, int]) -> Trace:
    return Trace([Observation(MIN, at, output, n) for n, (at, output) in enumerate(points, 1)])


EVERY_SECOND = [(1_000 * n, 10_000 * n) for n in range(100)]


def test_it_is_never_expected_in_the_past() -> None:
    known = trace(*EVERY_SECOND)
    for now_ms in (99_000, 99_999):
        found = estimate(known, now_ms, 990_001)
        assert isinstance(found, Expected)
        assert found.between_ms[0] >= now_ms
    # By a clock that is behind the one that dated the history.
    assert isinstance(estimate(known, 98_000, 990_001), Expected)


def test_a_stall_that_is_longer_than_any_is_not_explained_away() -> None:
    known = trace(*EVERY_SECOND)
    found = estimate(known, 99_000 + 60_000, 1_000_000)
    assert isinstance(found, NoEstimate)
    assert found.because.startswith("the stage has stood still for 1 min,")


def test_a_pause_that_is_a_little_longer_than_most_is_none_to_speak_of() -> None:
    known = trace(*EVERY_SECOND)
    near, far = (estimate(known, 99_000 + 1_200, 990_000 + d) for d in (10_000, 100_000))
    assert isinstance(near, NoEstimate)
    assert isinstance(far, Expected)


def test_what_only_changed_the_input_is_no_advance() -> None:
    known = [Observation(MIN, at, output, 2 * n) for n, (at, output) in enumerate(EVERY_SECOND, 1)]
    between = [Observation(MIN, o.at_ms + 500, o.output, o.version + 1) for o in known]
    both = sorted([*known, *between], key=lambda each: each.version)
    assert estimate(Trace(both), 99_700, 1_100_000) == estimate(Trace(known), 99_700, 1_100_000)


@pytest.mark.parametrize(
    "known",
    [
        Trace([]),
        trace((5, MIN)),
        trace((5, MIN), (6, 100)),
        trace((5, 100)),
        trace((5, EARLIEST), (6, LATEST - 1)),
        trace((5, 100), (5, 200)),
    ],
)
def test_of_little_history_nothing_is_said(known: Trace) -> None:
    assert isinstance(estimate(known, 10, LATEST), NoEstimate)


def test_the_end_of_time_is_nobody_s_guess() -> None:
    found = estimate(trace(*EVERY_SECOND), 99_500, MAX)
    assert found == NoEstimate("the end of a stage cannot be estimated")


def test_all_at_once_is_no_division_by_zero() -> None:
    known = trace(*((5, n) for n in range(100)))
    found = estimate(known, 5, 101)
    assert isinstance(found, NoEstimate | Expected)


def test_an_estimate_takes_linear_time() -> None:
    """A thousand advances, as many as are ever looked at, cost no more than their number."""

    def took(count: int) -> float:
        known = trace(*((1_000 * n, 10_000 * n) for n in range(count)))
        runs: list[float] = []
        for _ in range(5):
            began = time.process_time()
            for _ in range(10):
                estimate(known, 1_000 * (count - 1) + 500, 10_000 * count + 5)
            runs.append(time.process_time() - began)
        return min(runs)

    assert took(10_000) < 100 * took(100)
