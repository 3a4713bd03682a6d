"""Responses to reports."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from service.api.range_names import written
from service.api.responses.common import Count, Watermark
from service.api.responses.leases import DeniedBody, denied_bodies
from service.api.responses.throttle import AdviceBody
from service.frontier.timestamps import to_wire
from service.model.jobs import StageView
from service.model.leases import LostReason
from service.model.reports import Reported


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
    token: str | UnsetType = UNSET
    """The token of a claimed lease, and the members of a claim's result below, only of a report with a
    claim."""
    fence: Count | UnsetType = UNSET
    granted: list[str] | UnsetType = UNSET
    denied: list[DeniedBody] | UnsetType = UNSET
    denied_total: Count | UnsetType = UNSET
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


async def reported_body(
    reported: Reported, view: StageView, advice: dict[str, AdviceBody] | UnsetType
) -> ReportedBody:
    """Return the result of a report, and of its claim."""
    body = ReportedBody(
        reported.accepted,
        list(reported.behind),
        [RejectedBody(one, reason) for one, reason in reported.rejected],
        reported.expires_in_ms,
        stage_watermark_body(view),
        throttle=advice,
    )
    grant = reported.grant
    if grant is None:
        return body
    return structs.replace(
        body,
        token=grant.token,
        fence=grant.fence,
        granted=await written(grant.granted),
        denied=denied_bodies(grant.denied),
        denied_total=grant.denied_total if grant.denied_total > len(grant.denied) else UNSET,
    )
