"""Explanation of a watermark: from the requested stage to the ranges that hold it back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from service.frontier.facts import Facts
from service.frontier.graph import Pipeline, StageWatermark, Status
from service.frontier.timestamps import MAX, MIN

STALLED_AFTER = 3
"""Report intervals without a move, after which a range that has old work is stalled."""


class Reason(StrEnum):
    """The reason why a range holds its stage back: the first that applies."""

    NEVER_REPORTED = "never_reported"
    ENDED = "ended"
    """The range has no holder, since the last run of its stage has finished."""
    LEASE_EXPIRED = "lease_expired"
    """The range has no holder: its lease has expired, or it was never claimed."""
    WAITING_FOR_COMMIT = "waiting_for_commit"
    """The range has reported a higher promise, in an epoch that is not committed."""
    THROTTLED = "throttled"
    STALLED = "stalled"
    """Reports continue, the promise does not move, and the oldest work ages."""
    BUFFERING = "buffering"
    """A hold is the minimum of the range."""
    NO_INPUT = "no_input"
    """The range has observed less input than is published."""
    IDLE = "idle"
    BEHIND = "behind"
    """The range is the lowest, without another reason."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Facts about a range that holds its stage back."""

    promise: int
    has_reported: bool
    """True if any of its reports was applied, or waits."""
    is_leased: bool
    has_ended: bool
    """True if the last run of its stage has finished."""
    better_waits: bool
    """True if a higher promise waits in an epoch."""
    is_throttled: bool
    is_idle: bool
    holds: Mapping[str, int]
    facts: Facts | None
    raised_at_ms: int | None
    """The instant of the last move of its promise."""


def least_hold(holds: Mapping[str, int]) -> str | None:
    """Return the component that holds a range back most.

    >>> least_hold({"state": 5, "output": 3}), least_hold({}) is None
    ('output', True)
    """
    return min(holds, key=lambda name: (holds[name], name), default=None)


def reason(holder: Holder, *, published_input: int | None, now_ms: int) -> Reason:
    """Return the reason why a range holds its stage back.

    `published_input`: of its stage; None: a source.

    >>> from dataclasses import replace
    >>> held = Holder(5, True, True, False, False, False, False, {"state": 5}, None, 90)
    >>> reason(held, published_input=9, now_ms=100)
    <Reason.BUFFERING: 'buffering'>
    >>> reason(replace(held, holds={}), published_input=9, now_ms=100)
    <Reason.NO_INPUT: 'no_input'>

    An idle range needs neither a report nor a worker.

    >>> idle = Holder(MIN, False, False, False, False, False, True, {}, None, None)
    >>> reason(idle, published_input=None, now_ms=100)
    <Reason.IDLE: 'idle'>
    """
    component = least_hold(holder.holds)
    fits = {
        Reason.NEVER_REPORTED: holder.promise == MIN
        and not holder.has_reported
        and not holder.is_idle,
        Reason.ENDED: holder.has_ended and not holder.is_leased,
        Reason.LEASE_EXPIRED: not holder.is_leased and not holder.is_idle,
        Reason.WAITING_FOR_COMMIT: holder.better_waits,
        Reason.THROTTLED: holder.is_throttled,
        Reason.STALLED: is_stalled(holder.facts, holder.raised_at_ms, now_ms),
        Reason.BUFFERING: component is not None and holder.holds[component] <= holder.promise,
        Reason.NO_INPUT: published_input is not None and holder.promise < published_input,
        Reason.IDLE: holder.is_idle,
        Reason.BEHIND: True,
    }
    return next(each for each in Reason if fits[each])


def is_stalled(facts: Facts | None, raised_at_ms: int | None, now_ms: int) -> bool:
    """Return whether reports continue, the promise has not moved for some of them, and old work ages.

    >>> facts = Facts(95, 10, oldest_work_ms=40, pending=None, backlog=0, quiet_since_ms=0)
    >>> is_stalled(facts, raised_at_ms=60, now_ms=100), is_stalled(facts, raised_at_ms=80, now_ms=100)
    (True, False)
    """
    if facts is None or facts.interval_ms is None or facts.oldest_work_ms is None:
        return False
    patience_ms = STALLED_AFTER * max(facts.interval_ms, 1)
    return (
        now_ms - facts.reported_at_ms <= patience_ms
        and now_ms - (raised_at_ms or 0) >= patience_ms
        and facts.oldest_work_ms < facts.reported_at_ms
    )


