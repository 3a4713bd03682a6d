"""Estimate of the instant when a watermark reaches a value, from the times of its earlier advances.

The only assumption is that the pipeline continues as before. D is the distance that is left, and *a* the
time since the last advance. Consider each earlier advance after which the watermark stood still for at
least *a*, and the time from *a* after it until the watermark was D ahead. These waits are the sample.
Their median is the estimate, and the range between their outer quantiles is the interval.

For a pipeline that gets faster or slower, waits are also taken relative to the pace before them: to the
time that the last D (or the last 4 D) had taken at that moment. The narrowest of the three samples is
used. `benchmarks/eta.py` measures the share of intervals that contain the truth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.frontier.durations import duration_text
from service.frontier.timestamps import LATEST, MAX, MIN

CONFIDENCE: Final = 0.8
"""The intended share of intervals that contain the truth."""

ENOUGH: Final = 50
"""Number of cases from which older history is not read."""

NEWEST: Final = 1_000
"""Number of the newest advances to read, before samples of longer windows."""

WINDOWS_MS: Final = tuple(10 * 60_000 * 6**n for n in range(6))
"""Windows of history: 10 minutes, then six times as much each time, up to 54 days."""

INTERVALS: Final = 500
"""Number of intervals into which the history in a window is divided."""

_NEEDED: Final = 9
"""Least number of cases for an estimate: of 9, the extremes are an interval of 80 %."""

_TAIL: Final = 0.08
"""Part that is left out at each end: less than 10 %, as the sample is chosen to be narrow."""

_USUAL: Final = (0.9, 0.75, 0.5)
_NEGLIGIBLE: Final = 0.1
"""Share of the wait up to which a difference is negligible. If few pauses were as long as the present
pause, it counts as one of these quantiles of the pauses, unless the difference is larger."""

_PACES: Final = (0, 1, 4)
"""Bases of the waits: the time that this multiple of the distance had taken before. 0: absolute."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observation:
    """The last advance in an interval of wall time."""

    after_ms: int
    """Begin of the interval. `MIN`: the beginning of time."""
    at_ms: int
    output: int
    """The stage's output watermark from then on."""
    version: int
    """Rises by one with each advance, including those that were left out."""


@dataclass(frozen=True, slots=True)
class Expected:
    """An estimate of the instant when the output watermark reaches the target."""

    at_ms: int
    between_ms: tuple[int, int]
    """The interval that contains the instant in `CONFIDENCE` of all cases."""
    cases: int
    """Number of disjoint stretches of history in the sample."""
    because: str


@dataclass(frozen=True, slots=True)
class NoEstimate:
    """The reason why an estimate is not possible."""

    because: str


Estimate = Expected | NoEstimate


def settled(found: Estimate) -> bool:
    """Return whether an estimate needs no older history."""
    return isinstance(found, Expected) and found.cases >= ENOUGH


def better(found: Estimate, older: Estimate) -> Estimate:
    """Choose between the estimates of two windows, by the number of cases.

    >>> few, more = Expected(9, (8, 10), 10, "…"), Expected(7, (6, 8), 12, "…")
    >>> better(few, more) is more, better(more, few) is more
    (True, True)
    >>> better(few, NoEstimate("…")) is few, better(NoEstimate("…"), NoEstimate("now")).because
    (True, 'now')
    """
    if isinstance(found, Expected) and not (
        isinstance(older, Expected) and older.cases > found.cases
    ):
        return found
    return older


