"""The ledger port: the durable state. Pipelines, runs, epochs, watermarks, checkpoints.

Each method is one transaction. Wall-clock times are parameters: the ledger reads no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.frontier.graph import StageWatermark
from service.model.audit import AuditRecord, Deed
from service.model.checkpoints import CheckpointChunk, Columns
from service.model.history import HistoryPoint
from service.model.jobs import Specification, StageView, StoredJob
from service.model.keys import Key
from service.model.positions import Position
from service.model.runs import EndedRun, NewRun, RunEnd, RunRecord


@dataclass(frozen=True, slots=True)
class NewLayout:
    """A specification to be stored, and how it changes the ranges."""

    job: str
    spec: bytes
    changed: Sequence[str]
    """Stages that are new or whose own ranges change."""
    inherited: Mapping[str, Columns] = field(default_factory=dict[str, Columns])
    """For each changed stage that was there before, what its new ranges begin with."""
    joined: str | None = None
    """The source that shards join, if that is the change."""


@dataclass(frozen=True, slots=True)
class JobHead(Position):
    """Position of a job in the ledger."""

    job: str


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Changes to be recorded for one job: advances, epochs, and the promises on which they depend."""

    job: str
    incarnation: int
    """The incarnation of the live state that all this was read from."""
    generation: int
    layout_version: int
    seen: int
    """The newest revision that the live store shows."""
    advances: Mapping[str, StageWatermark]
    epochs: Mapping[str, int]
    chunks: Sequence[CheckpointChunk] = ()
    unless_newer: bool = False
    """Record it only if nothing newer than `seen` is recorded. Advances are joins, so their order does
    not matter. Idleness is not a join: it must not be recorded after the report that ended it."""


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
    """True if there may be more to do."""


