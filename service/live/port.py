"""The live port: leases, promises, waiting reports, and the views that readers get.

Each method is one atomic step of the store: none is ever seen half done, and two never interleave.
Whether a lease is current is judged inside the step, by the store's own clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.model.checkpoints import CheckpointChunk, Columns
from service.model.jobs import (
    Census,
    InstalledJob,
    JobView,
    StageProgress,
    StageView,
    StoreSize,
)
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.observations import Instant, Marks, Settled, StageObservation
from service.model.positions import Position
from service.model.reports import Commit, Committed, RangeOrder, RangeView, Report, Reported
from service.model.runs import RunEnd

REMEMBERED = 10_000
"""Ended leases of a job that are remembered with their reason; older ones are `unknown`."""

FENCE_BITS = 32
"""The bits of a fence below the incarnation: they number its leases."""


def new_token() -> str:
    """Make an unguessable token."""
    return secrets.token_urlsafe(24)


class StateLostError(Exception):
    """The store has no trustworthy state of this job: none at all, or one of an earlier server run.

    Either the job does not exist, which the ledger knows, or its state was lost: then it must be started
    afresh, in a new incarnation.
    """

    def __init__(self, job: str) -> None:
        super().__init__(f"no state of job {job!r}")
        self.job = job


class Watch(Protocol):
    """A reader's wake-up. It may wake for nothing, but misses no change after `rearm`."""

    def rearm(self) -> None:
        """Forget the changes so far. To miss none, read after this, and wait only then."""
        ...

    async def wait(self) -> None:
        """Return once something has changed since `rearm`."""
        ...


class JobState(Protocol):
    """The steps of a live store on the state of single jobs.

    Raises `UnknownStageError` wherever a stage is named, and `UnavailableError` when the store does not
    answer in time.
    """

    # ---- jobs

    async def begin(self, job: InstalledJob) -> None:
        """Start a job's state afresh from the ledger: with the checkpoint's promises, and no leases.

        Must be called only once for each incarnation, by the replica that began it in the ledger. If the
        store has this incarnation or a later one already, nothing changes.
        """
        ...

    async def install(self, job: InstalledJob) -> None:
        """Bring a job's state up to date with the ledger; what is newer in the store stays.

        A newer layout keeps the leases and promises of unchanged ranges; changed ones inherit their
        promise and lose their lease. A newer generation starts over, but fences go on rising.
        """
        ...

    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        """Return a job's pipeline. It may be out of date, unless it lacks `stage`.

        That is safe, since each step checks the layout that it was prepared for.
        """
        ...

    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        """Return one job and the censuses of its stages, all at one instant."""
        ...

    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        """Return one stage."""
        ...

    async def progress(self, job: str, stage: str) -> tuple[int, StageProgress]:
        """Return the job's generation, and a stage's run in it and its last epoch whose commit is in the
        ledger: one that is not may be lost with this store.
        """
        ...

    # ---- leases

    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        """Grant the ranges that are free, expired, held by the same holder, or outranked.

        Raises `StaleRunError` if the claim is not of the stage's run, `LeaseConflictError` if nothing
        is granted.
        """
        ...

    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        """Extend leases that are current. One that has run out cannot be renewed."""
        ...

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        """End leases; return how many were current."""
        ...

    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        """Give the stages to this run: leases and waiting reports of older runs become void."""
        ...

    async def end_run(self, job: str, stages: Sequence[str], end: RunEnd) -> None:
        """Note the end of a run at those stages that still belong to it, and end its leases on them.

        Promises, and what waits for a commit, stay as they are. Readers are woken.
        """
        ...

    # ---- reports

    async def report(self, job: str, stage: str, report: Report) -> Reported:
        """Apply a report, or let it wait for its epoch, if its lease is current; renew the lease.

        Raises `LeaseLostError`, `StaleRunError`, `StaleEpochError`, `InputAheadError`,
        `EpochsWaitingError`; then nothing was applied.
        """
        ...

    async def commit(self, job: str, commit: Commit) -> Committed:
        """Apply the reports that wait for this epoch, for all its stages or for none.

        Raises `StaleRunError`, `StaleEpochError`, `InputAheadError`, `InvalidRequestError` (a
        waiting report leaves its input watermark to the commit, which has none).
        """
        ...

    # ---- ranges

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """Return ranges, in the order of the layout, or those that hold the stage back most first."""
        ...

    async def range_views(
        self, job: str, stage: str, indices: Sequence[int]
    ) -> Sequence[RangeView]:
        """Return single ranges, by their index in the layout, with what waits for a commit.

        Raises `InvalidRequestError` for a passthrough.
        """
        ...

    async def columns(self, job: str, stage: str) -> Columns:
        """Return what a checkpoint keeps of every range, in the order of the layout: a copy."""
        ...

    async def observe(
        self, job: str, stages: Sequence[str]
    ) -> tuple[Instant, Mapping[str, StageObservation]]:
        """Return the time, and what the ranges of these stages have said of their work.

        Stages without ranges are left out.
        """
        ...

    async def settle(self, job: str, stage: str, decisions: Sequence[Settled]) -> bool:
        """Apply decisions about quiet ranges, each only if its range is as it was observed.

        Return whether the stage's agreement is ahead of what is published, so it has to be published.
        """
        ...

    async def raise_marks(
        self, job: str, generation: int, marks: Mapping[str, Marks]
    ) -> Mapping[str, Marks]:
        """Join soft values of stages with those that were shown before; return all of these stages.

        They only rise within an incarnation and a generation, for all replicas together. Those of
        another generation change nothing.
        """
        ...


