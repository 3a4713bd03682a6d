"""Checks of a live store on Redis alone: its connections, its scripts, its server."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from functools import partial
from struct import pack, pack_into
from typing import Any, cast

import numpy as np
import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from service.clock import SystemClock
from service.errors import LeaseConflictError, UnavailableError
from service.frontier.facts import ReportedFacts
from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.idleness import Commits
from service.frontier.leases import Rank
from service.frontier.policies import IdlePolicy, StagePolicy
from service.frontier.ranges import ShardLayout
from service.frontier.timestamps import MIN
from service.live.port import REMEMBERED, StateLostError
from service.live.redis import client
from service.live.redis.client import RedisClient
from service.live.redis.schema import CHANNELS, COMMITS_MARK, channel, job_keys, stage_keys
from service.live.redis.store import RedisLiveStore
from service.model.jobs import StageView
from service.model.leases import Claim, Denied
from service.model.reports import Commit, Report, StageCommit
from tests.conformance.test_live import installed, pipeline
from tests.support.clock import FakeClock
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisCluster, RedisServer
from tests.support.stores import hasten


def test_connections_to_a_node_that_are_closed_in_use_are_no_surprise(
    redis_cluster: RedisCluster,
) -> None:
    """redis-py closes all connections to a node that fails, also those that others are using."""

    async def scenario() -> None:
        client = RedisClient(redis_cluster.url)
        inner: Any = cast("Any", client)._client
        await inner.initialize()
        try:
            await close_in_use(client, inner)
        finally:
            await client.close()

    async def close_in_use(client: RedisClient, inner: Any) -> None:
        for moment in range(24):
            await asyncio.gather(
                *(client.command("GET", b"{a}%d" % n) for n in range(4)), return_exceptions=True
            )
            writes = [
                asyncio.ensure_future(client.command("SET", b"{a}%d" % n, "x")) for n in range(4)
            ]
            for _ in range(moment % 8):
                await asyncio.sleep(0)
            for node in inner.get_nodes():
                await node.disconnect()
            answers = await asyncio.gather(*writes, return_exceptions=True)
            found = [answer for answer in answers if isinstance(answer, BaseException)]
            assert all(isinstance(error, UnavailableError) for error in found), found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_connections_that_broke_while_they_were_idle_are_not_used(
    redis_server: RedisServer,
) -> None:
    """On uvloop, which has not noticed yet that the server has closed them, one and all."""

    async def scenario() -> None:
        client = RedisClient(redis_server.url)
        try:
            for _ in range(10):
                await asyncio.gather(*(client.command("GET", "x") for _ in range(6)))
                redis_server.command("CLIENT", "KILL", "TYPE", "normal")
                assert await client.command("GET", "x") is None
        finally:
            await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


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
    """A fault while a script is sent again is the store's, not an internal error."""

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
            await client.step("heads", job_keys("j"))
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


def test_a_view_of_an_earlier_version_has_its_last_change_as_its_last_rise(
    redis_server: RedisServer,
) -> None:
    """A replica of that version publishes it without the last member."""
    redis_server.command("FLUSHALL")
    view = StageView(StageWatermark(5, 4), 3, 2, 8, 7)

    async def scenario() -> StageView:
        store = RedisLiveStore(redis_server.url, SystemClock())
        await store.open()
        await store.begin(installed(pipeline(), views={"k": view}))
        whole = redis_server.command("HGET", job_keys("j")[1], "k")
        redis_server.command("HSET", job_keys("j")[1], "k", whole[:-8])
        found = await store.job("j")
        await store.close()
        return found.stages["k"]

    assert asyncio.run(scenario()) == replace(view, advanced_at_ms=8)


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


def test_a_clock_that_is_set_back_prolongs_no_lease(redis_server: RedisServer) -> None:
    """A lease of three seconds must not block its range for the hour by which the clock went back."""
    redis_server.command("FLUSHALL")
    hour = 3_600_000

    async def scenario() -> None:
        clock = FakeClock()
        store = RedisLiveStore(redis_server.url, clock)
        await store.open()
        await store.begin(installed(pipeline()))
        token = (await store.claim("j", "s", Claim(None, "x", 3_000, Rank()))).token
        await store.report("j", "s", Report(token, ["a"], [5], idle=[True]))
        # The stored state was written with a clock that is an hour ahead.
        redis_server.command("HINCRBY", job_keys("j")[0], "clock", hour)
        for fence in redis_server.command("ZRANGE", job_keys("j")[3], 0, -1):
            redis_server.command("ZINCRBY", job_keys("j")[3], hour, fence)
        with pytest.raises(LeaseConflictError) as refused:
            await store.claim("j", "s", Claim(["a"], "y", 3_000, Rank()))
        # To a second: the store notes only now and then how late it is.
        denied = cast("Denied", refused.value.denied[0])
        assert (denied.expires_in_ms or 0) <= 4_000
        clock.advance(4_000)
        hasten([redis_server], 4_000)
        assert await store.expire("j") == {"j": {"s": 1}}
        _, agreed = await store.agreements("j", frozenset("s"))
        assert not agreed["s"].idle
        assert (await store.claim("j", "s", Claim(["a"], "y", 3_000, Rank()))).granted == ["a"]
        await store.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())


