"""Explanation of a watermark: the ranges that hold it back, with the reason in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from service.aggregator.columns import Columns, on_columns
from service.aggregator.explanation_texts import (
    because_text,
    behind_text,
    idle_text,
    limit_text,
    remedies_text,
    retired_text,
    stands_text,
)
from service.aggregator.health import Examiner, unpublished_stages
from service.aggregator.holders import HoldingRange, following, holding
from service.aggregator.late_ranges import REMEDY, late_ranges, late_text
from service.aggregator.retirements import Retirement, Retirements
from service.aggregator.throttling import Throttling
from service.aggregator.troubles import Trouble, TroubledRanges, ended_text, unpublished_trouble
from service.consistency.failures import PublishFailure
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnknownStageError
from service.frontier.columns import counted, lowest
from service.frontier.explain import Reason, Step, path, slowest_inputs
from service.frontier.graph import Pipeline, StageWatermark, Status
from service.frontier.health import Health, Outcome
from service.frontier.throttle import Advice
from service.frontier.timestamps import MAX, MIN
from service.model.jobs import JobView, StageView
from service.model.observations import Instant, StageObservation


@dataclass(frozen=True, slots=True)
class PathStep:
    """A stage on the path from the explained one to the root of its delay."""

    stage: str
    step: Step
    health: Health


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a stage's watermark."""

    stage: str
    view: StageView
    health: Health
    because: str
    remedy: str | None
    """The next thing to do; None: the cause is not a problem."""
    path: Sequence[PathStep]
    holders: Sequence[HoldingRange]
    """The ranges that hold back the last stage of the path, the longest-holding first."""
    holders_total: int
    retired: Sequence[Retirement]
    """The retired ranges of the stage and of the stages above it."""