class Ledger(Protocol):
    """Port of a ledger. Raises `UnavailableError` when its database does not answer in time.

    A change with a `deed` is recorded in the audit, in the same transaction.
    """

    async def open(self, *, exclusive: bool) -> None:
        """Bring the schema up to date, however many replicas do so at once.

        `exclusive`: for one process, whose live store nobody else can see. Raises `StoreRefusedError`
        if another one has the ledger already.
        """
        ...

    async def heads(self) -> Sequence[JobHead]:
        """Return the position of every job."""
        ...

    async def deleted(self, jobs: Collection[str]) -> Mapping[str, int]:
        """Return which of these jobs were deleted, each with the generation that ended."""
        ...

    async def head(self, job: str) -> JobHead:
        """Return the position of one job. Raises `UnknownJobError`, also if it is deleted."""
        ...

    async def begin_incarnations(
        self, seen: Mapping[str, int], at_ms: int
    ) -> Mapping[str, StoredJob]:
        """Begin the next incarnations of these jobs' live state; return them with their last checkpoint.

        A job is missing if it is unknown, or if its incarnation is no longer the one `seen`, because
        another replica has begun one. Once this is committed, nothing is recorded that was read from an
        earlier incarnation, whose leases are void.
        """
        ...

    async def get(self, job: str) -> StoredJob:
        """Return one job, without its promises. Raises `UnknownJobError`."""
        ...

    async def specification(self, job: str) -> Specification:
        """Return the specification of one job as it is stored. Raises `UnknownJobError`."""
        ...

    async def create(
        self, layout: NewLayout, at_ms: int, deed: Deed | None = None
    ) -> StoredJob | None:
        """Store a new job, or a deleted one in its next generation; None if the job exists.

        It gets a new incarnation, higher than any before.
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
        """Store the next layout of a job; None if its layout is no longer the one given.

        Once this is committed, no advance that was computed for an older layout is recorded. Raises
        `InvalidRequestError` if shards join a source that is final: that is decided here, since until
        now an advance to the end of time could have been recorded.
        """
        ...

    async def reset(self, job: str, at_ms: int, deed: Deed | None = None) -> StoredJob:
        """Begin the next generation. Raises `UnknownJobError`."""
        ...

    async def delete(self, job: str, at_ms: int, deed: Deed | None = None) -> int:
        """Delete all of the job but its numbers; return the generation that ends.

        Raises `UnknownJobError`.
        """
        ...

    async def open_run(self, job: str, run: NewRun, at_ms: int, deed: Deed | None = None) -> int:
        """Give its stages to a new run; return its number. Raises `UnknownJobError`."""
        ...

    async def end_run(self, job: str, end: RunEnd, deed: Deed | None = None) -> EndedRun:
        """End a run. One that has ended with the same outcome stays as it is.

        Raises `UnknownJobError`, `UnknownRunError`; `StaleRunError` if it has ended with another
        outcome, or if no stage belongs to it any more.
        """
        ...

    async def runs(self, job: str, limit: int) -> Sequence[RunRecord]:
        """Return the newest runs of a job, newest first. Raises `UnknownJobError`."""
        ...

    async def run_holder(self, job: str, run: int) -> str | None:
        """Return who opened the run. None: no stage belongs to it, or it is older than this record."""
        ...

    async def record(self, records: Sequence[JobRecord], at_ms: int) -> Mapping[str, Recorded]:
        """Record advances, epochs and promises of many jobs; return, by job, what is now published.

        The write is monotone and conditional: a job whose incarnation, generation or layout is no longer
        the one given (or that has changed, see `JobRecord.unless_newer`) is skipped as a whole, and
        missing from the result.
        """
        ...

    async def checkpoint(self, chunks: Sequence[CheckpointChunk]) -> None:
        """Save promises, except those of an older incarnation, generation, layout or stamp."""
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

        First the last advance up to `from_ms`, then the last one in each of as many equal intervals from
        there up to `until_ms`, included. Intervals without one are left out; so are advances of other
        generations, and those whose version is above `newest`. It takes time for each interval, not
        for each advance.
        """
        ...

    async def began_after(self, job: str, stage: str, *, generation: int, at_ms: int) -> bool:
        """Return whether this generation's first advance of a stage was after this time.

        False if that is not known any more, as history was thinned or deleted.
        """
        ...

    async def last_advances(
        self, job: str, stage: str, *, generation: int, newest: int, limit: int
    ) -> Sequence[HistoryPoint]:
        """Return at most `limit` of a stage's advances: those of this generation that are dated last.

        The oldest comes first. The interval of each is what its minute has before it: as history is
        thinned, others may have been there. Advances whose version is above `newest` are left out.
        """
        ...

    async def thin_history(self, *, fine_until_ms: int, keep_until_ms: int) -> Thinned:
        """Thin some of the history of watermarks, without holding up other transactions for long.

        Of rows before `keep_until_ms` none is kept; before the minute of `fine_until_ms`, the last of
        each minute. Call it again while there is more to do.
        """
        ...

    async def keys(self) -> Sequence[Key]:
        """Return all keys, by name."""
        ...

    async def add_key(self, key: Key, deed: Deed, *, first: bool = False) -> bool:
        """Store a key; False if there is one of its name."""
        ...

    async def delete_key(self, name: str, deed: Deed) -> bool:
        """Delete a key; False if there is none of this name."""
        ...

    async def note_uses(self, used_at_ms: Mapping[bytes, int]) -> None:
        """Store when keys, given by their digests, were last used; to about a minute."""
        ...

    async def read_audit(
        self, limit: int, before: int | None, job: str | None
    ) -> Sequence[AuditRecord]:
        """Return the newest records of the audit, newest first.

        `before`: only those with a lower number; `job`: only those about this job.
        """
        ...

    async def trim_audit(self, keep_until_ms: int) -> int:
        """Delete the records of the audit before this time; return how many."""
        ...

    async def ping(self) -> None:
        """Return if the database takes writes; raise `UnavailableError` otherwise."""
        ...

    async def close(self) -> None:
        """Close the database."""
        ...