def test_moments_ahead_of_the_clock_are_corrected_once(
    redis_server: RedisServer,
) -> None:
    """They are from before a set-back, and must not count once the clock reaches them again."""
    redis_server.command("FLUSHALL")

    async def scenario() -> None:
        store = RedisLiveStore(redis_server.url, FakeClock())
        await store.open()
        stages = {**pipeline().stages}
        stages["s"] = replace(stages["s"], policy=StagePolicy(idle=IdlePolicy(60_000)))
        await store.begin(installed(Pipeline(stages)))
        for epoch in (1, 2):
            await store.commit("j", Commit(0, epoch, {"s": StageCommit()}))
        [marks] = [key for key in stage_keys("j", "s") if str(key).endswith(":marks")]
        is_kept = partial(redis_server.command, "HEXISTS", marks, COMMITS_MARK)

        async def commits() -> Commits | None:
            return (await store.observe("j", ["s"]))[1]["s"].commits

        found = await commits()
        assert found is not None
        assert (found.count, is_kept()) == (2, 1)
        # Earlier versions of the service have not written when the last one arrived.
        older = pack("<dddd", found.since_ms, found.last_ms, 2, found.since_ms)
        redis_server.command("HSET", marks, COMMITS_MARK, older)
        assert await commits() == found
        await store.commit("j", Commit(0, 3, {"s": StageCommit()}))
        found = await commits()
        assert found is not None
        assert found.count == 3
        hour = 3_600_000
        since, last = found.since_ms + hour, found.last_ms + hour
        ahead = pack("<ddddd", since, last, 2, since, last)
        redis_server.command("HSET", marks, COMMITS_MARK, ahead)
        token = (await store.claim("j", "s", Claim(["a"], "x", 60_000, Rank()))).token
        facts = [ReportedFacts(records=1, pending=b"rows")]
        await store.report("j", "s", Report(token, ["a"], [5], facts=facts))
        # Its facts and its lease are of before the set-back, too.
        [said] = [key for key in stage_keys("j", "s") if str(key).endswith(":facts")]
        [moments] = [key for key in stage_keys("j", "s") if str(key).endswith(":moments")]
        now = (await store.observe("j", ["s"]))[0].lease_ms
        raw = bytearray(redis_server.command("HGET", said, 0))
        pack_into("<d", raw, 4 * 8, now + hour)
        redis_server.command("HSET", said, 0, bytes(raw))
        redis_server.command("SETRANGE", moments, 2 * 2 * 8, pack("<d", now + hour))
        instant, seen = await store.observe("j", ["s"])
        assert seen["s"].is_ahead_of(instant.lease_ms)
        await store.follow_set_back("j", "s", 60_000)
        instant, seen = await store.observe("j", ["s"])
        assert not seen["s"].is_ahead_of(instant.lease_ms)
        assert seen["s"].commits is None
        assert is_kept() == 0
        corrected = seen["s"].facts[0]
        assert now <= corrected.quiet_since_ms == seen["s"].held_since_ms[0] <= instant.lease_ms
        assert corrected.pending == b"rows"
        assert seen["s"].counts.records == 1
        await store.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())


def test_moments_of_very_many_shards_follow_a_set_back(redis_server: RedisServer) -> None:
    """Lua returns at most some thousand values at once: the step failed, and the job was restored."""

    redis_server.command("FLUSHALL")

    async def follow() -> None:
        store = RedisLiveStore(redis_server.url, FakeClock())
        await store.open()
        names = [f"{number:05}" for number in range(9_000)]
        await store.begin(installed(pipeline(shards=ShardLayout.of(names))))
        await store.claim("j", "s", Claim(None, "x", 60_000, Rank()))
        [moments] = [key for key in stage_keys("j", "s") if str(key).endswith(":moments")]
        now = (await store.observe("j", ["s"]))[0].lease_ms
        last = 8 * (2 * len(names) + 8_999)
        redis_server.command("SETRANGE", moments, last, pack("<d", now + 3_600_000))
        await store.follow_set_back("j", "s", 60_000)
        instant, seen = await store.observe("j", ["s"])
        assert not seen["s"].is_ahead_of(instant.lease_ms)
        assert now <= int(seen["s"].held_since_ms[8_999]) <= instant.lease_ms
        await store.close()

    with asyncio.Runner() as runner:
        runner.run(follow())


