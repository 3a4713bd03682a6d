"""Responses with past watermarks, and estimates."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from service.aggregator import (
    PastWatermark,
)
from service.api.responses.common import Count, Instant, Watermark
from service.frontier.estimate import CONFIDENCE, Estimate, Expected, NoEstimate
from service.frontier.graph import Status
from service.frontier.timestamps import MAX, iso, to_wire

_Rows = Annotated[
    Count | None,
    Meta(
        description="Rows that the ranges had reported at this change, as in the watermark. They start"
        " over at a loss of the live store. null: unknown, or not a change, as at `from`",
    ),
]


class PastWatermarkBody(Struct, frozen=True):
    """The watermarks of a stage, from an instant of the wall clock on."""

    at: Annotated[
        int, Meta(description="Moment of the wall clock, in ms since the Unix epoch, UTC")
    ]
    input_watermark: Watermark
    output_watermark: Watermark
    status: Status
    records: _Rows
    late: _Rows


class HistoryBody(Struct, frozen=True):
    """Past watermarks of a stage, by wall time: the state at `from`, then each change."""

    points: list[PastWatermarkBody]


class EtaBody(Struct, frozen=True):
    """Estimate of the instant when the output watermark reaches an event time, or a reason instead."""

    at: Annotated[int, Meta(description="The requested event time")]
    reached: bool
    expected_at: Instant | None
    between: (
        Annotated[
            list[Instant],
            Meta(
                min_length=2,
                max_length=2,
                description="Interval that contains the instant in the share `confidence` of all cases",
            ),
        ]
        | None
    )
    confidence: Annotated[float, Meta(ge=0, le=1)]
    because: str


def past_watermark_body(past: PastWatermark) -> PastWatermarkBody:
    """Return a point of a history."""
    watermark, counts = past.watermark, past.counts
    return PastWatermarkBody(
        past.at_ms,
        to_wire(watermark.input),
        to_wire(watermark.output),
        watermark.status,
        None if counts is None else counts.records,
        None if counts is None else counts.late,
    )


def eta_body(target: int, found: Estimate | None, output: int) -> EtaBody:
    """Return an estimate; None: the given output watermark has reached the target."""
    match found:
        case None:
            where = "at the end of time" if output == MAX else f"at {iso(output)}"
            because = f"the output watermark is {where}"
            return EtaBody(target, True, None, None, CONFIDENCE, because)
        case NoEstimate(because):
            return EtaBody(target, False, None, None, CONFIDENCE, because)
        case Expected(at_ms, (low_ms, high_ms), _, because):
            between = [iso(low_ms), iso(high_ms)]
            return EtaBody(target, False, iso(at_ms), between, CONFIDENCE, because)
