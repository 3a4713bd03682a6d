"""Things that are asked while a call is under way share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from service.errors import UnavailableError

A = TypeVar("A")
T = TypeVar("T")

_BATCH = 128
"""Askers that share a call at most."""

_BATCH_WEIGHT = 10_000
"""Ranges in one call: what makes the others wait for as long as the store is busy with it."""

_WORTH_A_CALL = 1_000
"""Ranges that wait for no other call: the store works on one while the next is packed. What is lighter
costs most as a call of its own, and shares one.
"""

_QUEUE = 4_096
"""Askers that may wait for a call; more are told to come again."""


class Batcher(Generic[A, T]):
    """Lets things that are asked while a call is under way share the next one."""

    def __init__(
        self,
        call: Callable[[Sequence[A]], Awaitable[Sequence[T | Exception]]],
        weight: Callable[[A], int],
        flights: int,
    ) -> None:
        """`call` answers many at once, `weight` says how many ranges one adds to a call, `flights` how
        many calls may be under way.
        """
        self._call = call
        self._weight = weight
        self._flights = flights
        self._under_way = 0
        self._waiting: list[tuple[A, asyncio.Future[T]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, what: A) -> T:
        """Ask; return the answer, or raise it. Raises `UnavailableError` if too many wait."""
        if len(self._waiting) >= _QUEUE:
            raise UnavailableError(f"{_QUEUE} requests wait for the live store: come again")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((what, future))
        if not self._under_way or (self._under_way < self._flights and self._is_heavy()):
            self._under_way += 1
            task = asyncio.get_running_loop().create_task(self._fly())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    def _is_heavy(self) -> bool:
        """Tell whether what waits is worth another call now; a few are enough to see it."""
        return sum(self._weight(what) for what, _ in self._waiting[:_BATCH]) >= _WORTH_A_CALL

    def _next(self) -> list[tuple[A, asyncio.Future[T]]]:
        size, ranges = 0, 0
        for what, _ in self._waiting[:_BATCH]:
            ranges += self._weight(what)
            if size and ranges > _BATCH_WEIGHT:
                break
            size += 1
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        return batch

    async def _fly(self) -> None:
        try:
            while batch := self._next():
                await self._one(batch)
        finally:
            # In the same breath as nothing was found to wait: whoever comes next begins another.
            self._under_way -= 1

    async def _one(self, batch: Sequence[tuple[A, asyncio.Future[T]]]) -> None:
        try:
            results = await self._call([what for what, _ in batch])
        except Exception as error:  # noqa: BLE001 - each who asked is told
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue  # Whoever asked has gone.
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
