"""Responses to reports."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from service.api.responses.common import Count, Watermark
from service.api.responses.throttle import AdviceBody
from service.frontier.timestamps import to_wire
from service.model.jobs import StageView
from service.model.leases import LostReason


class RejectedBody(Struct, frozen=True):
    """A range that the token does not cover, or no longer covers."""

    range: str
    reason: LostReason


class StageWatermarkBody(Struct, frozen=True):
    """The watermarks of the reported stage."""

    input_watermark: Watermark
    output_watermark: Watermark
    version: Count


class ReportedBody(Struct, frozen=True, omit_defaults=True):
    """The result of a report."""

    accepted: Count
    behind: list[str]
    rejected: list[RejectedBody]
    expires_in_ms: Count
    watermark: StageWatermarkBody
    throttle: (
        Annotated[
            dict[str, AdviceBody],
            Meta(description="Throttle advice for the reported shards; left out if empty"),
        ]
        | UnsetType
    ) = UNSET


def stage_watermark_body(view: StageView) -> StageWatermarkBody:
    """Return the watermarks of a reported stage."""
    return StageWatermarkBody(
        to_wire(view.watermark.input), to_wire(view.watermark.output), view.version
    )
