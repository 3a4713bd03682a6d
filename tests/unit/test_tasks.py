"""Ending a task that does not want to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from service.tasks import end_task


def test_a_task_that_drops_a_cancellation_is_cancelled_again() -> None:
    dropped = 0

    async def stubborn() -> None:
        nonlocal dropped
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        dropped += 1
        await asyncio.Event().wait()

    async def scenario() -> bool:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await end_task(task)
        return task.cancelled()

    assert asyncio.run(scenario())
    assert dropped == 1


def test_what_a_task_raises_while_it_ends_is_dropped() -> None:
    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("while closing")

    async def scenario() -> None:
        task = asyncio.create_task(failing())
        await asyncio.sleep(0)
        await end_task(task)

    asyncio.run(scenario())
