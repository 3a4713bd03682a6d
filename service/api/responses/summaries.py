"""Summaries of the ranges of a stage, and of all jobs."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from service.aggregator import (
    Condition,
    JobSummary,
    Overview,
    RangeSummary,
)
from service.api.responses.common import Count, HoldsBackNext, Instant, Watermark, instant
from service.api.responses.ranges import Stalled
from service.frontier.graph import Status
from service.frontier.health import Health
from service.frontier.timestamps import MAX, data_lag_ms, iso, to_wire


class BucketBody(Struct, frozen=True):
    """Neighbouring ranges, counted together."""

    index: Annotated[int, Meta(ge=0, description="Index of the first range, in the stage")]
    first: Annotated[str, Meta(description="Name of the first range")]
    ranges: Annotated[int, Meta(ge=1, description="Number of ranges")]
    lowest: Annotated[
        int | None,
        Meta(
            description="The least promise of the ranges that the stage waits for; null: one of them has"
            f" never reported; {MAX}: the stage waits for none"
        ),
    ]
    highest: Annotated[int | None, Meta(description="The greatest promise; null: none")]
    never_reported: Count
    expired: Count
    idle: Count
    final: Count
    retired: Count


class ListedRangeBody(Struct, frozen=True):
    """A single range, with its holder and its times."""

    index: Count
    range: str
    condition: Condition
    promise: Watermark
    holds: dict[str, int]
    holder: str | None
    held_since: Annotated[
        Instant | None,
        Meta(description="Begin of its leases without a gap, to any workers"),
    ]
    expires_in_ms: Count | None
    reported_at: Instant | None
    since: Annotated[Instant | None, Meta(description="Instant of the last move of its promise")]
    stalled: Stalled = UNSET


class RangeSummaryBody(Struct, frozen=True):
    """The ranges of a stage, or a window of them: counted in buckets, and some of them singly.

    Each range counts as the first of these that applies: `final`, `retired`, `idle`, `never_reported`,
    `expired` (without a lease), `active`.
    """

    job: str
    stage: str
    total: Annotated[int, Meta(ge=0, description="Number of the stage's ranges")]
    counts: Annotated[
        dict[Condition, Count], Meta(description="Number of ranges of each, in the window")
    ]
    buckets: list[BucketBody]
    listed: list[ListedRangeBody]
    matching: Annotated[int, Meta(ge=0, description="Number of ranges to list, in the window")]
    lowest: Annotated[
        int | None,
        Meta(
            description="The least promise of all ranges that the stage waits for, at the same instant;"
            f" null: one of them has never reported; {MAX}: the stage waits for none"
        ),
    ]


class JobSummaryBody(Struct, frozen=True):
    """A job, and its stage that is furthest behind."""

    job: str
    stages: Annotated[int, Meta(ge=1, description="Number of its stages")]
    slowest: Annotated[
        str,
        Meta(description="The stage with the lowest watermark; of equal ones, the most upstream"),
    ]
    status: Annotated[
        Status, Meta(description="Status of that stage, as all members up to `since`")
    ]
    output_watermark: Watermark
    data_lag_ms: int | None
    since: Annotated[Instant, Meta(description="Instant of the last rise of its output watermark")]
    health: Annotated[Health | None, Meta(description="The worst of all stages; null: unknown")]
    problems: Annotated[int, Meta(ge=0, description="Number of its root causes")]
    because: Annotated[str | None, Meta(description="The worst root cause, in one sentence")]
    slowest_ended: Annotated[
        bool | UnsetType,
        Meta(description="true: the last run of the slowest stage has finished. Absent: not so"),
    ] = UNSET
    cause: Annotated[
        str | UnsetType,
        Meta(
            description="The worst root cause as lists show it: as `because`, with the name of a single"
            " range. Absent: none"
        ),
    ] = UNSET
    holds_back: Annotated[
        list[str] | UnsetType,
        Meta(description="The downstream stages that wait for this cause. Absent: none"),
    ] = UNSET
    holds_back_next: HoldsBackNext = UNSET
    late_ranges: Annotated[
        Count | UnsetType, Meta(description="Late ranges of its final stages; absent: 0")
    ] = UNSET


class OverviewBody(Struct, frozen=True):
    """The jobs that the key may read: the worst health first, and then the longest still."""

    jobs: list[JobSummaryBody]
    matching: Annotated[
        int, Meta(ge=0, description="Number of jobs that match the search, listed or not")
    ]
    total: Count


def range_summary_body(job: str, stage: str, found: RangeSummary) -> RangeSummaryBody:
    """Return the summary of a stage's ranges."""
    layout = found.layout
    if layout is None:
        return RangeSummaryBody(job, stage, 0, dict(found.counts), [], [], 0, MAX)
    buckets = [
        BucketBody(
            each.index,
            layout.name(each.index),
            each.size,
            to_wire(each.lowest),
            to_wire(each.highest),
            each.counts[Condition.NEVER_REPORTED],
            each.counts[Condition.EXPIRED],
            each.counts[Condition.IDLE],
            each.counts[Condition.FINAL],
            each.counts[Condition.RETIRED],
        )
        for each in found.buckets
    ]
    listed = [
        ListedRangeBody(
            each.index,
            each.view.name,
            each.condition,
            to_wire(each.view.promise),
            each.view.note.holds,
            each.view.holder,
            instant(each.held_since_ms),
            each.view.expires_in_ms,
            instant(each.view.reported_at_ms),
            instant(each.view.raised_at_ms),
            each.is_stalled or UNSET,
        )
        for each in found.listed
    ]
    counts = dict(found.counts)
    return RangeSummaryBody(
        job, stage, len(layout), counts, buckets, listed, found.matching, to_wire(found.lowest)
    )


def overview_body(found: Overview, now_ms: int) -> OverviewBody:
    """Return the summary of all jobs."""
    return OverviewBody(
        [_job_summary_body(each, now_ms) for each in found.jobs], found.matching, found.total
    )


def _job_summary_body(found: JobSummary, now_ms: int) -> JobSummaryBody:
    output = found.view.watermark.output
    problems = () if found.found is None else found.found.problems
    worst = problems[0] if problems else None
    return JobSummaryBody(
        found.job.name,
        len(found.job.stages),
        found.stage,
        found.status,
        to_wire(output),
        data_lag_ms(output, now_ms),
        iso(found.view.advanced_at_ms),
        None if found.found is None else found.found.health,
        len(problems),
        None if worst is None else worst.because,
        found.slowest_ended or UNSET,
        UNSET if worst is None else worst.cause,
        UNSET if worst is None else list(worst.holds_back) or UNSET,
        UNSET if worst is None else list(worst.holds_back_next) or UNSET,
        UNSET if found.found is None else found.found.late_ranges or UNSET,
    )
