"""The bodies of responses, contract version 1. One type each, which encodes and documents it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from service.aggregator import (
    Condition,
    Explanation,
    HoldingRange,
    JobSummary,
    Overview,
    PastWatermark,
    RangeSummary,
    StageState,
    version_of,
)
from service.api.range_names import written
from service.api.requests import Run
from service.frontier.estimate import CONFIDENCE, CannotSay, Estimate, Expected
from service.frontier.explain import Reason, Step
from service.frontier.graph import Stage, Status
from service.frontier.ranges import KeyLayout, Layout
from service.frontier.reports import range_status
from service.frontier.throttle import Advice, ThrottleView
from service.frontier.timestamps import MAX, data_lag_ms, iso, to_wire
from service.model.audit import Action, AuditRecord
from service.model.jobs import JobView, Specification, StageView
from service.model.keys import Key, Role
from service.model.leases import Denied, Grant, LostReason
from service.model.reports import RangeView
from service.spec import StageSpec, ThrottleSpec

Watermark = Annotated[
    int | None, Meta(description="Milliseconds since the Unix epoch, UTC; null: no watermark yet")
]
Count = Annotated[int, Meta(ge=0)]
Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class JobBody(Struct, frozen=True, omit_defaults=True):
    """A pipeline as it is stored."""

    job: str
    generation: Count
    layout_version: Count
    stages: dict[str, StageSpec]
    throttle: ThrottleSpec | None = None


class JobLine(Struct, frozen=True):
    """A job in the list of jobs."""

    job: str
    generation: Count
    layout_version: Count
    stages: list[str]


class JobsBody(Struct, frozen=True):
    """Every job."""

    jobs: list[JobLine]


class NodeBody(Struct, frozen=True):
    """A stage of the graph."""

    stage: str
    inputs: list[str]
    kind: Literal["source", "keyed", "passthrough"]
    ranges: Count


class GraphBody(Struct, frozen=True):
    """A job's graph, without the names of its shards: each stage after its inputs."""

    job: str
    layout_version: Count
    stages: list[NodeBody]


class RunBody(Struct, frozen=True):
    """A run that has begun."""

    run: Run


class DeniedBody(Struct, frozen=True, omit_defaults=True):
    """A range that was not granted."""

    range: str
    reason: Literal["held", "unknown"]
    holder: str | None = None
    expires_in_ms: Count | None = None


class GrantBody(Struct, frozen=True, omit_defaults=True):
    """A lease. The token is shown here and nowhere else."""

    token: str
    fence: Count
    expires_in_ms: Count
    granted: list[str]
    denied: list[DeniedBody]
    denied_total: Count | None = None
    """Only if not all of them are listed."""


class RenewalBody(Struct, frozen=True):
    """A renewed lease."""

    token: str
    expires_in_ms: Count
    ranges: list[str]


class LostBody(Struct, frozen=True):
    """A lease that was lost."""

    token: str
    reason: LostReason


class RenewedBody(Struct, frozen=True):
    """The result of a renewal."""

    renewed: list[RenewalBody]
    lost: list[LostBody]


class ReleasedBody(Struct, frozen=True):
    """How many of the leases were current, and were released."""

    released: Count


class RejectedBody(Struct, frozen=True):
    """A range that the token does not cover, or no longer."""

    range: str
    reason: LostReason


class StageWatermarkBody(Struct, frozen=True):
    """The watermarks of the reported stage."""

    input_watermark: Watermark
    output_watermark: Watermark
    version: Count


