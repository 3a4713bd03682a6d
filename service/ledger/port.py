"""The ledger port: what must survive anything. Pipelines, runs, epochs, watermarks, checkpoints.

Each method is one transaction. Times of the wall are parameters; the ledger asks no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.frontier.graph import StageWatermark
from service.state import InstalledJob, PromiseChunk, StageView


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job with the specification as its author wrote it."""

    spec: bytes
    """JSON."""
    installed: InstalledJob


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
class JobRecord:
    """What one job has to record: advances, epochs, and the promises that they rest on."""

    job: str
    generation: int
    layout_version: int
    advances: Mapping[str, StageWatermark]
    epochs: Mapping[str, int]
    chunks: Sequence[PromiseChunk] = ()


class Ledger(Protocol):
    """What a ledger does. Raises `UnavailableError` when its database does not answer."""

    async def open(self, at_ms: int) -> int:
        """Bring the schema up to date and begin a new incarnation of the live store; return it."""
        ...

    async def load(self) -> Sequence[StoredJob]:
        """Return every job that is not deleted, with its last checkpoint."""
        ...

    async def get(self, job: str) -> StoredJob:
        """Return one job, without its promises. Raises `UnknownJobError`."""
        ...

    async def create(self, layout: NewLayout, at_ms: int) -> StoredJob | None:
        """Store a new job, or a deleted one in its next generation; None if there is one already."""
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

    async def delete(self, job: str, at_ms: int) -> None:
        """Delete the job, all but its generation and run number. Raises `UnknownJobError`."""
        ...

    async def open_run(self, job: str, stages: Sequence[str]) -> int:
        """Give the stages to a new run; return its number. Raises `UnknownJobError`."""
        ...

    async def record(
        self, records: Sequence[JobRecord], at_ms: int
    ) -> Mapping[str, Mapping[str, StageView]]:
        """Take advances, epochs and promises of many jobs; return, by job, what is now published.

        The write is monotone and conditional: a job that is no longer at the generation and layout
        given is left out as a whole, and missing in the answer.
        """
        ...

    async def checkpoint(self, chunks: Sequence[PromiseChunk]) -> None:
        """Keep promises; those of an older layout or generation are left out."""
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
