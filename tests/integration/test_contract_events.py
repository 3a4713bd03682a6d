"""Contract section 3, server-sent events: first everything, then each change, the latest last."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.api import Api, events, ok, problem
from tests.support.inprocess import InProcess
from tests.support.server import Service

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["0", "1"]},
    "k": {"inputs": ["s"], "ranges": 2},
    "u": {"inputs": ["k"], "passthrough": True},
}
Event = tuple[str | None, dict[str, Any]]


@asynccontextmanager
async def listening(api: Api, **headers: str) -> AsyncGenerator[AsyncIterator[Event]]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with api.client.stream("GET", f"{api.root}/events", headers=names) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].split(";")[0] == "text/event-stream"
        assert "no-cache" in response.headers.get("cache-control", "") or (
            "no-store" in response.headers.get("cache-control", "")
        )
        yield events(response)


async def take(stream: AsyncIterator[Event], count: int) -> list[Event]:
    async with asyncio.timeout(60):
        return [await anext(stream) for _ in range(count)]


async def until(stream: AsyncIterator[Event], stage: str, output: int) -> list[Event]:
    """The events up to the first that shows the stage at the output."""
    seen: list[Event] = []
    async with asyncio.timeout(60):
        async for event in stream:
            seen.append(event)
            if event[1]["stage"] == stage and event[1]["output_watermark"] == output:
                break
    return seen


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


async def test_first_the_current_state_of_every_stage(job: Api):
    token = await job.token("s")
    await job.report("s", token, {"0": 10, "1": 10})
    async with listening(job) as stream:
        first = {event[1]["stage"]: event[1] for event in await take(stream, len(SPEC))}
    assert first == await job.snapshot()


async def test_a_second_follower_gets_the_lags_of_now(job: Api, gauge: InProcess):
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=600_000)
    await job.report("s", token, {"0": 10, "1": 10})
    async with listening(job) as one:
        await take(one, len(SPEC))
        gauge.advance(14_000)
        async with listening(job) as other:
            first = {event[1]["stage"]: event[1] for event in await take(other, len(SPEC))}
        assert first == await job.snapshot()
        assert first["s"]["system_lag_ms"] == 14_000


async def test_then_each_change(job: Api):
    token = await job.token("s", ttl_ms=600_000)
    async with listening(job) as stream:
        await take(stream, len(SPEC))
        await job.report("s", token, {"0": 10, "1": 10})
        seen = await take(stream, 2)
        assert {(d["stage"], d["input_watermark"], d["output_watermark"]) for _, d in seen} == {
            ("s", None, 10),
            ("k", 10, None),
        }
        await job.report("s", token, {"0": 11})  # changes nothing of the stage
        await job.report("s", token, {"1": 20})
        seen = await take(stream, 2)
        assert {(d["stage"], d["output_watermark"]) for _, d in seen} == {("s", 11), ("k", None)}
        await job.report("s", token, {"0": {"idle": True}, "1": {"idle": True}})
        ((_, state),) = await take(stream, 1)
        assert (state["stage"], state["status"], state["output_watermark"]) == ("s", "idle", 11)


async def test_an_event_is_what_get_answers(job: Api):
    token = await job.token("s")
    async with listening(job) as stream:
        await take(stream, len(SPEC))
        await job.report("s", token, {"0": 10, "1": 10})
        for _, state in await take(stream, 2):
            assert state == await job.watermark(state["stage"])


async def test_what_changed_together_ends_with_an_id(job: Api):
    token = await job.token("s")
    async with listening(job) as stream:
        await take(stream, len(SPEC))
        await job.report("s", token, {"0": 10, "1": 10})
        ids = [event[0] for event in await take(stream, 2)]
    assert ids[-1], ids


async def test_resuming_shows_the_latest_of_what_changed(job: Api):
    token = await job.token("s", ttl_ms=600_000)
    await job.report("s", token, {"0": 10, "1": 10})
    async with listening(job) as stream:
        last, _ = (await take(stream, len(SPEC)))[-1]
    assert last is not None
    await job.report("s", token, {"0": 20, "1": 20})
    await job.report("s", token, {"0": 30, "1": 30})
    async with listening(job, Last_Event_ID=last) as stream:
        latest: dict[str, Any] = {}
        async with asyncio.timeout(60):
            while not {"s", "k"} <= set(latest):
                _, state = await anext(stream)
                latest[state["stage"]] = state
    now = await job.snapshot()
    for stage, state in latest.items():
        assert state == now[stage]


async def test_resuming_after_nothing_changed_still_shows_the_next_change(job: Api):
    token = await job.token("s", ttl_ms=600_000)
    async with listening(job) as stream:
        last, _ = (await take(stream, len(SPEC)))[-1]
    assert last is not None
    async with listening(job, Last_Event_ID=last) as stream:
        await job.report("s", token, {"0": 20, "1": 20})
        await until(stream, "s", 20)


async def test_resuming_shows_a_health_that_changed_while_nobody_listened(job: Api):
    run = await job.run("s")
    token = await job.token("s", run=run, ttl_ms=600_000)
    await job.report("s", token, {"0": 10, "1": 10})
    async with listening(job) as stream:
        last, _ = (await take(stream, len(SPEC)))[-1]
    assert last is not None
    ok(await job.client.post(f"{job.root}/runs/{run}/end", json={"outcome": "failed"}))
    async with listening(job, Last_Event_ID=last) as stream:
        resumed = await take(stream, len(SPEC))
        states = {state["stage"]: state for _, state in resumed}
    assert states["s"]["health"] == "failed"
    # Once shown, it is not sent again.
    last = resumed[-1][0]
    assert last is not None
    async with listening(job, Last_Event_ID=last) as stream:
        await job.delete()
        assert [event async for event in stream] == []


@pytest.mark.parametrize(
    "last", ["nonsense", "1-1-0-zzzzzzzz", "1-1", "999999999999", "-1", "%00", "9" * 100]
)
async def test_an_unknown_last_event_id_starts_from_the_beginning(job: Api, last: str):
    async with listening(job, Last_Event_ID=last) as stream:
        token = await job.token("s")
        await job.report("s", token, {"0": 20, "1": 20})
        await until(stream, "s", 20)


async def test_resuming_over_a_restart(job: Api, gauge: InProcess):
    token = await job.token("s", ttl_ms=600_000)
    async with listening(job) as stream:
        last, _ = (await take(stream, len(SPEC)))[-1]
    assert last is not None
    await job.report("s", token, {"0": 20, "1": 20})
    await gauge.crash()
    async with listening(gauge.api(), Last_Event_ID=last) as stream:
        await until(stream, "s", 20)


async def test_a_reset_is_an_event(job: Api):
    token = await job.token("s")
    await job.report("s", token, {"0": 10, "1": 10})
    async with listening(job) as stream:
        await take(stream, len(SPEC))
        ok(await job.reset())
        async with asyncio.timeout(60):
            async for _, state in stream:
                if state["generation"] == 2 and state["stage"] == "s":
                    assert state["output_watermark"] is None
                    break


async def test_a_new_stage_is_an_event(job: Api):
    async with listening(job) as stream:
        await take(stream, len(SPEC))
        await job.change(SPEC | {"t": {"shards": ["0"]}})
        await job.report("t", await job.token("t"), {"0": 5})
        await until(stream, "t", 5)


async def test_the_stream_of_a_deleted_job_ends(job: Api):
    async with listening(job) as stream:
        await take(stream, len(SPEC))
        ok(await job.delete(), 204)
        async with asyncio.timeout(60):
            async for _ in stream:
                pass


async def test_another_jobs_changes_are_not_shown(job: Api, gauge: InProcess):
    other = gauge.api("other")
    await other.define(SPEC)
    async with listening(job) as stream:
        await take(stream, len(SPEC))
        await other.report("s", await other.token("s"), {"0": 1, "1": 1})
        await job.report("s", await job.token("s"), {"0": 2, "1": 2})
        for _, state in await take(stream, 2):
            assert state["job"] == "job"


async def test_streams_of_what_is_not_there(gauge: InProcess):
    problem(await gauge.client.get("/v1/jobs/nobody/events"), 404, "unknown-job")


def fan_out(width: int) -> dict[str, Any]:
    """A source and many stages that follow it: each advance is that many events."""
    follow = {f"p{i}": {"inputs": ["s"], "passthrough": True} for i in range(width)}
    return {"s": {"shards": ["0"]}} | follow


async def test_a_slow_reader_loses_the_middle_and_slows_nobody(remote: Api, server: Service):
    width, advances = 100, 400
    await remote.define(fan_out(width))
    token = await remote.token("s", ttl_ms=600_000)

    # A reader that asks and then reads nothing, with as little room in the kernel as it may have.
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    with slow:
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(f"GET {remote.root}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        async with listening(remote) as stream:
            await take(stream, width + 1)
            for time in range(1, advances + 1):
                await remote.report("s", token, {"0": time})
            quick = await until(stream, "s", advances)
            assert quick
        count, latest = await asyncio.to_thread(drain, slow, width + 1, advances)
    assert set(latest.values()) == {advances}
    assert count < advances * (width + 1), "nothing was left out: the reader was not slow"


def drain(slow: socket.socket, stages: int, wanted: int) -> tuple[int, dict[str, int]]:
    """Read until every stage shows the wanted output; how many events that took."""
    slow.settimeout(60)
    count, latest, rest = 0, dict[str, int](), b""
    while len(latest) < stages or set(latest.values()) != {wanted}:
        data = slow.recv(65_536)
        assert data, "the stream ended"
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                state = json.loads(line.removeprefix(b"data:"))
                output = state["output_watermark"]
                assert latest.get(state["stage"], -1) <= (-1 if output is None else output)
                latest[state["stage"]] = -1 if output is None else output
                count += 1
    return count, latest


async def test_many_readers_hear_the_latest(remote: Api):
    await remote.define(fan_out(3))
    token = await remote.token("s", ttl_ms=600_000)
    ready = asyncio.Semaphore(0)

    async def read() -> list[int]:
        async with listening(remote) as stream:
            await take(stream, 4)
            ready.release()
            seen = await until(stream, "p2", 50)
        return [d["output_watermark"] for _, d in seen if d["stage"] == "p2"]

    readers = [asyncio.create_task(read()) for _ in range(20)]
    for _ in readers:
        await ready.acquire()
    for time in range(1, 51):
        await remote.report("s", token, {"0": time})
    for reader in readers:
        outputs = await reader
        assert outputs == sorted(set(outputs))
        assert outputs[-1] == 50


async def test_a_reader_that_goes_away_is_forgotten(remote: Api):
    await remote.define(SPEC)
    token = await remote.token("s", ttl_ms=600_000)
    for time in range(1, 20):
        async with listening(remote) as stream:
            await take(stream, len(SPEC))
        await remote.report("s", token, {"0": time, "1": time})
    assert await remote.output("s") == 19


async def test_shutdown_lets_waiting_readers_go(tmp_path: Any):
    with Service(tmp_path) as service:
        # The poll goes over the connection that is open already, and the stream over one of its own, so
        # the service has read the poll when it answers the stream. One that it had not read yet would
        # find its connection closed.
        async with (
            httpx.AsyncClient(base_url=service.url, timeout=60) as client,
            httpx.AsyncClient(base_url=service.url, timeout=60) as other,
        ):
            api = Api(client)
            await api.define(SPEC)
            token = await api.token("s", ttl_ms=600_000)
            await api.report("s", token, {"0": 10, "1": 20})
            etag = (await api.get_watermark("s")).headers["etag"]
            poll = asyncio.create_task(api.get_watermark("s", If_None_Match=etag, Prefer="wait=60"))
            async with listening(Api(other)) as stream:
                await take(stream, len(SPEC))
                await asyncio.to_thread(service.stop)
                with pytest.raises((StopAsyncIteration, httpx.RemoteProtocolError)):
                    await take(stream, 1_000)
            response = await poll
            assert response.status_code in {200, 304, 503}
        service.start()
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            # The shutdown wrote a last checkpoint: the promises are as they were.
            assert await Api(client).promises("s") == {"0": 10, "1": 20}
            assert await Api(client).output("s") == 10
