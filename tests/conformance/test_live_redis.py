"""What only a live store on Redis can be asked: its connections, its scripts, its server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from service.clock import SystemClock
from service.errors import UnavailableError
from service.frontier.leases import Rank
from service.live.port import StateLostError
from service.live.redis.client import RedisClient
from service.live.redis.schema import job_keys
from service.live.redis.store import RedisLiveStore
from service.model.leases import Claim
from service.model.reports import Report
from tests.conformance.test_live import installed, pipeline
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer


def test_connections_that_are_cut_are_made_again(redis_server: RedisServer) -> None:
    """On uvloop, which has a word of its own for a write to a connection that was just closed."""
    redis_server.command("FLUSHALL")

    async def scenario() -> None:
        store = RedisLiveStore(redis_server.url, SystemClock())
        await store.open()
        await store.begin(installed(pipeline()))
        token = (await store.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
        for value in range(100):
            said = Report(token, ["a", "b"], [value, value])
            *answers, _ = await asyncio.gather(
                store.report("j", "s", said),
                store.job("j"),
                store.heads(),
                asyncio.to_thread(redis_server.command, "CLIENT", "KILL", "TYPE", "normal"),
                return_exceptions=True,
            )
            assert all(
                isinstance(answer, UnavailableError)
                for answer in answers
                if isinstance(answer, BaseException)
            ), answers
        assert (await store.report("j", "s", Report(token, ["a"], [1_000]))).accepted == 1
        await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_one_steps_scripts_are_sent_once(redis_server: RedisServer) -> None:
    """The server knows a script by its digest; after SCRIPT FLUSH it is told the source again."""
    redis_server.command("FLUSHALL")

    async def scenario() -> None:
        store = RedisLiveStore(redis_server.url, SystemClock())
        await store.open()
        await store.begin(installed(pipeline()))
        redis_server.command("SCRIPT", "FLUSH")
        redis_server.command("CONFIG", "RESETSTAT")
        for _ in range(3):
            await store.job("j")
        stats = redis_server.info("commandstats")
        calls = {
            name: int(fields.partition("calls=")[2].partition(",")[0])
            for name, fields in stats.items()
        }
        assert (calls["cmdstat_eval"], calls["cmdstat_evalsha"]) == (1, 3)
        await store.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())


def test_a_server_that_forgot_a_script_and_then_stalls_is_away(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong while a script is sent again is the store's trouble, not an internal error."""

    async def scenario(failure: Exception) -> None:
        client = RedisClient(redis_server.url)
        execute = client._execute  # pyright: ignore[reportPrivateUsage]

        async def stall(command: str, *words: Any) -> Any:
            if command == "EVAL":
                raise failure
            return await execute(command, *words)

        monkeypatch.setattr(client, "_execute", stall)
        redis_server.command("SCRIPT", "FLUSH")
        with pytest.raises(UnavailableError):
            await client.step("head", job_keys("j"))
        await client.close()

    asyncio.run(scenario(RedisTimeoutError("Timeout reading")))
    asyncio.run(scenario(OSError("reset")))


def test_a_key_that_the_server_threw_away_is_noticed(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")

    async def scenario(key: str) -> None:
        store = RedisLiveStore(redis_server.url, SystemClock())
        await store.open()
        await store.begin(installed(pipeline(), incarnation=1 + KEYS.index(key)))
        token = (await store.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
        redis_server.command("DEL", f"tidegauge:{{j}}:stage:s{key}")
        with pytest.raises(StateLostError):
            await store.report("j", "s", Report(token, ["a", "b"], [5, 5]))
        await store.close()

    with asyncio.Runner() as runner:
        for key in KEYS:
            runner.run(scenario(key))


KEYS = ["", ":weights", ":owners"]


def test_an_incarnation_does_not_begin_twice_around_a_loss(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is lost, and then all that it has written: fences would come again."""
    redis_server.command("FLUSHALL")

    async def scenario() -> None:
        with Proxy(redis_server.port) as proxy:
            url = redis_server.url.replace(str(redis_server.port), str(proxy.port))
            store = RedisLiveStore(url, SystemClock())
            await store.open()
            evaluate = store._client._evaluate
            losses: list[object] = []

            async def losing(*asked: Any) -> Any:
                if losses:
                    return await evaluate(*asked)
                proxy.cut_answers(1)
                try:
                    return await evaluate(*asked)
                except RedisConnectionError:
                    losses.append(redis_server.command("EXISTS", "tidegauge:{j}"))
                    redis_server.command("FLUSHALL")
                    raise

            # So that it is not the source that has to be sent.
            await store.begin(replace(installed(pipeline()), name="i"))
            monkeypatch.setattr(store._client, "_evaluate", losing)
            with pytest.raises(UnavailableError):
                await store.begin(installed(pipeline()))
            assert losses == [1]
            assert redis_server.command("EXISTS", "tidegauge:{j}") == 0
            await store.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())
