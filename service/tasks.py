"""Tasks: work that must not be interrupted, work side by side and in threads, wake-ups, the shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from itertools import islice
from types import CoroutineType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_ASK_AGAIN_S = 0.1


def run_to_completion(
    work: Callable[P, CoroutineType[Any, Any, R]],
) -> Callable[P, CoroutineType[Any, Any, R]]:
    """Let a started coroutine run to completion, even if its caller is cancelled.

    A client that disconnects, or a server that shuts down, cancels the task of a request at any
    `await`. Between two writes that belong together, this would leave only the first: an open
    transaction, or a layout that is in the ledger and not in the live store. So the cancellation takes
    effect once the work is done.
    """

    @wraps(work)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        task = asyncio.ensure_future(work(*args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled():
                # The error has no receiver any more. Retrieving it keeps asyncio from warning.
                task.exception()
            raise

    return run


async def side_by_side(
    items: Sequence[T], work: Callable[[T], CoroutineType[Any, Any, R]], at_once: int
) -> list[R]:
    """Do this work for all items, so many at once, and return the results in order.

    If the work fails for an item, the work that has begun is completed, and not any more is begun: a
    store that hangs would take its timeout for each of the items. Then the first error is raised.
    """
    if len(items) == 1:
        return [await work(items[0])]
    results: list[R] = []
    for start in range(0, len(items), at_once):
        some = items[start : start + at_once]
        for each in await asyncio.gather(*map(work, some), return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
            results.append(each)
    return results


_ASIDE: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aside")

_MANY: Final = 20_000
"""Number of ranges up to which numpy's loops take less than a millisecond."""


async def aside(work: Callable[[], R], ranges: int) -> R:
    """Do work on the columns of so many ranges, in a thread if they are many.

    Numpy's loops release the interpreter's lock. The columns must not change meanwhile. Such works run
    one after the other: several at once would take the lock from the event loop in turn.
    """
    if ranges <= _MANY:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_ASIDE, work)


async def end_task(task: asyncio.Task[object]) -> None:
    """Cancel this task, and return once it has ended. Its exceptions are dropped.

    A library may catch a cancellation and continue: redis-py does while it connects to a cluster. Then
    the task is cancelled again.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_ASK_AGAIN_S)
    if not task.cancelled():
        task.exception()


class Wakeups:
    """Wakes waiting tasks a few at a time, so that other work runs in between.

    Thousands of requests may wait for one advance. If all of them ran in one iteration of the event
    loop, every other request would wait until the last of them has written its response.
    """

    AT_ONCE = 16

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, None] = {}
        self._scheduled = False

    def wake(self, events: Iterable[asyncio.Event]) -> None:
        """Set these events soon. An event that is already in the queue keeps its place."""
        self._waiting.update(dict.fromkeys(events))
        if self._waiting and not self._scheduled:
            self._wake_some()

    def _wake_some(self) -> None:
        for event in list(islice(self._waiting, self.AT_ONCE)):
            del self._waiting[event]
            event.set()
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._wake_some)


class Shutdown:
    """Signal of the end of the service to background work and waiting requests."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """End every present `sleep` now, and every later one at once."""
        self._begun.set()

    async def sleep(self, seconds: float) -> bool:
        """Sleep and return True; return False at once when the service ends."""
        try:
            async with asyncio.timeout(seconds):
                await self._begun.wait()
        except TimeoutError:
            return True
        return False