class AdviceBody(Struct, frozen=True):
    """What a shard is asked to do. Nothing is enforced: whoever reads the shard does it, or does not."""

    pause: Annotated[
        bool, Meta(description="Read nothing: its promise is ahead of its group's limit")
    ]
    until: Annotated[
        int | None,
        Meta(
            description="The furthest event time (ms) that it may run to; null: there is no limit"
        ),
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
    """How far the shards of a group of sources may run."""

    stages: list[str]
    limit: Annotated[
        int | None,
        Meta(
            description="The slowest shard's promise plus `max_drift_ms`; null: there is no limit, since"
            " no shard has promised, or all that have are idle or final"
        ),
    ]
    held_by: HeldByBody | None


class ThrottleBody(Struct, frozen=True):
    """What the shards of a job are asked to do."""

    version: Annotated[int, Meta(ge=0, description="Differs if anything else here does; the ETag")]
    groups: list[GroupBody]
    shards: Annotated[
        dict[str, dict[str, AdviceBody]],
        Meta(description="By stage and shard: only those that are asked to do something"),
    ]


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
            Meta(description="What the reported shards are asked to do; left out if nothing"),
        ]
        | UnsetType
    ) = UNSET


class RangeCounts(Struct, frozen=True):
    """How complete a watermark is."""

    total: Count
    reported: Count
    idle: Count
    final: Count
    leased: Count


class WatermarkBody(Struct, frozen=True, kw_only=True):
    """The watermarks of a stage. A commit's answer leaves out what is computed for readers."""

    job: str
    stage: str
    generation: Count
    version: Count
    status: Status
    input_watermark: Watermark
    output_watermark: Watermark
    ranges: RangeCounts
    updated_at: Instant
    processing_watermark: (
        Annotated[
            int | None,
            Meta(
                description="Milliseconds since the Unix epoch, on the wall clock: all work that came in"
                " before is done, here and upstream; null: some range has never reported"
            ),
        ]
        | UnsetType
    ) = UNSET
    system_lag_ms: (
        Annotated[
            int | None,
            Meta(
                description="Now minus the processing watermark: for how long the oldest work has waited"
            ),
        ]
        | UnsetType
    ) = UNSET
    data_lag_ms: (
        Annotated[
            int | None,
            Meta(
                description="Now minus the output watermark: how far it is behind, in event time; 0 at"
                " the end of time, negative for data of the future"
            ),
        ]
        | UnsetType
    ) = UNSET
    records: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="That its ranges have reported; from 0 after a loss of the live store",
            ),
        ]
        | UnsetType
    ) = UNSET
    late: (
        Annotated[int, Meta(ge=0, description="Of those, how many were behind the watermark")]
        | UnsetType
    ) = UNSET
    percentiles: (
        Annotated[
            dict[str, int | None],
            Meta(
                description="By percentage, if the stage declares any: the largest time that so many"
                " percent of what is in flight are not before; null: some range has never said what is"
            ),
        ]
        | UnsetType
    ) = UNSET


class CommittedBody(Struct, frozen=True):
    """The result of a commit: ranges applied by stage, and the stages' watermarks."""

    applied: dict[str, Count]
    watermarks: dict[str, WatermarkBody]


class SnapshotBody(Struct, frozen=True):
    """The watermarks of all stages, at one instant."""

    job: str
    generation: Count
    watermarks: dict[str, WatermarkBody]


class PastWatermarkBody(Struct, frozen=True):
    """The watermarks of a stage, from some instant of the wall clock on."""

    at: Annotated[int, Meta(description="Milliseconds since the Unix epoch, UTC")]
    input_watermark: Watermark
    output_watermark: Watermark
    status: Status


class HistoryBody(Struct, frozen=True):
    """Where a stage's watermarks were, by wall time: what held at `from`, then what changed."""

    points: list[PastWatermarkBody]


class EtaBody(Struct, frozen=True):
    """When the output watermark gets to a time: an estimate, or why there is none."""

    at: Annotated[int, Meta(description="The time that was asked for")]
    reached: bool
    expected_at: Instant | None
    between: (
        Annotated[
            list[Instant],
            Meta(
                min_length=2,
                max_length=2,
                description="It is there between these in the share `confidence` of all cases",
            ),
        ]
        | None
    )
    confidence: Annotated[float, Meta(ge=0, le=1)]
    because: str


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
        Meta(description="When its last report was applied: with an epoch, at the commit"),
    ]


