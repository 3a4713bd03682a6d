"""The live port: leases, promises, waiting reports, and what readers are served from.

Each method is one atomic step of the store: nobody sees it half done, and two of them never
interleave. Whether a lease is current is judged inside the step, by the store's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.state import InstalledJob, PromiseChunk, StageView

Holds = Mapping[str, int]

Column = Sequence[int] | npt.NDArray[np.int64]
"""Integers, a great many of them as an array: the report path must not touch each one for itself."""

LostReason = Literal["expired", "superseded", "released", "unknown"]
"""Why a token, or a range under it, is no longer current."""

RangeOrder = Literal["range", "promise"]

MAX_WAITING_EPOCHS = 64
"""Epochs of one stage that may wait for their commit."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """What decides between two claims to one range: the greater takes over."""

    run: int = 0
    """0: of no run."""
    epoch: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Census:
    """How many of a stage's ranges are what."""

    total: int
    reported: int
    """Those that have ever promised."""
    idle: int
    final: int
    leased: int


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as readers see it: one consistent snapshot."""

    name: str
    pipeline: Pipeline
    generation: int
    layout_version: int
    revision: int
    stages: Mapping[str, StageView]
    """Only to be read: it may be the store's own."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A wish for ranges of a stage."""

    ranges: Sequence[str] | None
    """None: all of them."""
    holder: str
    ttl_ms: int
    rank: Rank


@dataclass(frozen=True, slots=True)
class Denied:
    """A range that was not granted, and to whom it belongs, unless the stage has no such range."""

    range: str
    reason: Literal["held", "unknown"]
    holder: str | None = None
    expires_in_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease: the right to report for `granted` until it runs out."""

    token: str
    fence: int
    expires_in_ms: int
    granted: Sequence[str]
    denied: Sequence[Denied]


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease that goes on."""

    token: str
    expires_in_ms: int
    ranges: Sequence[str]


@dataclass(frozen=True, slots=True)
class LostLease:
    """A lease that does not."""

    token: str
    reason: LostReason


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says, folded by the rules of `service.frontier.promises`."""

    token: str
    ranges: Sequence[str]
    """No range twice. The columns below go with it."""
    promises: Column
    """With `capped_at_commit`, only the least of the holds: the commit brings the input."""
    idle: Sequence[bool] | None = None
    """None: nobody is."""
    holds: Sequence[Holds | None] | None = None
    """None: nobody has any."""
    epoch: int | None = None
    observed_input: int | None = None
    """The input watermark that the worker says it has observed; checked against the published one."""
    capped_at_commit: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """What became of a report."""

    accepted: int
    behind: Sequence[str]
    rejected: Sequence[tuple[str, LostReason]]
    expires_in_ms: int
    view: StageView
    advances: bool
    """The stage's agreement is ahead of what is published: somebody must publish it."""


@dataclass(frozen=True, slots=True)
class StageCommit:
    """The input watermark that an epoch ran with; None: said in the reports, or there is none."""

    observed_input: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The word that an epoch is done."""

    run: int
    """0: of no run."""
    epoch: int
    stages: Mapping[str, StageCommit]


@dataclass(frozen=True, slots=True)
class Committed:
    """How many ranges of each stage were applied, and which stages were not committed before."""

    applied: Mapping[str, int]
    fresh: Sequence[str]
    generation: int


@dataclass(frozen=True, slots=True)
class RangeView:
    """One range, for people: who holds it, and what holds it back."""

    name: str
    promise: int
    idle: bool
    holds: Holds
    holder: str | None
    fence: int | None
    expires_in_ms: int | None
    reported_at_ms: int | None


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

    Raises `UnknownJobError` and `UnknownStageError` wherever a job or a stage is named.
    """

    async def open(self, incarnation: int) -> None:
        """Begin as this incarnation: fences are above those of every earlier one."""
        ...

    async def install(self, job: InstalledJob) -> None:
        """Create the job, or bring it up to its newer layout or generation.

        Ranges that are unchanged keep lease and promise, changed ones inherit their promise and lose
        their lease. An older layout or generation than the one at hand changes nothing.
        """
        ...

    async def remove(self, job: str) -> None:
        """Forget the job, and let its readers go."""
        ...

    async def jobs(self) -> Sequence[JobView]:
        """Show every job."""
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

    async def agreements(self, job: str, stages: frozenset[str]) -> Mapping[str, Agreement]:
        """Say what the ranges of each of the stages that has any agree on, all at one instant."""
        ...

    async def publish(self, job: str, generation: int, views: Mapping[str, StageView]) -> None:
        """Show readers what the ledger has taken, and wake them. An older version changes nothing."""
        ...

    async def expire(self) -> Mapping[str, Mapping[str, int]]:
        """End the leases that have run out; return how many, by job and stage."""
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
        """Take the promises that changed since they were last taken."""
        ...

    async def mark_unsaved(self, chunks: Sequence[PromiseChunk]) -> None:
        """Put back what could not be saved."""
        ...

    def watch(self, job: str, stage: str | None = None) -> AbstractContextManager[Watch]:
        """Wake at each change of a stage (None: of any stage), and when the job goes."""
        ...

    async def ping(self) -> None:
        """Return if the store answers; raise `UnavailableError` otherwise."""
        ...

    async def close(self) -> None:
        """Let every reader go."""
        ...
