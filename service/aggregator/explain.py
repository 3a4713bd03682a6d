"""Explaining a watermark: which ranges hold it back, and why, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from service.aggregator.columns import Columns, on_columns
from service.aggregator.throttling import Throttling
from service.errors import UnknownStageError
from service.frontier.columns import lowest, weights
from service.frontier.durations import duration_text
from service.frontier.explain import (
    Holder,
    Reason,
    Step,
    follows_input,
    least_hold,
    path,
    reason,
)
from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.throttle import Advice, GroupLimit
from service.frontier.timestamps import MAX, MIN, iso
from service.live_jobs import LiveJobs
from service.model.jobs import StageView
from service.model.observations import StageObservation
from service.model.reports import RangeView


@dataclass(frozen=True, slots=True)
class HoldingRange:
    """A range that holds a stage back."""

    view: RangeView
    reason: Reason
    component: str | None
    """The component whose hold it is, if it is buffering."""
    would_be: int | None
    """Where the stage's output would be without this range; None: no other counts."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a stage's watermark is where it is."""

    stage: str
    view: StageView
    because: str
    path: Sequence[tuple[str, Step]]
    holders: Sequence[HoldingRange]
    """The ranges that hold the last stage of the path back, the longest-holding first."""
    holders_total: int


class Explainer:
    """Explains watermarks."""

    def __init__(self, live: LiveJobs, throttling: Throttling) -> None:
        self._live = live
        self._throttling = throttling

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
        asked = throttle.shards
        least |= _following(pipeline, observed, watermarks, least)
        least |= _paused(pipeline, observed, watermarks, asked)
        way = path(pipeline, stage, watermarks, least)
        root, step = way[-1]
        if step is Step.FINAL or root not in observed:
            return Explanation(
                stage, view.stages[stage], f"{stage} is final: nothing more will come", way, [], 0
            )
        is_source = pipeline.stages[root].is_source
        held = await on_columns(partial(_held, is_source=is_source, limit=limit), observed[root])
        views = await self._live.range_views(job, root, held.chosen)
        advice = asked.get(root, {})
        output = watermarks[root].output
        holders = [
            _holding(
                each,
                None if held.without is None else max(held.without, output),
                None if is_source else watermarks[root].input,
                advice,
                now_ms,
            )
            for each in views
        ]
        because = _because(stage, root, holders, held.total, watermarks[root].input, advice, now_ms)
        if holders and holders[0].reason is Reason.BEHIND:
            because += _may_run(root, holders[0].view, throttle.groups)
        return Explanation(stage, view.stages[stage], because, way, holders, held.total)


def _following(
    pipeline: Pipeline,
    observed: Mapping[str, StageObservation],
    watermarks: Mapping[str, StageWatermark],
    least: Mapping[str, int],
) -> Mapping[str, int]:
    """Return the stages that lag by their input, although they keep back something of it, with that
    input: it is all that they wait for.
    """
    found: dict[str, int] = {}
    for name, seen in observed.items():
        at = watermarks[name].input
        if seen.kept is None or seen.kept.observed_input < at:
            continue
        hold = min(seen.kept.holds.values())
        sources = [
            _newest(observed[each])
            for each in pipeline.ancestors((name,))
            if pipeline.stages[each].is_source and each in observed
        ]
        furthest = max(sources, default=MIN)
        if least[name] >= hold and follows_input(furthest=furthest, published_input=at, hold=hold):
            found[name] = at
    return found


def _paused(
    pipeline: Pipeline,
    observed: Mapping[str, StageObservation],
    watermarks: Mapping[str, StageWatermark],
    asked: Mapping[str, Mapping[str, Advice]],
) -> Mapping[str, int]:
    """Return the stages whose next epoch waits since all shards that they read are to pause, with their
    input: they will observe it with that epoch.
    """
    found: dict[str, int] = {}
    for name, seen in observed.items():
        at, inputs = watermarks[name].input, pipeline.stages[name].inputs
        waits = seen.kept is not None and seen.kept.observed_input < at and bool(seen.owners.all())
        if waits and all(_is_paused(observed.get(each), asked.get(each, {})) for each in inputs):
            found[name] = at
    return found


def _is_paused(source: StageObservation | None, asked: Mapping[str, Advice]) -> bool:
    """Whether all shards of a source that are not final are to pause."""
    if source is None or not asked:
        return False
    paused = sum(each.pause for each in asked.values())
    return paused >= int((source.promises != MAX).sum())


def _newest(seen: StageObservation) -> int:
    """Return the furthest promise of a source's shards, but for the final ones."""
    return int(seen.promises.max(initial=MIN, where=seen.promises != MAX))