class RangesBody(Struct, frozen=True):
    """Ranges of a stage."""

    job: str
    stage: str
    total: Count
    ranges: list[RangeBody]


class BucketBody(Struct, frozen=True):
    """Neighbouring ranges, counted together."""

    index: Annotated[int, Meta(ge=0, description="Of the first of them, among the stage's ranges")]
    first: Annotated[str, Meta(description="Its name")]
    ranges: Annotated[int, Meta(ge=1, description="How many they are")]
    lowest: Annotated[
        int | None,
        Meta(
            description="The least promise of those that are waited for; null: one of them has never"
            f" reported; {MAX}: none is waited for"
        ),
    ]
    highest: Annotated[int | None, Meta(description="The greatest; null: there is none")]
    never_reported: Count
    expired: Count
    idle: Count
    final: Count


class ListedRangeBody(Struct, frozen=True):
    """A single range, who holds it, and since when."""

    index: Count
    range: str
    condition: Condition
    promise: Watermark
    holds: dict[str, int]
    holder: str | None
    held_since: Annotated[
        Instant | None,
        Meta(description="Since when it is leased, to one worker after the other, without a gap"),
    ]
    expires_in_ms: Count | None
    reported_at: Instant | None
    since: Annotated[Instant | None, Meta(description="Since when its promise has not moved")]


class RangeSummaryBody(Struct, frozen=True):
    """The ranges of a stage, or a window of them: counted in buckets, and some of them singly.

    Each range counts as the first of these that fits: `final`, `idle`, `never_reported`, `expired`
    (nobody has a lease on it), `active`.
    """

    job: str
    stage: str
    total: Annotated[int, Meta(ge=0, description="How many ranges the stage has")]
    counts: Annotated[
        dict[Condition, Count], Meta(description="How many there are of each, in the window")
    ]
    buckets: list[BucketBody]
    listed: list[ListedRangeBody]
    matching: Annotated[int, Meta(ge=0, description="How many could be listed, in the window")]


class JobSummaryBody(Struct, frozen=True):
    """A job, and the stage of it that is furthest behind."""

    job: str
    stages: Annotated[int, Meta(ge=1, description="How many it has")]
    slowest: Annotated[str, Meta(description="The stage: the lowest, upstream of equal ones")]
    status: Annotated[Status, Meta(description="Of that stage, and so are the members below")]
    output_watermark: Watermark
    data_lag_ms: int | None
    since: Annotated[Instant, Meta(description="Since when it stands there")]


class OverviewBody(Struct, frozen=True):
    """The jobs that the key may read, the one that stands still for longest first."""

    jobs: list[JobSummaryBody]
    matching: Annotated[int, Meta(ge=0, description="How many fit the search, listed or not")]
    total: Count


class WhoAmIBody(Struct, frozen=True):
    """The key that the request was sent with."""

    name: Annotated[str | None, Meta(description="null: there are no keys, and everyone is served")]
    role: Role
    jobs: Annotated[str, Meta(description="The jobs that it is for, by name")]
    now: Annotated[int, Meta(description="The service's clock, in ms since the Unix epoch")]


class StepBody(Struct, frozen=True):
    """A stage on the way to what holds a watermark back."""

    stage: str
    reason: Annotated[
        Step,
        Meta(
            description="`input`: it waits for the next stage of the path; `ranges`: for its own ranges;"
            " `final`: for nothing"
        ),
    ]


class HolderBody(Struct, frozen=True):
    """A range that holds a watermark back."""

    stage: str
    range: str
    reason: Annotated[
        Reason,
        Meta(
            description="The first that fits: `never_reported`; `lease_expired` (nobody has a lease on"
            " it); `waiting_for_commit` (it has reported more, in an epoch that is not committed);"
            " `throttled` (it is asked to pause); `stalled` (it keeps reporting, its promise stands"
            " still, and its oldest work ages); `buffering` (a hold is its promise); `no_input` (it has"
            " observed less input than is published); `idle`; `behind` (it is simply the lowest)"
        ),
    ]
    component: Annotated[str | None, Meta(description="Whose hold it is, if it is `buffering`")]
    promise: Watermark
    would_be: Annotated[
        int | None,
        Meta(description="The stage's output without this range; null: no other counts"),
    ]
    holder: str | None
    fence: Count | None
    expires_in_ms: Count | None
    reported_at: Instant | None
    since: Annotated[Instant | None, Meta(description="Since when its promise has not moved")]


