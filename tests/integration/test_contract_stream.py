"""What the stream of events carries besides plain watermarks."""

from __future__ import annotations

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
