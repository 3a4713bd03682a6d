"""The stores under test. A new one is added to a list here, and this whole folder is run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from service.ledger.port import Ledger
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.live.port import LiveStore
from service.live.redis.store import RedisLiveStore
from tests.support.clock import FakeClock
from tests.support.postgres_server import PostgresServer
from tests.support.redis_rights import documented, documented_in_cluster
from tests.support.redis_server import RedisCluster, RedisServer
from tests.support.stores import hasten

T = TypeVar("T")
Run = Callable[[Awaitable[T]], T]


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "redis", "cluster"])
def redis_servers(request: pytest.FixtureRequest) -> Sequence[RedisServer]:
    """The servers behind the live store, emptied; none: it is in memory."""
    servers: Sequence[RedisServer] = ()
    if request.param == "redis":
        servers = [request.getfixturevalue("redis_server")]
    elif request.param == "cluster":
        servers = request.getfixturevalue("redis_cluster").nodes
    for server in servers:
        server.command("FLUSHALL")
    return servers


@pytest.fixture
def live(
    runner: asyncio.Runner,
    clock: FakeClock,
    redis_servers: Sequence[RedisServer],
    request: pytest.FixtureRequest,
) -> Iterator[LiveStore]:
    store: LiveStore
    match redis_servers:
        case []:
            store = MemoryLiveStore(clock)
        case [server]:
            # As a user with the rights that the documentation lists, and no others.
            store = RedisLiveStore(documented(server), clock)
        case _:
            cluster: RedisCluster = request.getfixturevalue("redis_cluster")
            store = RedisLiveStore(documented_in_cluster(cluster), clock)
    runner.run(store.open())
    yield store
    runner.run(store.close())


@pytest.fixture
def advance(clock: FakeClock, redis_servers: Sequence[RedisServer]) -> Callable[[int], None]:
    """Let time pass for leases."""

    def advance(ms: int) -> None:
        clock.advance(ms)
        hasten(redis_servers, ms)

    return advance


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
