"""The live port: leases, promises, pending reports, and published views.

Each method is one atomic step of the store: no other step observes it half done, and two never
interleave. The store checks inside the step, by its own clock, that a lease is current.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

from msgspec import structs

from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.frontier.ranges import Layout
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
from service.model.positions import LivePosition
from service.model.reports import Commit, Committed, RangeOrder, RangeView, Report, Reported
from service.model.runs import RunEnd

REMEMBERED = 10_000
"""Number of a job's ended leases that are kept with their reason; older ones are `unknown`."""

MAX_DEPARTED = 32
"""Number of the last holders of leases on a stage that are kept, for display alone."""

FENCE_BITS = 32
"""The bits of a fence below the incarnation: they number its leases."""


def new_token() -> str:
    """Make an unguessable token."""
    return secrets.token_urlsafe(24)


def with_token(report: Report, tokens: Callable[[], str]) -> Report:
    """Return a report with a new token for its claim, if it has one."""
    return report if report.claim is None else structs.replace(report, token=tokens())


class StateLostError(Exception):
    """The store has no trustworthy state of this job: none at all, or one of an earlier server run.

    Either the job does not exist in the ledger, or its state was lost and must be started afresh, in a
    new incarnation.
    """

    def __init__(self, job: str) -> None:
        super().__init__(f"no state of job {job!r}")
        self.job = job


class UnknownShardsError(Exception):
    """A report claims shards that its dynamic source does not have. The shards must join first: nothing
    was applied or granted.
    """

    def __init__(self, shards: Sequence[str]) -> None:
        super().__init__(f"{len(shards)} shards have not joined")
        self.shards = shards


class Watch(Protocol):
    """A waiting request's wake-up. It may be spurious, but misses no change after `rearm`."""

    def rearm(self) -> None:
        """Drop the changes so far. A read after `rearm` and before `wait` misses no change."""
        ...

    async def wait(self) -> None:
        """Return once something has changed since `rearm`."""
        ...


class JobState(Protocol):
    """The steps of a live store on the state of single jobs.

    Raises `UnknownStageError` for every unknown stage, and `UnavailableError` when the store does not
    answer in time.
    """

    # ---- jobs

    async def begin(self, job: InstalledJob) -> None:
        """Start a job's state afresh from the ledger: with the checkpoint's promises, without leases.

        Must be called only once for each incarnation, by the replica that began it in the ledger. If the
        store has this incarnation or a later one already, nothing changes.
        """
        ...

    async def install(self, job: InstalledJob) -> None:
        """Bring a job's state up to date with the ledger; newer parts of the store stay.

        A newer layout keeps the leases and promises of unchanged ranges; changed ones inherit their
        promise and lose their lease. A newer generation starts over, but fences continue to rise.
        """
        ...

    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        """Return a job's pipeline. It may be out of date, unless it lacks `stage`.

        This is safe, since each step checks the layout that it was prepared for.
        """
        ...

    async def snapshot(self, job: str) -> tuple[JobView, Mapping[str, Census]]:
        """Return one job and the censuses of its stages, all at one instant."""
        ...

    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        """Return one stage."""
        ...

    async def progress(self, job: str, stage: str) -> tuple[int, StageProgress]:
        """Return the job's generation, and a stage's run in it and its last epoch with a commit in the
        ledger: a later one may be lost with this store.
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
        """Extend current leases. An expired lease cannot be renewed."""
        ...

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        """End leases; return the number of current ones."""
        ...

    async def open_run(self, job: str, stages: Sequence[str], run: int) -> None:
        """Give the stages to this run: leases and waiting reports of older runs become void."""
        ...

    async def end_run(self, job: str, stages: Sequence[str], end: RunEnd) -> None:
        """Note the end of a run at the stages that still belong to it, and end its leases on them.

        Promises and pending reports stay unchanged. Waiting requests are woken.
        """
        ...

    # ---- reports

    async def report(self, job: str, stage: str, report: Report) -> Reported:
        """Apply a report under a current lease, or keep it pending for its epoch; renew the lease.

        A report with a claim is a `claim` of its ranges, the report for the granted ones, and perhaps
        the `release` of the lease, all in one step.

        Raises `LeaseLostError`, `StaleRunError`, `StaleEpochError`, `InputAheadError`,
        `EpochsWaitingError`, and with a claim `LeaseConflictError` and `UnknownShardsError`; then
        nothing was applied or granted.
        """
        ...

    async def commit(self, job: str, commit: Commit) -> Committed:
        """Apply the reports that wait for this epoch, for all its stages or for none.

        The late rows and corrections that a new epoch brings are added to the counts of its stages. An
        epoch that is committed already changes nothing.

        Raises `StaleRunError`, `StaleEpochError`, `InputAheadError`, `InvalidRequestError` (a
        waiting report leaves its input watermark to the commit, which has none).
        """
        ...

    # ---- ranges

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """Return ranges, in the order of the layout, or the lowest promise first."""
        ...

    async def range_views(
        self, job: str, stage: str, indices: Sequence[int]
    ) -> Sequence[RangeView]:
        """Return single ranges, by their index in the layout, with their pending promises.

        Raises `InvalidRequestError` for a passthrough.
        """
        ...

    async def columns(self, job: str, stage: str) -> Columns:
        """Return a copy of the checkpoint's columns of every range, in the order of the layout."""
        ...

    async def observe(
        self, job: str, stages: Sequence[str]
    ) -> tuple[Instant, Mapping[str, StageObservation]]:
        """Return the time, and the observations of the ranges of these stages.

        Stages without ranges are left out.
        """
        ...

    async def settle(
        self, job: str, stage: str, layout: Layout, decisions: Sequence[Settled]
    ) -> bool:
        """Apply decisions about quiet ranges, each only if its range is unchanged since the observation.

        `layout`: of the observation. In another one, an index may be of another range, and nothing is
        applied.

        Return whether the stage's agreement is ahead of its published watermark, and must be published.
        """
        ...

    async def follow_set_back(self, job: str, stage: str, after_ms: int) -> None:
        """Correct the moments of a stage that are ahead of the clock, which was set back: they must not
        count once more when the clock reaches them (`is_void`, `after_set_back`).

        Shards that are idle by policy have been quiet for `after_ms`.
        """
        ...

    async def retire(self, job: str, stage: str, range_name: str) -> bool:
        """Retire a range until its next report (see `service.frontier.retirement`).

        Return whether the stage's agreement is ahead of its published watermark, and must be published.
        A range that is retired or final already stays unchanged. Raises `InvalidRequestError` for a
        passthrough, `UnknownRangeError`.
        """
        ...

    async def raise_marks(
        self, job: str, generation: int, marks: Mapping[str, Marks]
    ) -> Mapping[str, Marks]:
        """Join soft values of stages with earlier ones; return the joined values of these stages.

        The values only rise within an incarnation and a generation, for all replicas together. Values of
        another generation change nothing.
        """
        ...


