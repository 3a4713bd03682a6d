"""The background work: expiring leases, comparing the stores, checkpoints, and thinning the history."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from service.aggregator.dynamic_shards import DynamicShards
from service.aggregator.idleness import IdlePolicies
from service.aggregator.keys import Keys
from service.clock import Clock
from service.consistency.publisher import Publisher
from service.consistency.reconciler import Reconciler
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError
from service.frontier.idleness import MAX_GAP_MS
from service.ledger.port import Ledger
from service.live.port import LiveStore
from service.tasks import Shutdown

log = logging.getLogger(__name__)

_EXPIRE_INTERVAL_S = 0.1
"""Interval at which expired leases are ended without a request, which also ends idleness."""

_HISTORY_INTERVAL_S = 600.0
"""Interval at which the history is thinned."""

_THINNING_REST = 9
"""Ratio of the pause after a step of thinning to the step: advances go first."""

_IDLE_INTERVAL_S = 0.1
"""Interval at which the policies for idleness are applied."""

_RECONCILE_INTERVAL_S = 1.0
"""Interval at which the live store is compared with the ledger."""


_SHARE = 10
"""The least ratio of the pause after a round over all jobs to the round, which leaves nine tenths of the
time to requests for single jobs."""

_LONGEST_PAUSE_S = 10.0
"""Pause after the longest round."""

_LONGEST_IDLE_PAUSE_S = MAX_GAP_MS / 2_000
"""Pause after the longest round of idle policies: a longer one would break their series of samples."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention of the history of watermarks, and of the audit, by age in milliseconds."""

    fine_ms: int
    keep_ms: int
    audit_ms: int = 90 * 86_400_000


class Background:
    """The background work, until `Shutdown`."""

    def __init__(
        self,
        store: LiveStore,
        live: RecoveringLiveStore,
        ledger: Ledger,
        publisher: Publisher,
        reconciler: Reconciler,
        keys: Keys,
        idle_policies: IdlePolicies,
        dynamic_shards: DynamicShards,
        clock: Clock,
        shutdown: Shutdown,
        *,
        checkpoint_interval_ms: int,
        retention: Retention,
    ) -> None:
        self._store = store
        self._live = live
        self._ledger = ledger
        self._publisher = publisher
        self._reconciler = reconciler
        self._keys = keys
        self._idle_policies = idle_policies
        self._dynamic_shards = dynamic_shards
        self._clock = clock
        self._shutdown = shutdown
        self._checkpoint_interval_ms = checkpoint_interval_ms
        self._retention = retention
        self._tasks: list[asyncio.Task[None]] = []
        self._publishing: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks."""
        work = (
            self._expire_leases,
            self._reconcile,
            self._checkpoint,
            self._thin_history,
            self._follow_keys,
            self._apply_idle_policies,
            self._let_final_shards_leave,
        )
        for each in work:
            self._tasks.append(asyncio.create_task(_keep_running(each), name=each.__name__))
        publishing = _keep_running(self._publisher.run)
        self._publishing.append(asyncio.create_task(publishing, name="publish"))

    async def stop(self) -> None:
        """Let the tasks end, then publish and checkpoint once more."""
        # The tasks are not cancelled: the outcome of an interrupted transaction is unknown.
        self._shutdown.begin()
        # Other tasks may wait for a round of publishing, so the publisher ends last.
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        self._publisher.stop()
        await asyncio.gather(*self._publishing)
        self._publishing.clear()
        await self._publisher.publish_all()
        await self._save_promises()

    async def _expire_leases(self) -> None:
        while await self._shutdown.sleep(_EXPIRE_INTERVAL_S):
            try:
                self._live.note_expired(await self._store.expire())
            except UnavailableError as error:
                log.debug("cannot expire leases now, retrying: %s", error.detail)

    async def _reconcile(self) -> None:
        await self._in_rounds(
            _RECONCILE_INTERVAL_S, self._reconciler.reconcile, "compare the stores"
        )

    async def _checkpoint(self) -> None:
        interval_s = self._checkpoint_interval_ms / 1_000
        await self._in_rounds(interval_s, self._save_promises, "save a checkpoint")

    async def _in_rounds(
        self,
        interval_s: float,
        step: Callable[[], Awaitable[None]],
        purpose: str,
        longest_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        await in_rounds(self._shutdown.sleep, self._clock, interval_s, longest_s, step, purpose)

    async def _save_promises(self) -> None:
        chunks = await self._store.unsaved()
        if chunks:
            await self._ledger.checkpoint(chunks, self._clock.wall_ms())
            await self._store.note_saved(chunks)

    async def _apply_idle_policies(self) -> None:
        await self._in_rounds(
            _IDLE_INTERVAL_S,
            self._idle_policies.apply,
            "apply the idle policies",
            _LONGEST_IDLE_PAUSE_S,
        )

    async def _let_final_shards_leave(self) -> None:
        await self._in_rounds(
            _RECONCILE_INTERVAL_S, self._dynamic_shards.apply, "let final shards leave"
        )

    async def _follow_keys(self) -> None:
        await self._keys.run(self._shutdown)

    async def _thin_history(self) -> None:
        while await self._shutdown.sleep(_HISTORY_INTERVAL_S):
            try:
                await self._thin_in_steps()
                await self._ledger.trim_audit(self._clock.wall_ms() - self._retention.audit_ms)
            except UnavailableError as error:
                log.warning("cannot thin the history now, retrying: %s", error.detail)

    async def _thin_in_steps(self) -> None:
        more = True
        while more:
            began_ms, now_ms = self._clock.steady_ms(), self._clock.wall_ms()
            thinned = await self._ledger.thin_history(
                fine_until_ms=now_ms - self._retention.fine_ms,
                keep_until_ms=now_ms - self._retention.keep_ms,
            )
            rest_ms = _THINNING_REST * (self._clock.steady_ms() - began_ms)
            more = thinned.more and await self._shutdown.sleep(max(rest_ms, 1) / 1_000)


async def in_rounds(
    sleep: Callable[[float], Awaitable[bool]],
    clock: Clock,
    interval_s: float,
    longest_s: float,
    step: Callable[[], Awaitable[None]],
    purpose: str,
) -> None:
    """Run a step over all jobs at intervals until `sleep` returns False.

    A step that takes long runs less often. A step that finds a store unavailable is retried after the
    interval: an outage takes long, too.
    """
    pause_s = interval_s
    while await sleep(pause_s):
        began_ms = clock.steady_ms()
        try:
            await step()
        except UnavailableError as error:
            log.warning("cannot %s now, retrying: %s", purpose, error.detail)
            pause_s = interval_s
        else:
            took_s = (clock.steady_ms() - began_ms) / 1_000
            pause_s = max(interval_s, min(_SHARE * took_s, longest_s))


async def _keep_running(work: Callable[[], Awaitable[None]]) -> None:
    """Run work until the service ends. After an unexpected error, log it and restart the work."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s failed, restarting it", getattr(work, "__name__", work))
            await asyncio.sleep(1)
