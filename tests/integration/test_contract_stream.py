"""Events of the stream besides plain watermarks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.api import Api, events, ok

pytestmark = pytest.mark.anyio


async def test_the_events_carry_it(remote: Api) -> None:
    await remote.define({"s": {"shards": ["a", "b"], "percentiles": [33, 66]}})
    token = await remote.token("s")
    nothing = {"watermark": 10, "pending": None, "records": 4}
    await remote.report("s", token, {"a": nothing, "b": nothing})
    async with remote.client.stream("GET", f"{remote.root}/events") as stream:
        async for _, data in events(stream):
            if data["stage"] == "s":
                assert data["records"] == 8
                assert data["percentiles"] == {"33": 10, "66": 10}
                assert data["system_lag_ms"] >= 0
                break


async def test_the_stream_has_throttle_events(remote: Api) -> None:
    throttle = {"groups": [{"stages": ["a"], "max_drift_ms": 1_000}]}
    body = {"stages": {"a": {"shards": ["0", "1"]}}, "throttle": throttle}
    ok(await remote.client.put(remote.root, json=body), 201)
    token = await remote.token("a")
    await remote.report("a", token, {"0": 42, "1": 44})
    limits: list[int] = []
    async with remote.client.stream("GET", f"{remote.root}/events") as stream:
        event = ""
        async for line in stream.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                event = value
            elif name == "data" and event == "throttle":
                limits.append(int(value.split('"limit":')[1].split(",")[0]))
                if limits == [1_042]:
                    # No watermark moves, so nothing is published: the limit does.
                    await remote.report("a", token, {"0": 43})
                else:
                    break
    assert limits == [1_042, 1_043]


GROUP = {"groups": [{"stages": ["a"], "max_drift_ms": 1_000}]}
Stream = AsyncIterator[tuple[str, str, dict[str, Any]]]


@asynccontextmanager
async def listening(api: Api, last: str | None = None) -> AsyncGenerator[Stream]:
    """The events of a job, as name, id and data."""
    headers = {} if last is None else {"Last-Event-ID": last}
    async with api.client.stream("GET", f"{api.root}/events", headers=headers) as response:
        yield _parsed(response)


async def _parsed(response: httpx.Response) -> Stream:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
        if not line:
            fields = {}


async def until(stream: Stream, wanted: Callable[[str, dict[str, Any]], bool]) -> list[str]:
    """Read up to such an event; return the ids that there were."""
    ids: list[str] = []
    async with asyncio.timeout(60):
        async for name, cursor, data in stream:
            ids.append(cursor)
            if wanted(name, data):
                break
    return [cursor for cursor in ids if cursor]


def pauses(shard: str) -> Callable[[str, dict[str, Any]], bool]:
    return lambda name, data: name == "throttle" and shard in data["shards"].get("a", {})


def pauses_nobody(name: str, data: dict[str, Any]) -> bool:
    return name == "throttle" and data["shards"] == {}


@pytest.mark.parametrize("throttle", [None, {"groups": []}])
async def test_a_throttle_that_is_removed_is_an_event(
    api: Api, throttle: dict[str, Any] | None
) -> None:
    body: dict[str, Any] = {"stages": {"a": {"shards": ["0", "1"]}}}
    ok(await api.client.put(api.root, json=body | {"throttle": GROUP}), 201)
    token = await api.token("a")
    await api.report("a", token, {"0": 42, "1": 5_000})
    without = body if throttle is None else body | {"throttle": throttle}
    async with listening(api) as stream:
        ids = await until(stream, pauses("1"))
        ok(await api.client.put(api.root, json=without, headers={"If-Match": "*"}))
        await until(stream, pauses_nobody)
    # Whoever was away meanwhile hears of it, too.
    async with listening(api, ids[-1]) as stream:
        await until(stream, pauses_nobody)


async def test_stages_that_are_removed_are_an_event(api: Api) -> None:
    await api.define({"a": {"shards": ["0"]}, "b": {"shards": ["0"]}})
    async with listening(api) as stream:
        ids = await until(stream, lambda _, data: data["stage"] == "b")
        await api.change({"a": {"shards": ["0"]}})
        await until(stream, lambda name, data: name == "stages" and data == {"stages": ["a"]})
    async with listening(api, ids[-1]) as stream:
        await until(stream, lambda name, data: name == "stages" and data == {"stages": ["a"]})


async def test_a_stage_that_was_added_is_resumed(api: Api) -> None:
    await api.define({"a": {"shards": ["0"]}})
    async with listening(api) as stream:
        ids = await until(stream, lambda _, data: data["stage"] == "a")
        await api.change({"a": {"shards": ["0"]}, "b": {"shards": ["0"]}})
        later = await until(stream, lambda _, data: data["stage"] == "b")
    assert not set(later) & set(ids), "no id stands for two states"
    async with listening(api, ids[-1]) as stream:
        await until(stream, lambda name, data: name == "watermark" and data["stage"] == "b")
