"""Types of the service's responses. At run time they are plain dictionaries: the service's own JSON.

Times that end in `_watermark`, `promise`, `at` or `until` are ms since 1970 (`MAX_MS`: the end of time);
others are ISO 8601, as the service writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict


class JobLine(TypedDict):
    """A job, in the list of all."""

    job: str
    generation: int
    layout_version: int
    stages: Sequence[str]


class JobsAnswer(TypedDict):
    """Every job."""

    jobs: Sequence[JobLine]
    next: NotRequired[str]


class JobAnswer(TypedDict):
    """A job's specification."""

    job: str
    generation: int
    layout_version: int
    stages: Mapping[str, Any]
    throttle: NotRequired[Mapping[str, Any] | None]
    health: NotRequired[Mapping[str, Health]]


Health = Literal[
    "final",
    "unpublished",
    "failed",
    "silent",
    "no_worker",
    "stalled",
    "waiting",
    "ended",
    "idle",
    "ok",
]
"""Ability of a stage's watermark to move, or the first reason why it cannot."""

RunOutcome = Literal["finished", "stopped", "failed"]
"""The outcome of a run."""


class RunLine(TypedDict):
    """A run."""

    run: int
    stages: Sequence[str]
    holder: str
    program: str | None
    links: Mapping[str, str]
    started_at: str | None
    ended_at: str | None
    outcome: RunOutcome | None
    because: str | None
    epoch: int | None
    fenced: NotRequired[bool]


class RunsAnswer(TypedDict):
    """The newest runs of a job, newest first."""

    runs: Sequence[RunLine]
    next: NotRequired[str]


class ProblemLine(TypedDict):
    """A root cause of stages that stand still."""

    job: str
    stage: str
    health: Health
    severity: Literal["critical", "warning"]
    since: str | None
    ranges: int
    examples: Sequence[str]
    holds_back: Sequence[str]
    holds_back_next: NotRequired[Sequence[str]]
    """Stages that do not wait for it yet: another input, or a range of their own, is lower."""
    because: str
    remedy: str


class JobProblemsAnswer(TypedDict):
    """Problems of a job, the worst first."""

    job: str
    health: Health
    problems: Sequence[ProblemLine]
    late_ranges: NotRequired[int]


class ProblemsAnswer(TypedDict):
    """Problems of all jobs that the key may read, the worst first."""

    problems: Sequence[ProblemLine]
    total: int
    late_ranges: NotRequired[Mapping[str, int]]


class JobSummary(TypedDict):
    """A job by its slowest stage: the stage without a watermark, else the active one furthest behind."""

    job: str
    stages: int
    slowest: str
    status: str
    output_watermark: int | None
    data_lag_ms: int | None
    since: str
    health: Health | None
    problems: int
    because: str | None
    slowest_ended: NotRequired[bool]
    cause: NotRequired[str]
    """The worst problem as lists show it: as `because`, with the name of a single range."""
    holds_back: NotRequired[Sequence[str]]
    holds_back_next: NotRequired[Sequence[str]]
    late_ranges: NotRequired[int]


class OverviewAnswer(TypedDict):
    """Jobs, the worst health first, and then the longest unchanged."""

    jobs: Sequence[JobSummary]
    matching: int
    total: int


class RangeCounts(TypedDict):
    """Number of a stage's ranges in each condition."""

    total: int
    reported: int
    idle: int
    final: int
    leased: int
    retired: NotRequired[int]


class WatermarkAnswer(TypedDict):
    """Watermarks and state of a stage."""

    job: str
    stage: str
    generation: int
    version: int
    status: str
    health: NotRequired[Health | None]
    late_ranges: NotRequired[int]
    input_ended: NotRequired[bool]
    """True if the stage is sound, and waits for an input whose last run has finished."""
    input_watermark: int | None
    output_watermark: int | None
    ranges: RangeCounts
    updated_at: str
    processing_watermark: NotRequired[int | None]
    system_lag_ms: NotRequired[int | None]
    data_lag_ms: NotRequired[int | None]
    records: NotRequired[int | None]
    late: NotRequired[int | None]
    corrections: NotRequired[int | None]
    percentiles: NotRequired[Mapping[str, int | None]]


