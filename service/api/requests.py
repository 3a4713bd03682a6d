"""The bodies of requests, contract version 1. One type each, which decodes, checks and documents it."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field

from service.frontier.sketches import MAX_SKETCH
from service.frontier.timestamps import MAX
from service.model.keys import EVERY_JOB, JOBS_PATTERN, Role
from service.model.reports import RangeNote
from service.spec import MAX_RANGES, MAX_STAGES, Name

T = TypeVar("T")

MAX_REPORTED = 10_000
"""Ranges that one report may carry."""

MIN_TTL_MS, DEFAULT_TTL_MS, MAX_TTL_MS = 1_000, 10_000, 600_000

Time = Annotated[
    int,
    Meta(
        description="Milliseconds since the Unix epoch, UTC: an instant of the years 0001 to 9999, or"
        f" {MAX} (the end of time)",
        extra_json_schema={"examples": [1767225600000, MAX]},
    ),
]
JobsPattern = Annotated[
    str,
    Meta(
        pattern=JOBS_PATTERN,
        description="The jobs that it is for, by name: `*` stands for any characters, `?` for one",
    ),
]
MAX_KEY_LIFE_MS = 100 * 365 * 86_400_000
Number = Annotated[int, Meta(ge=0, le=2**53)]
Run = Annotated[int, Meta(ge=1, le=2**53)]
Token = Annotated[str, Meta(min_length=1, max_length=256)]
Holder = Name
HoldName = Annotated[str, Meta(min_length=1, max_length=128)]
Holds = Annotated[
    dict[HoldName, Time],
    Meta(
        max_length=100, description="Lower bounds that components of the range keep on its promise"
    ),
]


class OpenRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A program that starts to execute some stages."""

    stages: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    holder: Holder


class ClaimBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A claim for ranges of a stage."""

    ranges: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_RANGES)] | Literal["all"]
    holder: Holder
    ttl_ms: Annotated[int, Meta(ge=MIN_TTL_MS, le=MAX_TTL_MS)] = DEFAULT_TTL_MS
    run: Run | None = None
    epoch: Number | None = None
    attempt: Number | None = None


class Tokens(Struct, frozen=True, forbid_unknown_fields=True):
    """Leases, by their tokens."""

    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_REPORTED)]


class Pending(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What is in flight in a range, as an Apache DataSketches KLL doubles sketch of event times (ms)."""

    count: Number
    event_times: Annotated[bytes, Meta(max_length=MAX_SKETCH)]


class WorkReport(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What a range may say of its work, besides its promise."""

    oldest_work: (
        Annotated[int, Meta(description="Since when (ms, wall clock) its oldest work has waited")]
        | None
    ) = None
    pending: Pending | UnsetType | None = UNSET
    records: Number | UnsetType = UNSET
    late: Number = 0
    backlog: Number = 0


class ShardReport(WorkReport, frozen=True, forbid_unknown_fields=True, gc=False):
    """What a source's shard reports."""

    watermark: Time | UnsetType | None = UNSET
    holds: Holds = field(default_factory=dict[str, int])
    idle: bool = False
    final: bool = False


class KeyRangeReport(RangeNote, frozen=True, forbid_unknown_fields=True, gc=False):
    """What a key range reports: holds. Its promise is capped by the report's input_watermark."""

    holds: Holds = field(default_factory=dict[str, int])


class KeyRangeWorkReport(WorkReport, frozen=True, forbid_unknown_fields=True, gc=False):
    """What a key range reports, with what it says of its work."""

    holds: Holds = field(default_factory=dict[str, int])
    idle: bool = False


Row = Annotated[tuple[T, ...], Meta(max_length=MAX_RANGES)]


class WorkColumns(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a packed report says of the lease's ranges: one entry for each, in the order of `granted`."""

    holds: Annotated[dict[HoldName, Row[Time | None]], Meta(max_length=100)] = field(
        default_factory=dict[str, tuple[int | None, ...]]
    )
    idle: Row[bool] | None = None
    oldest_work: Row[int | None] | None = None
    pending: Row[Pending | None] | None = None
    records: Row[Number] | None = None
    late: Row[Number] | None = None
    backlog: Row[Number] | None = None


class SourceColumns(WorkColumns, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The columns of a source's report."""

    watermark: Row[Time | None] | None = None
    final: Row[bool] | None = None


class PlainReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A report of a source with nothing but a watermark for each shard."""

    token: Token
    ranges: dict[str, int]
    epoch: Number | None = None
    input_watermark: None = None


class SourceReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A report for shards of a source: `ranges`, or `columns` for all ranges of the lease."""

    token: Token
    ranges: dict[str, Time | ShardReport | None] | None = None
    columns: SourceColumns | None = None
    epoch: Number | None = None
    input_watermark: None = None


class PlainKeyedReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A report for key ranges with nothing but holds."""

    token: Token
    ranges: dict[str, KeyRangeReport]
    epoch: Number | None = None
    input_watermark: Time | UnsetType | None = UNSET


class KeyedReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A report for key ranges: `ranges`, or `columns` for all ranges of the lease."""

    token: Token
    ranges: dict[str, KeyRangeWorkReport] | None = None
    columns: WorkColumns | None = None
    epoch: Number | None = None
    input_watermark: Time | UnsetType | None = UNSET


class StageCommitBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The input watermark that a keyed stage's epoch ran with."""

    input_watermark: Time | UnsetType | None = UNSET


class CommitBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The commit of an epoch."""

    epoch: Number
    stages: Annotated[dict[Name, StageCommitBody], Meta(min_length=1, max_length=MAX_STAGES)]
    run: Run | None = None


class CreateKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key that is to be created."""

    name: Name
    role: Role
    jobs: JobsPattern = EVERY_JOB
    expires_in_ms: Annotated[int, Meta(ge=1, le=MAX_KEY_LIFE_MS)] | None = None


REQUESTS = (
    OpenRun, ClaimBody, Tokens, SourceReport, KeyedReport, CommitBody, CreateKey,
)  # fmt: skip
