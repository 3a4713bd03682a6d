"""Fixtures: the service in process, and one real server for what streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.api import Api
from tests.support.inprocess import InProcess, with_schema
from tests.support.server import Service
from tests.support.stores import Stores


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def gauge(tmp_path: Path, stores: Stores) -> AsyncIterator[InProcess]:
    async with InProcess(with_schema(tmp_path), stores=stores) as service:
        yield service


@pytest.fixture
def api(gauge: InProcess) -> Api:
    return gauge.api()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A real server that the tests share; each uses jobs of its own name."""
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


@pytest.fixture
async def remote(server: Service, request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """A job on the real server, named after the test."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield Api(client, request.node.name.replace("[", "-").replace("]", "")[:128])
