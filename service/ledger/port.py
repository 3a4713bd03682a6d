"""The ledger port: what must survive anything. Pipelines, runs, epochs, watermarks, checkpoints.

Each method is one transaction. Times of the wall are parameters; the ledger asks no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.frontier.graph import StageWatermark
from service.model.checkpoints import PromiseChunk
from service.model.jobs import StageView, StoredJob
from service.model.positions import Position


@dataclass(frozen=True, slots=True)
class NewLayout:
    """A specification to be stored, and what it means for the ranges."""

    job: str
    spec: bytes
    changed: Sequence[str]
    """Stages that are new or whose own ranges change."""
    promises: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """For each of them that has any, the promises that its new ranges inherit, packed as in
    `PromiseChunk`."""


@dataclass(frozen=True, slots=True)
class JobHead(Position):
    """How far a job is in the ledger."""

    job: str
    deleted: bool


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What one job has to record: advances, epochs, and the promises that they rest on."""

    job: str
    incarnation: int
    """Of the live store's state that all this was read from."""
    generation: int
    layout_version: int
    seen: int
    """The newest revision that the live store shows."""
    advances: Mapping[str, StageWatermark]
    epochs: Mapping[str, int]
    chunks: Sequence[PromiseChunk] = ()
    unless_newer: bool = False
    """Take it only if nothing newer than `seen` is recorded. Advances are joins and true in any order;
    that somebody is idle is not, and must not be recorded after the word that ended it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is published now: all that is newer than what the live store showed."""

    revision: int
    views: Mapping[str, StageView]


class Ledger(Protocol):
    """What a ledger does. Raises `UnavailableError` when its database does not answer in time."""

    async def open(self, *, exclusive: bool) -> None:
        """Bring the schema up to date, however many replicas do so at once.

        `exclusive`: for one process, whose live store nobody else can see. Raises `StoreRefusedError`
        if another one has the ledger already.
        """
        ...

    async def heads(self) -> Sequence[JobHead]:
        """Show where every job is, deleted ones too."""
        ...

    async def head(self, job: str) -> JobHead:
        """Show where one job is. Raises `UnknownJobError` (also if it is deleted)."""
        ...

    async def begin_incarnation(self, job: str, seen: int, at_ms: int) -> StoredJob | None:
        """Begin the next incarnation of a job's live state; return the job with its last checkpoint.

        None if it is no longer at the incarnation `seen`: somebody else began one. From the commit of
        this on, nothing is taken that rests on the state of an earlier one: its leases are void.
        Raises `UnknownJobError`.
        """
        ...

    async def get(self, job: str) -> StoredJob:
        """Return one job, without its promises. Raises `UnknownJobError`."""
        ...

    async def create(self, layout: NewLayout, at_ms: int) -> StoredJob | None:
        """Store a new job, or a deleted one in its next generation; None if there is one already.

        It has an incarnation of its own, higher than any before.
        """
        ...

    async def replace(
        self, layout: NewLayout, generation: int, layout_version: int, at_ms: int
    ) -> StoredJob | None:
        """Store the next layout of a job; None if it is no longer at the one given.

        From the commit of this on, no advance that was computed for an older layout is taken.
        """
        ...

    async def reset(self, job: str, at_ms: int) -> StoredJob:
        """Begin the next generation. Raises `UnknownJobError`."""
        ...

    async def delete(self, job: str, at_ms: int) -> int:
        """Delete the job, all but its numbers; return the generation that ends.

        Raises `UnknownJobError`.
        """
        ...

    async def open_run(self, job: str, stages: Sequence[str]) -> int:
        """Give the stages to a new run; return its number. Raises `UnknownJobError`."""
        ...

    async def record(self, records: Sequence[JobRecord], at_ms: int) -> Mapping[str, Recorded]:
        """Take advances, epochs and promises of many jobs; return, by job, what is now published.

        The write is monotone and conditional: a job that is no longer at the incarnation, generation
        and layout given (or has moved on, see `JobRecord.unless_newer`) is left out as a whole, and
        missing in the answer.
        """
        ...

    async def checkpoint(self, chunks: Sequence[PromiseChunk]) -> None:
        """Keep promises; those of an older incarnation, generation, layout or stamp are left out."""
        ...

    async def thin_history(self, *, fine_until_ms: int, keep_until_ms: int) -> int:
        """Thin the history of watermarks; return how many rows went.

        Older than `keep_until_ms`: all go. Older than `fine_until_ms`: the last of each minute stays.
        """
        ...

    async def ping(self) -> None:
        """Return if the database answers."""
        ...

    async def close(self) -> None:
        """Let the database go."""
        ...
