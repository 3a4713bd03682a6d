"""Bringing the live store up to date with the ledger, after a lost state or a missed change.

The live store may lose state: it may come back empty, or with an older state. And a replica that has
written to the ledger may die before it writes to the live store. A request finds that the state is not
trustworthy, or else, within a second, the comparison of the two stores finds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from service.clock import Clock
from service.consistency.publisher import Publisher
from service.errors import UnavailableError, UnknownJobError
from service.ledger.port import JobHead, Ledger
from service.live.port import LiveStore, StateLostError
from service.model.jobs import InstalledJob
from service.model.positions import LivePosition, Position
from service.tasks import run_to_completion, side_by_side
from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

R = TypeVar("R")

_RESTORE_TIMEOUT_MS = 5_000
"""Wait of a request for the restoration of its job's state."""

_INSTALL_CHECKS = 50
"""Number of checks for an incarnation that another replica is installing."""

_POLL_S = 0.02
_LONGEST_PAUSE_S = 0.5

_RESTORED_AT_ONCE = 100
"""Number of jobs whose incarnations begin together. Others wait until these are installed."""

_AT_ONCE = 16
"""Number of jobs that are compared or installed at once: a shared live store is a trip away."""


class Reconciler:
    """Restoration of the live state of single jobs, and comparison of all jobs."""

    def __init__(
        self,
        live: LiveStore,
        ledger: Ledger,
        publisher: Publisher,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._live = live
        self._ledger = ledger
        self._publisher = publisher
        self._clock = clock
        self._metrics = metrics
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self._incarnations: dict[str, int] = {}
        """The last begun incarnation of each job, as far as this process has observed."""
        self._missing_before: Collection[str] | None = None
        """Jobs without live state in the last comparison; None: not yet compared. Every job is in the
        ledger alone for a moment after its creation: a job is lost if it stays so, or had a state."""
        self._behind_before: dict[str, Position] = {}
        """Jobs that were behind the ledger in the last comparison. Every job is, for a moment, between
        the two writes of an advance: a job needs to catch up if it stays at the same position."""
        self._compared: dict[str, LivePosition] = {}
        """Position of each job in the live store at the last comparison."""
        self._keepers: list[Callable[[Collection[str]], None]] = []
        self._dropped: set[str] = set()
        """Jobs that were not published for an unexpected error, until they are compared."""

    def add_keeper(self, keep_only: Callable[[Collection[str]], None]) -> None:
        """Have this called at each comparison, with the jobs that there are."""
        self._keepers.append(keep_only)

    async def run_with_restore(self, job: str, step: Callable[[], Awaitable[R]]) -> R:
        """Run a step on a job's live state; if the state was lost, restore it and retry.

        Raises `UnknownJobError` if the job does not exist, `UnavailableError` after a timeout.
        """
        deadline_ms: int | None = None
        pause_s = 0.0
        while True:
            try:
                return await step()
            except StateLostError:
                now_ms = self._clock.steady_ms()
                if deadline_ms is None:
                    deadline_ms = now_ms + _RESTORE_TIMEOUT_MS
                # The state may be lost again during the restoration, or another replica may begin its
                # next incarnation meanwhile: then the next attempt finds it.
                with suppress(StateLostError, TimeoutError):
                    async with asyncio.timeout(_RESTORE_TIMEOUT_MS / 1_000):
                        await self.restore(job)
                if self._clock.steady_ms() > deadline_ms:
                    raise UnavailableError(
                        f"the state of job {job!r} is being restored: retry"
                    ) from None
                # The first retry is at once. The pauses keep a state that is lost again and again from
                # taking all the time in restorations.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s + _POLL_S, _LONGEST_PAUSE_S)

    def note_installed(self, job: str, incarnation: int) -> None:
        """Note that this process has installed a job: a missing job is lost from now on."""
        self._incarnations[job] = incarnation

    async def restore(self, job: str) -> None:
        """Restore a job's state; return when a retry makes sense. Concurrent calls share one attempt."""
        task = self._restoring.get(job)
        if task is None:
            task = self._begin_attempt([job], self._restore(job))
        # Shielded: a cancelled request must not cancel the restoration for others.
        await asyncio.shield(task)

    def _begin_attempt(
        self, jobs: Sequence[str], attempt: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """Begin a restoration of these jobs, which concurrent calls share.

        Between the begin of an incarnation in the ledger and its installation, another attempt would
        find the job still lost, and begin one more.
        """
        task = asyncio.ensure_future(attempt)
        self._restoring |= dict.fromkeys(jobs, task)

        def end(done: asyncio.Task[None]) -> None:
            for job in jobs:
                del self._restoring[job]
            # If all requests were cancelled, the exception is not retrieved otherwise.
            _ = done.cancelled() or done.exception()

        task.add_done_callback(end)
        return task

    async def _restore(self, job: str) -> None:
        try:
            head = await self._ledger.head(job)
        except UnknownJobError:
            self._incarnations.pop(job, None)
            raise
        live = await self._live.head(job)
        if live is not None and live.incarnation >= head.incarnation:
            self._incarnations[job] = live.incarnation
            if live.is_behind(head):
                await self._catch_up(job)
            return
        # A job that is new to this process was perhaps created just now: its creator is about to install
        # it, and an installation here would overwrite the leases granted since.
        begun_elsewhere = head.incarnation > self._incarnations.get(job, 0)
        if begun_elsewhere and await self._wait_for_install(head):
            return
        await self._begin([head])

    async def _wait_for_install(self, head: JobHead) -> bool:
        """Wait for another replica to install its incarnation; False: the replica has probably died."""
        for _ in range(_INSTALL_CHECKS):
            live = await self._live.head(head.job)
            if live is not None and live.incarnation >= head.incarnation:
                self._incarnations[head.job] = live.incarnation
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def restore_missing(self, present: Collection[str]) -> bool:
        """Restore jobs that had a live state and are not present; return False if all are present.

        Raises `UnavailableError` if a store does not answer, and after a timeout.
        """
        missing = self._incarnations.keys() - present
        if not missing:
            return False
        try:
            async with asyncio.timeout(_RESTORE_TIMEOUT_MS / 1_000):
                # Without the jobs that another replica has deleted.
                heads = [head for head in await self._ledger.heads() if head.job in missing]
                await self._restore_lost(heads)
        except TimeoutError:
            raise UnavailableError(
                f"the states of {len(missing)} jobs are being restored: retry"
            ) from None
        return True

    @run_to_completion
    async def _begin(self, heads: Sequence[JobHead]) -> None:
        if not heads:
            return
        # Compare and set: of all replicas that find the state lost, one begins the next incarnation.
        # Only this replica installs it, and once: two installed states could grant the same fences.
        stored = await self._ledger.begin_incarnations(
            {head.job: head.incarnation for head in heads}, self._clock.wall_ms()
        )
        for head in heads:
            if head.job not in stored:
                self._incarnations.setdefault(head.job, head.incarnation)
        if not stored:
            return
        log.warning(
            "%d jobs have no live state, %s first: their next incarnations begin from the last"
            " checkpoints",
            len(stored),
            next(iter(stored)),
        )
        self._metrics.incarnations.inc(len(stored))
        # Noted before the installation: if it fails, the retry does not wait for another replica.
        self._incarnations |= {job: each.installed.incarnation for job, each in stored.items()}
        await side_by_side([each.installed for each in stored.values()], self._install, _AT_ONCE)

    async def _install(self, job: InstalledJob) -> None:
        await self._live.begin(job)
        # The checkpoint may be ahead of the last advance, and idleness has ended.
        self._publisher.touch(job.name, job.stages)

    async def _catch_up(self, job: str) -> None:
        stored = await self._ledger.get(job)
        await self._live.install(stored.installed)
        self._publisher.touch(job, stored.installed.stages)

    async def reconcile(self) -> None:
        """Compare every job; restore lost jobs, and update those that are behind.

        Raises `UnavailableError` if a store does not answer; some jobs may be done by then.
        """
        touches = self._publisher.touches()
        heads = await self._ledger.heads()
        self._drop_deleted({head.job for head in heads}, touches)
        positions = await self._live.heads()
        known = self._live.known()
        self._dropped |= self._publisher.failures.take_dropped()
        behind: dict[str, Position] = {}
        compared: dict[str, LivePosition] = {}
        changed: list[tuple[JobHead, LivePosition]] = []
        missing = [head for head in heads if head.job not in positions]
        await self._restore_lost([head for head in missing if self._is_lost(head)])
        self._missing_before = {head.job for head in missing}
        for head in heads:
            live = positions.get(head.job)
            if live is None:
                continue
            job = head.job
            if job in known and job not in self._dropped and self._is_unchanged(head, live):
                compared[job] = live
                continue
            if live.is_behind(head):
                behind[job] = live
            changed.append((head, live))

        async def compare(job: tuple[JobHead, LivePosition]) -> None:
            head, live = job
            try:
                await self._compare(head, live, is_dropped=head.job in self._dropped)
            except (UnknownJobError, StateLostError):
                return
            except UnavailableError:
                raise
            except Exception:
                # One job's trouble is no other job's. The next comparison retries it.
                log.exception("cannot compare job %s", head.job)
                return
            compared[head.job] = live
            self._dropped.discard(head.job)

        await side_by_side(changed, compare, _AT_ONCE)
        self._behind_before = behind
        self._compared = compared
        names = {head.job for head in heads}
        self._dropped &= names
        self._incarnations = {job: n for job, n in self._incarnations.items() if job in names}
        await self._remove_deleted(positions.keys() - names)

    def _is_unchanged(self, head: JobHead, live: LivePosition) -> bool:
        """Return whether both stores are where they were at the last comparison, as an idle job is."""
        return (
            self._compared.get(head.job) == live
            and live.incarnation == head.incarnation
            and not live.is_behind(head)
        )

    def _is_lost(self, head: JobHead) -> bool:
        """Return whether a job without live state has lost it."""
        before, begun = self._missing_before, self._incarnations.get(head.job, 0)
        return before is None or head.job in before or begun >= head.incarnation

    async def _restore_lost(self, heads: Sequence[JobHead]) -> None:
        """Restore jobs without live state: many at a time, as after the loss of the whole store."""
        for start in range(0, len(heads), _RESTORED_AT_ONCE):
            part = heads[start : start + _RESTORED_AT_ONCE]
            # Without jobs that another replica, or another call here, may be installing.
            ours = [
                head
                for head in part
                if head.job not in self._restoring
                and head.incarnation <= self._incarnations.get(head.job, head.incarnation)
            ]
            attempt = self._begin_attempt([head.job for head in ours], self._begin_missing(ours))
            await asyncio.shield(attempt)
            for head in part:
                if head not in ours:
                    with suppress(UnknownJobError, StateLostError):
                        await self.restore(head.job)

    async def _begin_missing(self, heads: Sequence[JobHead]) -> None:
        # The comparison may be out of date: read the positions in the live store again.
        names = [head.job for head in heads]
        there = await side_by_side(names, self._live.head, _AT_ONCE)
        await self._begin([h for h, live in zip(heads, there, strict=True) if live is None])

    def _drop_deleted(self, names: Collection[str], touches: Mapping[str, int]) -> None:
        """Drop what this process keeps of jobs that are not in the ledger, also during an outage of the
        live store.

        A job is in the ledger before it is touched. So one that had been touched before the ledger was
        read, and is not there, was deleted.
        """
        self._publisher.drop_deleted({job: n for job, n in touches.items() if job not in names})
        for keep_only in self._keepers:
            keep_only(names)

    async def _remove_deleted(self, unknown: Collection[str]) -> None:
        """Remove jobs that another replica has deleted from the ledger before it died."""
        if unknown:
            # A job created since is not among these: its row was never, or is no longer, deleted.
            for job, generation in (await self._ledger.deleted(unknown)).items():
                await self._live.remove(job, generation)

    async def _compare(self, head: JobHead, live: LivePosition, *, is_dropped: bool) -> None:
        if live.incarnation < head.incarnation:
            await self.restore(head.job)
        else:
            self._incarnations[head.job] = live.incarnation
            if live.is_behind(head):
                if self._behind_before.get(head.job) == live:
                    log.warning(
                        "the live state of job %s is behind the ledger: catching up", head.job
                    )
                    await self._catch_up(head.job)
            elif self._live.shared or is_dropped:
                pipeline = await self._live.pipeline(head.job)
                if is_dropped or self._compared.get(head.job) != live:
                    # Any replica publishes reports that another one has accepted just before its death.
                    self._publisher.touch(head.job, pipeline.stages)
