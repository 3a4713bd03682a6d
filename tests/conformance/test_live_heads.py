"""The heads of all jobs in a shared live store: by them, other replicas find changes and losses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from service.frontier.graph import StageWatermark
from service.frontier.leases import Rank
from service.frontier.ranges import ShardLayout
from service.frontier.timestamps import MIN
from service.live.redis.schema import job_keys
from service.live.redis.store import RedisLiveStore
from service.model.leases import Claim
from service.model.observations import Settled
from service.model.reports import Report
from tests.conformance.test_live import LEFT, RIGHT, Worker, installed, pipeline
from tests.support.clock import FakeClock
from tests.support.redis_server import RedisCluster, RedisServer
from tests.support.stores import hasten

Advance = Callable[[int], None]


@pytest.fixture(params=["redis", "cluster"])
def servers(request: pytest.FixtureRequest) -> list[RedisServer]:
    """The servers of a shared live store, emptied."""
    if request.param == "redis":
        found = [request.getfixturevalue("redis_server")]
    else:
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
        found = list(cluster.nodes)
    for server in found:
        server.command("FLUSHALL")
    return found


@pytest.fixture
def replicas(
    runner: asyncio.Runner,
    clock: FakeClock,
    servers: list[RedisServer],
    request: pytest.FixtureRequest,
) -> Iterator[tuple[RedisLiveStore, RedisLiveStore]]:
    """Two processes on one store, with the job `j`."""
    url = servers[0].url
    if len(servers) > 1:
        url = request.getfixturevalue("redis_cluster").url
    one, other = RedisLiveStore(url, clock), RedisLiveStore(url, clock)
    runner.run(one.begin(installed(pipeline())))
    yield one, other
    runner.run(one.close())
    runner.run(other.close())


@pytest.fixture
def advance(clock: FakeClock, servers: list[RedisServer]) -> Advance:
    def advance(ms: int) -> None:
        clock.advance(ms)
        hasten(servers, ms)

    return advance


def raise_a_shard(worker: Worker, token: str, _: Advance) -> None:
    worker.report(token, {"a": 5, "b": 7})


def let_a_shard_be_idle(worker: Worker, token: str, _: Advance) -> None:
    worker.report(token, {"a": 5, "b": 7}, idle=["a"])


def let_every_key_range_be_idle(worker: Worker, _: str, __: Advance) -> None:
    """A key range that is idle keeps its weight: its stage's agreement changes all the same."""
    token = worker.claim(None, stage="k").token
    worker.report(token, {LEFT: MIN, RIGHT: MIN}, stage="k", idle=[LEFT, RIGHT])


def end_the_idleness_by_a_release(worker: Worker, token: str, _: Advance) -> None:
    let_a_shard_be_idle(worker, token, _)
    worker.run(worker.live.release("j", [token]))


def end_the_idleness_by_an_expiry(worker: Worker, token: str, advance: Advance) -> None:
    let_a_shard_be_idle(worker, token, advance)
    advance(20_000)
    worker.run(worker.live.expire())


def settle_that_a_shard_is_idle(worker: Worker, token: str, _: Advance) -> None:
    worker.report(token, {"a": 5, "b": 7})
    seen = worker.observe()
    facts = seen.facts.get(0)
    quiet = None if facts is None else facts.quiet_since_ms
    decision = Settled(0, int(seen.owners[0]), quiet, idle=True, promise=MIN)
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [decision]))


def retire_a_shard(worker: Worker, token: str, _: Advance) -> None:
    worker.report(token, {"a": 5, "b": 7})
    worker.run(worker.live.retire("j", "s", "a"))


def end_a_retirement(worker: Worker, token: str, _: Advance) -> None:
    retire_a_shard(worker, token, _)
    worker.report(token, {"a": 5})


def commit_an_epoch(worker: Worker, token: str, _: Advance) -> None:
    worker.report(token, {"a": 5, "b": 7}, epoch=1)
    worker.commit(1, s=None)


