"""The servers that tests share: started when the first test asks, stopped after the last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for all. Tests keep apart by the names of their jobs, or by FLUSHALL."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """One Postgres for all. Tests keep apart by `database()`."""
    with PostgresServer(tmp_path_factory.mktemp("postgres")) as server:
        yield server
