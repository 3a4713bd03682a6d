"""The bodies of requests, contract version 1: a type each, for decoding, checks and documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field

from service.api.run_requests import EndRun, Holder, OpenRun, Retire
from service.frontier.leases import Rank
from service.frontier.sketches import MAX_SKETCH
from service.frontier.timestamps import MAX
from service.model.keys import EVERY_JOB, JOBS_PATTERN, Role
from service.model.leases import Claim
from service.model.pipeline_spec import MAX_RANGES, MAX_STAGES, Name
from service.model.reports import MAX_REPORTED, RangeNote
from service.model.runs import MAX_NUMBER

T = TypeVar("T")

MIN_TTL_MS, DEFAULT_TTL_MS, MAX_TTL_MS = 1_000, 10_000, 600_000

IN_RFC_3339 = {"x-rfc-3339": True}
"""Mark of an integer that may be sent in RFC 3339: `service.api.openapi` documents it."""

Time = Annotated[
    int,
    Meta(
        description="Milliseconds since the Unix epoch, UTC: an instant of the years 0001 to 9999, or"
        f" {MAX} (the end of time)",
        extra_json_schema={"examples": [1767225600000, MAX], **IN_RFC_3339},
    ),
]
JobsPattern = Annotated[
    str,
    Meta(
        pattern=JOBS_PATTERN,
        description="Pattern of the jobs' names: `*` stands for any characters, `?` for one",
    ),
]
MAX_KEY_LIFE_MS = 100 * 365 * 86_400_000
Number = Annotated[int, Meta(ge=0, le=2**53)]
Run = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
Token = Annotated[str, Meta(min_length=1, max_length=256)]
HoldName = Annotated[str, Meta(min_length=1, max_length=128)]
Holds = Annotated[
    dict[HoldName, Time],
    Meta(
        max_length=100, description="Lower bounds that components of the range keep on its promise"
    ),
]


class ReportClaim(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A claim of the ranges of a report. It outranks leases with a smaller run, epoch and attempt."""

    holder: Holder
    ttl_ms: Annotated[int, Meta(ge=MIN_TTL_MS, le=MAX_TTL_MS)] = DEFAULT_TTL_MS
    run: Run | None = None
    epoch: Number | None = None
    attempt: Number | None = None
    watched: Annotated[
        bool,
        Meta(
            description="false: the worker does not poll the ranges under this lease, so that the lease"
            " is not evidence that they are quiet (idle policy)"
        ),
    ] = True

    def claim(self, ranges: Sequence[str] | None) -> Claim:
        """Return the claim of these ranges (None: of all)."""
        rank = Rank(self.run or 0, self.epoch or 0, self.attempt or 0)
        return Claim(ranges, self.holder, self.ttl_ms, rank, self.watched)