class LiveStore(JobState, Protocol):
    """Port of a live store. All implementations pass one conformance suite.

    Raises `StateLostError` for a job without state, `UnknownStageError` for an unknown stage, and
    `UnavailableError` when the store does not answer in time.
    """

    shared: ClassVar[bool]
    """True if other processes share the state."""

    async def open(self) -> None:
        """Open the store."""
        ...

    # ---- jobs

    async def remove(self, job: str, generation: int) -> None:
        """Remove the job, unless it has a later generation by now, and wake its waiting requests."""
        ...

    async def head(self, job: str) -> LivePosition | None:
        """Return the position of one job; None: without a trustworthy state."""
        ...

    async def heads(self) -> Mapping[str, LivePosition]:
        """Return the position of every job with a trustworthy state."""
        ...

    async def jobs(self) -> Sequence[JobView]:
        """Return every job."""
        ...

    def size(self) -> StoreSize:
        """Return the size of the store, as last observed by this process."""
        ...

    def known(self) -> Mapping[str, Pipeline]:
        """Return the pipelines that this process has observed, without a request to a server."""
        ...

    async def job(self, job: str) -> JobView:
        """Return one job, as a consistent snapshot."""
        ...

    # ---- leases

    async def expire(self, job: str | None = None) -> Mapping[str, Mapping[str, int]]:
        """End the expired leases; return their number, by job and stage.

        With a job: only if this process has observed, without a request to a server, that one has
        expired.
        """
        ...

    # ---- publishing and saving

    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        """Return the published state, and the agreements of all stages that `touched` stages can move.

        All at one instant, and after ending expired leases: an idle range has a current lease.
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
        """Make the ledger's records visible, and wake waiting requests. Older versions change nothing.

        `epochs` are the epochs that the ledger has now recorded, by stage.
        """
        ...

    async def unsaved(self, job: str | None = None) -> Sequence[CheckpointChunk]:
        """Return the chunks of promises that have changed since they were last marked as saved."""
        ...

    async def note_saved(self, chunks: Sequence[CheckpointChunk]) -> None:
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
        """Wake every waiting request."""
        ...

    async def close(self) -> None:
        """Close the store."""
        ...
