"""Work side by side, and the end of a task that does not want to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from service.tasks import end_task, side_by_side


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


def test_work_side_by_side_is_in_order_and_bounded() -> None:
    running, most = 0, 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10 - number % 7):
            await asyncio.sleep(0)
        running -= 1
        return -number

    numbers = list(range(23))
    assert asyncio.run(side_by_side(numbers, work, 5)) == [-number for number in numbers]
    assert most == 5


def test_begun_work_is_completed_and_no_more_is_begun_after_a_failure() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        if number == 1:
            raise ValueError("one")
        done.append(number)

    with pytest.raises(ValueError, match="one"):
        asyncio.run(side_by_side(range(7), work, 3))
    assert done == [0, 2]
