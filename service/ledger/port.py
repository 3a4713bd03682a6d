"""The ledger port: the durable state. Pipelines, runs, epochs, watermarks, checkpoints.

Each method is one transaction. Wall-clock times are parameters: the ledger does not read a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.errors import ProblemError
from service.frontier.graph import StageWatermark
from service.frontier.ranges import Layout
from service.model.audit import Action, AuditRecord, Deed
from service.model.checkpoints import CheckpointChunk, Columns
from service.model.history import HistoryPoint, RowCounts
from service.model.jobs import Specification, StageView, StoredJob
from service.model.keys import Key
from service.model.positions import Position
from service.model.runs import EndedRun, NewRun, RunEnd, RunRecord


class RejectedValueError(ProblemError):
    """The ledger rejects a value that does not fit its column. A retry is rejected again."""


@dataclass(frozen=True, slots=True)
class NewLayout:
    """A specification to be stored, with its changes to the ranges."""

    job: str
    spec: bytes
    changed: Sequence[str]
    """Stages that are new, or whose own ranges change."""
    inherited: Mapping[str, Columns] = field(default_factory=dict[str, Columns])
    """By changed stage, unless it is new: the columns with which its new ranges begin."""
    layouts: Mapping[str, tuple[Layout, Layout]] = field(
        default_factory=dict[str, tuple[Layout, Layout]]
    )
    """By stage that inherits columns: its former and its next layout. What the ledger has saved
    meanwhile for the former one is joined to the inherited columns."""
    joined: str | None = None
    """The source that shards join; None: another change."""
    differences: Mapping[str, str] = field(default_factory=dict[str, str])
    """Differences from the former specification, in a few words by stage, for the audit."""


@dataclass(frozen=True, slots=True)
class JobHead(Position):
    """Position of a job in the ledger."""

    job: str


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Changes to be recorded for one job: advances, epochs, and the promises on which they depend."""

    job: str
    incarnation: int
    """The incarnation of the live state from which the record was read."""
    generation: int
    layout_version: int
    seen: int
    """The newest revision in the live store."""
    advances: Mapping[str, StageWatermark]
    epochs: Mapping[str, int]
    counts: Mapping[str, RowCounts] = field(default_factory=dict[str, RowCounts])
    """The rows of stages that advance, for the history."""
    chunks: Sequence[CheckpointChunk] = ()
    unless_newer: bool = False
    """True if nothing newer than `seen` may have been recorded. Advances are joins, so their order does
    not matter. Idleness and a retirement are not joins: neither must be recorded after the report that
    ended it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Published watermarks that are newer than those of the live store."""

    revision: int
    views: Mapping[str, StageView]


@dataclass(frozen=True, slots=True)
class Thinned:
    """Result of one step of thinning."""

    rows: int
    """Number of deleted rows."""
    more: bool
    """True if rows may be left."""


Span = tuple[int, int]
"""An interval of wall time in ms, both ends included."""


@dataclass(frozen=True, slots=True)
class RecordedChanges:
    """Records of the changes of a job, each kind newest first."""

    records: Sequence[AuditRecord]
    """Those of the audit, except the ones about runs."""
    runs: Sequence[RunRecord]
    """Runs that were opened or ended."""