class LiveStore(JobState, Protocol):
    """Port of a live store. All implementations pass one conformance suite.

    Raises `StateLostError` wherever a job is named, `UnknownStageError` wherever a stage is, and
    `UnavailableError` when the store does not answer in time.
    """

    shared: ClassVar[bool]
    """True if other processes see the same state."""

    async def open(self) -> None:
        """Open the store."""
        ...

    # ---- jobs

    async def remove(self, job: str, generation: int) -> None:
        """Remove the job, unless it has a later generation by now, and wake its readers."""
        ...

    async def head(self, job: str) -> Position | None:
        """Return the position of one job; None: it has no trustworthy state."""
        ...

    async def heads(self) -> Mapping[str, Position]:
        """Return the position of every job with a trustworthy state."""
        ...

    async def jobs(self) -> Sequence[JobView]:
        """Return every job."""
        ...

    def size(self) -> StoreSize:
        """Return how much this process knows to be in the store."""
        ...

    def known(self) -> Mapping[str, Pipeline]:
        """Return the pipelines that this process knows, as `size` does: without asking a server."""
        ...

    async def job(self, job: str) -> JobView:
        """Return one job, as a consistent snapshot."""
        ...

    # ---- leases

    async def expire(self, job: str | None = None) -> Mapping[str, Mapping[str, int]]:
        """End the leases that have run out; return how many, by job and stage.

        With a job: only if the store already knows, without a request to its server, that one has.
        """
        ...

    # ---- publishing and saving

    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        """Return what is published, and the agreements of all stages that `touched` stages can move.

        All at one instant, and after ending expired leases: no range is idle whose lease is over.
        """
        ...

    async def publish(
        self,
        job: str,
        generation: int,
        revision: int,
        views: Mapping[str, StageView],
        epochs: Mapping[str, int],
    ) -> None:
        """Make visible what the ledger has recorded, and wake readers. Older versions change nothing.

        `epochs` are the epochs that are now recorded in the ledger, by stage.
        """
        ...

    async def unsaved(self, job: str | None = None) -> Sequence[CheckpointChunk]:
        """Return the chunks of promises that changed since they were last marked as saved."""
        ...

    async def mark_saved(self, chunks: Sequence[CheckpointChunk]) -> None:
        """Mark chunks as saved in the ledger, unless they have changed again since."""
        ...

    # ---- waiting

    def watch(self, job: str, stage: str | None = None) -> AbstractContextManager[Watch]:
        """Watch for changes of a stage (None: of any stage), and for the removal of the job."""
        ...

    async def ping(self) -> None:
        """Return if the store takes writes; raise `UnavailableError` otherwise."""
        ...

    def wake_readers(self) -> None:
        """Wake every waiting reader."""
        ...

    async def close(self) -> None:
        """Close the store."""
        ...
