"""Cancellation of work for a client that has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

from service.errors import ClientGoneError

T = TypeVar("T")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await work, and cancel it if the client disconnects.

    Raises `ClientGoneError`, or the work's errors.

    The request's body must have been read: later messages are dropped.
    """
    # Starlette uses a task group for each client, and there may be thousands of clients.
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError("the client disconnected before it was answered")
    finally:
        leaving.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