class ExplanationBody(Struct, frozen=True):
    """Why a watermark is where it is."""

    job: str
    stage: str
    output_watermark: Watermark
    status: Status
    since: Annotated[
        Instant, Meta(description="Since when its watermarks and status are as they are")
    ]
    because: Annotated[str, Meta(description="The answer, in one sentence")]
    path: Annotated[
        list[StepBody],
        Meta(description="From the stage that was asked for to the one where the holders are"),
    ]
    holders: Annotated[
        list[HolderBody],
        Meta(
            description="Ranges of the last stage of the path: those that never reported, else those at"
            " its minimum; the longest-holding first, at most `limit`"
        ),
    ]
    holders_total: Annotated[int, Meta(ge=0, description="How many there are, listed or not")]


class ProblemBody(Struct, frozen=True):
    """An RFC 9457 problem. It may have more members."""

    type: str
    title: str
    status: int
    detail: str


class HealthBody(Struct, frozen=True):
    """The service answers."""

    status: Literal["ok"] = "ok"


class KeyLine(Struct, frozen=True):
    """A key, without its secret."""

    name: str
    role: Role
    jobs: str
    created_at: str
    created_by: str
    expires_at: str | None
    used_at: str | None


class KeysBody(Struct, frozen=True):
    """Every key in the ledger."""

    keys: list[KeyLine]


class NewKeyBody(Struct, frozen=True):
    """A key with its secret, which is shown here and nowhere else."""

    name: str
    role: Role
    jobs: str
    expires_at: str | None
    secret: str


class AuditLine(Struct, frozen=True):
    """A change: who made it, from where and when."""

    number: Count
    at: str
    by: str
    address: str
    action: Action
    job: str | None
    key: str | None
    detail: str


class AuditBody(Struct, frozen=True):
    """Changes, the newest first."""

    records: list[AuditLine]


RESPONSES = (
    JobBody, JobsBody, RunBody, GrantBody, RenewedBody, ReleasedBody, ReportedBody, WatermarkBody,
    CommittedBody, SnapshotBody, HistoryBody, EtaBody, RangesBody, ProblemBody, HealthBody,
    ThrottleBody, ExplanationBody,
    KeysBody, NewKeyBody, AuditBody, RangeSummaryBody, OverviewBody, WhoAmIBody,
    GraphBody,
)  # fmt: skip


# ---- from the results of the use cases


def written_job(found: Specification) -> bytes:
    """Write a `JobBody`, with the stages as they are stored.

    The stored text is an object that begins with `stages`, so the other members are put before it.
    Shards that have joined since are stored behind it, and are not shown.

    >>> written_job(Specification("j", 1, 2, b'{"stages":{"s":{"shards":["0"]}}}'))
    b'{"job":"j","generation":1,"layout_version":2,"stages":{"s":{"shards":["0"]}}}'
    """
    text = found.spec
    if b'"joined"' in text:
        text = msgspec.json.encode(_authored(text))
    _, _, stages = text.partition(b"{")
    numbers = b'"generation":%d,"layout_version":%d' % (found.generation, found.layout_version)
    return b'{"job":%b,%b,%b' % (msgspec.json.encode(found.job), numbers, stages)


class _Authored(Struct, omit_defaults=True):
    stages: msgspec.Raw
    throttle: msgspec.Raw | UnsetType = UNSET


_authored = msgspec.json.Decoder(_Authored).decode
"""What the author of a stored specification wrote, without a look inside."""


