"""Work that must not be cut off in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def to_its_end(
    work: Callable[P, CoroutineType[Any, Any, R]],
) -> Callable[P, CoroutineType[Any, Any, R]]:
    """Let work that has begun run to its end, also if whoever asked for it is cancelled.

    A client that gives up, or a server that ends, cancels the task of a request wherever it happens to
    wait. Between two writes that belong together that would leave half of them: a transaction open, or a
    layout in the ledger that the live store does not know. The cancellation takes effect afterwards.
    """

    @wraps(work)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        task = asyncio.ensure_future(work(*args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled():
                # Nobody is left to be told of it; asking for it keeps asyncio from complaining.
                task.exception()
            raise

    return run