def publish_a_watermark(worker: Worker, _: str, __: Advance) -> None:
    worker.publish(s=StageWatermark(MIN, 5))


def publish_after_a_newer_revision(worker: Worker, _: str, __: Advance) -> None:
    """Two replicas publish two stages, and the older record comes last: the revision stays."""
    worker.publish(2, k=StageWatermark(MIN, 5))
    worker.publish(1, s=StageWatermark(MIN, 5))


def catch_up_with_the_ledger(worker: Worker, _: str, __: Advance) -> None:
    job = installed(pipeline(), revision=3)
    stage = job.stages["s"]
    view = replace(stage.view, watermark=StageWatermark(MIN, 9), version=1)
    stages = {**job.stages, "s": replace(stage, view=view)}
    worker.run(worker.live.install(replace(job, stages=stages)))


def add_a_shard(worker: Worker, _: str, __: Advance) -> None:
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("abc")), layout_version=2)))


def reset_the_job(worker: Worker, _: str, __: Advance) -> None:
    worker.run(worker.live.install(installed(pipeline(), generation=2)))


def lose_and_restore_it(worker: Worker, _: str, __: Advance) -> None:
    worker.run(worker.live.begin(installed(pipeline(), incarnation=2)))


@pytest.mark.parametrize(
    "change",
    [
        raise_a_shard,
        let_a_shard_be_idle,
        let_every_key_range_be_idle,
        end_the_idleness_by_a_release,
        end_the_idleness_by_an_expiry,
        settle_that_a_shard_is_idle,
        retire_a_shard,
        end_a_retirement,
        commit_an_epoch,
        publish_a_watermark,
        publish_after_a_newer_revision,
        catch_up_with_the_ledger,
        add_a_shard,
        reset_the_job,
        lose_and_restore_it,
    ],
)
def test_another_replica_finds_each_change_of_an_agreement_or_a_view(
    change: Callable[[Worker, str, Advance], None],
    replicas: tuple[RedisLiveStore, RedisLiveStore],
    runner: asyncio.Runner,
    advance: Advance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each step, also within one change: who compares between two of them misses none."""
    one, other = replicas
    worker = Worker(one, runner)
    token = worker.claim(None).token
    step = one._client.step  # pyright: ignore[reportPrivateUsage]
    seen: list[tuple[object, object]] = []

    async def look() -> None:
        # A first read of the agreements ends leases that have run out.
        await other.agreements("j", frozenset("sk"))
        head = (await other.heads()).get("j")
        view, agreed = await other.agreements("j", frozenset("sk"))
        views = await other.jobs()
        assert [replace(each, changes=0) for each in views] == [replace(view, changes=0)]
        seen.append((head, (replace(view, changes=0), agreed)))

    async def looked(name: str, *words: Any, **options: Any) -> Any:
        reply = await step(name, *words, **options)
        # In between, no step but the next of the change itself is taken.
        if name not in ("freeze", "dump"):
            await look()
        return reply

    runner.run(look())
    monkeypatch.setattr(one._client, "step", looked)  # pyright: ignore[reportPrivateUsage]
    change(worker, token, advance)
    monkeypatch.undo()
    moved = list(pairwise(seen))
    assert any(before[1] != after[1] for before, after in moved), "nothing has changed"
    for before, after in moved:
        assert before[0] != after[0] or before[1] == after[1]


def test_a_lease_of_a_replica_that_died_is_ended_by_another(
    replicas: tuple[RedisLiveStore, RedisLiveStore], runner: asyncio.Runner, advance: Advance
) -> None:
    one, other = replicas
    runner.run(one.claim("j", "s", Claim(None, "x", 1_000, Rank())))
    assert runner.run(other.heads()).keys() == {"j"}
    assert runner.run(other.expire()) == {}
    advance(1_500)
    assert runner.run(other.expire()) == {"j": {"s": 1}}
    assert runner.run(other.expire()) == {}


def test_leases_are_ended_after_the_clock_was_set_back(
    replicas: tuple[RedisLiveStore, RedisLiveStore],
    servers: list[RedisServer],
    runner: asyncio.Runner,
    advance: Advance,
) -> None:
    """Nobody but the background work has touched the job since."""
    one, other = replicas
    runner.run(one.claim("j", "s", Claim(None, "x", 3_000, Rank())))
    hour = 3_600_000
    for server in servers:
        for key in server.command("KEYS", job_keys("j")[0]):
            server.command("HINCRBY", key, "clock", hour)
    hasten(servers, -hour)
    runner.run(other.heads())
    runner.run(other.expire())
    advance(4_500)
    assert runner.run(other.expire()) == {"j": {"s": 1}}


@pytest.mark.parametrize("key", [1, 2, 3, 5])
def test_a_damaged_job_is_lost_alone(
    key: int,
    replicas: tuple[RedisLiveStore, RedisLiveStore],
    servers: list[RedisServer],
    runner: asyncio.Runner,
) -> None:
    one, other = replicas
    for name in ("i", "k"):
        runner.run(one.begin(replace(installed(pipeline()), name=name)))
    for server in servers:
        for there in server.command("KEYS", job_keys("j")[key]):
            server.command("DEL", there)
    assert runner.run(other.heads()).keys() == {"i", "k"}
    # Whatever was left is not trusted later, either.
    assert runner.run(one.head("j")) is None


@pytest.mark.parametrize("key", [0, 3, 5])
def test_a_key_of_another_type_is_of_one_job_alone(
    key: int,
    replicas: tuple[RedisLiveStore, RedisLiveStore],
    servers: list[RedisServer],
    runner: asyncio.Runner,
) -> None:
    one, other = replicas
    runner.run(one.begin(replace(installed(pipeline()), name="i")))
    for server in servers:
        for there in server.command("KEYS", job_keys("j")[key]):
            server.command("SET", there, "x")
    assert runner.run(other.heads()).keys() == {"i"}


def test_the_first_step_on_a_new_connection_finds_the_state(
    replicas: tuple[RedisLiveStore, RedisLiveStore], runner: asyncio.Runner
) -> None:
    """On each node of a cluster."""
    one, other = replicas
    for number in range(9):
        runner.run(one.begin(replace(installed(pipeline()), name=f"j{number}")))
    for number in range(9):
        assert runner.run(other.head(f"j{number}")) is not None


def test_a_look_at_idle_jobs_takes_few_steps(
    redis_server: RedisServer,
    runner: asyncio.Runner,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs, unsaved chunks and expired leases of three hundred jobs, one of which is busy."""
    redis_server.command("FLUSHALL")
    store = RedisLiveStore(redis_server.url, clock)
    names = [f"j{number:03}" for number in range(300)]
    for name in names:
        runner.run(store.begin(replace(installed(pipeline()), name=name)))
    assert len(runner.run(store.jobs())) == 300
    token = runner.run(store.claim("j007", "s", Claim(None, "x", 60_000, Rank()))).token
    runner.run(store.report("j007", "s", Report(token, ["a", "b"], [5, 7])))
    step = store._client.step  # pyright: ignore[reportPrivateUsage]
    steps: Counter[str] = Counter()

    async def counted(name: str, *words: Any, **options: Any) -> Any:
        steps[name] += 1
        return await step(name, *words, **options)

    monkeypatch.setattr(store._client, "step", counted)  # pyright: ignore[reportPrivateUsage]
    assert [job.name for job in runner.run(store.jobs())] == names
    assert steps == {"heads": 3, "read": 1}
    steps.clear()
    assert [chunk.job for chunk in runner.run(store.unsaved())] == ["j007"]
    assert steps == {"heads": 3, "unsaved": 2}
    steps.clear()
    assert runner.run(store.expire()) == {}
    assert not steps
    monkeypatch.undo()
    runner.run(store.close())