class CommitsAnswer(TypedDict):
    """Last commit of a stage."""

    job: str
    stage: str
    generation: int
    run: int | None
    epoch: int | None


class SnapshotAnswer(TypedDict):
    """Watermarks of all stages of a job at one instant."""

    job: str
    generation: int
    watermarks: Mapping[str, WatermarkAnswer]


class RangeAnswer(TypedDict):
    """A range: its promise, and its holder."""

    range: str
    start: int | None
    end: int | None
    status: str
    promise: int | None
    holds: Mapping[str, int]
    holder: str | None
    fence: int | None
    expires_in_ms: int | None
    reported_at: str | None
    retired: NotRequired[bool]
    stalled: NotRequired[bool]


class RangesAnswer(TypedDict):
    """Ranges of a stage."""

    job: str
    stage: str
    total: int
    ranges: Sequence[RangeAnswer]


class PastWatermark(TypedDict):
    """Watermarks of a stage at an instant of the past."""

    at: int
    input_watermark: int | None
    output_watermark: int | None
    status: str
    records: int | None
    late: int | None


class HistoryAnswer(TypedDict):
    """Past watermarks of a stage, by wall time."""

    points: Sequence[PastWatermark]


class EtaAnswer(TypedDict):
    """Estimate of the instant when a stage reaches an event time."""

    at: int
    reached: bool
    expected_at: str | None
    between: Sequence[str] | None
    confidence: float
    because: str


class StepAnswer(TypedDict):
    """A stage on the path to the root cause."""

    stage: str
    reason: str
    health: NotRequired[Literal["idle", "ended", "final"]]
    """The reason for which the stage does not wait."""


class HolderAnswer(TypedDict):
    """A range that holds a stage back."""

    stage: str
    range: str
    promise: int | None
    would_be: int | None
    holder: str | None
    fence: int | None
    expires_in_ms: int | None
    reported_at: str | None
    since: str | None
    reason: str
    component: str | None
    backlog: NotRequired[int]
    position: NotRequired[str]


class RetiredAnswer(TypedDict):
    """A range that is not waited for, by an operator's declaration."""

    stage: str
    range: str
    because: str | None
    by: str | None
    since: str | None


class StandAnswer(TypedDict):
    """The watermarks of a stage, before or after a retirement."""

    input_watermark: int | None
    output_watermark: int | None
    status: str


class MoveAnswer(TypedDict):
    """A stage whose watermarks move by a retirement."""

    stage: str
    before: StandAnswer
    after: StandAnswer


class RetireAnswer(TypedDict):
    """The retirement of a range, with the watermarks that move by it at once."""

    job: str
    stage: str
    range: str
    retired: bool
    promise: int | None
    holder: str | None
    moves: Sequence[MoveAnswer]
    held_by: str | None
    """The range that is the lowest then; None: not one is left."""


class ExplainAnswer(TypedDict):
    """Explanation of a stage's watermark."""

    job: str
    stage: str
    output_watermark: int | None
    status: str
    health: Health
    since: str
    because: str
    remedy: str | None
    path: Sequence[StepAnswer]
    holders: Sequence[HolderAnswer]
    holders_total: int
    retired: NotRequired[Sequence[RetiredAnswer]]


class HeldByAnswer(TypedDict):
    """The shard that a group of sources waits for."""

    stage: str
    range: str


class GroupAnswer(TypedDict):
    """Sources that are kept together."""

    stages: Sequence[str]
    limit: int | None
    held_by: HeldByAnswer | None


class AdviceAnswer(TypedDict):
    """Throttle advice for a shard."""

    pause: bool
    until: int | None
    rate: float
    because: str


class ThrottleAnswer(TypedDict):
    """Throttle advice for a job's sources."""

    version: int
    groups: Sequence[GroupAnswer]
    shards: Mapping[str, Mapping[str, AdviceAnswer]]