class Trace:
    """An output watermark over wall time: the instants when it reached its values.

    >>> trace = Trace([Observation(MIN, 0, 100, 1), Observation(0, 10, 200, 2)])
    >>> trace.reached_ms(np.array([100.0, 101.0, 200.0])).tolist()
    [0.0, 10.0, 10.0]

    An advance that was left out is taken to be half way between its neighbours:

    >>> trace = Trace([Observation(MIN, 0, 100, 1), Observation(0, 10, 200, 3)])
    >>> trace.reached_ms(np.array([150.0, 151.0])).tolist()
    [5.0, 10.0]
    """

    def __init__(self, observations: Sequence[Observation]) -> None:
        at_ms: list[int] = []
        output: list[int] = []
        since_ms: list[int] = []
        steps: list[int] = []
        before: Observation | None = None
        for each in observations:
            rises = before is None or each.output > before.output
            if rises and MIN < each.output < MAX:
                at_ms.append(each.at_ms)
                output.append(each.output)
                # The earliest possible instant of an advance that was left out.
                since_ms.append(each.at_ms if before is None else max(before.at_ms, each.after_ms))
                steps.append(1 if before is None else max(each.version - before.version, 1))
            before = each
        self.at_ms: _Floats = np.array(at_ms, dtype=np.float64)
        self.output: _Floats = np.array(output, dtype=np.float64)
        self._since_ms: _Floats = np.array(since_ms, dtype=np.float64)
        self._steps: _Floats = np.array(steps, dtype=np.float64)

    def __len__(self) -> int:
        return len(self.at_ms)

    def reached_ms(self, outputs: _Floats) -> _Floats:
        """Return the instants when it reached these outputs, up to its last one."""
        index = np.searchsorted(self.output, outputs)
        before, after = self.output[np.maximum(index - 1, 0)], self.output[index]
        steps, since_ms = self._steps[index], self._since_ms[index]
        part = np.ones_like(outputs)
        np.divide(outputs - before, after - before, out=part, where=after > before)
        # A watermark advances in steps: it reaches an output with the first step that is as far.
        part = np.minimum(np.ceil(part * steps - 1e-9) / steps, 1.0)
        return since_ms + part * (self.at_ms[index] - since_ms)


def estimate(trace: Trace, now_ms: int, target: int) -> Estimate:
    """Estimate the instant when the output watermark of this history reaches `target`.

    `target` is above the last output of the trace.

    >>> trace = Trace([Observation(MIN, n * 10, n * 60, n) for n in range(30)])
    >>> expected = estimate(trace, now_ms=293, target=1_860)
    >>> expected.at_ms, expected.between_ms, expected.cases
    (310, (310, 310), 14)
    >>> estimate(trace, now_ms=320, target=1_860).because
    'the stage has stood still for 30 ms, and an estimate needs 9 such pauses: fewer in the last 320 ms'
    >>> estimate(trace, now_ms=293, target=9_000).because
    'the history is too short: an estimate needs 9 advances by 7.2 s: fewer in the last 293 ms; at the \
pace so far, the history is long enough in about 1 s'
    >>> estimate(trace, now_ms=393, target=9_000).because.rpartition(": ")[2]
    'fewer in the last 393 ms'
    >>> estimate(Trace([Observation(MIN, 10, 60, 1)]), now_ms=293, target=9_000).because
    'the stage has stood still since its first output watermark, for 283 ms'
    """
    if target == MAX:
        return NoEstimate("the end of a stage cannot be estimated")
    if not len(trace):
        return NoEstimate("the stage does not have an output watermark yet")
    distance = target - trace.output[-1]
    stood_ms = max(now_ms - trace.at_ms[-1], 0.0)
    history_ms = now_ms - trace.at_ms[0]
    if len(trace) == 1:
        return NoEstimate(
            "the stage has stood still since its first output watermark, for"
            f" {duration_text(stood_ms)}"
        )
    completed = trace.output[:-1] + distance <= trace.output[-1]
    if _disjoint(trace.output[:-1][completed], distance) < _NEEDED:
        return NoEstimate(
            f"the history is too short: an estimate needs {_NEEDED} advances by"
            f" {duration_text(distance)}: fewer in the last {duration_text(history_ms)}"
            f"{_enough_text(trace, distance, history_ms, stood_ms)}"
        )
    best = _narrowest(trace, completed, distance, now_ms, stood_ms)
    if best is None:
        return NoEstimate(
            f"the stage has stood still for {duration_text(stood_ms)}, and an estimate needs"
            f" {_NEEDED} such pauses: fewer in the last {duration_text(history_ms)}"
        )
    return Expected(
        at_ms=_instant(now_ms + best.middle_ms),
        between_ms=(_instant(now_ms + best.low_ms), _instant(now_ms + best.high_ms)),
        cases=best.cases,
        because=(
            f"in the last {duration_text(history_ms)} the stage advanced by {duration_text(distance)}"
            f" {best.cases} times; estimated from these durations{_RELATIVE[best.pace]}"
        ),
    )


