"""The ranges that hold a stage back, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.frontier.explain import Holder, Reason, follows_input, least_hold, reason
from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.throttle import Advice
from service.frontier.timestamps import MAX, MIN
from service.model.observations import StageObservation
from service.model.reports import RangeView


@dataclass(frozen=True, slots=True)
class HoldingRange:
    """A range that holds a stage back."""

    view: RangeView
    reason: Reason
    component: str | None
    """The component of the hold, if the reason is `buffering`."""
    would_be: int | None
    """The stage's output without this range; None: this range counts alone."""


def following(
    pipeline: Pipeline,
    chosen: Mapping[str, StageObservation],
    observed: Mapping[str, StageObservation],
    watermarks: Mapping[str, StageWatermark],
    least: Mapping[str, int],
) -> Mapping[str, int]:
    """Return the chosen stages that lag by their input, although they hold back a part of it, with this
    input: they wait for nothing else.
    """
    found: dict[str, int] = {}
    for name, seen in chosen.items():
        at = watermarks[name].input
        if seen.kept is None or seen.kept.observed_input < at:
            continue
        hold = min(seen.kept.holds.values())
        sources = [
            newest(observed[each])
            for each in pipeline.ancestors((name,))
            if pipeline.stages[each].is_source and each in observed
        ]
        furthest = max(sources, default=MIN)
        if least[name] >= hold and follows_input(furthest=furthest, published_input=at, hold=hold):
            found[name] = at
    return found


def newest(seen: StageObservation) -> int:
    """Return the furthest promise of a source's shards that are not final."""
    return int(seen.promises.max(initial=MIN, where=seen.promises != MAX))


def holding(
    view: RangeView,
    would_be: int | None,
    published_input: int | None,
    advice: Mapping[str, Advice],
    now_ms: int,
    *,
    has_ended: bool = False,
) -> HoldingRange:
    """Return a range with its reason. `published_input`: of its stage; None: a source.
    `has_ended`: its stage's last run has finished.
    """
    waiting = view.waiting_promise
    paused = view.name in advice and advice[view.name].pause
    found = reason(
        Holder(
            view.promise,
            view.reported_at_ms is not None or waiting is not None,
            view.holder is not None,
            has_ended,
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
