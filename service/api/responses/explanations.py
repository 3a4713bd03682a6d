"""Responses that explain a watermark."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from service.aggregator import (
    Explanation,
    HoldingRange,
    PathStep,
    Retirement,
)
from service.api.responses.common import Count, Instant, Watermark
from service.frontier.explain import Reason, Step
from service.frontier.graph import Status
from service.frontier.health import Health
from service.frontier.timestamps import iso, to_wire


class StepBody(Struct, frozen=True):
    """A stage on the path to the ranges that hold a watermark back."""

    stage: str
    reason: Annotated[
        Step,
        Meta(
            description="`input`: it waits for the next stage of the path; `ranges`: for its own ranges;"
            " `final`: for nothing; `unpublished`: for a store that does not take its advance"
        ),
    ]
    health: Annotated[
        Health | UnsetType,
        Meta(
            description="`idle` or `ended`, of a stage above the explained one: the stage does not wait,"
            " and its watermark stands for this reason. Absent: another health"
        ),
    ] = UNSET


class HolderBody(Struct, frozen=True):
    """A range that holds a watermark back."""

    stage: str
    range: str
    reason: Annotated[
        Reason,
        Meta(
            description="The first that applies: `never_reported`; `ended` (without a lease, since the"
            " last run has finished); `lease_expired` (without a lease); `waiting_for_commit` (it has"
            " reported more, in an epoch that is not committed); `throttled` (it should pause); "
            "`stalled`"
            " (it continues to report, its promise stands still, and its oldest work ages); `buffering`"
            " (a hold is its promise); `no_input` (it has observed less input than is published); "
            "`idle`;"
            " `behind` (the lowest, without another reason)"
        ),
    ]
    component: Annotated[str | None, Meta(description="The hold's component, if `buffering`")]
    promise: Watermark
    would_be: Annotated[
        int | None,
        Meta(description="The stage's output without this range; null: no other range counts"),
    ]
    holder: str | None
    fence: Count | None
    expires_in_ms: Count | None
    reported_at: Instant | None
    since: Annotated[Instant | None, Meta(description="Instant of the last move of its promise")]
    backlog: Annotated[
        Count | UnsetType, Meta(description="A shard: records that are not read yet, if reported")
    ] = UNSET
    position: Annotated[
        str | UnsetType, Meta(description="A shard: where its reader is, if reported")
    ] = UNSET


class RetiredBody(Struct, frozen=True):
    """A range that is not waited for, by an operator's declaration."""

    stage: str
    range: str
    because: Annotated[str | None, Meta(description="The reason; null: not available")]
    by: Annotated[str | None, Meta(description="The name of the key that retired it")]
    since: Instant | None


class ExplanationBody(Struct, frozen=True):
    """The explanation of a watermark."""

    job: str
    stage: str
    output_watermark: Watermark
    status: Status
    health: Annotated[Health, Meta(description="As in its watermark")]
    since: Annotated[Instant, Meta(description="Instant of the last rise of its output watermark")]
    because: Annotated[str, Meta(description="The answer, in one sentence")]
    remedy: Annotated[
        str | None,
        Meta(description="The next thing to do; null: the stage waits for what is not a problem"),
    ]
    path: Annotated[
        list[StepBody],
        Meta(description="From the requested stage to the stage of the holders"),
    ]
    holders: Annotated[
        list[HolderBody],
        Meta(
            description="Ranges of the last stage of the path: those that never reported, else those at"
            " its minimum; the longest-holding first, at most `limit`"
        ),
    ]
    holders_total: Annotated[int, Meta(ge=0, description="Number of holders, listed or not")]
    retired: Annotated[
        list[RetiredBody] | UnsetType,
        Meta(
            description="Ranges of the stage, and of stages above it, that an operator has retired: none"
            " of these stages waits for them; absent: none"
        ),
    ] = UNSET


def explanation_body(job: str, found: Explanation) -> ExplanationBody:
    """Return the explanation of a watermark."""
    root = found.path[-1].stage
    return ExplanationBody(
        job,
        found.stage,
        to_wire(found.view.watermark.output),
        found.view.watermark.status,
        found.health,
        iso(found.view.advanced_at_ms),
        found.because,
        found.remedy,
        [_step_body(each, found.stage) for each in found.path],
        [_holder_body(root, each) for each in found.holders],
        found.holders_total,
        [retired_body(each) for each in found.retired] or UNSET,
    )


_RESTS: Final = frozenset({Health.IDLE, Health.ENDED})


def _step_body(of: PathStep, explained: str) -> StepBody:
    # The health of the explained stage is in the response anyway.
    rests = of.stage != explained and of.health in _RESTS
    return StepBody(of.stage, of.step, of.health if rests else UNSET)


def retired_body(found: Retirement) -> RetiredBody:
    """Return a retired range, with its record in the audit."""
    record = found.record
    return RetiredBody(
        found.stage,
        found.range,
        found.because,
        None if record is None else record.deed.by.name,
        None if record is None else iso(record.deed.at_ms),
    )


def _holder_body(stage: str, holding: HoldingRange) -> HolderBody:
    view = holding.view
    return HolderBody(
        stage,
        view.name,
        holding.reason,
        holding.component,
        to_wire(view.promise),
        holding.would_be,
        view.holder,
        view.fence,
        view.expires_in_ms,
        None if view.reported_at_ms is None else iso(view.reported_at_ms),
        None if view.raised_at_ms is None else iso(view.raised_at_ms),
        (view.facts and view.facts.backlog) or UNSET,
        view.note.position or UNSET,
    )
