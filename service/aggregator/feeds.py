"""Feeds: the changes of one job, read and prepared once for all its followers.

Thousands may follow one job. So its state is read once for each change, not once for each follower, and
followers at the same position share one object, also in its written form. Followers are woken a few at a
time, so that reports and other requests run in between.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
)
from contextlib import contextmanager, suppress

from service.aggregator.feed_changes import (
    NO_DEFINITION,
    SILENCE,
    Changes,
    Definition,
    checksum_of,
    health_of,
    in_order,
)
from service.aggregator.states import StageState
from service.aggregator.throttling import POLL_S
from service.errors import UnavailableError, UnknownJobError
from service.frontier.throttle import NO_ADVICE, ThrottleView
from service.live.port import LiveStore, Watch
from service.model.jobs import JobView
from service.tasks import Shutdown, Wakeups

log = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Longest silence of a stream."""

_RETRY_S = 1.0
"""Retry interval of a feed while the live store does not answer."""

_HEALTH_POLL_S = 2.0
"""Poll interval of a feed: an expiry of leases is not published."""

_SOFT_MS = 1_000
"""Age at which the lags and other soft values of a stage that has not changed are replaced, for
followers to come."""

_CURSOR = re.compile(r"(?a:(\d{1,18})-(\d{1,18})-(\d{1,18})(?:-([0-9a-f]{8}))?)")


_States = Mapping[str, StageState]
_Read = Callable[[str], Awaitable[_States]]
_Complete = Callable[[_States], Awaitable[_States]]
_ReadThrottle = Callable[[str, JobView], Awaitable[ThrottleView]]


class Feed:
    """The state of one job for its followers."""

    def __init__(
        self,
        job: str,
        read: _Read,
        complete: _Complete,
        read_throttle: _ReadThrottle,
        wakeups: Wakeups,
    ) -> None:
        self._job = job
        self._read = read
        self._complete = complete
        self._read_throttle = read_throttle
        self.throttle: ThrottleView | None = None
        """None: the job has not throttled a shard since the feed began."""
        self._throttle_at = 0
        self._wakeups = wakeups
        self._states: dict[str, StageState] = {}
        self._changed_at: dict[str, int] = {}
        """For each stage, the position at which it changed last."""
        self._moved_at: dict[str, int] = {}
        """Likewise, but for changes of its health alone, which the ledger does not number."""
        self._removed_at = 0
        """The position at which stages were last removed."""
        self._shared: dict[int, Changes] = {}
        self.position = 0
        """Number that rises with each change that was read."""
        self.definition = NO_DEFINITION
        self.is_throttled = False
        self.ended = False
        self.followers: set[asyncio.Event] = set()
        self.task: asyncio.Task[None] | None = None

    async def refresh(self, *, healths: bool = True) -> None:
        """Read the job, and wake the followers if it has changed.

        `healths`: also check for changes of healths alone, which takes more steps of the live store.

        Raises `UnknownJobError`, `UnavailableError`.
        """
        states = await self._read(self._job)
        job = next(iter(states.values())).job
        before = self.position
        if healths or self._has_moved(states):
            self._take(await self._complete(states))
        self.is_throttled = bool(job.pipeline.throttle)
        # Also once after the throttle was removed: else a paused shard would not get the end of its
        # pause.
        if self.is_throttled or self.throttle not in (None, NO_ADVICE):
            self._take_throttle(await self._read_throttle(self._job, job))
        if self.position != before:
            self.wake()

    def wake(self) -> None:
        """Wake every follower."""
        self._wakeups.wake(self.followers)

    def _has_moved(self, states: _States) -> bool:
        """Return whether the job has changed since the last change for followers."""
        job = next(iter(states.values())).job
        return (
            Definition(job.generation, job.layout_version) != self.definition
            or states.keys() != self._states.keys()
            or any(
                self._states[name].view.version < each.view.version for name, each in states.items()
            )
        )

    def _take(self, states: _States) -> None:
        job = next(iter(states.values())).job
        definition = Definition(job.generation, job.layout_version)
        if definition < self.definition:
            # Read before a newer one, and arrived after it.
            return
        removed = self._states.keys() - states.keys()
        if definition.generation > self.definition.generation:
            self._states.clear()
            self._changed_at.clear()
            self._moved_at.clear()
        self.definition = definition
        for name in removed & self._states.keys():
            del self._states[name], self._changed_at[name], self._moved_at[name]
        fresh = [
            state
            for name, state in states.items()
            if (previous := self._states.get(name)) is None
            or previous.view.version < state.view.version
        ]
        unwell = [
            state
            for name, state in states.items()
            if (previous := self._states.get(name)) is not None
            and previous.view.version == state.view.version
            and health_of(previous) != health_of(state)
        ]
        if fresh or unwell or removed:
            self._move()
        if removed:
            self._removed_at = self.position
        for state in (*fresh, *unwell):
            self._states[state.name] = state
            self._changed_at[state.name] = self.position
        for state in fresh:
            self._moved_at[state.name] = self.position
        self._renew(states)

    def _renew(self, states: _States) -> None:
        """Replace the soft values of stages that have not changed. Followers do not get these again."""
        old = [
            state
            for name, state in states.items()
            # Else it was read before a newer one, and arrived after it.
            if state.view.version == self._states[name].view.version
            and state.now_ms - self._states[name].now_ms >= _SOFT_MS
        ]
        for state in old:
            self._states[state.name] = state
        if old:
            self._shared.clear()

    def _take_throttle(self, throttle: ThrottleView) -> None:
        if throttle != self.throttle:
            self._move()
            self.throttle = throttle
            self._throttle_at = self.position

    def _move(self) -> None:
        self.position += 1
        self._shared.clear()

    def since(self, position: int) -> Changes:
        """Return the changes since a position; 0: everything."""
        found = self._shared.get(position)
        if found is None:
            fresh = [
                state for name, state in self._states.items() if self._changed_at[name] > position
            ]
            throttle = self.throttle if self._throttle_at > position else None
            stages = tuple(self._states) if self._removed_at > position > 0 else None
            still = {state.name for state in fresh if self._moved_at[state.name] <= position}
            present = self._states.values()
            found = Changes(in_order(fresh, self.definition, present, still), throttle, stages)
            self._shared[position] = found
        return found

    def resumed(self, cursor: str | None) -> Changes:
        """Return the changes since a cursor, or everything if the cursor is not usable.

        If any health differs from the cursor's, each stage is sent anew.
        """
        read, present = _CURSOR.fullmatch(cursor or ""), self._states.values()
        if read is None:
            return self.since(0)
        if _definition_in(read) != self.definition:
            # The follower's stages and throttle advice may have been removed.
            everything = in_order(tuple(present), self.definition, present)
            return Changes(everything, self.throttle or NO_ADVICE, tuple(self._states))
        revision = int(read[3])
        is_unchanged = read[4] == checksum_of(present)
        fresh = [each for each in present if not is_unchanged or each.view.revision > revision]
        return Changes(in_order(fresh, self.definition, present), self.throttle)

    def is_behind(self, cursor: str | None) -> bool:
        """Return whether a cursor is of a later state than this feed's."""
        read = _CURSOR.fullmatch(cursor or "")
        if read is None:
            return False
        newest = max((each.view.revision for each in self._states.values()), default=-1)
        return (self.definition, newest) < (_definition_in(read), int(read[3]))


