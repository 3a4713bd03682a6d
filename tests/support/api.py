"""The HTTP API, version 1, as a handful of calls, and the shape that every answer must have."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx

MAX = 9_223_372_036_854_775_807
FIRST_TIME = -62_135_596_800_000
"""0001-01-01T00:00:00.000Z."""
LAST_TIME = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z."""
KEYS = 1 << 32
WHOLE = "00000000-100000000"
LOWER = "00000000-80000000"
UPPER = "80000000-100000000"

T = TypeVar("T")


def tile_ids(count: int) -> tuple[str, ...]:
    """The ids of `count` even key ranges."""
    edges = [KEYS * i // count for i in range(count + 1)]
    return tuple(f"{a:08x}-{b:08x}" for a, b in itertools.pairwise(edges))


def ok(response: httpx.Response, status: int = 200) -> Any:
    """The answer's JSON, if its status is as expected."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:2000]}"
    if status == 204:
        assert response.content == b""
        return None
    assert response.headers["content-type"].split(";")[0] == "application/json"
    return response.json()


def problem(response: httpx.Response, status: int, *slugs: str) -> Any:
    """The problem's JSON (RFC 9457), if it is an expected one."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:2000]}"
    assert response.headers["content-type"].split(";")[0] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert isinstance(body["title"], str)
    assert body["title"]
    assert isinstance(body["detail"], str)
    assert body["type"].startswith("/problems/")
    if slugs:
        assert body["type"].removeprefix("/problems/") in slugs, body
    return body


class Api:
    """One job of a service, through any httpx client."""

    def __init__(self, client: httpx.AsyncClient, job: str = "job") -> None:
        self.client = client
        self.job = job
        self.root = f"/v1/jobs/{job}"

    async def put(
        self, stages: Mapping[str, Any], *, etag: str | None = None, **others: Any
    ) -> httpx.Response:
        headers = {} if etag is None else {"If-Match": etag}
        spec = {"stages": stages, **others}
        return await self.client.put(self.root, json=spec, headers=headers)

    async def define(self, stages: Mapping[str, Any], **others: Any) -> Any:
        """Create the job, which must be new."""
        return ok(await self.put(stages, **others), 201)

    async def change(self, stages: Mapping[str, Any], **others: Any) -> Any:
        """Replace the job's current specification."""
        etag = (await self.client.get(self.root)).headers["etag"]
        return ok(await self.put(stages, etag=etag, **others))

    async def spec(self) -> httpx.Response:
        return await self.client.get(self.root)

    async def delete(self) -> httpx.Response:
        return await self.client.delete(self.root)

    async def reset(self) -> httpx.Response:
        return await self.client.post(f"{self.root}/reset")

    async def open_run(
        self, stages: Sequence[str], holder: str = "driver", **members: Any
    ) -> httpx.Response:
        return await self.client.post(
            f"{self.root}/runs", json={"stages": list(stages), "holder": holder} | members
        )

    async def run(self, *stages: str) -> int:
        return ok(await self.open_run(stages), 201)["run"]

    async def post_end(self, run: int, outcome: str, **members: Any) -> httpx.Response:
        return await self.client.post(
            f"{self.root}/runs/{run}/end", json={"outcome": outcome} | members
        )

    async def end(self, run: int, outcome: str, **members: Any) -> Any:
        return ok(await self.post_end(run, outcome, **members))

    async def runs(self, query: str = "") -> list[dict[str, Any]]:
        return ok(await self.client.get(f"{self.root}/runs{query}"))["runs"]

    async def changes(self, query: str = "") -> Any:
        return ok(await self.client.get(f"{self.root}/changes{query}"))

    async def health(self, stage: str) -> str:
        return (await self.watermark(stage))["health"]

    async def problems(self) -> Any:
        return ok(await self.client.get(f"{self.root}/problems"))

    async def explain(self, stage: str) -> Any:
        return ok(await self.client.get(f"{self.root}/stages/{stage}/explain"))

    async def post_retire(
        self, stage: str, key: str, because: str = "gone", **members: Any
    ) -> httpx.Response:
        path = f"{self.root}/stages/{stage}/ranges/{key}/retire"
        return await self.client.post(path, json={"because": because, **members})

    async def retire(self, stage: str, key: str, because: str = "gone", **members: Any) -> Any:
        return ok(await self.post_retire(stage, key, because, **members))

    async def post_claim(
        self,
        stage: str,
        ranges: Sequence[str] | str = "all",
        *,
        holder: str = "worker",
        **members: Any,
    ) -> httpx.Response:
        body = {"ranges": ranges if isinstance(ranges, str) else list(ranges), "holder": holder}
        return await self.client.post(f"{self.root}/stages/{stage}/leases", json=body | members)

    async def claim(
        self,
        stage: str,
        ranges: Sequence[str] | str = "all",
        *,
        holder: str = "worker",
        **members: Any,
    ) -> Any:
        return ok(await self.post_claim(stage, ranges, holder=holder, **members), 201)

    async def token(
        self,
        stage: str,
        ranges: Sequence[str] | str = "all",
        *,
        holder: str = "worker",
        **members: Any,
    ) -> str:
        return (await self.claim(stage, ranges, holder=holder, **members))["token"]

    async def renew(self, *tokens: str) -> Any:
        return ok(await self.client.post(f"{self.root}/leases/renew", json={"tokens": tokens}))

    async def release(self, *tokens: str) -> int:
        answer = ok(await self.client.post(f"{self.root}/leases/release", json={"tokens": tokens}))
        return answer["released"]

    async def post_report(
        self, stage: str, token: str, ranges: Mapping[str, Any], **members: Any
    ) -> httpx.Response:
        return await self.client.post(
            f"{self.root}/stages/{stage}/reports",
            json={"token": token, "ranges": ranges} | members,
        )

    async def post_claimed_report(
        self, stage: str, claim: Mapping[str, Any], ranges: Mapping[str, Any], **members: Any
    ) -> httpx.Response:
        return await self.client.post(
            f"{self.root}/stages/{stage}/reports",
            json={"claim": dict(claim), "ranges": ranges} | members,
        )

    async def report(
        self, stage: str, token: str, ranges: Mapping[str, Any], **members: Any
    ) -> Any:
        return ok(await self.post_report(stage, token, ranges, **members))

    async def post_commit(self, epoch: int, stages: Mapping[str, Any], **members: Any) -> Any:
        return await self.client.post(
            f"{self.root}/commits", json={"epoch": epoch, "stages": stages} | members
        )

    async def commit(self, epoch: int, stages: Mapping[str, Any], **members: Any) -> Any:
        return ok(await self.post_commit(epoch, stages, **members))

    async def get_commits(self, stage: str) -> httpx.Response:
        return await self.client.get(f"{self.root}/stages/{stage}/commits")

    async def committed(self, stage: str) -> tuple[int | None, int | None]:
        """The run of a stage and its last committed epoch."""
        body = ok(await self.get_commits(stage))
        return body["run"], body["epoch"]

    async def get_watermark(self, stage: str, query: str = "", **headers: str) -> httpx.Response:
        return await self.client.get(
            f"{self.root}/stages/{stage}/watermark{query}",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    async def watermark(self, stage: str) -> Any:
        return ok(await self.get_watermark(stage))

    async def output(self, stage: str) -> int | None:
        return (await self.watermark(stage))["output_watermark"]

    async def snapshot(self) -> dict[str, Any]:
        return ok(await self.client.get(f"{self.root}/watermarks"))["watermarks"]

    async def ranges(self, stage: str, query: str = "") -> list[dict[str, Any]]:
        return ok(await self.client.get(f"{self.root}/stages/{stage}/ranges{query}"))["ranges"]

    async def promises(self, stage: str) -> dict[str, int | None]:
        return {row["range"]: row["promise"] for row in await self.ranges(stage, "?limit=10000")}


async def events(response: httpx.Response) -> AsyncIterator[tuple[str | None, dict[str, Any]]]:
    """The watermarks in a streaming answer as (id, data); comments and other events are skipped."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif fields:
            if "data" in fields and fields["event"] == "watermark":
                yield fields.get("id"), json.loads(fields["data"])
            fields = {}


async def eventually(
    probe: Callable[[], Awaitable[T]],
    wanted: Callable[[T], bool],
    *,
    deadline_s: float = 120,
    what: str = "the condition",
) -> T:
    """Poll until the answer is the wanted one."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while True:
        value = await probe()
        if wanted(value):
            return value
        if loop.time() > end:
            raise AssertionError(f"{what} did not come true in {deadline_s} s; last: {value!r}")
        await asyncio.sleep(0.01)
