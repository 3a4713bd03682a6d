"""Stores that are lost, replaced or away: it costs time, never truth, and mends by itself."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import msgspec
import pytest

from service.clock import SystemClock
from service.errors import UnavailableError
from service.frontier.leases import Rank
from service.ledger.port import NewLayout
from service.ledger.sql import SqlLedger
from service.live.redis import schema
from service.live.redis.client import RedisClient
from service.live.redis.store import RedisLiveStore
from service.model.leases import Claim
from service.model.reports import Report
from tests.support.api import Api, eventually, ok, problem
from tests.support.binaries import wait_until
from tests.support.inprocess import InProcess
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisCluster, RedisError, RedisSentinel, RedisServer
from tests.support.sketches import pending
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

ROUNDS = 4
"""The client of a cluster chooses by chance whom to send what has no key."""

FLOW = {"s": {"shards": ["0", "1"]}, "k": {"inputs": ["s"], "ranges": 1}}
KEYS = "00000000-100000000"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One of the test's own: it is going to be mistreated."""
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server:
        yield server
        server.resume()


@pytest.fixture(scope="module")
def own_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with PostgresServer(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture
async def gauge(
    tmp_path: Path, redis: RedisServer, own_postgres: PostgresServer
) -> AsyncIterator[InProcess]:
    async with InProcess(
        tmp_path, clock=SystemClock(), stores=Stores(redis, own_postgres)
    ) as service:
        yield service


@pytest.fixture
async def job(gauge: InProcess) -> Api:
    """A job whose watermarks stand at 10, with its checkpoint in the ledger."""
    api = gauge.api()
    await api.define(FLOW)
    token = await api.token("s", ttl_ms=600_000)
    run = await api.run("s")
    token = await api.token("s", ttl_ms=600_000, run=run)
    await api.report("s", token, {"0": 10, "1": 11}, epoch=1)
    await api.commit(1, {"s": {}}, run=run)
    assert await outputs(api) == (10, 10)
    return api


async def outputs(api: Api) -> tuple[int | None, int | None]:
    seen = await api.snapshot()
    return seen["s"]["output_watermark"], seen["k"]["input_watermark"]


async def goes_on(job: Api) -> None:
    """Leases are void, the watermark stands where it was, and moves once somebody reports again."""
    assert await outputs(job) == (10, 10)
    assert (await job.watermark("s"))["ranges"]["leased"] == 0
    token = await job.token("s", run=1)
    await job.report("s", token, {"0": 20})
    assert await outputs(job) == (11, 11)


def lose_flush(redis: RedisServer) -> None:
    redis.command("FLUSHALL")


def lose_empty(redis: RedisServer) -> None:
    redis.kill()
    redis._forget()
    redis.start()


def lose_nothing_but_the_process(redis: RedisServer) -> None:
    redis.kill()
    redis.start()


@pytest.mark.parametrize("lose", [lose_flush, lose_empty, lose_nothing_but_the_process])
async def test_invariant_7_a_lost_live_store_costs_time(job: Api, redis: RedisServer, lose):
    fence = (await job.claim("s", run=1, ttl_ms=600_000))["fence"]
    lose(redis)
    assert await outputs(job) == (10, 10)
    await goes_on(job)
    assert (await job.claim("s", run=1))["fence"] >> 32 > fence >> 32


async def test_an_old_file_is_no_state_to_go_on_from(job: Api, redis: RedisServer):
    old = redis.save_files()
    token = await job.token("s", run=1, ttl_ms=600_000)
    await job.report("s", token, {"0": 30, "1": 40})
    assert await outputs(job) == (30, 30)
    redis.kill()
    redis.restore_files(old)
    redis.start()
    assert await outputs(job) == (30, 30)
    problem(await job.post_report("s", token, {"0": 50}), 410, "lease-lost")


async def test_a_replica_that_lags_takes_over(
    tmp_path: Path, redis: RedisServer, own_postgres: PostgresServer
):
    for name in ("second", "sentinel"):
        (tmp_path / name).mkdir()
    with (
        RedisServer(tmp_path / "second") as second,
        RedisSentinel(tmp_path / "sentinel", redis, second) as sentinel,
    ):
        stores = Stores(redis, own_postgres, live_url=sentinel.url)
        async with InProcess(tmp_path, clock=SystemClock(), stores=stores) as gauge:
            api = gauge.api()
            await api.define(FLOW)
            token = await api.token("s", ttl_ms=600_000)
            await api.report("s", token, {"0": 10, "1": 11})
            second.pause()
            await api.report("s", token, {"0": 20, "1": 21})
            redis.kill()
            second.resume()
            sentinel.wait_for_primary(second.port)
            await eventually(lambda: outputs_or_none(api), lambda seen: seen == (20, 20))
            problem(await api.post_report("s", token, {"0": 50}), 410, "lease-lost")
            token = await api.token("s")
            await api.report("s", token, {"0": 30, "1": 30})
            assert await outputs(api) == (30, 30)


async def outputs_or_none(api: Api) -> tuple[int | None, int | None] | None:
    """The same, or None while nobody may say."""
    try:
        return await outputs(api)
    except AssertionError as error:
        if "503" in str(error):
            return None
        raise


async def test_a_flushed_script_cache_is_filled_again(job: Api, redis: RedisServer):
    token = await job.token("s", run=1)
    redis.command("SCRIPT", "FLUSH")
    await job.report("s", token, {"0": 12, "1": 12})
    assert await outputs(job) == (12, 12)


async def test_without_redis_writes_wait_and_reads_go_on_where_that_is_safe(
    job: Api, gauge: InProcess, redis: RedisServer
):
    token = await job.token("s", run=1, ttl_ms=600_000)
    assert await outputs(job) == (10, 10)
    redis.stop()
    refused = await job.post_report("s", token, {"0": 20, "1": 20})
    problem(refused, 503, "unavailable")
    assert int(refused.headers["Retry-After"]) >= 1
    problem(await gauge.client.get("/readyz"), 503, "unavailable")
    ok(await gauge.client.get("/healthz"))
    assert await outputs(job) == (10, 10)
    # Records of another replica may or may not have been seen meanwhile: neither is safe.
    gauge.stores.execute("UPDATE jobs SET revision = revision + 1")
    problem(await job.get_watermark("s"), 503, "unavailable")
    redis.start()
    await goes_on(job)


async def test_without_redis_no_value_is_reused_that_another_replica_may_have_changed(
    job: Api, gauge: InProcess, redis: RedisServer
):
    """As long as the job stands, they are reused: but nobody can see any more that it does."""
    for _ in range(5):
        # Values that follow the clock are not reused.
        await asyncio.sleep(0.01)
        assert (await job.watermark("s"))["records"] is not None
        ok(await gauge.client.get("/v1/problems"))
    redis.stop()
    seen = await job.watermark("s")
    assert (seen["output_watermark"], seen["records"]) == (10, None)

    async def problems() -> int:
        return (await gauge.client.get("/v1/problems")).status_code

    await eventually(problems, lambda status: status == 503)
    redis.start()
    await goes_on(job)


async def readiness(gauge: InProcess, postgres: PostgresServer) -> httpx.Response:
    # Each time, since a session may have missed the signal of the last reload.
    postgres.execute("SELECT pg_reload_conf()")
    return await gauge.client.get("/readyz")


async def test_a_postgres_that_takes_no_writes_is_not_ready(
    job: Api, gauge: InProcess, own_postgres: PostgresServer
):
    ok(await gauge.client.get("/readyz"))
    own_postgres.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    try:
        refused = await eventually(
            lambda: readiness(gauge, own_postgres), lambda response: response.status_code == 503
        )
        problem(refused, 503, "unavailable")
        assert await outputs(job) == (10, 10)
    finally:
        own_postgres.execute("ALTER SYSTEM RESET default_transaction_read_only")
        own_postgres.execute("SELECT pg_reload_conf()")
    await eventually(lambda: gauge.client.get("/readyz"), lambda r: r.status_code == 200)


T = TypeVar("T")


async def timed(asked: Awaitable[T]) -> tuple[T, float]:
    """Return an answer, and how many seconds it took."""
    began_s = asyncio.get_running_loop().time()
    answer = await asked
    return answer, asyncio.get_running_loop().time() - began_s


async def test_a_redis_that_hangs_is_away(job: Api, redis: RedisServer):
    token = await job.token("s", run=1, ttl_ms=600_000)
    assert await outputs(job) == (10, 10)
    redis.pause()
    _, first_s = await timed(outputs(job))
    seen, next_s = await timed(outputs(job))
    assert seen == (10, 10)
    assert next_s < first_s / 2, "one command has waited for a whole timeout, and is the last"
    problem(await job.post_report("s", token, {"0": 20}), 503, "unavailable")
    redis.resume()
    # The same server, with all it knew: nothing was lost, not even the lease.
    answer = await job.report("s", token, {"0": 20})
    assert answer["accepted"] == 1


async def test_a_node_of_a_cluster_that_hangs_keeps_nobody_from_the_others(tmp_path: Path):
    with RedisCluster(tmp_path, extra={"cluster-require-full-coverage": "no"}) as cluster:
        client = RedisClient(cluster.url)
        keys = [f"{{job-{number}}}".encode() for number in range(12)]
        for key in keys:
            await client.command("SET", key, "0")
        # The one that the client sends to what has no key.
        port = cast("Any", client._client).get_default_node().port
        [hung] = [node for node in cluster.nodes if node.port == port]
        there = [key for key in keys if serves(hung, key)]
        elsewhere = [key for key in keys if key not in there]
        assert there
        assert elsewhere
        hung.pause()
        refused: list[str] = []
        try:
            for key in [there[0], *elsewhere] * ROUNDS:
                try:
                    await client.command("SET", key, "1")
                except UnavailableError as error:
                    # The hung node itself, or the client's look at the cluster, if it began there.
                    refused.append(error.detail)
        finally:
            hung.resume()
            await client.close()
        assert ROUNDS <= len(refused) < ROUNDS * (1 + len(elsewhere))
        assert not [each for each in refused if "Timeout" not in each], "without having been sent"


def serves(node: RedisServer, key: bytes) -> bool:
    """Return whether a key is one of this node's."""
    try:
        node.command("EXISTS", key.decode())
    except RedisError:
        return False
    return True


def refuse_memory(redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "maxmemory", "1")


def take_memory(redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "maxmemory", "0")


def refuse_without_replicas(redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "min-replicas-to-write", "1")


def take_without_replicas(redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "min-replicas-to-write", "0")


def refuse_as_a_replica(redis: RedisServer) -> None:
    redis.command("REPLICAOF", "127.0.0.1", "1")


def refuse_after_a_failed_save(redis: RedisServer) -> None:
    # A folder that is gone: Redis may go on writing to files that are open, but makes no new ones.
    shutil.rmtree(redis._data)
    redis.command("CONFIG", "SET", "save", "1 1")
    redis.command("BGSAVE")
    wait_until(
        lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "err", "the save to fail"
    )


def take_after_a_failed_save(redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")


@pytest.mark.parametrize(
    ("refuse", "take"),
    [
        (refuse_memory, take_memory),
        (refuse_without_replicas, take_without_replicas),
        (refuse_as_a_replica, RedisServer.promote),
        (refuse_after_a_failed_save, take_after_a_failed_save),
    ],
)
async def test_a_redis_that_refuses_writes_is_away(
    job: Api,
    gauge: InProcess,
    redis: RedisServer,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[RedisServer], None],
    take: Callable[[RedisServer], None],
):
    """The server answers, but takes no writes: scripts fail with errors of many forms."""
    token = await job.token("s", run=1, ttl_ms=600_000)
    refuse(redis)
    refused = [
        await job.post_report("s", token, {"0": 20, "1": 20}),
        await job.post_claim("s", run=1, epoch=9, holder="another"),
        await job.post_commit(7, {"s": {}}, run=1),
        await job.put(FLOW | {"s": {"shards": ["0", "1", "2"]}}, etag="*"),
        await gauge.api("new").put(FLOW),
        await job.open_run(["s"]),
        await gauge.client.post(f"{job.root}/leases/renew", json={"tokens": [token]}),
        await gauge.client.post(f"{job.root}/leases/release", json={"tokens": [token]}),
    ]
    for response in refused:
        problem(response, 503, "unavailable")
    problem(await gauge.client.get("/readyz"), 503, "unavailable")
    assert [r for r in caplog.records if r.exc_info] == []
    take(redis)
    # Whatever the ledger took meanwhile is there now, and a retry does the rest.
    await gauge.api("new").put(FLOW)
    ok(await job.put(FLOW | {"s": {"shards": ["0", "1", "2"]}}, etag="*"))
    token = await job.token("s", run=await job.run("s"))
    await job.report("s", token, {"0": 30, "1": 30, "2": 30})
    assert await outputs(job) == (30, 30)


async def test_no_specification_is_shown_ahead_of_the_watermarks(
    job: Api, redis: RedisServer
) -> None:
    """A reset was answered 503, and is in the ledger. Whoever waits for a watermark of the generation
    that the specification shows must not be given that of the one before.
    """
    before = (await job.snapshot())["s"]["generation"]
    redis.command("CONFIG", "SET", "min-replicas-to-write", "1")
    problem(await job.client.post(f"{job.root}/reset"), 503, "unavailable")
    assert await outputs(job) == (10, 10), "readers are still shown the generation before"
    problem(await job.client.get(job.root), 503, "unavailable")
    redis.command("CONFIG", "SET", "min-replicas-to-write", "0")
    spec = await eventually(lambda: job.client.get(job.root), lambda r: r.status_code == 200)
    assert spec.json()["generation"] == before + 1
    assert (await job.watermark("s"))["generation"] == before + 1
    assert await outputs(job) == (None, None)


async def test_no_specification_is_shown_ahead_of_a_live_store_that_is_away(
    job: Api, gauge: InProcess, redis: RedisServer
) -> None:
    """A job that is deleted and defined again while the live store is away has its next generation in
    the ledger alone. A replica that has not read the job since cannot compare the two.
    """
    before = (await job.snapshot())["s"]["generation"]
    redis.pause()
    problem(await job.delete(), 503, "unavailable")
    problem(await job.client.get(f"{job.root}/watermarks"), 404, "unknown-job")
    problem(await job.put(FLOW), 503, "unavailable")
    problem(await job.client.get(job.root), 503, "unavailable")
    redis.resume()
    spec = await eventually(lambda: job.client.get(job.root), lambda r: r.status_code == 200)
    assert spec.json()["generation"] == before + 1
    assert (await job.watermark("s"))["generation"] == before + 1
    assert await outputs(job) == (None, None)


async def test_no_percentile_goes_back_while_redis_takes_no_writes(
    gauge: InProcess, redis: RedisServer
) -> None:
    """Then it can be computed, but not compared with what was shown before."""
    api = gauge.api("soft")
    await api.define({"s": {"shards": ["0"], "percentiles": [66]}})
    token = await api.token("s", ttl_ms=600_000)

    async def says(time: int) -> None:
        waiting = {"watermark": 10, "records": 1, "pending": pending([time])}
        await api.report("s", token, {"0": waiting})

    async def shown() -> int | None:
        return (await api.watermark("s"))["percentiles"]["66"]

    await says(90)
    assert await shown() == 90
    await says(50)
    redis.command("CONFIG", "SET", "min-replicas-to-write", "1")
    seen = await api.watermark("s")
    assert (seen["percentiles"], seen["records"]) == ({"66": None}, None)
    redis.command("CONFIG", "SET", "min-replicas-to-write", "0")
    assert await eventually(shown, lambda found: found is not None) == 90


async def test_without_postgres_watermarks_stand_and_reports_are_taken(
    job: Api, gauge: InProcess, own_postgres: PostgresServer
):
    token = await job.token("s", run=1, ttl_ms=600_000)
    own_postgres.stop("immediate")
    try:
        for value in (20, 21):
            answer = await job.report("s", token, {"0": value, "1": value})
            assert answer["accepted"] == 2
            assert answer["watermark"]["output_watermark"] == 10
        assert await outputs(job) == (10, 10)
        await job.report("s", token, {"0": 30, "1": 30}, epoch=2)
        problem(await job.post_commit(2, {"s": {}}, run=1), 503, "unavailable")
        problem(await gauge.client.get("/readyz"), 503, "unavailable")
    finally:
        own_postgres.start()
    # The commit was not answered, but not lost either: what it applied is published as soon as may be.
    await eventually(lambda: job.output("s"), lambda output: output == 30)
    await job.commit(2, {"s": {}}, run=1)
    assert await outputs(job) == (30, 30)


async def test_a_layout_change_that_nobody_ended_is_ended(
    job: Api, gauge: InProcess, redis: RedisServer
):
    """A replica dies after it has stopped the job for its next layout, before that is in place."""
    assert gauge.stores.ledger_url is not None
    ledger = SqlLedger(gauge.stores.ledger_url)
    finer = FLOW | {"s": {"shards": ["0", "1", "2"]}}
    redis.command("HSET", "tidegauge:{job}", "at", "!1-1")
    spec = msgspec.json.encode({"stages": finer})
    assert await ledger.replace(NewLayout("job", spec, ("s",)), 1, 1, 5) is not None
    await ledger.close()
    token = await job.token("s", ["2"], run=1)
    assert (await job.watermark("s"))["output_watermark"] == 10
    assert (await job.report("s", token, {"2": 50}))["accepted"] == 1


async def test_invariant_8_no_layout_is_passed_over(job: Api, gauge: InProcess):
    """One replica stores a layout and dies before it installs it; another is asked for the next."""
    assert gauge.stores.ledger_url is not None
    ledger = SqlLedger(gauge.stores.ledger_url)
    without = msgspec.json.encode({"stages": FLOW | {"s": {"shards": ["0", "00"]}}})
    assert await ledger.replace(NewLayout("job", without, ("s",)), 1, 1, 5) is not None
    await ledger.close()
    await job.change(FLOW | {"s": {"shards": ["0", "00", "1"]}})
    assert await job.promises("s") == {"0": 10, "00": None, "1": None}


def throw_away(redis: RedisServer, key: str) -> None:
    redis.command("DEL", key)


def overwrite(redis: RedisServer, key: str) -> None:
    redis.command("DEL", key)
    redis.command("XADD", key, "*", "something", "else")


def cut_short(redis: RedisServer, key: str) -> None:
    """Text, where most keys are something else: the type is wrong, or the columns are too short."""
    redis.command("SET", key, "short")


@pytest.mark.parametrize("damage", [throw_away, overwrite, cut_short])
@pytest.mark.parametrize(
    "key", [schema.JOBS, *schema.job_keys("job"), *schema.stage_keys("job", "s")]
)
async def test_any_key_that_is_damaged_is_mended(
    job: Api,
    gauge: InProcess,
    redis: RedisServer,
    key: str,
    damage: Callable[[RedisServer, str], None],
):
    """Whatever is missing or of a wrong type is restored from the ledger, as if all was lost."""
    token = await job.token("s", run=1, ttl_ms=600_000)
    await job.report("s", token, {"0": 50, "1": {"watermark": 12, "holds": {"x": 11}}}, epoch=2)
    await job.report("s", token, {"1": {"watermark": 11, "idle": True}})
    assert await outputs(job) == (10, 10)
    damage(redis, key)
    for path in ("", "/watermarks", "/stages/s/watermark", "/stages/s/ranges"):
        ok(await gauge.client.get(f"{job.root}{path}"))
    assert await outputs(job) == (10, 10)
    answers = [
        await job.post_report("s", token, {"0": 15}),
        await gauge.client.post(f"{job.root}/leases/renew", json={"tokens": [token]}),
        await job.post_commit(2, {"s": {}}, run=1),
        await job.put(FLOW | {"s": {"shards": ["0", "1", "2"]}}, etag="*"),
    ]
    assert [r.status_code for r in answers if r.status_code not in (200, 410)] == []
    token = await job.token("s", run=1)
    await job.report("s", token, {"0": 60, "1": 61, "2": 62})
    assert await outputs(job) == (60, 60)
    ok(await job.reset())
    await eventually(lambda: listed(gauge), lambda names: names == ["job"])
    damage(redis, key)
    ok(await job.delete(), 204)
    damage(redis, key)
    await job.define(FLOW)
    assert await outputs(job) == (None, None)


FIELDS = [
    *(("", field) for field in ("at", "generation", "revision", "layout_version", "stages")),
    *(("", field) for field in ("pipeline", "incarnation", "last_run", "fence", "stamp", "clock")),
    *((":stage:s", field) for field in ("n", "source", "run", "epoch", "recorded", "since")),
    *((":stage:s", field) for field in ("name", "promised", "idle", "final", "leased", "waiting")),
]


@pytest.mark.parametrize(("key", "field"), FIELDS)
async def test_a_field_that_is_missing_is_mended_and_is_no_other_jobs_trouble(
    job: Api, gauge: InProcess, redis: RedisServer, key: str, field: str
):
    other = gauge.api("other")
    await other.define(FLOW)
    token = await other.token("s", ttl_ms=600_000)
    # Something waits, so that there is a field that says so.
    waiting = await job.token("s", run=1, ttl_ms=600_000)
    await job.report("s", waiting, {"0": 50}, epoch=2)
    redis.command("HDEL", f"tidegauge:{{job}}{key}", field)
    for value in (20, 21):
        refused, answer = await asyncio.gather(
            job.post_report("s", waiting, {"0": 15, "1": 15}),
            other.report("s", token, {"0": value, "1": value}),
        )
        assert refused.status_code in (200, 410), refused.text
        assert answer["watermark"]["output_watermark"] == value
    assert (await outputs(job))[0] in (10, 15)
    token = await job.token("s", run=1)
    await job.report("s", token, {"0": 60, "1": 61})
    assert await outputs(job) == (60, 60)


async def listed(gauge: InProcess) -> list[str]:
    return [line["job"] for line in ok(await gauge.client.get("/v1/jobs"))["jobs"]]


@pytest.mark.parametrize("key", ["", ":weights", ":owners"])
async def test_a_key_that_was_thrown_away_costs_an_incarnation(
    job: Api, redis: RedisServer, key: str
):
    token = await job.token("s", run=1, ttl_ms=600_000)
    redis.command("DEL", f"tidegauge:{{job}}:stage:s{key}")
    problem(await job.post_report("s", token, {"0": 20, "1": 20}), 410, "lease-lost")
    await goes_on(job)


async def test_jobs_and_metrics_are_shown_without_redis(
    job: Api, gauge: InProcess, redis: RedisServer
):
    assert "tidegauge_watermark_timestamp_seconds{" in (await gauge.client.get("/metrics")).text
    other = gauge.api("other")
    await other.define(FLOW)
    ok(await other.delete(), 204)
    redis.stop()
    listed = ok(await gauge.client.get("/v1/jobs"))["jobs"]
    assert [line["job"] for line in listed] == ["job"]
    text = (await gauge.client.get("/metrics")).text
    assert "tidegauge_reports_total" in text
    assert 'tidegauge_watermark_timestamp_seconds{job="job"' in text
    # Somebody may have seen this, or may not.
    gauge.stores.execute("UPDATE jobs SET revision = revision + 1")
    text = (await gauge.client.get("/metrics")).text
    assert "tidegauge_reports_total" in text
    assert "tidegauge_watermark_timestamp_seconds{" not in text


async def test_what_was_recorded_but_never_shown_is_shown(
    job: Api, gauge: InProcess, redis: RedisServer
):
    """A replica dies between the ledger's commit and the live store's: another one notices."""
    gauge.stores.execute(
        "UPDATE stages SET output = 15, version = version + 1, revision = revision + 1"
        " WHERE stage = 's'"
    )
    gauge.stores.execute("UPDATE jobs SET revision = revision + 1")
    await eventually(lambda: job.output("s"), lambda output: output == 15)


async def test_a_report_of_a_replica_that_died_is_published_beside_reports_of_another_stage(
    gauge: InProcess, redis: RedisServer
):
    """The other stage changes the job between any two comparisons."""
    api = gauge.api()
    await api.define({"s": {"shards": ["0"]}, "other": {"shards": ["0"]}})
    token = await api.token("other", ttl_ms=600_000)
    dying = RedisLiveStore(redis.url, SystemClock())
    lease = await dying.claim("job", "s", Claim(None, "x", 60_000, Rank()))
    # Accepted, and not published any more.
    await dying.report("job", "s", Report(lease.token, ["0"], [50]))
    await dying.close()
    values = count(1)

    async def report_the_other() -> int | None:
        await api.report("other", token, {"0": next(values)})
        return (await api.watermark("s"))["output_watermark"]

    await eventually(report_the_other, lambda output: output == 50)