def graph_body(job: JobView) -> GraphBody:
    """Return a job's graph."""
    stages = job.pipeline.stages
    return GraphBody(
        job.name,
        job.layout_version,
        [_node_body(name, stages[name]) for name in job.pipeline.order],
    )


def _node_body(name: str, stage: Stage) -> NodeBody:
    ranges = 0 if stage.layout is None else len(stage.layout)
    if stage.is_source:
        return NodeBody(name, [], "source", ranges)
    kind = "passthrough" if stage.is_passthrough else "keyed"
    return NodeBody(name, list(stage.inputs), kind, ranges)


def key_line(key: Key) -> KeyLine:
    """Return a key, without its secret."""
    return KeyLine(
        key.name,
        key.role,
        key.jobs,
        iso(key.created_at_ms),
        key.created_by,
        None if key.expires_at_ms is None else iso(key.expires_at_ms),
        None if key.used_at_ms is None else iso(key.used_at_ms),
    )


def new_key_body(key: Key, secret: str) -> NewKeyBody:
    """Return a new key."""
    expires_at = None if key.expires_at_ms is None else iso(key.expires_at_ms)
    return NewKeyBody(key.name, key.role, key.jobs, expires_at, secret)


def audit_line(record: AuditRecord) -> AuditLine:
    """Return a record of the audit."""
    deed = record.deed
    return AuditLine(
        record.number,
        iso(deed.at_ms),
        deed.by.name,
        deed.by.address,
        deed.action,
        record.job,
        record.key,
        record.detail,
    )


def denied_bodies(denied: Iterable[Denied]) -> list[DeniedBody]:
    """Return the ranges that were not granted."""
    return [DeniedBody(d.range, d.reason, d.holder, d.expires_in_ms) for d in denied]


async def grant_body(grant: Grant) -> GrantBody:
    """Return a lease."""
    return GrantBody(
        grant.token,
        grant.fence,
        grant.expires_in_ms,
        await written(grant.granted),
        denied_bodies(grant.denied),
        grant.denied_total if grant.denied_total > len(grant.denied) else None,
    )


def stage_watermark_body(view: StageView) -> StageWatermarkBody:
    """Return the watermarks of a reported stage."""
    return StageWatermarkBody(
        to_wire(view.watermark.input), to_wire(view.watermark.output), view.version
    )


def watermark_body(state: StageState) -> WatermarkBody:
    """Return the watermarks of a stage."""
    view, census = state.view, state.census
    return WatermarkBody(
        job=state.job.name,
        stage=state.name,
        generation=state.job.generation,
        version=view.version,
        status=view.watermark.status,
        input_watermark=to_wire(view.watermark.input),
        output_watermark=to_wire(view.watermark.output),
        ranges=RangeCounts(census.total, census.reported, census.idle, census.final, census.leased),
        updated_at=iso(view.updated_at_ms),
    )


def read_body(state: StageState, percentile: int | None = None) -> WatermarkBody:
    """Return the watermarks of a stage, with what is computed for readers.

    `percentile`: that percentile watermark stands in place of the output watermark.
    """
    body = watermark_body(state)
    soft, output = state.soft, state.view.watermark.output
    processing_ms = None if soft is None else soft.processing_ms
    return msgspec.structs.replace(
        body,
        output_watermark=body.output_watermark
        if percentile is None
        else to_wire(state.percentile(percentile)),
        processing_watermark=processing_ms,
        system_lag_ms=None if processing_ms is None else max(0, state.now_ms - processing_ms),
        data_lag_ms=data_lag_ms(output, state.now_ms),
        records=0 if soft is None else soft.counts.records,
        late=0 if soft is None else soft.counts.late,
        percentiles={str(p): to_wire(state.percentile(p)) for p in soft.percentiles}
        if soft is not None and soft.percentiles
        else UNSET,
    )


def past_watermark_body(past: PastWatermark) -> PastWatermarkBody:
    """Return a point of a history."""
    watermark = past.watermark
    return PastWatermarkBody(
        past.at_ms, to_wire(watermark.input), to_wire(watermark.output), watermark.status
    )