class Explainer:
    """Explains watermarks."""

    def __init__(
        self,
        live: RecoveringLiveStore,
        throttling: Throttling,
        examiner: Examiner,
        retirements: Retirements,
    ) -> None:
        self._live = live
        self._retirements = retirements
        self._throttling = throttling
        self._examiner = examiner

    async def explain(self, job: str, stage: str, limit: int) -> Explanation:
        """Explain a stage's watermark. Raises `UnknownStageError`."""
        view, now, observed = await self._read(job, stage)
        failure: PublishFailure | None = None
        if ahead := unpublished_stages(view, observed):
            # An advance may be on its way, also that of a report to another replica.
            failure = await self._live.publish(job, ahead, now.wall_ms)
            view, now, observed = await self._read(job, stage)
            # Without a failure, those are advances since.
            ahead = unpublished_stages(view, observed) if failure else frozenset[str]()
        pipeline = view.pipeline
        now_ms = now.wall_ms
        watermarks = {name: each.watermark for name, each in view.stages.items()}
        least = {name: int(seen.promises.min()) for name, seen in observed.items()}
        throttle = await self._throttling.read(job)
        advice = throttle.shards
        least |= following(pipeline, observed, observed, watermarks, least)
        least |= _paused(pipeline, observed, watermarks, advice)
        way = path(pipeline, stage, watermarks, least, ahead)
        root, step = way[-1]
        above = pipeline.ancestors((stage,))
        healths = await self._examiner.healths(view, above, observed, now)
        steps = [PathStep(name, step, healths[name]) for name, step in way]
        health = healths[stage]
        retired = await self._retirements.among(job, observed)
        late, lasting = await self._late(view, observed)
        if step is Step.FINAL or root not in observed:
            because = f"{stage} is final: nothing more will come"
            because += retired_text(stage, retired) + late
            cure = remedies_text(stage, None, lasting)
            return Explanation(
                stage, view.stages[stage], health, because, cure, steps, [], 0, retired
            )
        others = await self._other_problems(view, way, observed, now)
        if step is Step.UNPUBLISHED and failure is not None:
            trouble = unpublished_trouble(TroubledRanges(root, observed[root], now), failure)
            because = (
                f"{stands_text(stage, health, root, watermarks[stage].output)}: {trouble.because}"
            )
            because += _besides(others) + retired_text(stage, retired) + late
            cure = remedies_text(root, trouble.remedy, _remedies(others, lasting))
            return Explanation(
                stage, view.stages[stage], health, because, cure, steps, [], 0, retired
            )
        is_source = pipeline.stages[root].is_source
        held = await on_columns(partial(_held, is_source=is_source, limit=limit), observed[root])
        views = await self._live.range_views(job, root, held.chosen)
        root_advice = advice.get(root, {})
        output = watermarks[root].output
        end = observed[root].end
        holders = [
            holding(
                each,
                None if held.without is None else max(held.without, output),
                None if is_source else watermarks[root].input,
                root_advice,
                now_ms,
                has_ended=end is not None and end.outcome is Outcome.FINISHED,
            )
            for each in views
        ]
        because = because_text(
            stage,
            health,
            root,
            holders,
            held.total,
            watermarks[root].input,
            output,
            root_advice,
            now_ms,
        )
        if stage == root and watermarks[stage].status is Status.IDLE:
            because = idle_text(stage, holders, held.total) or because
        found = await self._problems(view, root, observed[root], now, holders, held.least)
        if found.cause is not None:
            because = f"{stands_text(stage, health, root, watermarks[stage].output)}: {found.cause}"
            because += behind_text(holders, output)
        elif holders and holders[0].reason is Reason.BEHIND:
            because += limit_text(root, holders[0].view, throttle.groups)
        because += found.besides + _besides(others) + retired_text(stage, retired) + late
        return Explanation(
            stage,
            view.stages[stage],
            health,
            because,
            remedies_text(root, found.remedy, _remedies(others, lasting)),
            steps,
            holders,
            held.total,
            retired,
        )

    async def _read(
        self, job: str, stage: str
    ) -> tuple[JobView, Instant, Mapping[str, StageObservation]]:
        """Read a job, and then the ranges of a stage and those above it."""
        view, _ = await self._live.snapshot(job)
        if stage not in view.pipeline.stages:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        now, observed = await self._live.observe(job, view.pipeline.ancestors((stage,)))
        return view, now, observed

    async def _late(
        self, view: JobView, observed: Mapping[str, StageObservation]
    ) -> tuple[str, Mapping[str, str]]:
        """Write the late ranges of final stages, as the end of a sentence (empty: none), and the
        remedies by stage.
        """
        found = late_ranges(view.stages, observed)
        reasons = await self._retirements.ended(view.name, [(e.stage, e.range) for e in found])
        texts = map(late_text, found, reasons)
        return "".join(f"; {each}" for each in texts), {each.stage: REMEDY for each in found}

    async def _other_problems(
        self,
        view: JobView,
        way: Sequence[tuple[str, Step]],
        observed: Mapping[str, StageObservation],
        now: Instant,
    ) -> Mapping[str, Trouble]:
        """Return the worst problem of each stage of the path below its root, and of inputs that are as
        low as those on the path, from the root down, but of few stages.

        A stage waits for its lowest inputs first. Once they have come, the stage waits for itself.
        """
        found: dict[str, Trouble] = {}
        watermarks = {name: each.watermark for name, each in view.stages.items()}
        names: list[str] = []
        for (below, _), (above, _) in reversed([*pairwise(way)]):
            lowest_ones = slowest_inputs(view.pipeline.stages[below].inputs, watermarks)
            names += [each for each in lowest_ones if each != above]
            names.append(below)
        for name in dict.fromkeys(names):
            if name in observed and len(found) < _PROBLEMS:
                troubles = await self._examiner.troubles(view, name, observed[name], now)
                if troubles:
                    found[name] = troubles[0]
        return found

    async def _problems(
        self,
        view: JobView,
        root: str,
        seen: StageObservation,
        now: Instant,
        holders: Sequence[HoldingRange],
        least: int,
    ) -> _Problems:
        """Find the problem that is the root cause, and the worst of the others.

        A range with a problem may stand at the stage's minimum together with sound ones. The sound ones
        are listed first if they have held the stage for longer, and the problem is the root cause. A
        problem ahead of the minimum does not hold the stage yet, and may be the next to hold it.
        """
        first = holders[0].reason if holders else None
        if first is Reason.ENDED and seen.end is not None:
            return _Problems(f"the last run of {root} {ended_text(seen.end, now.wall_ms)}")
        wanted = _WANTED.get(first, _UNATTENDED) if first else ()
        troubles = await self._examiner.troubles(view, root, seen, now)
        cause = next(
            (each for each in troubles if each.health in wanted and each.lowest <= least), None
        )
        other = next((each for each in troubles if each is not cause), None)
        remedied = cause or other
        return _Problems(
            None if cause is None else cause.cause,
            "" if other is None else f"; besides, {other.cause}",
            None if remedied is None else remedied.remedy,
        )


