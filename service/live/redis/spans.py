"""Reports on their way into a script and back: names become indices, and indices names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from service.live import refusals
from service.live.redis import schema
from service.live.redis.packing import blob
from service.live.redis.schema import Plan
from service.model.leases import LostReason
from service.model.reports import Column, RangeNote, Report, Reported

T = TypeVar("T")


_BULK = 64
"""From so many ranges on, what was looked up is worth remembering."""

_REMEMBERED = 256
"""Leases whose last report is remembered."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Ranges that were looked up in a plan."""

    names: Sequence[str]
    order: npt.NDArray[np.int64] | None
    """How they were sorted; None: they were in order."""
    count: int
    """Of those that the layout has."""
    spans: Sequence[Sequence[Any]]
    unknown: Sequence[str]
    """Names that the layout does not have."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A report, with the indices of its ranges worked out."""

    stage: str
    said: Report
    looked: Looked


def asked_of(plan: Plan, stage: str, report: Report) -> Asked:
    """Look the ranges of a report up.

    A worker mostly reports for the same ranges in the same order, and to see that it does is cheaper
    than to look them up.
    """
    names = report.ranges
    if len(names) < _BULK:
        return Asked(stage, report, _look_up(plan, stage, names))
    remembered: dict[Any, Any] = plan.looked
    last: Looked | None = remembered.get((stage, report.token))
    if last is None or last.names != names:
        last = remembered[stage, report.token] = _look_up(plan, stage, names)
        if len(remembered) > _REMEMBERED:
            del remembered[next(iter(remembered))]
    return Asked(stage, report, last)


def _look_up(plan: Plan, stage: str, names: Sequence[str]) -> Looked:
    index = plan.index(stage)
    places = [index.get(name, -1) for name in names]
    at = np.array(places, dtype=np.int64)
    if len(at) == 1 and places[0] >= 0:
        return Looked(names, None, 1, schema.spans_of(at), ())
    unknown = [name for name, i in zip(names, places, strict=True) if i < 0]
    order: npt.NDArray[np.int64] | None = None
    if unknown or bool((np.diff(at) <= 0).any()):
        order = np.argsort(at, kind="stable")
        order = order[at[order] >= 0]
        at = at[order]
    spans = schema.spans_of(at) if len(at) else []
    return Looked(names, order, len(at), spans, unknown)


def report_args(stage: int, asked: Asked) -> list[Any]:
    """Write a report as `report.lua` reads it."""
    said, order, spans = asked.said, asked.looked.order, asked.looked.spans
    promises = schema.as_column(_sorted(said.promises, order))
    return [
        stage,
        said.token,
        False if said.epoch is None else schema.epoch_text(said.epoch),
        False if said.observed_input is None else float(said.observed_input),
        said.capped_at_commit,
        spans,
        _by_span(spans, promises.astype("<f8").tobytes()),
        False if said.idle is None else _picked(said.idle, order),
        False if said.notes is None else [_note(note) for note in _picked(said.notes, order)],
    ]


def _by_span(spans: Sequence[Sequence[Any]], promises: bytes) -> list[msgspec.Raw]:
    parts: list[msgspec.Raw] = []
    start = 0
    for span in spans:
        end = start + 8 * (len(span[2]) if len(span) == 3 else span[3] - span[2] + 1)
        parts.append(blob(promises[start:end]))
        start = end
    return parts


def _sorted(column: Column, order: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    values = np.asarray(column, dtype=np.int64)
    return values if order is None else values[order]


def _picked(values: Sequence[T], order: npt.NDArray[np.int64] | None) -> list[T]:
    return list(values) if order is None else [values[i] for i in order.tolist()]


def _note(note: RangeNote | None) -> msgspec.Raw | bool:
    return blob(msgspec.json.encode(note)) if note else False


def reported_of(
    plan: Plan, asked: Asked, result: Sequence[Any], *, ahead: bool
) -> Reported | Exception:
    """Read what became of a report. `ahead`: its stage agrees on more than is published."""
    match result:
        case ["ok", accepted, behind, rejected, ttl_ms, view, counts]:
            return Reported(
                accepted=int(accepted),
                behind=[plan.name(asked.stage, index) for index in behind or ()],
                rejected=_rejected(plan, asked, rejected or ()),
                expires_in_ms=int(ttl_ms),
                view=schema.read_view(view),
                advances=ahead and bool(counts),
            )
        case _:
            return _refusal(plan, asked, result)


def _refusal(plan: Plan, asked: Asked, result: Sequence[Any]) -> Exception:
    stage, said = asked.stage, asked.said
    refusal: Exception
    match result:
        case ["none", rejected]:
            refusal = refusals.none_covered(stage, _rejected(plan, asked, rejected or ()))
        case ["lease-lost", "unknown"]:
            refusal = refusals.unknown_lease(stage)
        case ["lease-lost", reason]:
            refusal = refusals.lost_lease(reason)
        case ["stale-run", ours, theirs]:
            refusal = refusals.stale_run(stage, int(ours), int(theirs))
        case ["stale-epoch", last]:
            refusal = refusals.stale_epoch(stage, said.epoch or 0, int(last))
        case ["input-ahead", view]:
            published = schema.read_view(view).watermark.input
            refusal = refusals.input_ahead(stage, said.observed_input or 0, published)
        case ["epochs-waiting", count]:
            refusal = refusals.epochs_waiting(stage, int(count))
        case _:
            raise AssertionError(result)
    return refusal


def _rejected(
    plan: Plan, asked: Asked, rejected: Iterable[Sequence[Any]]
) -> list[tuple[str, LostReason]]:
    """Put what was rejected in the order of the report."""
    reasons: dict[str, LostReason] = dict.fromkeys(asked.looked.unknown, "unknown")
    for index, reason in rejected:
        reasons[plan.name(asked.stage, index)] = reason
    if not reasons:
        return []
    return [(name, reasons[name]) for name in asked.said.ranges if name in reasons]
