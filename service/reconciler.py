"""Keeping the live store up with the ledger: what it lost, or what nobody could tell it, comes back.

The live store is soft. It may come back empty, or as it was a while ago; and whoever has changed the
ledger may die before it can say so to the live store. Both are noticed here, by a request that finds no
state it could trust, or within a second by comparison.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from service.clock import Clock
from service.errors import UnavailableError, UnknownJobError
from service.ledger.port import JobHead, Ledger
from service.live.port import LiveStore, StateLostError
from service.metrics import Metrics
from service.model.positions import Position
from service.publisher import Publisher
from service.tasks import to_its_end

log = logging.getLogger(__name__)

R = TypeVar("R")

_PATIENCE_MS = 5_000
"""How long a request waits for its job's state to be restored."""

_GRACE_MS = 1_000
"""How long another replica that has begun an incarnation has to install it."""

_POLL_S = 0.02


class Reconciler:
    """Restores the live store's state of single jobs, and compares all of them."""

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
        self._known: dict[str, int] = {}
        """The last incarnation of each job that this process has seen begun."""
        self._behind: dict[str, Position] = {}
        """Jobs that were behind the ledger when last compared. Between the two writes of an advance
        each is, for an instant: only one that stays so has been left behind."""

    async def on(self, job: str, use: Callable[[], Awaitable[R]]) -> R:
        """Do something with a job's live state, which is restored first if it was lost.

        Raises `UnknownJobError` if there is no such job, `UnavailableError` if it takes too long.
        """
        until_ms = self._clock.steady_ms() + _PATIENCE_MS
        while True:
            try:
                return await use()
            except StateLostError:
                await self.restore(job)
                if self._clock.steady_ms() > until_ms:
                    raise UnavailableError(
                        f"the state of job {job!r} is being restored: try again"
                    ) from None

    async def restore(self, job: str) -> None:
        """Bring a job's state back; return once it may be tried again. Many may ask, one does it."""
        task = self._restoring.get(job)
        if task is None:
            task = asyncio.ensure_future(self._restore(job))
            self._restoring[job] = task
            task.add_done_callback(lambda _: self._restoring.pop(job, None))
        # Shielded: a client that gives up must not end what others wait for.
        await asyncio.shield(task)

    async def _restore(self, job: str) -> None:
        try:
            head = await self._ledger.head(job)
        except UnknownJobError:
            self._known.pop(job, None)
            raise
        live = await self._live.head(job)
        if live is not None and live.incarnation >= head.incarnation:
            self._known[job] = live.incarnation
            if live.is_behind(head):
                await self._catch_up(job)
            return
        if head.incarnation > self._known.get(job, head.incarnation) and await self._installed(
            head
        ):
            return
        await self._begin(head)

    async def _installed(self, head: JobHead) -> bool:
        """Wait for another replica's incarnation to be installed; False: it has probably died."""
        until_ms = self._clock.steady_ms() + _GRACE_MS
        while self._clock.steady_ms() < until_ms:
            live = await self._live.head(head.job)
            if live is not None and live.incarnation >= head.incarnation:
                self._known[head.job] = live.incarnation
                return True
            await asyncio.sleep(_POLL_S)
        return False

    @to_its_end
    async def _begin(self, head: JobHead) -> None:
        # Compare and set: of all replicas that have found the state lost, one begins the next
        # incarnation. Each number is installed by whoever drew it, once: else two lives of the store
        # could grant the same fences.
        stored = await self._ledger.begin_incarnation(
            head.job, head.incarnation, self._clock.wall_ms()
        )
        if stored is None:
            self._known.setdefault(head.job, head.incarnation)
            return
        installed = stored.installed
        log.warning(
            "job %s has no trustworthy live state: incarnation %d begins from the last checkpoint",
            head.job,
            installed.incarnation,
        )
        self._metrics.incarnations.inc()
        # Known before it is there: if this fails, the next try need not wait for somebody else.
        self._known[head.job] = installed.incarnation
        await self._live.begin(installed)
        # A checkpoint may be ahead of the last advance, and what was idle is not any more.
        self._publisher.touch(head.job, installed.stages)

    async def _catch_up(self, job: str) -> None:
        stored = await self._ledger.get(job)
        await self._live.install(stored.installed)
        self._publisher.touch(job, stored.installed.stages)

    async def reconcile(self) -> None:
        """Compare every job, and repair what was lost or left behind.

        Raises `UnavailableError` if a store is away; as far as it got, it is done.
        """
        heads = await self._ledger.heads()
        lives = await self._live.heads()
        behind: dict[str, Position] = {}
        for head in heads:
            live = lives.get(head.job)
            if live is not None and live.is_behind(head):
                behind[head.job] = live
            try:
                await self._compare(head, live)
            except (UnknownJobError, StateLostError):
                continue
        self._behind = behind

    async def _compare(self, head: JobHead, live: Position | None) -> None:
        if head.deleted:
            if live is not None and live.generation <= head.generation:
                await self._live.remove(head.job, head.generation)
        elif live is None or live.incarnation < head.incarnation:
            await self.restore(head.job)
        else:
            self._known[head.job] = live.incarnation
            if live.is_behind(head):
                if self._behind.get(head.job) == live:
                    log.warning("job %s was left behind the ledger: catching up", head.job)
                    await self._catch_up(head.job)
            elif self._live.shared:
                # What another replica was told before it died is published by whoever looks next.
                self._publisher.touch(head.job, (await self._live.pipeline(head.job)).stages)
