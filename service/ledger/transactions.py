"""Methods of a ledger as transactions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from service.ledger.database import Database
from service.tasks import run_to_completion


class _HasDatabase(Protocol):
    database: Database


L = TypeVar("L", bound=_HasDatabase)
P = ParamSpec("P")
R = TypeVar("R")


def writing(
    work: Callable[Concatenate[L, AsyncConnection, P], Awaitable[R]],
) -> Callable[Concatenate[L, P], CoroutineType[Any, Any, R]]:
    """Run a method as one transaction, which it gets as its first argument."""

    @run_to_completion
    @wraps(work)
    async def run(ledger: L, *args: P.args, **kwargs: P.kwargs) -> R:
        return await ledger.database.write(lambda db: work(ledger, db, *args, **kwargs))

    return run


def reading(
    work: Callable[Concatenate[L, AsyncConnection, P], Awaitable[R]],
) -> Callable[Concatenate[L, P], CoroutineType[Any, Any, R]]:
    """Run a method as one transaction that only reads."""

    @run_to_completion
    @wraps(work)
    async def run(ledger: L, *args: P.args, **kwargs: P.kwargs) -> R:
        return await ledger.database.read(lambda db: work(ledger, db, *args, **kwargs))

    return run
