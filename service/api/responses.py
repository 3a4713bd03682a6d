"""The bodies of responses, contract version 1. One type each, which encodes and documents it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Literal

from msgspec import Meta, Struct

from service.aggregator import PastWatermark, StageState
from service.api.range_names import written
from service.api.requests import Run
from service.frontier.estimate import CONFIDENCE, CannotSay, Estimate, Expected
from service.frontier.graph import Status
from service.frontier.ranges import KeyLayout, Layout
from service.frontier.reports import range_status
from service.frontier.timestamps import MAX, to_wire
from service.model.audit import Action, AuditRecord
from service.model.jobs import StageView, StoredJob
from service.model.keys import Key, Role
from service.model.leases import Denied, Grant, LostReason
from service.model.reports import RangeView
from service.spec import StageSpec, decode_spec

Watermark = Annotated[
    int | None, Meta(description="Milliseconds since the Unix epoch, UTC; null: no watermark yet")
]
Count = Annotated[int, Meta(ge=0)]
Instant = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class JobBody(Struct, frozen=True):
    """A pipeline as it is stored."""

    job: str
    generation: Count
    layout_version: Count
    stages: dict[str, StageSpec]


class JobLine(Struct, frozen=True):
    """A job in the list of jobs."""

    job: str
    generation: Count
    layout_version: Count
    stages: list[str]


class JobsBody(Struct, frozen=True):
    """Every job."""

    jobs: list[JobLine]


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


class ReportedBody(Struct, frozen=True):
    """The result of a report."""

    accepted: Count
    behind: list[str]
    rejected: list[RejectedBody]
    expires_in_ms: Count
    watermark: StageWatermarkBody


class RangeCounts(Struct, frozen=True):
    """How complete a watermark is."""

    total: Count
    reported: Count
    idle: Count
    final: Count
    leased: Count


class WatermarkBody(Struct, frozen=True):
    """The watermarks of a stage."""

    job: str
    stage: str
    generation: Count
    version: Count
    status: Status
    input_watermark: Watermark
    output_watermark: Watermark
    ranges: RangeCounts
    updated_at: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


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
    reported_at: str | None


class RangesBody(Struct, frozen=True):
    """Ranges of a stage."""

    job: str
    stage: str
    total: Count
    ranges: list[RangeBody]


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
    KeysBody, NewKeyBody, AuditBody,
)  # fmt: skip


# ---- from the results of the use cases


@lru_cache(maxsize=4_096)
def iso(at_ms: int) -> str:
    """Format an instant of the wall clock.

    >>> iso(1767225603120)
    '2026-01-01T00:00:03.120Z'
    """
    at = datetime.fromtimestamp(at_ms // 1_000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_ms % 1_000:03d}Z"


def job_body(stored: StoredJob) -> JobBody:
    """Return a pipeline as its author wrote it."""
    job = stored.installed
    return JobBody(job.name, job.generation, job.layout_version, decode_spec(stored.spec).stages)


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


def is_keyed(layout: Layout | None) -> bool:
    """Whether the ranges are key ranges, which have bounds, and not shards."""
    return isinstance(layout, KeyLayout)
