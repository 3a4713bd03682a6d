"""Advances that a store does not take: everything that explains a watermark names the store, and not a
range, whose promise is ahead of the watermark.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from service.clock import SystemClock
from tests.support.api import Api, eventually, ok
from tests.support.binaries import limit_files, wait_until
from tests.support.inprocess import InProcess
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.server import Service
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

FLOW = {
    "a": {"shards": ["x", "y"]},
    "k": {"inputs": ["a"], "ranges": 1},
    "p": {"inputs": ["k"], "passthrough": True},
}
KEYS = "00000000-100000000"


async def stand_at_500(api: Api) -> tuple[str, str]:
    """Define a job whose watermarks stand at 500; return the tokens of its stages."""
    await api.define(FLOW)
    shards, keys = await api.token("a", ttl_ms=600_000), await api.token("k", ttl_ms=600_000)
    await api.report("a", shards, {"x": 500, "y": 700})
    await api.report("k", keys, {KEYS: {"holds": {}}}, input_watermark=500)
    return shards, keys


async def is_explained(api: Api) -> None:
    """Every answer has the store as the cause of where `a` stands."""
    found = await api.explain("a")
    assert (found["output_watermark"], found["health"]) == (500, "unpublished")
    assert str(found["because"]).startswith(
        "a stands at 1970-01-01T00:00:00.500Z: the ranges of a have moved on, and the advance cannot"
    )
    assert "the ledger does not answer: " in str(found["because"])
    assert found["path"] == [{"stage": "a", "reason": "unpublished"}]
    assert (found["holders"], found["holders_total"]) == ([], 0)
    assert str(found["remedy"]).startswith("Let the store take writes again")
    below = await api.explain("p")
    assert str(below["because"]).startswith("p waits for a: the ranges of a have moved on")
    found = await api.problems()
    assert found["health"] == "unpublished"
    [first] = found["problems"]
    assert (first["stage"], first["health"], first["severity"]) == ("a", "unpublished", "critical")
    assert (first["ranges"], first["examples"], first["holds_back"]) == (0, [], ["k", "p"])
    healths = {name: seen["health"] for name, seen in (await api.snapshot()).items()}
    assert healths == {"a": "unpublished", "k": "waiting", "p": "waiting"}


async def is_well_again(api: Api) -> None:
    async def stands() -> tuple[int | None, str]:
        seen = await api.watermark("a")
        return seen["output_watermark"], seen["health"]

    await eventually(stands, lambda seen: seen == (900, "ok"))
    assert "unpublished" not in str(await api.explain("a"))
    assert (await api.problems())["problems"] == []


async def test_a_full_disk_is_the_cause_of_a_watermark_that_stands(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            api = Api(client, "flow")
            shards, _ = await stand_at_500(api)
            assert (await api.watermark("a"))["health"] == "ok"
            limit_files([service.pid], 0)
            await api.report("a", shards, {"x": 900, "y": 1_500})
            await is_explained(api)
            overview = ok(await client.get("/v1/overview"))
            assert overview["jobs"][0]["health"] == "unpublished"
            metrics = (await client.get("/metrics")).text
            assert (
                'tidegauge_stage_health{health="unpublished",job="flow",stage="a"} 1.0' in metrics
            )
            limit_files([service.pid], -1)

            await is_well_again(api)


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """One of the tests' own: it is going to be stopped."""
    with PostgresServer(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def replicas(
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> AsyncIterator[tuple[InProcess, InProcess]]:
    stores = Stores(redis, postgres)
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(InProcess(tmp_path, clock=SystemClock(), stores=stores))
            for _ in range(2)
        ]
        yield first, second


async def test_a_ledger_away_is_the_cause_also_for_a_replica_without_the_report(
    replicas: tuple[InProcess, InProcess], postgres: PostgresServer
) -> None:
    first, second = (each.api() for each in replicas)
    shards, _ = await stand_at_500(first)
    assert (await second.watermark("a"))["health"] == "ok"
    postgres.stop("immediate")
    try:
        await first.report("a", shards, {"x": 900, "y": 1_500})
        # The report went to the first: the second finds that its own attempt to publish fails.
        await is_explained(second)
        await is_explained(first)
    finally:
        postgres.start()
        wait_until(postgres.takes_writes, "Postgres takes writes")
    await is_well_again(second)
    await is_well_again(first)