def _enough_text(trace: Trace, distance: float, history_ms: float, stood_ms: float) -> str:
    """Write the time until the history has enough advances, at its pace so far; empty: never, or the
    stage has stood still for longer than before.

    Meanwhile the history grows, and the distance shrinks as much.
    """
    advanced = trace.output[-1] - trace.output[0]
    left_ms = (_NEEDED * distance - advanced) / (_NEEDED + 1) * history_ms / advanced
    has_stopped = stood_ms > np.diff(trace.at_ms).max()
    if has_stopped or left_ms <= 0 or history_ms + left_ms > WINDOWS_MS[-1]:
        return ""
    return f"; at the pace so far, the history is long enough in about {duration_text(left_ms)}"


_RELATIVE: Final = {
    0: "",
    1: ", relative to the stretch before",
    4: ", relative to the four such stretches before",
}


@dataclass(frozen=True, slots=True)
class _Sample:
    """The quantiles of a sample of waits."""

    low_ms: float
    middle_ms: float
    high_ms: float
    cases: int
    pace: int

    @property
    def width(self) -> float:
        return (self.high_ms - self.low_ms) / max(self.middle_ms, 1.0)


def _narrowest(
    trace: Trace, completed: NDArray[np.bool_], distance: float, now_ms: int, stood_ms: float
) -> _Sample | None:
    """Return the best sample; None: too few pauses were as long as the present one."""
    pauses = np.diff(trace.at_ms)
    usual = np.quantile(pauses[completed], _USUAL)
    for pause_ms in (stood_ms, *usual[usual < stood_ms].tolist()):
        as_long = completed & (pauses >= pause_ms)
        samples = [
            sample
            for pace in _PACES
            if (sample := _sample(trace, as_long, distance, now_ms, pause_ms, pace)) is not None
        ]
        if samples:
            best = min(samples, key=lambda sample: sample.width)
            return best if stood_ms - pause_ms <= _NEGLIGIBLE * best.middle_ms else None
    return None


def _sample(
    trace: Trace,
    chosen: NDArray[np.bool_],
    distance: float,
    now_ms: int,
    stood_ms: float,
    pace: int,
) -> _Sample | None:
    """Return the waits after these advances, relative to a pace; None: too few."""
    first = trace.output[0] + pace * distance
    chosen = chosen & (trace.output[:-1] >= first)
    output = trace.output[:-1][chosen]
    cases = _disjoint(output, distance)
    if cases < _NEEDED or trace.output[-1] < first:
        return None
    from_ms = trace.at_ms[:-1][chosen] + stood_ms
    waits = np.maximum(trace.reached_ms(output + distance) - from_ms, 0.0)
    scale = 1.0
    if pace:
        took = from_ms - trace.reached_ms(output - pace * distance)
        scale = now_ms - trace.reached_ms(trace.output[-1:] - pace * distance)[0]
        waits = waits / np.maximum(took, 1.0)
    # With few cases the quantiles move outwards, to the extremes of nine, as for a sample that is drawn
    # from the same distribution as the truth.
    tail = max((_TAIL * (cases + 1) - 1) / (cases - 1), 0.0)
    low, middle, high = np.quantile(waits, [tail, 0.5, 1 - tail]) * scale
    return _Sample(float(low), float(middle), float(high), cases, pace)


def _disjoint(outputs: _Floats, distance: float) -> int:
    """Count the disjoint stretches of this length that begin at these outputs."""
    # A single value is found in a list in a fifth of the time that an array takes.
    starts: list[float] = outputs.tolist()
    count, index = 0, 0
    while index < len(starts):
        count += 1
        index = bisect_left(starts, starts[index] + distance)
    return count


def _instant(at_ms: float) -> int:
    return int(min(at_ms, LATEST))