@dataclass(frozen=True, slots=True)
class _Held:
    chosen: Sequence[int]
    """Some of the ranges, by their index, the longest-holding first."""
    total: int
    without: int | None
    """What the others have promised, if one of these is left out; None: nothing, or there is none."""


def _held(seen: Columns, *, is_source: bool, limit: int) -> _Held:
    """Find the ranges at a stage's minimum: those that are waited for, or if there are none, all."""
    counted = weights(seen.promises, seen.idle) if is_source else seen.promises
    if is_source and int(counted.min()) == MAX and bool(seen.idle.any()):
        counted = seen.promises
    least = int(counted.min())
    at = counted == least
    indices = np.flatnonzero(at)
    if len(indices) > 1:
        without: int | None = least
    else:
        others = counted[~at]
        # A shard that is final and idle is final.
        counts = ~(seen.idle & (seen.promises != MAX))[~at] | (not is_source)
        without = int(others.min()) if bool(counts.any()) else None
    longest = lowest(seen.raised_at_ms.take(indices), limit)
    return _Held(indices[longest].tolist(), len(indices), None if without == MIN else without)


def _holding(
    view: RangeView,
    would_be: int | None,
    published_input: int | None,
    advice: Mapping[str, Advice],
    now_ms: int,
) -> HoldingRange:
    waiting = view.waiting_promise
    paused = view.name in advice and advice[view.name].pause
    found = reason(
        Holder(
            view.promise,
            view.reported_at_ms is not None or waiting is not None,
            view.holder is not None,
            waiting is not None and waiting > view.promise,
            paused,
            view.idle,
            view.note.holds,
            view.facts,
            view.raised_at_ms,
        ),
        published_input=published_input,
        now_ms=now_ms,
    )
    component = least_hold(view.note.holds) if found is Reason.BUFFERING else None
    return HoldingRange(view, found, component, would_be)


def _because(
    stage: str,
    root: str,
    holders: Sequence[HoldingRange],
    total: int,
    published_input: int,
    advice: Mapping[str, Advice],
    now_ms: int,
) -> str:
    if not holders:
        return f"{stage} waits for {root}, whose ranges are changing: ask again"
    first = holders[0]
    who = f" (holder {first.view.holder})" if first.view.holder else ""
    where = f"range {first.view.name}{who}"
    phrase = _phrase(first, published_input, advice, now_ms)
    more = f", and {total - 1:,} more" if total > 1 else ""
    if stage == root:
        return f"{stage} waits for {where}, which {phrase}{more}"
    return f"{stage} waits for {root}, where {where} {phrase}{more}"


def _may_run(stage: str, shard: RangeView, groups: Sequence[GroupLimit]) -> str:
    """Say how far a shard may run that waits for its group, as far as that is known.

    A query that looks ahead waits before the batch that would take it past its group's limit. It is not
    asked to pause then, and nothing else tells of it.
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
    still = (
        f", unchanged for {duration_text(max(0, now_ms - view.raised_at_ms))}"
        if view.raised_at_ms
        else ""
    )
    oldest_ms = None if view.facts is None else view.facts.oldest_work_ms
    hold_ms = view.note.holds.get(holding.component or "", MIN)
    asked = advice.get(view.name)
    phrases = {
        Reason.NEVER_REPORTED: "has never reported"
        + ("" if view.holder else ", and nobody holds a lease on it"),
        Reason.LEASE_EXPIRED: "has no worker: nobody holds a lease on it; its promise stays at"
        f" {at}{still}",
        Reason.WAITING_FOR_COMMIT: f"has reported more than {at} in an epoch that is not committed yet",
        Reason.THROTTLED: f"is paused at {at}: {'' if asked is None else asked.because}",
        Reason.STALLED: "keeps reporting, while its oldest work has been waiting since"
        f" {'' if oldest_ms is None else iso(oldest_ms)}{still}",
        Reason.BUFFERING: f"keeps a hold {holding.component!r} at"
        f" {'' if hold_ms == MIN else time_text(hold_ms)}{still}",
        Reason.NO_INPUT: f"has observed input up to {at}, and"
        f" {'' if published_input == MIN else time_text(published_input)} is published{still}",
        Reason.IDLE: f"is idle at {at}",
        Reason.BEHIND: f"is the lowest, at {at}{still}",
    }
    return phrases[holding.reason]


def time_text(at_ms: int) -> str:
    """Write an event time for people.

    >>> time_text(0), time_text(MAX)
    ('1970-01-01T00:00:00Z', 'the end of time')
    """
    return "the end of time" if at_ms == MAX else iso(at_ms).replace(".000Z", "Z")
