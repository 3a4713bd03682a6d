"""Responses about single ranges."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from service.api.responses.common import Count, Instant, Watermark
from service.frontier.graph import Status
from service.frontier.ranges import KeyLayout, Layout
from service.frontier.reports import range_status
from service.frontier.timestamps import iso, to_wire
from service.model.reports import RangeView

Stalled = Annotated[
    bool | UnsetType,
    Meta(
        description="True if reports keep coming, its promise stands still, and its oldest work ages"
    ),
]


class RangeBody(Struct, frozen=True):
    """One range: its promise, its holds and its lease."""

    range: str
    start: Count | None
    end: Count | None
    status: Status
    promise: Watermark
    holds: dict[str, int]
    holder: str | None
    fence: Count | None
    expires_in_ms: Count | None
    reported_at: Annotated[
        Instant | None,
        Meta(description="Instant of its last applied report: with an epoch, the commit"),
    ]
    retired: Annotated[
        bool | UnsetType,
        Meta(description="True if an operator has retired it: it counts as final until it reports"),
    ] = UNSET
    stalled: Stalled = UNSET


class RangesBody(Struct, frozen=True):
    """Ranges of a stage."""

    job: str
    stage: str
    total: Count
    ranges: list[RangeBody]


def range_body(view: RangeView, bounds: tuple[int, int] | None, is_stalled: bool) -> RangeBody:
    """Return a range."""
    return RangeBody(
        range=view.name,
        start=None if bounds is None else bounds[0],
        end=None if bounds is None else bounds[1],
        status=range_status(view.promise, idle=view.idle, retired=view.retired),
        promise=to_wire(view.promise),
        holds=view.note.holds,
        holder=view.holder,
        fence=view.fence,
        expires_in_ms=view.expires_in_ms,
        reported_at=None if view.reported_at_ms is None else iso(view.reported_at_ms),
        retired=view.retired or UNSET,
        stalled=is_stalled or UNSET,
    )


def is_keyed(layout: Layout | None) -> bool:
    """Return whether the ranges are key ranges, with bounds, rather than shards."""
    return isinstance(layout, KeyLayout)
