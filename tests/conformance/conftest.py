"""The stores under test. A new one is added to a list here, and this whole folder is run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from service.ledger.port import Ledger
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.live.port import LiveStore
from tests.support.clock import FakeClock
from tests.support.postgres_server import PostgresServer

T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory"])
def live(runner: asyncio.Runner, clock: FakeClock) -> Iterator[LiveStore]:
    store = MemoryLiveStore(clock)
    runner.run(store.open(1))
    yield store
    runner.run(store.close())


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.database()


@pytest.fixture
def ledgers(runner: asyncio.Runner, ledger_url: str) -> Iterator[Callable[[], Ledger]]:
    """Open the same ledger again and again; the one before is closed."""
    opened: list[Ledger] = []

    def reopen() -> Ledger:
        if opened:
            runner.run(opened.pop().close())
        opened.append(SqlLedger(ledger_url))
        return opened[-1]

    yield reopen
    for ledger in opened:
        runner.run(ledger.close())
