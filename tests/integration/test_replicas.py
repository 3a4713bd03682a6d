"""Several processes on one Redis and one Postgres: equal, stateless, and replaceable."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api import Api
from tests.support.binaries import wait_until
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.server import ROOT, Service
from tests.support.sketches import pending

pytestmark = pytest.mark.anyio

FLOW = {"s": {"shards": ["0", "1"]}, "k": {"inputs": ["s"], "ranges": 2}}


class Replica(Service):
    """A service on stores that it shares."""

    def __init__(self, folder: Path, live_url: str, ledger_url: str, *options: str) -> None:
        folder.mkdir()
        super().__init__(folder, options=("--live-url", live_url, *options))
        self.ledger_url = ledger_url


@pytest.fixture(scope="module")
def replicas(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
) -> Iterator[tuple[Replica, Replica]]:
    redis_server.command("FLUSHALL")
    folder = tmp_path_factory.mktemp("replicas")
    url = postgres_server.database()
    one, other = (Replica(folder / name, redis_server.url, url) for name in ("one", "other"))
    # Both bring the schema up to date at the same time.
    one.launch()
    with other:
        one.wait_ready()
        yield one, other
    one.stop()


@pytest.fixture
async def both(
    replicas: tuple[Replica, Replica], request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Api, Api]]:
    name = request.node.name.replace("[", "-").replace("]", "")[:128]
    async with (
        httpx.AsyncClient(base_url=replicas[0].url, timeout=60) as one,
        httpx.AsyncClient(base_url=replicas[1].url, timeout=60) as other,
    ):
        yield Api(one, name), Api(other, name)


async def test_soft_values_do_not_go_back_for_a_reader_that_turns_to_the_other(
    both: tuple[Api, Api],
):
    one, other = both
    await one.define({"s": {"shards": ["0"], "percentiles": [50]}})
    token = await one.token("s")
    shown: list[tuple[int, int]] = []
    for step in range(1, 60):
        sent = {"watermark": step, "pending": pending([10 * step])}
        await one.report("s", token, {"0": sent})
        for api in (one, other):
            body = await api.watermark("s")
            shown.append((body["processing_watermark"], body["percentiles"]["50"]))
    assert [values for values, _ in shown] == sorted(values for values, _ in shown)
    assert [p for _, p in shown] == [10 * step for step in range(1, 60) for _ in range(2)]


async def test_what_is_soft_is_not_taken_back_by_the_other(both: tuple[Api, Api]):
    """One replica has just found that nothing is known; the next report is taken by the other."""
    one, other = both
    await one.define({"s": {"shards": ["0"], "percentiles": [50]}})
    token = await one.token("s", ["0"])
    for count in range(1, 9):
        before = await other.watermark("s")
        assert before["records"] == 5 * (count - 1)
        await one.report(
            "s", token, {"0": {"watermark": 10, "records": 5, "pending": pending([50])}}
        )
        first = await one.watermark("s")
        assert (first["percentiles"], first["records"]) == ({"50": 50}, 5 * count)
        later = await other.watermark("s")
        assert (later["percentiles"], later["records"]) == ({"50": 50}, 5 * count)
        assert later["processing_watermark"] >= first["processing_watermark"]


async def test_what_is_said_to_one_is_known_to_the_other(both: tuple[Api, Api]):
    one, other = both
    await one.define(FLOW)
    token = await other.token("s")
    await one.report("s", token, {"0": 10})
    await other.report("s", token, {"1": 20})
    assert (await one.watermark("s"))["output_watermark"] == 10
    assert (await other.watermark("k"))["input_watermark"] == 10
    renewed = await one.renew(token)
    assert sorted(renewed["renewed"][0]["ranges"]) == ["0", "1"]


async def test_a_layout_that_one_changes_is_the_others_too(both: tuple[Api, Api]):
    one, other = both
    await one.define(FLOW)
    token = await other.token("s")
    await other.report("s", token, {"0": 10, "1": 20})
    await one.change(FLOW | {"s": {"shards": ["0", "1", "2"]}})
    await other.report("s", token, {"0": 30, "1": 30})
    assert (await other.watermark("s"))["output_watermark"] == 10
    new = await other.token("s", ["2"])
    await one.report("s", new, {"2": 25})
    assert (await other.watermark("s"))["output_watermark"] == 25


async def test_a_reader_at_one_is_woken_by_a_change_at_the_other(both: tuple[Api, Api]):
    one, other = both
    await one.define(FLOW)
    token = await one.token("s")
    waiting = asyncio.create_task(
        other.client.get(
            f"/v1/jobs/{other.job}/stages/k/watermark",
            params={"at_least": 5},
            headers={"Prefer": "wait=30"},
        )
    )
    keyed = await one.token("k")
    await one.report("s", token, {"0": 5, "1": 5})
    ranges: dict[str, Any] = {"00000000-80000000": {}, "80000000-100000000": {}}
    await one.report("k", keyed, ranges, input_watermark=5)
    answer = await waiting
    assert answer.json()["output_watermark"] == 5


async def test_a_commit_of_one_is_the_others_too(both: tuple[Api, Api]):
    one, other = both
    await one.define(FLOW)
    run = await one.run("s")
    token = await other.token("s", run=run)
    await one.report("s", token, {"0": 5, "1": 6}, epoch=1)
    await other.commit(1, {"s": {}}, run=run)
    assert (await one.watermark("s"))["output_watermark"] == 5
    again = await one.commit(1, {"s": {}}, run=run)
    assert again["applied"] == {"s": 0}


async def test_a_deleted_job_is_gone_everywhere(both: tuple[Api, Api]):
    one, other = both
    await one.define(FLOW)
    await other.watermark("s")
    await one.delete()
    response = await other.client.get(f"/v1/jobs/{other.job}/stages/s/watermark")
    assert response.status_code == 404
    await other.define(FLOW)
    assert (await one.watermark("s"))["generation"] == 2


async def test_many_workers_share_a_port(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
):
    url = postgres_server.database()
    with Replica(tmp_path / "w", redis_server.url, url, "--workers", "2") as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")

        def workers() -> list[int]:
            spawned = [int(pid) for pid in children.read_text().split()]
            return [pid for pid in spawned if b"spawn_main" in _command(pid)]

        assert len(workers()) == 2
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            api = Api(client, "workers")
            await api.define(FLOW)
            token = await api.token("s")
            first = workers()[0]
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: first not in workers() and len(workers()) == 2, "a new worker")
            for value in range(20):
                async with httpx.AsyncClient(base_url=server.url, timeout=60) as fresh:
                    await Api(fresh, "workers").report("s", token, {"0": value, "1": value})
            assert (await api.watermark("s"))["output_watermark"] == 19
        left = workers()
        server.kill()
        wait_until(lambda: not any(_command(pid) for pid in left), "the workers' end")


_SLOW_START = """\
import sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    time.sleep(8)
"""


def test_a_worker_that_starts_slowly_is_not_replaced(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
):
    """Eight seconds, as its imports may take on a busy machine: longer than uvicorn waits by default."""
    (tmp_path / "sitecustomize.py").write_text(_SLOW_START)
    service = Service(
        tmp_path,
        options=("--live-url", redis_server.url, "--workers", "2"),
        environment={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    service.ledger_url = postgres_server.database()
    with service:
        assert "died" not in (tmp_path / "service.log").read_text()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