def follows_input(*, furthest: int, published_input: int, hold: int) -> bool:
    """Return whether a stage with this hold lags by its input rather than by the hold.

    Both are lags: the input's behind the furthest upstream source, and the hold's behind the input. The
    larger one is the answer. A hold of a millisecond does not count: rows at exactly the input watermark
    may still come out.

    >>> follows_input(furthest=100, published_input=40, hold=30)
    True
    >>> follows_input(furthest=100, published_input=90, hold=30)
    False
    >>> follows_input(furthest=100, published_input=100, hold=99)
    True
    """
    kept = published_input - hold
    return kept <= 1 or furthest - published_input > kept


class Step(StrEnum):
    """The cause for which a stage on the path waits."""

    INPUT = "input"
    RANGES = "ranges"
    FINAL = "final"
    UNPUBLISHED = "unpublished"
    """Its ranges have moved on, and the advance cannot be published."""


def path(
    pipeline: Pipeline,
    stage: str,
    views: Mapping[str, StageWatermark],
    lowest: Mapping[str, int],
    unpublished: Collection[str] = (),
) -> list[tuple[str, Step]]:
    """Return the path from a stage to the root of its delay, each stage with its cause.

    `lowest` is the least promise of each stage that has ranges. A stage waits for its ranges as long as
    one of them has promised less than the stage's input: the input has arrived, and the ranges hold it.
    Else the stage waits for its slowest input. The stages `unpublished`, whose advance cannot be
    published, wait for neither.

    >>> from service.frontier.graph import Stage
    >>> from service.frontier.ranges import KeyLayout, ShardLayout
    >>> keyed = Stage(("s",), KeyLayout.tile(1))
    >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "k": keyed, "u": Stage(("k",))})
    >>> at = {"s": StageWatermark(output=9), "k": StageWatermark(9, 5), "u": StageWatermark(5, 5)}
    >>> [str(step) for _, step in path(flow, "u", at, {"s": 9, "k": 5})]
    ['input', 'ranges']
    >>> [str(step) for _, step in path(flow, "u", at, {"s": 9, "k": 9}, unpublished={"k"})]
    ['input', 'unpublished']
    """
    found: list[tuple[str, Step]] = []
    while True:
        step = next_step(pipeline, stage, views, lowest.get(stage))
        if stage in unpublished:
            step = Step.UNPUBLISHED
        found.append((stage, step))
        if step is not Step.INPUT:
            return found
        stage = slowest_input(pipeline.stages[stage].inputs, views)


def next_step(
    pipeline: Pipeline, stage: str, views: Mapping[str, StageWatermark], lowest: int | None
) -> Step:
    """Return the cause for which a stage waits, given the least promise of its ranges (None: no ranges).

    >>> from service.frontier.graph import Stage
    >>> from service.frontier.ranges import KeyLayout, ShardLayout
    >>> keyed = Stage(("s",), KeyLayout.tile(1))
    >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "k": keyed})
    >>> at = {"k": StageWatermark(9, 5)}
    >>> str(next_step(flow, "k", at, 5)), str(next_step(flow, "k", at, 9))
    ('ranges', 'input')
    """
    at = views[stage]
    if at.status is Status.FINAL:
        return Step.FINAL
    keeps_back = lowest is not None and lowest < at.input
    is_source = not pipeline.stages[stage].inputs
    return Step.RANGES if is_source or keeps_back or at.input == MAX else Step.INPUT


def slowest_input(inputs: tuple[str, ...], views: Mapping[str, StageWatermark]) -> str:
    """Return the input that the stage waits for: the lowest that is not idle, else the lowest.

    >>> views = {"a": StageWatermark(output=3, idle=True), "b": StageWatermark(output=9)}
    >>> slowest_input(("a", "b"), views)
    'b'
    """
    return min(slowest_inputs(inputs, views))


def slowest_inputs(inputs: tuple[str, ...], views: Mapping[str, StageWatermark]) -> list[str]:
    """Return the inputs that the stage waits for: several, if they are equally low.

    >>> views = {name: StageWatermark(output=at) for name, at in (("a", 3), ("b", 9), ("c", 3))}
    >>> slowest_inputs(("a", "b", "c"), views)
    ['a', 'c']
    """
    active = [name for name in inputs if not views[name].idle and views[name].output != MAX]
    idle = [name for name in inputs if views[name].idle]
    counted = active or idle or inputs
    least = min(views[name].output for name in counted)
    return [name for name in counted if views[name].output == least]
