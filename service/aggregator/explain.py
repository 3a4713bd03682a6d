"""Explanation of a watermark: the ranges that hold it back, with the reason in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from service.aggregator.columns import Columns, on_columns
from service.aggregator.health import Examiner
from service.aggregator.holders import HoldingRange, following, holding
from service.aggregator.late_ranges import REMEDY, late_ranges, late_text
from service.aggregator.retirements import Retirement, Retirements
from service.aggregator.throttling import Throttling
from service.aggregator.troubles import Trouble, ended_text
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnknownStageError
from service.frontier.columns import counted, lowest
from service.frontier.durations import duration_text
from service.frontier.explain import Reason, Step, path
from service.frontier.graph import Pipeline, StageWatermark, Status
from service.frontier.health import Health, Outcome
from service.frontier.throttle import Advice, GroupLimit
from service.frontier.timestamps import MAX, MIN, iso, time_text
from service.model.jobs import JobView, StageView
from service.model.observations import Instant, StageObservation
from service.model.reports import RangeView


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a stage's watermark."""

    stage: str
    view: StageView
    health: Health
    because: str
    remedy: str | None
    """The next thing to do; None: the cause is not a problem."""
    path: Sequence[tuple[str, Step]]
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
        view, _ = await self._live.snapshot(job)
        pipeline = view.pipeline
        if stage not in pipeline.stages:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        now, observed = await self._live.observe(job, pipeline.ancestors((stage,)))
        now_ms = now.wall_ms
        watermarks = {name: each.watermark for name, each in view.stages.items()}
        least = {name: int(seen.promises.min()) for name, seen in observed.items()}
        throttle = await self._throttling.read(job)
        advice = throttle.shards
        least |= following(pipeline, observed, observed, watermarks, least)
        least |= _paused(pipeline, observed, watermarks, advice)
        way = path(pipeline, stage, watermarks, least)
        root, step = way[-1]
        above = pipeline.ancestors((stage,))
        health = (await self._examiner.healths(view, above, observed, now))[stage]
        retired = await self._retirements.among(job, observed)
        late = await self._late(view, observed)
        if step is Step.FINAL or root not in observed:
            because = f"{stage} is final: nothing more will come" + _retired_text(retired) + late
            cure = REMEDY if late else None
            return Explanation(
                stage, view.stages[stage], health, because, cure, way, [], 0, retired
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
        because = _because(
            stage, root, holders, held.total, watermarks[root].input, output, root_advice, now_ms
        )
        if stage == root and watermarks[stage].status is Status.IDLE:
            because = _idle(stage, holders, held.total) or because
        found = await self._problems(view, root, observed[root], now, holders, held.least)
        if found.cause is not None:
            because = f"{_stands(stage, root, watermarks[stage].output)}: {found.cause}"
        elif holders and holders[0].reason is Reason.BEHIND:
            because += _may_run(root, holders[0].view, throttle.groups)
        own = await self._own_problem(view, stage, root, observed, now)
        besides = "" if own is None else f"; besides, {own.because}"
        because += found.besides + besides + _retired_text(retired) + late
        return Explanation(
            stage,
            view.stages[stage],
            health,
            because,
            found.remedy or (own.remedy if own is not None else REMEDY if late else None),
            way,
            holders,
            held.total,
            retired,
        )

    async def _late(self, view: JobView, observed: Mapping[str, StageObservation]) -> str:
        """Write the late ranges of final stages, as the end of a sentence; empty: none."""
        found = late_ranges(view.stages, observed)
        records = await self._retirements.records(view.name, [(e.stage, e.range) for e in found])
        return "".join(
            f"; {late_text(each, record.because)}"
            for each, record in zip(found, records, strict=True)
        )

    async def _own_problem(
        self,
        view: JobView,
        stage: str,
        root: str,
        observed: Mapping[str, StageObservation],
        now: Instant,
    ) -> Trouble | None:
        """Return the worst problem of the explained stage itself; None: it has none, or is the root.

        The stage waits for its input first. Once the input has come, the stage waits for itself.
        """
        if stage == root or stage not in observed:
            return None
        troubles = await self._examiner.troubles(view, stage, observed[stage], now)
        return troubles[0] if troubles else None

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
            return _Problems(f"its last run {ended_text(seen.end, now.wall_ms)}")
        wanted = _WANTED.get(first, _UNATTENDED) if first else ()
        troubles = await self._examiner.troubles(view, root, seen, now)
        cause = next(
            (each for each in troubles if each.health in wanted and each.lowest <= least), None
        )
        other = next((each for each in troubles if each is not cause), None)
        remedied = cause or other
        return _Problems(
            None if cause is None else cause.because,
            "" if other is None else f"; besides, {other.because}",
            None if remedied is None else remedied.remedy,
        )


@dataclass(frozen=True, slots=True)
class _Problems:
    """The problems of the stage at the end of an explanation's path."""

    cause: str | None = None
    """The root cause, in the words of the job's problems; None: it is not a problem."""
    besides: str = ""
    """The worst of the others, as the end of a sentence."""
    remedy: str | None = None


_NOTED_FROM_MS: Final = 1_000
"""Time for which a promise is unchanged before an explanation mentions it."""

_UNATTENDED: Final = (Health.NO_WORKER, Health.FAILED)
_WANTED: Final[Mapping[Reason, tuple[Health, ...]]] = {
    Reason.NEVER_REPORTED: (Health.SILENT, *_UNATTENDED),
    Reason.IDLE: (),
    Reason.STALLED: (Health.STALLED, *_UNATTENDED),
}
"""Problems that explain a stage, by the reason of its first range: all ranges with the same problem are
counted, not only the first.
"""


def _retired_text(retired: Sequence[Retirement]) -> str:
    """Write the ranges that are not waited for by an operator's declaration; empty: none."""
    if not retired:
        return ""
    first = retired[0]
    more = f", and {len(retired) - 1:,} more" if len(retired) > 1 else ""
    reason = "" if first.because is None else f" ({first.because})"
    return f"; range {first.range} of {first.stage} is retired{reason}{more}"


def _stands(stage: str, root: str, output: int) -> str:
    if stage != root:
        return f"{stage} waits for {root}"
    return (
        f"{stage} has no watermark" if output == MIN else f"{stage} stands at {time_text(output)}"
    )


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


def _because(
    stage: str,
    root: str,
    holders: Sequence[HoldingRange],
    total: int,
    published_input: int,
    published_output: int,
    advice: Mapping[str, Advice],
    now_ms: int,
) -> str:
    if not holders:
        return f"{stage} waits for {root}, whose ranges are changing: retry"
    first = holders[0]
    who = f" (holder {first.view.holder})" if first.view.holder else ""
    where = f"range {first.view.name}{who}"
    phrase = _phrase(first, published_input, advice, now_ms) + _unread(first.view)
    more = f", and {total - 1:,} more" if total > 1 else ""
    if first.reason is Reason.BEHIND and first.view.promise < published_output:
        phrase += f", behind {time_text(published_output)}, before which its rows are late"
    if stage == root:
        return f"{stage} waits for {where}, which {phrase}{more}"
    return f"{stage} waits for {root}, where {where} {phrase}{more}"


def _idle(stage: str, holders: Sequence[HoldingRange], total: int) -> str:
    """Write that a stage is idle; empty: its lowest range is not idle."""
    if not holders or holders[0].reason is not Reason.IDLE:
        return ""
    first = holders[0].view
    who = f" (holder {first.holder})" if first.holder else ""
    more = f", and {total - 1:,} more" if total > 1 else ""
    at = ", and has never promised" if first.promise == MIN else f" at {time_text(first.promise)}"
    return (
        f"{stage} is idle, and stages below wait for it only without an active input: range"
        f" {first.name}{who} is idle"
        f"{at}{more}"
    )


def _may_run(stage: str, shard: RangeView, groups: Sequence[GroupLimit]) -> str:
    """Write the limit of a shard that waits for its group, if known.

    A query that reads ahead waits before the batch that would exceed its group's limit. Such a shard
    gets no advice to pause, so the reason is only visible here.
    """
    for group in groups:
        slow = group.held_by
        is_it = slow is not None and (slow.stage, slow.shard) == (stage, shard.name)
        if stage in group.stages and group.limit is not None and slow is not None and not is_it:
            return (
                f"; its group may run to {time_text(group.limit)}, since shard {slow.shard} of"
                f" {slow.stage} is at {time_text(slow.promise)}"
            )
    return ""


def _phrase(
    holding: HoldingRange, published_input: int, advice: Mapping[str, Advice], now_ms: int
) -> str:
    view = holding.view
    at = "no time" if view.promise == MIN else time_text(view.promise)
    still_ms = now_ms - view.raised_at_ms if view.raised_at_ms else 0
    still = f", unchanged for {duration_text(still_ms)}" if still_ms >= _NOTED_FROM_MS else ""
    oldest_ms = None if view.facts is None else view.facts.oldest_work_ms
    hold_ms = view.note.holds.get(holding.component or "", MIN)
    found = advice.get(view.name)
    work = "" if oldest_ms is None else f"its oldest work has been waiting since {iso(oldest_ms)}"
    phrases = {
        Reason.NEVER_REPORTED: "has never reported"
        + ("" if view.holder else " and is not held by a lease"),
        Reason.ENDED: f"is at {at}, as the last run has left it{still}",
        Reason.LEASE_EXPIRED: "has no worker: it is not held by a lease; its promise stays at"
        f" {at}{still}",
        Reason.WAITING_FOR_COMMIT: f"has reported more than {at} in an epoch that is not committed yet"
        + (work and f", and {work}"),
        Reason.THROTTLED: f"is paused at {at}: {'' if found is None else found.because}",
        Reason.STALLED: f"keeps reporting, while {work}{still}",
        Reason.BUFFERING: f"keeps a hold {holding.component!r} at"
        f" {'' if hold_ms == MIN else time_text(hold_ms)}{still}",
        Reason.NO_INPUT: f"has observed input up to {at}, and"
        f" {'' if published_input == MIN else time_text(published_input)} is published{still}",
        Reason.IDLE: f"is idle at {at}",
        Reason.BEHIND: f"is the lowest, at {at}{still}",
    }
    return phrases[holding.reason]


def _unread(view: RangeView) -> str:
    """Write where a shard's reader is, and its backlog, if reported."""
    backlog = 0 if view.facts is None else view.facts.backlog
    position = f"; it is read up to {view.note.position}" if view.note.position else ""
    if not backlog:
        return position and f"{position}, and has nothing more"
    return f"{position or '; it is read'}, with {backlog:,} records to go"
