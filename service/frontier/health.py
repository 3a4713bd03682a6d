"""Health: whether a stage's watermark can move, and the first reason why it cannot.

The *status* of a stage is about its watermark alone: a stage that stands still because all of its
workers have died is `active`. The health is about the workers that would have to move the watermark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from service.frontier.columns import Bools, Int64s, weights
from service.frontier.explain import Step, is_stalled, next_step, slowest_inputs
from service.frontier.facts import Facts
from service.frontier.graph import Pipeline, StageWatermark, Status
from service.frontier.timestamps import MAX, MIN


class Outcome(StrEnum):
    """The outcome of a run, in the words of the program that ended it."""

    FINISHED = "finished"
    """The program has done all its work, as a nightly job by day."""
    STOPPED = "stopped"
    """The program was stopped, with work left."""
    FAILED = "failed"


def past(outcome: Outcome) -> str:
    """Return an outcome as the end of a sentence about a run.

    >>> past(Outcome.STOPPED), past(Outcome.FINISHED)
    ('was stopped', 'finished')
    """
    return "was stopped" if outcome is Outcome.STOPPED else outcome.value


class Health(StrEnum):
    """The health of a stage: the first that applies."""

    FINAL = "final"
    """Nothing more will come."""
    UNPUBLISHED = "unpublished"
    """Its ranges have moved on, and the advance cannot be published: a store does not take it."""
    FAILED = "failed"
    """The last run failed."""
    SILENT = "silent"
    """A range has never reported, and all wait for it."""
    NO_WORKER = "no_worker"
    """A range that counts has no current lease while its run goes on, or its last run was stopped."""
    STALLED = "stalled"
    """A range that holds the stage back continues to report, and its oldest work ages."""
    WAITING = "waiting"
    """The stage has followed its inputs, and one of them has one of the five causes above."""
    ENDED = "ended"
    """The last run finished."""
    IDLE = "idle"
    OK = "ok"


class Severity(StrEnum):
    """The severity of a problem."""

    CRITICAL = "critical"
    """The watermark has no worker, or no store, that could move it: it stands until an operator acts."""
    WARNING = "warning"
    """The problem may pass by itself."""


SEVERITIES: Final[Mapping[Health, Severity]] = {
    # Nothing advances, whatever the workers do.
    Health.UNPUBLISHED: Severity.CRITICAL,
    Health.FAILED: Severity.CRITICAL,
    Health.NO_WORKER: Severity.CRITICAL,
    # Also before the first run of a job that was just defined.
    Health.SILENT: Severity.WARNING,
    # Three intervals of reports may be three seconds.
    Health.STALLED: Severity.WARNING,
}
"""The root causes, the worst first, each with its severity."""

_TROUBLED: Final = frozenset({*SEVERITIES, Health.WAITING})

_WORST_FIRST: Final = {
    health: place
    for place, health in enumerate(
        (*SEVERITIES, Health.WAITING, Health.OK, Health.IDLE, Health.ENDED, Health.FINAL)
    )
}


@dataclass(frozen=True, slots=True)
class Vitals:
    """The ranges of a stage that hold it back for a cause of its own, and the end of its last run."""

    silent: int = 0
    """Ranges that have never reported."""
    no_worker: int = 0
    """Ranges that have reported and count, and have no lease."""
    stalled: int = 0
    """Ranges that report without moving, as in `explain.is_stalled`."""
    outcome: Outcome | None = None
    """None: the last run continues, or the stage never had a run."""
    is_unpublished: bool = False
    """True if its ranges have moved on, and the advance cannot be published."""


def silent_ranges(promises: Int64s, idle: Bools, reported_at_ms: Int64s) -> Bools:
    """Return the ranges that have never reported, and that the stage waits for.

    >>> import numpy as np
    >>> promises, idle = np.array([MIN, MIN, MIN, 7]), np.array([False, True, False, False])
    >>> silent_ranges(promises, idle, np.array([0, 0, 5, 0])).tolist()
    [True, False, False, False]
    """
    return (promises == MIN) & ~idle & (reported_at_ms == 0)


def counted_ranges(promises: Int64s, idle: Bools, reported_at_ms: Int64s) -> Bools:
    """Return the ranges that have reported and count: they are neither idle nor final.

    >>> import numpy as np
    >>> promises, idle = np.array([MIN, 7, 7, MAX]), np.array([False, True, False, False])
    >>> counted_ranges(promises, idle, np.array([0, 5, 5, 5])).tolist()
    [False, False, True, False]
    """
    reported = (promises != MIN) | (reported_at_ms != 0)
    return reported & (promises != MAX) & ~idle


def stalled_ranges(
    promises: Int64s, idle: Bools, raised_at_ms: Int64s, facts: Mapping[int, Facts], now_ms: int
) -> list[int]:
    """Return the ranges at a stage's minimum that are stalled, by their own facts.

    >>> import numpy as np
    >>> stuck = Facts(95, 10, oldest_work_ms=40, pending=None, backlog=0, quiet_since_ms=0)
    >>> at = np.array([5, 9]), np.zeros(2, bool), np.array([60, 60])
    >>> stalled_ranges(*at, {0: stuck, 1: stuck}, 100), stalled_ranges(*at, {1: stuck}, 100)
    ([0], [])
    """
    found = [
        index
        for index, each in facts.items()
        if each.oldest_work_ms is not None
        and is_stalled(each, int(raised_at_ms[index]), now_ms)
        and promises[index] != MAX
        and not idle[index]
    ]
    if not found:
        return found
    least = int(weights(promises, idle).min())
    return [index for index in found if promises[index] == least]


NO_VITALS: Final = Vitals()
"""The vitals of a stage without ranges."""


def health(status: Status, vitals: Vitals, *, waits: bool) -> Health:
    """Return the health of a stage. `waits`: see `waits_for_trouble`.

    >>> health(Status.ACTIVE, Vitals(no_worker=24), waits=False)
    <Health.NO_WORKER: 'no_worker'>
    >>> health(Status.ACTIVE, Vitals(no_worker=24, outcome=Outcome.FINISHED), waits=False)
    <Health.ENDED: 'ended'>
    >>> health(Status.ACTIVE, Vitals(no_worker=24, outcome=Outcome.STOPPED), waits=True)
    <Health.NO_WORKER: 'no_worker'>
    >>> health(Status.FINAL, Vitals(outcome=Outcome.FAILED), waits=False)
    <Health.FINAL: 'final'>
    >>> health(Status.UNKNOWN, NO_VITALS, waits=True), health(Status.IDLE, NO_VITALS, waits=False)
    (<Health.WAITING: 'waiting'>, <Health.IDLE: 'idle'>)
    """
    outcome = vitals.outcome
    if status is Status.ACTIVE and outcome is None and not waits and not has_trouble(vitals):
        # The usual case, on every read.
        return Health.OK
    fits = {
        Health.FINAL: status is Status.FINAL,
        Health.UNPUBLISHED: vitals.is_unpublished,
        Health.FAILED: outcome is Outcome.FAILED,
        Health.SILENT: vitals.silent > 0,
        Health.NO_WORKER: outcome is Outcome.STOPPED or (outcome is None and vitals.no_worker > 0),
        Health.STALLED: vitals.stalled > 0,
        Health.WAITING: waits,
        Health.ENDED: outcome is Outcome.FINISHED,
        Health.IDLE: status is Status.IDLE,
        Health.OK: True,
    }
    return next(each for each in Health if fits[each])


def has_trouble(vitals: Vitals) -> bool:
    """Return whether a stage is held back for a cause of its own.

    >>> has_trouble(NO_VITALS), has_trouble(Vitals(stalled=1))
    (False, True)
    """
    return bool(vitals.silent or vitals.no_worker or vitals.stalled or vitals.is_unpublished)


def healths(
    pipeline: Pipeline,
    stages: Iterable[str],
    watermarks: Mapping[str, StageWatermark],
    vitals: Mapping[str, Vitals],
    lowest: Callable[[str], int | None],
) -> Mapping[str, Health]:
    """Return the health of each of these stages, given in an order in which inputs come first.

    `vitals` has the stages with ranges. `lowest` returns a stage's least promise (None: no ranges); it
    is called only for a stage that may be waiting.

    >>> from service.frontier.graph import Stage
    >>> from service.frontier.ranges import KeyLayout, ShardLayout
    >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "k": Stage(("s",), KeyLayout.tile(1))})
    >>> at = {"s": StageWatermark(output=9), "k": StageWatermark(9, 9)}
    >>> seen = {"s": Vitals(no_worker=1), "k": Vitals()}
    >>> [each.value for each in healths(flow, ("s", "k"), at, seen, {"s": 9, "k": 9}.get).values()]
    ['no_worker', 'waiting']
    >>> [each.value for each in healths(flow, ("s", "k"), at, seen, {"s": 9, "k": 7}.get).values()]
    ['no_worker', 'ok']
    """
    found: dict[str, Health] = {}
    for name in stages:
        waits = waits_for_trouble(pipeline, name, watermarks, found, lowest)
        found[name] = health(watermarks[name].status, vitals.get(name, NO_VITALS), waits=waits)
    return found


def waits_for_trouble(
    pipeline: Pipeline,
    stage: str,
    watermarks: Mapping[str, StageWatermark],
    above: Mapping[str, Health],
    lowest: Callable[[str], int | None],
) -> bool:
    """Return whether a stage has followed its inputs, and one of them is in trouble."""
    inputs = pipeline.stages[stage].inputs
    # Inputs are rarely in trouble, and then the promises are not read.
    if not any(above.get(each) in _TROUBLED for each in inputs):
        return False
    awaited = _awaited_inputs(pipeline, stage, watermarks, lowest)
    return any(above.get(each) in _TROUBLED for each in awaited)


def _awaited_inputs(
    pipeline: Pipeline,
    stage: str,
    watermarks: Mapping[str, StageWatermark],
    lowest: Callable[[str], int | None],
) -> list[str]:
    """Return the inputs that a stage waits for; empty: it waits for its own ranges."""
    if next_step(pipeline, stage, watermarks, lowest(stage)) is not Step.INPUT:
        return []
    return slowest_inputs(pipeline.stages[stage].inputs, watermarks)


def worst(found: Iterable[Health]) -> Health:
    """Return the health of a job, given those of its stages; `OK` without stages.

    >>> worst([Health.FINAL, Health.OK]), worst([Health.WAITING, Health.SILENT])
    (<Health.OK: 'ok'>, <Health.SILENT: 'silent'>)
    >>> worst([Health.FINAL, Health.ENDED])
    <Health.ENDED: 'ended'>
    """
    return min(found, key=badness, default=Health.OK)


def badness(of: Health) -> int:
    """Return the rank of a health, the worst first.

    >>> sorted(Health, key=badness)[1:4]
    [<Health.FAILED: 'failed'>, <Health.NO_WORKER: 'no_worker'>, <Health.SILENT: 'silent'>]
    """
    return _WORST_FIRST[of]


def waiting_stages(
    pipeline: Pipeline,
    watermarks: Mapping[str, StageWatermark],
    found: Mapping[str, Health],
    lowest: Callable[[str], int | None],
) -> frozenset[str]:
    """Return the stages that wait for an input in trouble, also those that are in trouble themselves: a
    stage waits for its input first, and for its own ranges once the input has come.

    >>> from service.frontier.graph import Stage
    >>> from service.frontier.ranges import KeyLayout, ShardLayout
    >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "k": Stage(("s",), KeyLayout.tile(1))})
    >>> at, dead = {"s": StageWatermark(output=9), "k": StageWatermark(9, 9)}, Health.NO_WORKER
    >>> sorted(waiting_stages(flow, at, {"s": dead, "k": dead}, {"s": 9, "k": 9}.get))
    ['k']
    """
    return frozenset(
        name for name in found if waits_for_trouble(pipeline, name, watermarks, found, lowest)
    )


def holds_back(
    pipeline: Pipeline,
    root: str,
    watermarks: Mapping[str, StageWatermark],
    waiting: Collection[str],
) -> list[str]:
    """Return the downstream stages that wait for this one, in the pipeline's order.

    `waiting`: see `waiting_stages`.

    >>> from service.frontier.graph import Stage
    >>> from service.frontier.ranges import ShardLayout
    >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "u": Stage(("s",))})
    >>> at = {"s": StageWatermark(output=9), "u": StageWatermark(9, 9)}
    >>> holds_back(flow, "s", at, {"u"})
    ['u']
    """
    held: list[str] = []
    for name in pipeline.order:
        if name in waiting:
            slowest = slowest_inputs(pipeline.stages[name].inputs, watermarks)
            if any(each == root or each in held for each in slowest):
                held.append(name)
    return held


def holds_back_next(
    pipeline: Pipeline,
    root: str,
    watermarks: Mapping[str, StageWatermark],
    held: Collection[str],
) -> list[str]:
    """Return the downstream stages that do not wait for this one yet, in the pipeline's order: another
    input, or a range of their own, is lower. Once this has passed, they wait.

    `held`: the stages that wait for it now, as in `holds_back`. A stage does not wait for an idle input.

    >>> from service.frontier.graph import Stage
    >>> from service.frontier.ranges import ShardLayout
    >>> one = Stage((), ShardLayout.of("0"))
    >>> flow = Pipeline({"s": one, "t": one, "u": Stage(("s", "t")), "v": Stage(("u",))})
    >>> at = {"s": StageWatermark(output=9), "t": StageWatermark(output=5)}
    >>> at |= {"u": StageWatermark(5, 5), "v": StageWatermark(5, 5)}
    >>> holds_back_next(flow, "s", at, ()), holds_back_next(flow, "t", at, ("u", "v"))
    (['u', 'v'], [])
    """
    below = {root}
    for name in pipeline.order:
        counted = (each for each in pipeline.stages[name].inputs if not watermarks[each].idle)
        if watermarks[name].status is not Status.FINAL and not below.isdisjoint(counted):
            below.add(name)
    return [name for name in pipeline.order if name in below - {root, *held}]


def stages_below_ended(
    pipeline: Pipeline,
    watermarks: Mapping[str, StageWatermark],
    found: Mapping[str, Health],
    lowest: Callable[[str], int | None],
) -> frozenset[str]:
    """Return the sound stages that wait for an input whose last run has finished, or for such a stage.
    They have come up to this input. A stage that its own ranges hold back has more to come.

    `found`: the healths, in an order in which inputs come first. `lowest`: see `healths`.

    >>> from service.frontier.graph import Stage
    >>> from service.frontier.ranges import ShardLayout
    >>> flow = Pipeline({"s": Stage((), ShardLayout.of("0")), "u": Stage(("s",)), "v": Stage(("u",))})
    >>> at = dict.fromkeys("suv", StageWatermark(9, 9))
    >>> ended = {"s": Health.ENDED, "u": Health.OK, "v": Health.OK}
    >>> sorted(stages_below_ended(flow, at, ended, {"s": 9}.get))
    ['u', 'v']
    >>> sorted(stages_below_ended(flow, at, ended, {"s": 9, "u": 7}.get))
    []
    >>> failed = {"s": Health.OK, "u": Health.ENDED, "v": Health.FAILED}
    >>> sorted(stages_below_ended(flow, at, failed, {"s": 9}.get))
    []
    """
    below: set[str] = set()
    # The usual case, on every read.
    if Health.ENDED not in found.values():
        return frozenset()
    for name, health in found.items():
        ended = [
            each
            for each in pipeline.stages[name].inputs
            if found.get(each) is Health.ENDED or each in below
        ]
        # Else the promises are not read.
        if health is Health.OK and ended:
            awaited = _awaited_inputs(pipeline, name, watermarks, lowest)
            if not set(ended).isdisjoint(awaited):
                below.add(name)
    return frozenset(below)