def eta_body(target: int, found: Estimate | None, output: int) -> EtaBody:
    """Return an estimate; None: the output watermark, which is given, is there."""
    match found:
        case None:
            where = "at the end of time" if output == MAX else f"at {iso(output)}"
            because = f"the output watermark is {where}"
            return EtaBody(target, True, None, None, CONFIDENCE, because)
        case CannotSay(because):
            return EtaBody(target, False, None, None, CONFIDENCE, because)
        case Expected(at_ms, (low_ms, high_ms), _, because):
            between = [iso(low_ms), iso(high_ms)]
            return EtaBody(target, False, iso(at_ms), between, CONFIDENCE, because)


def range_body(view: RangeView, bounds: tuple[int, int] | None) -> RangeBody:
    """Return a range."""
    return RangeBody(
        range=view.name,
        start=None if bounds is None else bounds[0],
        end=None if bounds is None else bounds[1],
        status=range_status(view.promise, idle=view.idle),
        promise=to_wire(view.promise),
        holds=view.note.holds,
        holder=view.holder,
        fence=view.fence,
        expires_in_ms=view.expires_in_ms,
        reported_at=None if view.reported_at_ms is None else iso(view.reported_at_ms),
    )


def range_summary_body(job: str, stage: str, found: RangeSummary) -> RangeSummaryBody:
    """Return the ranges of a stage at a glance."""
    layout = found.layout
    if layout is None:
        return RangeSummaryBody(job, stage, 0, dict(found.counts), [], [], 0)
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
            _instant(each.held_since_ms),
            each.view.expires_in_ms,
            _instant(each.view.reported_at_ms),
            _instant(each.view.raised_at_ms),
        )
        for each in found.listed
    ]
    counts = dict(found.counts)
    return RangeSummaryBody(job, stage, len(layout), counts, buckets, listed, found.matching)


def overview_body(found: Overview, now_ms: int) -> OverviewBody:
    """Return all jobs at a glance."""
    return OverviewBody(
        [_job_summary_body(each, now_ms) for each in found.jobs], found.matching, found.total
    )


def _job_summary_body(found: JobSummary, now_ms: int) -> JobSummaryBody:
    output = found.view.watermark.output
    return JobSummaryBody(
        found.job.name,
        len(found.job.stages),
        found.stage,
        found.status,
        to_wire(output),
        data_lag_ms(output, now_ms),
        iso(found.view.updated_at_ms),
    )


def _instant(at_ms: int | None) -> str | None:
    return None if at_ms is None else iso(at_ms)


def advice_bodies(asked: Mapping[str, Advice]) -> dict[str, AdviceBody]:
    """Return what shards are asked to do."""
    return {
        shard: AdviceBody(
            one.pause, None if one.until is None else to_wire(one.until), one.rate, one.because
        )
        for shard, one in asked.items()
    }


def throttle_body(view: ThrottleView) -> ThrottleBody:
    """Return what the shards of a job are asked to do."""
    groups = [
        GroupBody(
            list(group.stages),
            group.limit,
            None if group.held_by is None else HeldByBody(group.held_by.stage, group.held_by.shard),
        )
        for group in view.groups
    ]
    shards = {stage: advice_bodies(asked) for stage, asked in view.shards.items() if asked}
    return ThrottleBody(version_of(view), groups, shards)


def explanation_body(job: str, found: Explanation) -> ExplanationBody:
    """Return why a watermark is where it is."""
    root = found.path[-1][0]
    return ExplanationBody(
        job,
        found.stage,
        to_wire(found.view.watermark.output),
        found.view.watermark.status,
        iso(found.view.updated_at_ms),
        found.because,
        [StepBody(stage, step) for stage, step in found.path],
        [_holder_body(root, each) for each in found.holders],
        found.holders_total,
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
    )


def is_keyed(layout: Layout | None) -> bool:
    """Whether the ranges are key ranges, which have bounds, and not shards."""
    return isinstance(layout, KeyLayout)
