"""Lists that grow have pages: `limit`, `cursor` and `next`. Without them they are as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api import Api, ok, problem
from tests.support.inprocess import InProcess, with_schema

pytestmark = pytest.mark.anyio

SPEC = {"s": {"shards": ["0"]}}


async def pages(client: httpx.AsyncClient, path: str, member: str, limit: int) -> list[Any]:
    """Follow the cursors, with a page of this size each."""
    found: list[Any] = []
    cursor: dict[str, Any] = {}
    while True:
        answered = ok(await client.get(path, params={"limit": limit, **cursor}))
        assert len(answered[member]) <= limit
        found.append(answered[member])
        if "next" not in answered:
            return found
        cursor = {"cursor": answered["next"]}


async def test_jobs_by_name(gauge: InProcess) -> None:
    names = ["c", "a", "e", "b", "d"]
    for name in names:
        await gauge.api(name).define(SPEC)
    found = await pages(gauge.client, "/v1/jobs", "jobs", 2)
    assert [[job["job"] for job in page] for page in found] == [["a", "b"], ["c", "d"], ["e"]]
    everything = ok(await gauge.client.get("/v1/jobs"))
    assert everything == {"jobs": [job for page in found for job in page]}
    (whole,) = await pages(gauge.client, "/v1/jobs", "jobs", 5)
    assert whole == everything["jobs"]


async def test_a_cursor_outlives_its_job(gauge: InProcess) -> None:
    for name in "abc":
        await gauge.api(name).define(SPEC)
    first = ok(await gauge.client.get("/v1/jobs?limit=2"))
    ok(await gauge.api(first["next"]).delete(), 204)
    rest = ok(await gauge.client.get("/v1/jobs", params={"cursor": first["next"]}))
    assert [job["job"] for job in rest["jobs"]] == ["c"]


async def test_runs_from_the_newest(api: Api) -> None:
    await api.define(SPEC)
    for _ in range(5):
        await api.run("s")
    found = await pages(api.client, f"{api.root}/runs", "runs", 2)
    assert [[run["run"] for run in page] for page in found] == [[5, 4], [3, 2], [1]]
    assert [len(page) for page in await pages(api.client, f"{api.root}/runs", "runs", 5)] == [5]


async def test_keys_by_name(tmp_path: Path) -> None:
    async with InProcess(with_schema(tmp_path)) as gauge:
        body = {"name": "root", "role": "admin"}
        secret = ok(await gauge.client.post("/v1/keys", json=body), 201)["secret"]
        gauge.client.headers["Authorization"] = f"Bearer {secret}"
        for name in ("z", "a"):
            ok(await gauge.client.post("/v1/keys", json={"name": name, "role": "read"}), 201)
        found = await pages(gauge.client, "/v1/keys", "keys", 1)
        assert [[key["name"] for key in page] for page in found] == [["a"], ["root"], ["z"]]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=10001", "limit=x", "cursor=", "cursor=a%20b", "cursor=-"]
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/keys", "/v1/jobs/job/runs"])
async def test_what_is_not_a_page_is_rejected(api: Api, path: str, query: str) -> None:
    await api.define(SPEC)
    problem(await api.client.get(f"{path}?{query}"), 422, "invalid-request")