def test_a_subscription_that_has_gone_silent_is_given_up(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is half open: without an error, and without a message for ever."""
    monkeypatch.setattr(client, "_QUIET_S", 0.2)
    redis_server.command("CONFIG", "RESETSTAT")

    def pings() -> int:
        found = re.search(
            r"cmdstat_ping:calls=(\d+)", str(redis_server.command("INFO", "commandstats"))
        )
        return int(found[1]) if found else 0

    async def scenario(proxy: Proxy) -> None:
        url = redis_server.url.replace(str(redis_server.port), str(proxy.port))
        listener = RedisClient(url)
        async with asyncio.timeout(30), contextlib.aclosing(listener.hints(CHANNELS)) as hints:
            assert await anext(hints) is None
            heard = asyncio.ensure_future(anext(hints))
            # A server that answers each ping is not given up.
            while pings() < 3:
                await asyncio.wait({heard}, timeout=0.01)
            assert not heard.done()
            redis_server.command("PUBLISH", channel("j"), "x")
            assert await heard == (channel("j"), b"x")
            proxy.stall()
            with pytest.raises(UnavailableError, match="does not answer on the subscription"):
                await anext(hints)
            proxy.flow()
        async with asyncio.timeout(30), contextlib.aclosing(listener.hints(CHANNELS)) as hints:
            assert await anext(hints) is None
            heard = asyncio.ensure_future(anext(hints))
            while not redis_server.command("PUBLISH", channel("j"), "y"):
                await asyncio.wait({heard}, timeout=0.01)
            assert await heard == (channel("j"), b"y")
        await listener.close()

    with Proxy(redis_server.port) as proxy, asyncio.Runner() as runner:
        runner.run(scenario(proxy))


@pytest.mark.parametrize("within_report", [False, True])
def test_a_claim_that_is_sent_again_keeps_its_lease(
    redis_server: RedisServer, within_report: bool
) -> None:
    """It comes with the same token, so its first lease must not be remembered as one that has ended."""
    redis_server.command("FLUSHALL")

    async def scenario() -> None:
        tokens = iter(["again", "again", *(f"other-{n}" for n in range(9))])
        store = RedisLiveStore(redis_server.url, FakeClock(), tokens.__next__)
        await store.open()
        await store.begin(installed(pipeline()))
        claim = Claim(["a"], "x", 60_000, Rank())
        for _ in range(2):
            if within_report:
                await store.report("j", "s", Report("", ["a"], [5], claim=claim))
            else:
                await store.claim("j", "s", claim)
        # As many have ended as are remembered: with the next, the first of them is dropped.
        [ended] = [key for key in job_keys("j") if key.endswith("ended")]
        redis_server.command("RPUSH", ended, *(f"some-{n}" for n in range(REMEMBERED)))
        for _ in range(3):
            await store.claim("j", "s", Claim(["b"], "y", 60_000, Rank()))
        renewed, lost = await store.renew("j", ["again"])
        assert (list(renewed[0].ranges), list(lost)) == (["a"], [])
        assert (await store.report("j", "s", Report("again", ["a"], [6]))).accepted == 1
        await store.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())


def test_promises_are_saved_while_another_replica_changes_the_layout(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout moves between the two steps: which chunks have changed, and what is in them."""
    redis_server.command("FLUSHALL")

    async def scenario() -> None:
        one, other = (RedisLiveStore(redis_server.url, SystemClock()) for _ in range(2))
        await one.begin(installed(pipeline()))
        token = (await one.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
        await one.report("j", "s", Report(token, ["a", "b"], [5, 6]))
        ask = one._client.step
        asked: list[str] = []

        async def interrupted(name: str, *words: Any, **options: Any) -> Any:
            asked.append(name)
            if asked == ["heads", "unsaved", "unsaved"]:
                finer = pipeline(ShardLayout.of("abc"))
                await other.install(installed(finer, layout_version=2))
            return await ask(name, *words, **options)

        monkeypatch.setattr(one._client, "step", interrupted)
        chunks = {chunk.stage: chunk for chunk in await one.unsaved()}
        assert chunks["s"].layout_since == 2
        assert np.frombuffer(chunks["s"].columns["promises"], "<i8").tolist() == [5, 6, MIN]
        await one.close()
        await other.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())


def test_replicas_that_install_one_layout_at_once(redis_server: RedisServer) -> None:
    """Each finds the other half done: what they read must be of one layout, or be read again."""
    redis_server.command("FLUSHALL")

    async def scenario() -> None:
        stores = [RedisLiveStore(redis_server.url, SystemClock()) for _ in range(3)]
        await stores[0].begin(installed(pipeline()))
        token = (await stores[0].claim("j", "s", Claim(None, "x", 600_000, Rank()))).token
        await stores[0].report("j", "s", Report(token, ["a", "b"], [5, 6]))
        for version in range(2, 40):
            shards = ShardLayout.of(["a", "b", *(f"{n:03}" for n in range(version * 7 % 90))])
            changed = installed(pipeline(shards), layout_version=version)
            await asyncio.gather(*(store.install(changed) for store in stores))
        assert sorted((await stores[0].columns("j", "s"))["promises"].tolist())[-2:] == [5, 6]
        for store in stores:
            await store.close()

    with asyncio.Runner() as runner:
        runner.run(scenario())


def test_a_store_closes_at_any_moment_of_its_connecting_to_a_cluster(
    redis_cluster: RedisCluster,
) -> None:
    """While it connects, redis-py may drop a cancellation, and the service would not stop."""

    async def scenario() -> None:
        for moment in range(100):
            store = RedisLiveStore(redis_cluster.url, FakeClock())
            await store.open()
            for _ in range(moment):
                await asyncio.sleep(0)
            async with asyncio.timeout(30):
                await store.close()

    asyncio.run(scenario())
