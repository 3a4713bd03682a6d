"""The servers that tests share: started when the first test asks, stopped after the last."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from spark_agent.kafka_jars import JarsUnavailableError, KafkaJars, fetch
from tests.support.folders import use_memory
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.required import REQUIRE_KAFKA
from tests.support.stores import Stores

# At once: whatever is imported later may ask where temporary files belong.
use_memory()

# A machine that is busy is no fault of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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


@pytest.fixture(scope="session")
def kafka_jars() -> KafkaJars | JarsUnavailableError:
    """The jars of Kafka's broker and of Spark's connector, or the reason why there are none."""
    try:
        return fetch(lambda _: None, environment=os.environ)
    except JarsUnavailableError as error:
        if os.environ.get(REQUIRE_KAFKA):
            raise
        return error


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stores",
        default="memory,sqlite",
        help="what the service in process runs on: memory or redis, sqlite or postgres",
    )


@pytest.fixture
def stores(request: pytest.FixtureRequest) -> Stores:
    """The stores under the service in process: `--stores`, or what a test is parametrised with."""
    chosen = str(getattr(request, "param", None) or request.config.getoption("--stores"))
    live, ledger = chosen.split(",")
    return Stores(
        request.getfixturevalue("redis_server") if live == "redis" else None,
        request.getfixturevalue("postgres_server") if ledger == "postgres" else None,
    )