class Ledger(Protocol):
    """Port of a ledger. Raises `UnavailableError` when its database does not answer in time.

    A change with a `deed` is recorded in the audit, in the same transaction.
    """

    async def open(self, *, exclusive: bool) -> None:
        """Bring the schema up to date, also if several replicas do so at once.

        `exclusive`: for one process, whose live store is its own. Raises `StoreRefusedError` if another
        process has the ledger.
        """
        ...

    async def heads(self) -> Sequence[JobHead]:
        """Return the position of every job."""
        ...

    async def deleted(self, jobs: Collection[str]) -> Mapping[str, int]:
        """Return the deleted ones of these jobs, each with the generation that ended."""
        ...

    async def head(self, job: str) -> JobHead:
        """Return the position of one job. Raises `UnknownJobError`, also if it is deleted."""
        ...

    async def begin_incarnations(
        self, seen: Mapping[str, int], at_ms: int
    ) -> Mapping[str, StoredJob]:
        """Begin the next incarnations of these jobs' live state; return them with their last checkpoint.

        A job is missing in the result if it is unknown, or if its incarnation is no longer the one
        `seen`, because another replica has begun one. After the commit, nothing is recorded that was
        read from an earlier incarnation, whose leases are void.
        """
        ...

    async def get(self, job: str) -> StoredJob:
        """Return one job, without its promises. Raises `UnknownJobError`."""
        ...

    async def specification(self, job: str) -> Specification:
        """Return the stored specification of one job. Raises `UnknownJobError`."""
        ...

    async def create(
        self, layout: NewLayout, at_ms: int, deed: Deed | None = None
    ) -> StoredJob | None:
        """Store a new job, or a deleted one in its next generation; None if the job exists.

        The job gets a new incarnation, higher than all before.
        """
        ...

    async def replace(
        self,
        layout: NewLayout,
        generation: int,
        layout_version: int,
        at_ms: int,
        deed: Deed | None = None,
    ) -> StoredJob | None:
        """Store the next layout of a job; None if its present layout is another than the given one.

        After the commit, no advance that was computed for an older layout is recorded. Raises
        `InvalidRequestError` if shards join a final source: the check is here, since an advance to the
        end of time could be recorded until now.
        """
        ...

    async def reset(self, job: str, at_ms: int, deed: Deed | None = None) -> StoredJob:
        """Begin the next generation. Raises `UnknownJobError`."""
        ...

    async def delete(self, job: str, at_ms: int, deed: Deed | None = None) -> int:
        """Delete the job except its numbers; return the generation that ends.

        Raises `UnknownJobError`.
        """
        ...

    async def open_run(self, job: str, run: NewRun, at_ms: int, deed: Deed | None = None) -> int:
        """Give its stages to a new run; return its number. Raises `UnknownJobError`."""
        ...

    async def end_run(self, job: str, end: RunEnd, deed: Deed | None = None) -> EndedRun:
        """End a run. A run that has ended with the same outcome stays unchanged.

        Raises `UnknownJobError`, `UnknownRunError`; `StaleRunError` if the run has ended with another
        outcome, or has lost all its stages.
        """
        ...

    async def runs(
        self, job: str, limit: int, before: int | None = None, stage: str | None = None
    ) -> Sequence[RunRecord]:
        """Return the newest runs of a job, newest first. Raises `UnknownJobError`.

        `before`: only those with a lower number; `stage`: only those that were opened for this stage.
        """
        ...

    async def run_holder(self, job: str, run: int) -> str | None:
        """Return the holder of the run. None: it has no stages, or is older than this record."""
        ...

    async def record(self, records: Sequence[JobRecord], at_ms: int) -> Mapping[str, Recorded]:
        """Record advances, epochs and promises of many jobs; return the published state, by job.

        The write is monotone and conditional: a job whose incarnation, generation or layout differs from
        the given one (or that has changed, see `JobRecord.unless_newer`) is skipped as a whole, and
        missing from the result.

        Raises `RejectedValueError` if a value of any job does not fit: then nothing is recorded.
        """
        ...

    async def checkpoint(self, chunks: Sequence[CheckpointChunk], at_ms: int) -> None:
        """Save promises, except those of an older incarnation, generation, layout or stamp.

        Ends of retirements in them are recorded in the audit, as of `at_ms`.
        """
        ...

    async def history(
        self,
        job: str,
        stage: str,
        *,
        generation: int,
        newest: int,
        from_ms: int,
        until_ms: int,
        intervals: int,
    ) -> Sequence[HistoryPoint]:
        """Return some of the history of a stage's watermarks, by wall time.

        First the last advance up to `from_ms`, then the last one in each of as many equal intervals
        from there up to `until_ms`, included. Empty intervals are left out; so are advances of other
        generations, and those whose version is above `newest`. The time is proportional to the
        intervals, not to the advances.
        """
        ...

    async def began_after(self, job: str, stage: str, *, generation: int, at_ms: int) -> bool:
        """Return whether this generation's first advance of a stage was after this time.

        False if unknown, because history was thinned or deleted.
        """
        ...

    async def created_at_ms(self, job: str) -> int:
        """Return the moment of a job's creation. Raises `UnknownJobError`."""
        ...

    async def last_advances(
        self, job: str, stage: str, *, generation: int, newest: int, limit: int
    ) -> Sequence[HistoryPoint]:
        """Return the `limit` latest advances of a stage in this generation.

        The oldest comes first. The interval of each begins with its minute: as history is thinned, there
        may have been others in it. Advances whose version is above `newest` are left out.
        """
        ...

    async def thin_history(self, *, fine_until_ms: int, keep_until_ms: int) -> Thinned:
        """Thin a part of the history of watermarks, without delaying other transactions for long.

        Rows before `keep_until_ms` are deleted; of rows before the minute of `fine_until_ms`, the last
        of each minute stays. Call it again while `more` is true.
        """
        ...

    async def keys(self) -> Sequence[Key]:
        """Return all keys, by name."""
        ...

    async def add_key(self, key: Key, deed: Deed, *, first: bool = False) -> bool:
        """Store a key; False if its name exists."""
        ...

    async def delete_key(self, name: str, deed: Deed) -> bool:
        """Delete a key; False if the name does not exist."""
        ...

    async def note_uses(self, used_at_ms: Mapping[bytes, int]) -> None:
        """Store the last uses of keys, given by their digests, to about a minute."""
        ...

    async def note_deed(self, deed: Deed, job: str, detail: str) -> None:
        """Record a change of the live store in the audit, before the change is made."""
        ...

    async def read_audit(
        self, limit: int, before: int | None, job: str | None, action: Action | None = None
    ) -> Sequence[AuditRecord]:
        """Return the newest records of the audit, newest first.

        `before`: only records with a lower number; `job`: only records about this job; `action`: only
        records of this action.
        """
        ...

    async def changes(self, job: str, stage: str | None, span: Span, limit: int) -> RecordedChanges:
        """Return what makes up the newest `limit` changes of a job within a span of time.

        `stage`: without the runs and retirements of other stages. Raises `UnknownJobError`.
        """
        ...

    async def trim_audit(self, keep_until_ms: int) -> int:
        """Delete the records of the audit before this time; return their number."""
        ...

    async def ping(self) -> None:
        """Return if the database takes writes; raise `UnavailableError` otherwise."""
        ...

    async def close(self) -> None:
        """Close the database."""
        ...