class ClaimBody(ReportClaim, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A claim for ranges of a stage. It outranks leases with a smaller run, epoch and attempt."""

    ranges: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_RANGES)] | Literal["all"]


class Tokens(Struct, frozen=True, forbid_unknown_fields=True):
    """Leases, by their tokens."""

    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_REPORTED)]


class Pending(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The event times of a range's records in flight: read, and not yet emitted."""

    count: Annotated[Number, Meta(description="Number of records, equal to the sketch's")]
    event_times: Annotated[
        bytes,
        Meta(
            max_length=MAX_SKETCH,
            description="An Apache DataSketches KLL sketch of doubles (`kll_doubles_sketch`) of event"
            " times in whole ms, serialized",
        ),
    ]


OldestWork = Annotated[
    int,
    Meta(
        description="Wall-clock arrival (ms) of the range's oldest unfinished work. Left out or null:"
        " all work is finished. The processing watermark follows from these arrivals",
        extra_json_schema=IN_RFC_3339,
    ),
]
Records = Annotated[
    Number,
    Meta(
        description="Records since the range's last report. 0: the worker has polled and nothing came."
        " A report without this member counts as activity"
    ),
]
Late = Annotated[
    Number, Meta(description="Records since the last report that were behind the watermark")
]
LateAtCommit = Annotated[
    Number,
    Meta(
        description="Records behind the watermark that no report counts. They are added to the stage's"
        " `late` once, when the epoch is committed"
    ),
]
EvidenceAge = Annotated[
    Number,
    Meta(
        description="Time since the epoch's batch was planned, in ms, measured when the request is"
        " sent. A commit is evidence that shards without a report were quiet until then (idle policy)"
    ),
]
CorrectionsAtCommit = Annotated[
    Number,
    Meta(
        description="Values of windows that had been emitted before, which correct them. Added to the"
        " stage's `corrections` once, when the epoch is committed"
    ),
]
Backlog = Annotated[
    Number,
    Meta(description="Records that are not read yet. A shard with a backlog is not quiet"),
]
InFlight = Annotated[
    Pending | UnsetType | None,
    Meta(
        description="The records in flight, for the percentile watermarks. Left out: as reported last;"
        " null: none"
    ),
]
Idle = Annotated[
    bool,
    Meta(
        description="A shard: no data for now, so the stage does not wait for it. A key range: it holds"
        " nothing that has not been emitted. Ends with the next report without it, or with the lease"
    ),
]
Position = Annotated[
    str,
    Meta(
        max_length=256,
        description="Where its reader is, in the source's own words, such as an offset. For display",
    ),
]
Final = Annotated[bool, Meta(description="Nothing more will come: a promise of the end of time")]


class WorkReport(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Facts about a range's work, besides its promise."""

    oldest_work: OldestWork | None = None
    pending: InFlight = UNSET
    records: Records | UnsetType = UNSET
    late: Late = 0
    backlog: Backlog = 0


class ShardReport(WorkReport, frozen=True, forbid_unknown_fields=True, gc=False):
    """Report of a source's shard."""

    watermark: Time | UnsetType | None = UNSET
    holds: Holds = field(default_factory=dict[str, int])
    idle: Idle = False
    final: Final = False
    position: Position = ""


class KeyRangeReport(RangeNote, frozen=True, forbid_unknown_fields=True, gc=False):
    """Report of a key range: holds. Its promise is capped by the report's input_watermark."""

    holds: Holds = field(default_factory=dict[str, int])


class KeyRangeWorkReport(WorkReport, frozen=True, forbid_unknown_fields=True, gc=False):
    """Report of a key range, with facts about its work."""

    holds: Holds = field(default_factory=dict[str, int])
    idle: Idle = False


Row = Annotated[tuple[T, ...], Meta(max_length=MAX_RANGES)]

# Without a `pattern`, which would be applied to each request: `service.api.byte_columns` checks them.
TimesAsBytes = Annotated[
    str,
    Meta(
        description="In place of an array: standard base64 of one little-endian signed 64-bit integer"
        " for each range; -2^63 stands for null",
        extra_json_schema={
            "contentEncoding": "base64",
            "examples": ["AKjadpsBAABgktt2mwEAAAAAAAAAAACA"],
        },
    ),
]
FlagsAsBytes = Annotated[
    str,
    Meta(
        description="In place of an array: standard base64 of one byte for each range, 0 or 1",
        extra_json_schema={"contentEncoding": "base64", "examples": ["AAAB"]},
    ),
]
TimeColumn = Row[Time | None] | TimesAsBytes


class WorkColumns(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A packed report. Each column has one entry for each range of the lease, in the order of `granted`.

    The report is for all ranges of the lease. The member of the same name in `ranges` describes the
    meaning of an entry.
    """

    holds: Annotated[
        dict[HoldName, TimeColumn],
        Meta(max_length=100, description="By component; null: no hold on this range"),
    ] = field(default_factory=dict[str, TimeColumn])
    idle: Row[Idle] | FlagsAsBytes | None = None
    oldest_work: Row[OldestWork | None] | TimesAsBytes | None = None
    pending: (
        Annotated[
            Row[Pending | None],
            Meta(description="null: nothing is in flight. Without the column: as reported last"),
        ]
        | None
    ) = None
    records: Row[Records] | None = None
    late: Row[Late] | None = None
    backlog: Row[Backlog] | None = None


class SourceColumns(WorkColumns, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A source's packed report: one entry for each range of the lease, in the order of `granted`.

    The report is for all ranges of the lease. The member of the same name in `ranges` describes the
    meaning of an entry.
    """

    watermark: (
        Annotated[
            TimeColumn,
            Meta(description="null promises nothing. It may be left out if all are idle or final"),
        ]
        | None
    ) = None
    final: Row[Final] | FlagsAsBytes | None = None


class AnyReport(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Members of every report."""

    token: (
        Annotated[
            Token, Meta(description="Token of a lease on the ranges. Left out beside `claim`")
        ]
        | UnsetType
    ) = UNSET
    claim: (
        Annotated[
            ReportClaim,
            Meta(
                description="In place of a token: claims the ranges in `ranges`, and reports the granted"
                " ones, in one atomic step"
            ),
        ]
        | None
    ) = None
    release: Annotated[
        bool, Meta(description="Beside `claim`: releases the lease in the same step")
    ] = False
    epoch: Number | None = None


class PlainReport(AnyReport, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A report of a source with only a watermark for each shard."""

    ranges: dict[str, int]
    input_watermark: None = None


class SourceReport(AnyReport, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A report for shards of a source: `ranges`, or `columns` for all ranges of the lease."""

    ranges: dict[str, Time | ShardReport | None] | None = None
    columns: SourceColumns | None = None
    input_watermark: None = None


class PlainKeyedReport(AnyReport, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A report for key ranges with only holds."""

    ranges: dict[str, KeyRangeReport]
    input_watermark: Time | UnsetType | None = UNSET


class KeyedReport(AnyReport, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A report for key ranges: `ranges`, or `columns` for all ranges of the lease."""

    ranges: dict[str, KeyRangeWorkReport] | None = None
    columns: WorkColumns | None = None
    input_watermark: Time | UnsetType | None = UNSET


class StageCommitBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The input watermark of a keyed stage's epoch, the holds of all its ranges, and its counts."""

    input_watermark: Time | UnsetType | None = UNSET
    holds: Holds = field(default_factory=dict[str, int])
    late: LateAtCommit = 0
    corrections: CorrectionsAtCommit = 0


class CommitBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The commit of an epoch."""

    epoch: Number
    stages: Annotated[dict[Name, StageCommitBody], Meta(min_length=1, max_length=MAX_STAGES)]
    run: Run | None = None
    evidence_age_ms: EvidenceAge = 0


class CreateKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key to be created."""

    name: Name
    role: Role
    jobs: JobsPattern = EVERY_JOB
    expires_in_ms: Annotated[int, Meta(ge=1, le=MAX_KEY_LIFE_MS)] | None = None


REQUESTS = (
    OpenRun, EndRun, ClaimBody, Tokens, SourceReport, KeyedReport, CommitBody, CreateKey,
    Retire,
)  # fmt: skip
