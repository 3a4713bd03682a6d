"""Sentences of explanations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from service.aggregator.holders import HoldingRange
from service.aggregator.retirements import Retirement
from service.frontier.durations import duration_text
from service.frontier.explain import Reason
from service.frontier.health import Health
from service.frontier.throttle import Advice, GroupLimit
from service.frontier.timestamps import MIN, iso, time_text
from service.model.reports import RangeView

_NOTED_FROM_MS: Final = 1_000
"""Time for which a promise is unchanged before an explanation mentions it."""


def retired_text(stage: str, retired: Sequence[Retirement]) -> str:
    """Write the newest of the explained stage's ranges that an operator has retired; empty: none.

    Those of stages above it hold nothing back either, and are named where these stages are explained.
    """
    own = sorted((each for each in retired if each.stage == stage), key=_retired_at, reverse=True)
    if not own:
        return ""
    first = own[0]
    more = more_text(len(own))
    reason = "" if first.because is None else f" ({first.because})"
    return f"; range {first.range} of {first.stage} is retired{reason}{more}"


def _retired_at(of: Retirement) -> int:
    return 0 if of.record is None else of.record.deed.at_ms


def more_text(total: int) -> str:
    """Write the number of ranges beside the one that is named, as the end of a sentence.

    >>> more_text(1), more_text(2), more_text(1_001)
    ('', ', and 1 more range', ', and 1,000 more ranges')
    """
    more = total - 1
    return f", and {more:,} more range{'s' if more > 1 else ''}" if more else ""


def behind_text(holders: Sequence[HoldingRange], output: int) -> str:
    """Write that rows of a stage's lowest range are late, beside a problem; empty: they are not."""
    first = holders[0].view if holders else None
    if first is None or not MIN < first.promise < output:
        return ""
    return (
        f"; range {first.name} is at {time_text(first.promise)}, behind {time_text(output)}, before"
        " which its rows are late"
    )


def waits_text(stage: str, health: Health, root: str) -> str:
    """Write the relation of a stage to the root of its delay. An idle or ended stage does not wait.

    >>> waits_text("k", Health.OK, "s"), waits_text("k", Health.ENDED, "s")
    ('k waits for s', 'k has ended, and is below s')
    """
    rests = {Health.ENDED: "has ended", Health.IDLE: "is idle"}.get(health)
    return f"{stage} waits for {root}" if rests is None else f"{stage} {rests}, and is below {root}"


def stands_text(stage: str, health: Health, root: str, output: int) -> str:
    """Write where a stage stands, as the begin of a sentence that ends with a problem of the root."""
    if stage != root:
        return waits_text(stage, health, root)
    return (
        f"{stage} has no watermark" if output == MIN else f"{stage} stands at {time_text(output)}"
    )


def because_text(
    stage: str,
    health: Health,
    root: str,
    holders: Sequence[HoldingRange],
    total: int,
    published_input: int,
    published_output: int,
    advice: Mapping[str, Advice],
    now_ms: int,
) -> str:
    """Write the reason of a stage's watermark: the first of the ranges that hold back the root."""
    if not holders:
        return f"{waits_text(stage, health, root)}, whose ranges are changing: retry"
    first = holders[0]
    who = f" (holder {first.view.holder})" if first.view.holder else ""
    where = f"range {first.view.name}{who}"
    phrase = _phrase(first, published_input, advice, now_ms) + _unread(first.view)
    more = more_text(total)
    if first.reason is Reason.BEHIND and first.view.promise < published_output:
        phrase += f", behind {time_text(published_output)}, before which its rows are late"
    if stage == root:
        return f"{stage} waits for {where}, which {phrase}{more}"
    return f"{waits_text(stage, health, root)}, where {where} {phrase}{more}"


def idle_text(stage: str, holders: Sequence[HoldingRange], total: int) -> str:
    """Write that a stage is idle; empty: its lowest range is not idle."""
    if not holders or holders[0].reason is not Reason.IDLE:
        return ""
    first = holders[0].view
    who = f" (holder {first.holder})" if first.holder else ""
    more = more_text(total)
    at = ", and has never promised" if first.promise == MIN else f" at {time_text(first.promise)}"
    return (
        f"{stage} is idle, and stages below wait for it only without an active input: range"
        f" {first.name}{who} is idle"
        f"{at}{more}"
    )


def limit_text(stage: str, shard: RangeView, groups: Sequence[GroupLimit]) -> str:
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


def remedies_text(root: str, remedy: str | None, others: Mapping[str, str]) -> str | None:
    """Write the remedies of the root of a delay, and of the other stages on the path to it that have
    problems of their own; None: none has. The first comes without the name of its stage.

    >>> remedies_text("s", "Start it.", {"m": "Mend it.", "k": "Start it."})
    'Start it. For m: Mend it.'
    >>> remedies_text("s", None, {"m": "Mend it."}), remedies_text("s", None, {})
    ('Mend it.', None)
    """
    found = {root: remedy} if remedy else {}
    for stage, other in others.items():
        if other not in found.values():
            found[stage] = other
    first, *rest = found.items() or [("", "")]
    return " ".join([first[1], *(f"For {stage}: {each}" for stage, each in rest)]) or None