def _besides(others: Mapping[str, Trouble]) -> str:
    return "".join(f"; besides, {each.cause}" for each in others.values())


def _remedies(others: Mapping[str, Trouble], lasting: Mapping[str, str]) -> Mapping[str, str]:
    return {name: each.remedy for name, each in others.items()} | dict(lasting)


@dataclass(frozen=True, slots=True)
class _Problems:
    """The problems of the stage at the end of an explanation's path."""

    cause: str | None = None
    """The root cause, in the words of the job's problems; None: it is not a problem."""
    besides: str = ""
    """The worst of the others, as the end of a sentence."""
    remedy: str | None = None


_PROBLEMS: Final = 3
"""Number of problems of other stages than the root that an explanation has."""

_UNATTENDED: Final = (Health.NO_WORKER, Health.FAILED)
_WANTED: Final[Mapping[Reason, tuple[Health, ...]]] = {
    Reason.NEVER_REPORTED: (Health.SILENT, *_UNATTENDED),
    Reason.IDLE: (),
    Reason.STALLED: (Health.STALLED, *_UNATTENDED),
}
"""Problems that explain a stage, by the reason of its first range: all ranges with the same problem are
counted, not only the first.
"""


def _paused(
    pipeline: Pipeline,
    observed: Mapping[str, StageObservation],
    watermarks: Mapping[str, StageWatermark],
    advice: Mapping[str, Mapping[str, Advice]],
) -> Mapping[str, int]:
    """Return the stages whose next epoch waits because all shards that they read should pause, with the
    input that they will observe with this epoch.
    """
    found: dict[str, int] = {}
    for name, seen in observed.items():
        at, inputs = watermarks[name].input, pipeline.stages[name].inputs
        waits = seen.kept is not None and seen.kept.observed_input < at and bool(seen.owners.all())
        if waits and all(_is_paused(observed.get(each), advice.get(each, {})) for each in inputs):
            found[name] = at
    return found


def _is_paused(source: StageObservation | None, advice: Mapping[str, Advice]) -> bool:
    """Return whether all shards of a source that are not final should pause."""
    if source is None or not advice:
        return False
    paused = sum(each.pause for each in advice.values())
    return paused >= int((source.promises != MAX).sum())


@dataclass(frozen=True, slots=True)
class _Held:
    chosen: Sequence[int]
    """Some of the ranges, by their index, the longest-holding first."""
    total: int
    least: int
    without: int | None
    """Promise of the other ranges, if one of these is left out; None: none, or without others."""


def _held(seen: Columns, *, is_source: bool, limit: int) -> _Held:
    """Find the ranges at a stage's minimum: of the ranges that it waits for, or else of all."""
    values = counted(seen.promises, seen.idle, is_keyed=not is_source)
    least = int(values.min())
    at = values == least
    indices = np.flatnonzero(at)
    if len(indices) > 1:
        without: int | None = least
    else:
        others = int(values[~at].min(initial=MAX))
        # Without an active one, the least of all promises counts (see `agree`).
        least_of_all = int(seen.promises[~at].min(initial=MAX))
        without = None if at.all() else others if others < MAX else least_of_all
    longest = lowest(seen.raised_at_ms.take(indices), limit)
    return _Held(
        indices[longest].tolist(), len(indices), least, None if without == MIN else without
    )
