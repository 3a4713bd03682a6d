"""Turns: large answers are made and sent a few at a time, so that other requests run in between."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from typing import Final

from fastapi import Request

from service.errors import ClientGoneError, OverloadedError

_SENT_AT_ONCE: Final = 8


class Turns:
    """Limit of large answers that are made at once. The others wait, in the order of their requests.

    A large answer takes processor time, connections to the ledger, and more memory than its final body.
    """

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._turn = asyncio.Semaphore(at_once)
        self._most_waiting = most_waiting
        self._waiting = 0

    @asynccontextmanager
    async def take(self, request: Request) -> AsyncGenerator[None]:
        """Wait for a turn, which lasts as long as the block.

        Raises `OverloadedError` if too many wait already, and `ClientGoneError` if the client has
        disconnected when its turn comes.
        """
        if self._waiting >= self._most_waiting:
            raise OverloadedError(f"{self._waiting} large answers wait for their turn: retry")
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            if await request.is_disconnected():
                raise ClientGoneError("the client disconnected before its answer was made")
            yield
        finally:
            self._turn.release()


class WaitLimit:
    """Limit of the long polls and event streams of one client.

    They last long, so a client with many of them would keep others out.
    """

    def __init__(self, most_of_client: int) -> None:
        self._most = most_of_client
        self._of_client: Counter[str] = Counter()

    def enter(self, request: Request) -> ExitStack:
        """Enter, and return the stack whose close leaves. Raises `OverloadedError`."""
        client = "" if request.client is None else request.client.host
        if self._of_client[client] >= self._most:
            raise OverloadedError(
                f"{client} waits for {self._most} long polls and streams"
                " (TIDEGAUGE_MAX_READERS_PER_CLIENT): end some, or share one stream"
            )
        self._of_client[client] += 1
        left = ExitStack()
        left.callback(self._leave, client)
        return left

    def _leave(self, client: str) -> None:
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]


class Pace:
    """Limit of tasks that continue in each iteration of the event loop.

    Otherwise a thousand clients that read large answers would all be sent their next piece in one
    iteration, and other requests would wait.
    """

    def __init__(self, at_once: int = _SENT_AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = at_once
        self._scheduled = False

    async def next(self) -> None:
        """Return at this task's turn: at once, unless others had theirs in this iteration."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self) -> None:
        """Begin the next iteration."""
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        self._scheduled = self._left < self._at_once
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._begin)
