"""The memory of a replica for jobs that are gone: another replica deletes them, and clients name any."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from service.clock import SystemClock
from service.consistency.outage_reads import OutageReads
from service.consistency.publisher import Publisher
from service.consistency.reconciler import Reconciler
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError
from service.frontier.leases import Rank
from service.ledger.port import NewLayout
from service.ledger.sql import SqlLedger
from service.live.port import LiveStore
from service.live.redis.store import RedisLiveStore
from service.model.leases import Claim
from service.model.reports import Report
from service.telemetry.metrics import Metrics
from tests.support.clock import FakeClock
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.anyio

SPEC = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":1}}}'


class Replica:
    """The consistency of one replica, on stores that others use, too."""

    def __init__(self, live: LiveStore, ledger: SqlLedger) -> None:
        self.store, self.ledger = live, ledger
        self.publisher = Publisher(live, ledger, SystemClock(), Metrics())
        self.reconciler = Reconciler(live, ledger, self.publisher, SystemClock(), Metrics())
        self.last_seen = OutageReads(ledger)
        self.live = RecoveringLiveStore(
            live, self.reconciler, self.publisher, self.last_seen, Metrics()
        )

    async def create(self, job: str) -> None:
        stored = await self.ledger.create(NewLayout(job, SPEC, ("s", "k")), 1)
        assert stored is not None
        await self.live.begin(stored.installed)

    async def use(self, job: str) -> None:
        token = (await self.live.claim(job, "s", Claim(None, "x", 60_000, Rank()))).token
        await self.live.report(job, "s", Report(token, ["a", "b"], [6, 7]))
        self.publisher.touch(job, ["s"])
        await self.publisher.round()
        self.last_seen.note((await self.live.snapshot(job))[0], {})

    def names(self) -> set[str]:
        """The jobs of which anything is kept."""
        steps: Any = cast("Any", self.store)._steps
        kept = [
            steps.caches,
            steps.pipelines,
            steps._expiries,
            self.live._changes,
            self.last_seen._views,
            self.last_seen._censuses,
            self.publisher.touches(),
        ]
        return {job for each in kept for job in each}


async def test_nothing_is_kept_of_a_job_that_another_replica_has_deleted(
    redis_server: RedisServer, tmp_path: Path
):
    redis_server.command("FLUSHALL")
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    await ledger.open(exclusive=True)
    stores = [RedisLiveStore(redis_server.url, FakeClock()) for _ in range(2)]
    one, other = (Replica(store, ledger) for store in stores)
    for job in ("gone", "stays"):
        await one.create(job)
        await one.use(job)
    changes = one.live.changes_of("gone")
    generation = await ledger.delete("gone", 2)
    await other.store.remove("gone", generation)
    await one.reconciler.reconcile()
    assert one.names() == {"stays"}
    # The next job of this name is not taken for the one before.
    await one.create("gone")
    await one.use("gone")
    assert one.live.changes_of("gone") > changes
    assert (await one.live.stage("gone", "s"))[1].watermark.output == 6
    for store in stores:
        await store.close()
    await ledger.close()


async def test_nothing_is_kept_of_the_names_and_deleted_jobs_of_an_outage(
    redis_server: RedisServer, tmp_path: Path
):
    redis_server.command("FLUSHALL")
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    await ledger.open(exclusive=True)
    with Proxy(redis_server.port) as proxy:
        url = redis_server.url.replace(str(redis_server.port), str(proxy.port))
        store = RedisLiveStore(url, FakeClock())
        replica = Replica(store, ledger)
        for job in ("gone", "stays"):
            await replica.create(job)
            await replica.use(job)
        proxy.refuse()
        proxy.cut_all()
        for name in ("any", "gone", "stays"):
            with pytest.raises(UnavailableError):
                await replica.live.pipeline(name, "unknown")
        assert "any" not in replica.names()
        for job in ("gone", "stays"):
            replica.publisher.touch(job, ["s"])
        waits = asyncio.ensure_future(replica.publisher.flush("gone"))
        await asyncio.sleep(0)
        await ledger.delete("gone", 2)
        with pytest.raises(UnavailableError):
            await replica.reconciler.reconcile()
        assert set(replica.publisher.touches()) == {"stays"}
        assert set(replica.last_seen._views) == {"stays"}
        with pytest.raises(UnavailableError, match="deleted"):
            await waits
        proxy.flow()
        await store.close()
    await ledger.close()


async def test_a_job_that_is_touched_again_is_not_dropped_as_deleted(tmp_path: Path):
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    publisher = Publisher(cast("Any", None), ledger, FakeClock(), Metrics())
    publisher.touch("j", ["s"])
    before = publisher.touches()
    publisher.touch("j", ["k"])
    publisher.drop_deleted(before)
    assert publisher.touches() == {"j": 2}
    publisher.drop_deleted(publisher.touches())
    assert publisher.touches() == {}
