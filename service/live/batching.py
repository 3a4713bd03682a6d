"""Batching: requests that arrive while a call is running share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from service.errors import UnavailableError

A = TypeVar("A")
T = TypeVar("T")

_MAX_BATCH = 128
"""The largest number of requests in one call."""

_MAX_BATCH_WEIGHT = 10_000
"""The largest number of ranges in one call: other requests wait while the store is busy with it."""

_OWN_CALL_WEIGHT = 1_000
"""Ranges that are sent without waiting for a running call: the store works on one call while the next is
packed. For lighter requests the call itself is the main cost, so they share one.
"""

_MAX_QUEUE = 4_096
"""The largest number of requests that wait for a call; more are rejected."""


class Batcher(Generic[A, T]):
    """Queue in which requests that arrive during a call share the next one."""

    def __init__(
        self,
        call: Callable[[Sequence[A]], Awaitable[Sequence[T | Exception]]],
        weight: Callable[[A], int],
        max_calls: int,
    ) -> None:
        """`call` handles many requests at once, `weight` returns the number of ranges that a request
        adds to a call, `max_calls` is the largest number of calls at a time.
        """
        self._call = call
        self._weight = weight
        self._max_calls = max_calls
        self._running = 0
        self._queue: list[tuple[A, asyncio.Future[T]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, request: A) -> T:
        """Return the result, or raise it. Raises `UnavailableError` if the queue is full."""
        if len(self._queue) >= _MAX_QUEUE:
            raise UnavailableError(
                f"{_MAX_QUEUE} requests already wait for the live store: retry later"
            )
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        if not self._running or (self._running < self._max_calls and self._is_heavy()):
            self._running += 1
            task = asyncio.get_running_loop().create_task(self._drain())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    def _is_heavy(self) -> bool:
        """Return whether the queue is worth another call now. Its first requests decide."""
        return (
            sum(self._weight(request) for request, _ in self._queue[:_MAX_BATCH])
            >= _OWN_CALL_WEIGHT
        )

    def _next_batch(self) -> list[tuple[A, asyncio.Future[T]]]:
        size, ranges = 0, 0
        for request, _ in self._queue[:_MAX_BATCH]:
            ranges += self._weight(request)
            if size and ranges > _MAX_BATCH_WEIGHT:
                break
            size += 1
        batch, self._queue = self._queue[:size], self._queue[size:]
        return batch

    async def _drain(self) -> None:
        try:
            while batch := self._next_batch():
                await self._run(batch)
        finally:
            # No `await` since the queue was found empty, so no request can be left behind: the next one
            # finds this call over and starts another.
            self._running -= 1

    async def _run(self, batch: Sequence[tuple[A, asyncio.Future[T]]]) -> None:
        try:
            results = await self._call([request for request, _ in batch])
        except Exception as error:  # noqa: BLE001 - raised to each caller
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue  # The caller was cancelled.
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
