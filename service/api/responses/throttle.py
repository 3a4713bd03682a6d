"""Responses about throttling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from service.aggregator import (
    version_of,
)
from service.frontier.throttle import Advice, ThrottleView
from service.frontier.timestamps import to_wire


class AdviceBody(Struct, frozen=True):
    """Throttle advice for a shard. The worker of the shard may ignore it."""

    pause: Annotated[
        bool, Meta(description="Read nothing: its promise is ahead of its group's limit")
    ]
    until: Annotated[
        int | None,
        Meta(description="The furthest event time (ms) that it may run to; null: without a limit"),
    ]
    rate: Annotated[
        float, Meta(description="The fraction of its usual rate at which it should read, 0.1 to 1")
    ]
    because: str


class HeldByBody(Struct, frozen=True):
    """The slowest shard of a group."""

    stage: str
    range: str


class GroupBody(Struct, frozen=True):
    """Limit of the shards of a group of sources."""

    stages: list[str]
    limit: Annotated[
        int | None,
        Meta(
            description="The slowest shard's promise plus `max_drift_ms`; null: without a limit, since"
            " no shard has promised, or all that have are idle or final"
        ),
    ]
    held_by: HeldByBody | None


class ThrottleBody(Struct, frozen=True):
    """Throttle advice for the shards of a job."""

    version: Annotated[int, Meta(ge=0, description="Changes with any other member; the ETag")]
    groups: list[GroupBody]
    shards: Annotated[
        dict[str, dict[str, AdviceBody]],
        Meta(description="By stage and shard: only shards that should pause or slow down"),
    ]


def advice_bodies(advice: Mapping[str, Advice]) -> dict[str, AdviceBody]:
    """Return throttle advice for shards."""
    return {
        shard: AdviceBody(
            one.pause, None if one.until is None else to_wire(one.until), one.rate, one.because
        )
        for shard, one in advice.items()
    }


def throttle_body(view: ThrottleView) -> ThrottleBody:
    """Return the throttle advice for the shards of a job."""
    groups = [
        GroupBody(
            list(group.stages),
            group.limit,
            None if group.held_by is None else HeldByBody(group.held_by.stage, group.held_by.shard),
        )
        for group in view.groups
    ]
    shards = {stage: advice_bodies(advice) for stage, advice in view.shards.items() if advice}
    return ThrottleBody(version_of(view), groups, shards)