def _definition_in(cursor: re.Match[str]) -> Definition:
    return Definition(int(cursor[1]), int(cursor[2]))


class Feeds:
    """The feeds that have followers."""

    def __init__(
        self,
        store: LiveStore,
        read: _Read,
        complete: _Complete,
        read_throttle: _ReadThrottle,
        shutdown: Shutdown,
    ) -> None:
        self._store = store
        self._read = read
        self._complete = complete
        self._read_throttle = read_throttle
        self._shutdown = shutdown
        self._wakeups = Wakeups()
        self._feeds: dict[str, Feed] = {}
        self._released = False

    def release(self) -> None:
        """End every stream."""
        self._released = True
        for feed in self._feeds.values():
            feed.wake()

    async def follow(self, job: str, cursor: str | None) -> AsyncIterator[Changes]:
        """Yield all stages (or those that have changed since `cursor`), then each change.

        Changes that happen while the follower is busy are merged: it gets the latest, and blocks no
        other. `SILENCE` is yielded after `HEARTBEAT_S` without a change. Ends with the job or the
        service.
        """
        event = asyncio.Event()
        with self._following(job, event) as feed:
            # At least as new as the client's reads before it began to follow.
            is_current = False
            with suppress(UnavailableError, UnknownJobError):
                await feed.refresh()
                is_current = True
            # A feed that could not be read may be older than the client. Its next change was read.
            is_held = not is_current and feed.is_behind(cursor)
            changes, position = SILENCE if is_held else feed.resumed(cursor), feed.position
            while not self._released:
                event.clear()
                if changes:
                    yield changes
                elif not feed.ended and feed.position == position and not await _happens(event):
                    yield SILENCE
                if feed.ended:
                    return
                if is_held and feed.position != position:
                    changes, is_held = feed.resumed(cursor), False
                else:
                    changes = feed.since(position)
                position = feed.position

    @contextmanager
    def _following(self, job: str, event: asyncio.Event) -> Generator[Feed]:
        feed = self._feeds.get(job)
        if feed is None:
            feed = self._feeds[job] = Feed(
                job, self._read, self._complete, self._read_throttle, self._wakeups
            )
            feed.task = asyncio.create_task(self._keep_up(feed, job), name=f"feed {job}")
        feed.followers.add(event)
        try:
            yield feed
        finally:
            feed.followers.discard(event)
            if not feed.followers and self._feeds.get(job) is feed:
                del self._feeds[job]
                if feed.task is not None:
                    feed.task.cancel()

    async def _keep_up(self, feed: Feed, job: str) -> None:
        now_s = asyncio.get_running_loop().time
        healths_at_s, is_woken = now_s(), True
        with self._store.watch(job) as watch:
            while not self._released:
                watch.rearm()
                # The end of a run also wakes, and changes only healths.
                healths = is_woken or now_s() >= healths_at_s
                try:
                    await feed.refresh(healths=healths)
                except UnknownJobError:
                    # Followers of the next job of this name follow another feed.
                    if self._feeds.get(job) is feed:
                        del self._feeds[job]
                    feed.ended = True
                    feed.wake()
                    return
                except UnavailableError:
                    await self._shutdown.sleep(_RETRY_S)
                    continue
                except Exception:
                    log.exception("cannot read job %s for its followers, retrying", job)
                    await self._shutdown.sleep(_RETRY_S)
                    continue
                if healths:
                    healths_at_s = now_s() + _HEALTH_POLL_S
                is_woken = await watch_for(watch, POLL_S if feed.is_throttled else _HEALTH_POLL_S)


async def watch_for(watch: Watch, poll_s: float | None) -> bool:
    """Wait for a change, at most for `poll_s` (None: without a limit).

    Returns whether the wait ended with a change.
    """
    if poll_s is None:
        await watch.wait()
        return True
    with suppress(TimeoutError):
        async with asyncio.timeout(poll_s):
            await watch.wait()
            return True
    return False


async def _happens(event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            await event.wait()
    except TimeoutError:
        return False
    return True
