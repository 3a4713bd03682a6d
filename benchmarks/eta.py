"""`python -m benchmarks.eta [--worlds 20] [--questions 60]`: how good estimates are.

Each pipeline is simulated in virtual time: no Spark, no clock. At random moments it is asked when the
watermark will have advanced by some distance, from one step to a twentieth of the run, and the answer is
compared with when it did. `in it` is the share of answers in whose 80 % interval the truth lies, and
`width` is the interval's width relative to the wait (medians). Three others are asked the same:

- *mean rate*: the distance by the rate of the window, give or take 20 %
- *last stretch*: as long as the last such distance took, give or take 20 %
- *bootstrap*: advances in blocks of ten, drawn at random until the distance is covered, 200 times
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from service.frontier.estimate import ENOUGH, WINDOWS_MS, Expected, Trace
from tests.support.pipelines import PIPELINES, Question, questions

Interval = tuple[float, float]
"""Waits in ms."""


def window_of(question: Question) -> Trace:
    """The history that has the distance often enough."""
    trace = Trace([])
    for window_ms in WINDOWS_MS:
        trace = Trace(question.run.history(question.now_ms - window_ms, question.now_ms))
        distance = question.target - question.run.output_at(question.now_ms)
        if len(trace) > 1 and trace.output[-1] - trace.output[0] >= ENOUGH * distance:
            break
    return trace


def estimated(question: Question) -> Interval | None:
    found = question.run.estimate(question.now_ms, question.target)
    if not isinstance(found, Expected):
        return None
    low_ms, high_ms = found.between_ms
    return low_ms - question.now_ms, high_ms - question.now_ms


def mean_rate(question: Question) -> Interval | None:
    trace = window_of(question)
    if len(trace) < 2:
        return None
    rate = (trace.output[-1] - trace.output[0]) / (question.now_ms - trace.at_ms[0])
    wait_ms = (question.target - trace.output[-1]) / rate
    return 0.8 * wait_ms, 1.2 * wait_ms


def last_stretch(question: Question) -> Interval | None:
    trace = window_of(question)
    before = 2 * trace.output[-1:] - question.target
    if before[0] < trace.output[0]:
        return None
    wait_ms = question.now_ms - float(trace.reached_ms(before)[0])
    return 0.8 * wait_ms, 1.2 * wait_ms


def bootstrap(question: Question) -> Interval | None:
    trace = window_of(question)
    if len(trace) < 30:
        return None
    random = np.random.default_rng(question.now_ms)
    pauses, gains = np.diff(trace.at_ms), np.diff(trace.output)
    distance = question.target - trace.output[-1]
    blocks = int(distance / gains.mean() / 10 * 3) + 5
    starts = random.integers(0, len(gains) - 10, (200, blocks))
    index = (starts[:, :, None] + np.arange(10)).reshape(200, -1)
    covered = np.cumsum(gains[index], axis=1) >= distance
    steps = np.where(covered.any(axis=1), covered.argmax(axis=1), index.shape[1] - 1)
    waits = np.cumsum(pauses[index], axis=1)[np.arange(200), steps]
    waits = np.maximum(waits - (question.now_ms - trace.at_ms[-1]), 0.0)
    low, high = np.quantile(waits, [0.1, 0.9])
    return float(low), float(high)


METHODS: Sequence[tuple[str, Callable[[Question], Interval | None]]] = (
    ("this", estimated),
    ("mean rate", mean_rate),
    ("last stretch", last_stretch),
    ("bootstrap", bootstrap),
)


@dataclass(frozen=True)
class Score:
    answered: float
    covered: float
    width: float


def score(method: Callable[[Question], Interval | None], asked: Sequence[Question]) -> Score:
    covered: list[bool] = []
    widths: list[float] = []
    for question in asked:
        found = method(question)
        if found is not None:
            wait_ms = question.reached_ms - question.now_ms
            covered.append(found[0] <= wait_ms <= found[1])
            widths.append((found[1] - found[0]) / max(wait_ms, 1.0))
    if not covered:
        return Score(0.0, float("nan"), float("nan"))
    return Score(len(covered) / len(asked), float(np.mean(covered)), float(np.median(widths)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eta",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--worlds", type=int, default=20, help="seeds of each pipeline")
    parser.add_argument("--questions", type=int, default=60, help="for each of them")
    parser.add_argument("--first-seed", type=int, default=0, help="others make other worlds")
    options = parser.parse_args()
    print("| pipeline | asked | answered | in it | width | " + " | ".join(
        f"{name}: in it, width" for name, _ in METHODS[1:]) + " |")  # fmt: skip
    print("|---|---|---|---|---|" + "---|" * (len(METHODS) - 1))
    seconds, total = 0.0, 0
    for name in PIPELINES:
        asked = questions(name, options.worlds, options.questions, first_seed=options.first_seed)
        began = time.process_time()
        ours = score(estimated, asked)
        seconds, total = seconds + time.process_time() - began, total + len(asked)
        others = [score(method, asked) for _, method in METHODS[1:]]
        print(
            f"| {name} | {len(asked)} | {ours.answered:.0%} | {ours.covered:.0%} | {ours.width:.2f} | "
            + " | ".join(f"{each.covered:.0%}, {each.width:.2f}" for each in others)
            + " |",
            flush=True,
        )
    print(f"{1_000 * seconds / total:.1f} ms for each, with the simulated history")


if __name__ == "__main__":
    main()
