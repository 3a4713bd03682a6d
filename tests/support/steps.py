"""Counting the steps of the live store that one request takes, whatever else is going on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import pytest

from service.live.memory.store import MemoryLiveStore
from service.live.redis.client import RedisClient

_STEPS: Final = (
    *(
        "job",
        "jobs",
        "snapshot",
        "stage",
        "progress",
        "claim",
        "renew",
        "release",
        "report",
        "commit",
    ),
    *(
        "agreements",
        "publish",
        "ranges",
        "range_views",
        "columns",
        "observe",
        "settle",
        "follow_set_back",
        "retire",
        "raise_marks",
    ),
)
"""Steps of the port. The others are answered from what a process knows, or are no part of a request."""

_counted: ContextVar[list[str] | None] = ContextVar("steps", default=None)
"""Steps of this task and of those that it has begun. Background tasks have another context."""


@contextmanager
def counted_steps() -> Generator[list[str]]:
    """Collect the names of the steps that are taken within, by the tasks that are begun within."""
    steps: list[str] = []
    before = _counted.set(steps)
    try:
        yield steps
    finally:
        _counted.reset(before)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the stores count: memory its steps, Redis what is sent to the server."""
    for name in _STEPS:
        original = getattr(MemoryLiveStore, name)
        monkeypatch.setattr(MemoryLiveStore, name, _counting(original, lambda _, name=name: name))
    # A script, or a command: their first argument says which.
    for name in ("step", "command"):
        monkeypatch.setattr(RedisClient, name, _counting(getattr(RedisClient, name), str))


def _counting(method: Callable[..., Any], named: Callable[[object], str]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def counting(self: object, *args: Any, **options: Any) -> Any:
        steps = _counted.get()
        if steps is not None:
            steps.append(named(args[0] if args else ""))
        return await method(self, *args, **options)

    return counting
