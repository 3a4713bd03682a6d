"""The live port: leases, promises, waiting reports, and what readers are served from.

Each method is one atomic step of the store: nobody sees it half done, and two of them never
interleave. Whether a lease is current is judged inside the step, by the store's own clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.model.checkpoints import PromiseChunk
from service.model.jobs import Census, InstalledJob, JobView, StageView
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.positions import Position
from service.model.reports import Commit, Committed, RangeOrder, RangeView, Report, Reported

REMEMBERED = 10_000
"""Ended leases of a job whose reason is still known; older ones are `unknown`."""

FENCE_BITS = 32
"""Of a fence, the bits below the incarnation: leases that one incarnation can grant."""


def new_token() -> str:
    """Make a token that nobody can guess."""
    return secrets.token_urlsafe(24)


class StateLostError(Exception):
    """The store has no state of this job that could be trusted: none at all, or an older server's.

    Either the job does not exist, which the ledger knows, or the state was lost: then it must be
    installed afresh, in a new incarnation.
    """

    def __init__(self, job: str) -> None:
        super().__init__(f"no state of job {job!r}")
        self.job = job


class Watch(Protocol):
    """A reader's wake-up. It may wake for nothing, but no change goes by unseen after `rearm`."""

    def rearm(self) -> None:
        """Forget the changes so far. Read after this, and wait only then: else one could be missed."""
        ...

    async def wait(self) -> None:
        """Return once something has changed since `rearm`."""
        ...


class LiveStore(Protocol):
    """What a live store does. Both kinds pass one conformance suite.

    Raises `StateLostError` wherever a job is named, `UnknownStageError` wherever a stage is, and
    `UnavailableError` when the store does not answer in time.
    """

    shared: ClassVar[bool]
    """Whether other processes see the same state."""

    async def open(self) -> None:
        """Begin."""
        ...

    # ---- jobs

    async def begin(self, job: InstalledJob) -> None:
        """Start a job's state from the ledger alone: promises as checkpointed, no leases.

        To be called once for each incarnation, by whoever began it in the ledger. If there is one as
        late already, nothing changes.
        """
        ...

    async def install(self, job: InstalledJob) -> None:
        """Bring a job's state up to what the ledger has; whatever it has that is newer stays.

        A newer layout keeps the leases and promises of unchanged ranges; changed ones inherit their
        promise and lose their lease. A newer generation starts over, but fences go on.
        """
        ...

    async def remove(self, job: str, generation: int) -> None:
        """Forget the job, unless it is of a later generation by now; let its readers go."""
        ...

    async def head(self, job: str) -> Position | None:
        """Show where one job is; None: there is no state of it that could be trusted."""
        ...

    async def heads(self) -> Mapping[str, Position]:
        """Show where every job is whose state can be trusted."""
        ...

    async def jobs(self) -> Sequence[JobView]:
        """Show every job."""
        ...

    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        """Show a job's pipeline, up to date if it lacks `stage`.

        Else it may be out of date: each step checks what was made of it.
        """
        ...

    async def job(self, job: str) -> JobView:
        """Show one job, in one consistent snapshot."""
        ...

    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        """Show one job and how its ranges are, all at one instant."""
        ...

    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        """Show one stage."""
        ...

    # ---- leases

    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        """Grant what is free, run out, the same holder's or outranked; the old lease ends there.

        Raises `StaleRunError` if the claim is not of the stage's run, `LeaseConflictError` if nothing
        is granted.
        """
        ...

    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        """Put off the deadline of leases that have not run out. One that has is lost for ever."""
        ...

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        """End leases; return how many were current."""
        ...

    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        """Give the stages to this run: leases and waiting reports of older runs are void."""
        ...

    async def expire(self, job: str | None = None) -> Mapping[str, Mapping[str, int]]:
        """End the leases that have run out; return how many, by job and stage.

        With a job: only if the store knows of one there without asking anybody.
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
        """Apply what waits for this epoch, for all its stages or for none.

        Raises `StaleRunError`, `StaleEpochError`, `InputAheadError`, `InvalidRequestError` (a report
        waits that leaves its input watermark to the commit, which has none).
        """
        ...

    # ---- publishing and saving

    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        """Say what is published, and what the ranges of each stage in reach of `touched` agree on.

        All at one instant, with the leases that have run out by then ended: nobody is idle whose
        lease is over.
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
        """Show readers what the ledger has taken, and wake them. An older version changes nothing.

        `epochs` are those that the ledger knows to be committed now.
        """
        ...

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """Show ranges, in the order of the layout or the lowest weight in the agreement first."""
        ...

    async def promises(self, job: str, stage: str) -> Sequence[int]:
        """Show the promise of every range, in the order of the layout."""
        ...

    async def unsaved(self, job: str | None = None) -> Sequence[PromiseChunk]:
        """Show the promises that changed since they were last said to be saved."""
        ...

    async def mark_saved(self, chunks: Sequence[PromiseChunk]) -> None:
        """Hear that these are in the ledger. What has changed again since is unsaved still."""
        ...

    # ---- waiting

    def watch(self, job: str, stage: str | None = None) -> AbstractContextManager[Watch]:
        """Wake at each change of a stage (None: of any stage), and when the job goes."""
        ...

    async def ping(self) -> None:
        """Return if the store answers; raise `UnavailableError` otherwise."""
        ...

    def wake_readers(self) -> None:
        """Wake every reader that waits."""
        ...

    async def close(self) -> None:
        """Let the store go."""
        ...
