"""Idleness while the live store's clock is set: a step of the clock is not a time in which shards were
quiet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from service.aggregator.idleness import IdlePolicies
from service.aggregator.throttling import Throttling
from service.consistency.outage_reads import OutageReads
from service.consistency.publisher import Publisher
from service.consistency.reconciler import Reconciler
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.frontier.facts import ReportedFacts
from service.frontier.leases import Rank
from service.ledger.port import NewLayout
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.model.leases import Claim
from service.model.reports import Commit, Report, StageCommit
from service.tasks import Shutdown
from service.telemetry.metrics import Metrics
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

AFTER_MS, SLACK_MS = 1_000, 5_000
HOUR_MS = 3_600_000
EXCLUDE = {"after_ms": AFTER_MS, "then": "exclude"}
FOLLOW = {"after_ms": AFTER_MS, "then": "follow_clock", "slack_ms": SLACK_MS}


class World:
    """One replica, whose live store has a clock of its own, as Redis has."""

    def __init__(self, ledger: SqlLedger) -> None:
        self.clock, self.store_clock = FakeClock(), FakeClock()
        self.live = MemoryLiveStore(self.store_clock)
        self.publisher = Publisher(self.live, ledger, self.clock, Metrics())
        self._ledger = ledger
        self.policies = self.new_policies()
        self._epoch = 0

    def new_policies(self) -> IdlePolicies:
        """The policies as a replica has them that has just started."""
        reconciler = Reconciler(self.live, self._ledger, self.publisher, self.clock, Metrics())
        live = RecoveringLiveStore(
            self.live, reconciler, self.publisher, OutageReads(self._ledger), Metrics()
        )
        throttling = Throttling(live, self.clock, Shutdown())
        return IdlePolicies(self.live, live, throttling, self.publisher, self.clock)

    async def begin(self, policy: Mapping[str, Any], *, leased: bool = True) -> None:
        spec = json.dumps({"stages": {"s": {"shards": ["a", "b"], "idle": policy}}}).encode()
        stored = await self._ledger.create(NewLayout("j", spec, ("s",)), 1)
        assert stored is not None
        await self.live.begin(stored.installed)
        token = (await self.live.claim("j", "s", Claim(None, "x", 600_000, Rank()))).token
        facts = [ReportedFacts(records=1)] * 2
        await self.live.report("j", "s", Report(token, ["a", "b"], [5, 5], facts=facts))
        if not leased:
            await self.live.release("j", [token])
        await self.pass_time(0)

    async def pass_time(self, ms: int) -> None:
        """Let time pass on all clocks, with a decision at least each 100 ms."""
        while True:
            step_ms = min(ms, 100)
            self.clock.advance(step_ms)
            self.store_clock.advance(step_ms)
            ms -= step_ms
            await self.policies.apply()
            if not ms:
                return

    async def commit(self) -> None:
        self._epoch += 1
        await self.live.commit("j", Commit(0, self._epoch, {"s": StageCommit()}))

    async def idle(self) -> int:
        return (await self.live.stage("j", "s"))[2].idle

    async def promise(self) -> int:
        _, observed = await self.live.observe("j", ["s"])
        return int(observed["s"].promises.max())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    await ledger.open(exclusive=True)
    made = World(ledger)
    publishing = asyncio.create_task(made.publisher.run())
    yield made
    made.publisher.stop()
    await publishing
    await ledger.close()


async def test_invariant_4_a_clock_that_jumps_ahead_makes_no_shard_idle(world: World) -> None:
    await world.begin(EXCLUDE)
    await world.pass_time(500)
    world.store_clock.advance(60_000)
    await world.pass_time(0)
    assert await world.idle() == 0
    # Only the time after the jump counts.
    await world.pass_time(AFTER_MS - 1)
    assert await world.idle() == 0
    await world.pass_time(1)
    assert await world.idle() == 2


async def test_invariant_4_a_promise_by_the_clock_does_not_follow_a_jump(world: World) -> None:
    await world.begin(FOLLOW)
    await world.pass_time(AFTER_MS)
    assert await world.promise() == world.clock.wall_ms() - SLACK_MS
    world.store_clock.advance(60_000)
    await world.pass_time(2 * AFTER_MS)
    assert await world.promise() == world.clock.wall_ms() - SLACK_MS


async def test_a_promise_by_the_clock_follows_neither_of_two_clocks_that_jump(world: World) -> None:
    """Both are of one machine: of its clocks, only the steady one goes on evenly."""
    await world.begin(FOLLOW)
    await world.pass_time(AFTER_MS)
    begin_ms = world.clock.wall_ms()
    world.store_clock.advance(60_000)
    world.clock.set_ahead(60_000)
    await world.pass_time(2 * AFTER_MS)
    assert await world.promise() == begin_ms + 2 * AFTER_MS - SLACK_MS


@pytest.mark.parametrize("is_new", [False, True])
async def test_shards_become_idle_after_the_clock_was_set_back(world: World, is_new: bool) -> None:
    """It must not take as long as the clock went back, also on a replica that starts then."""
    await world.begin(EXCLUDE)
    world.store_clock.advance(-HOUR_MS)
    if is_new:
        world.policies = world.new_policies()
    await world.pass_time(0)
    await world.pass_time(AFTER_MS - 1)
    assert await world.idle() == 0
    await world.pass_time(1)
    assert await world.idle() == 2


async def test_shards_that_are_idle_stay_so_when_the_clock_is_set(world: World) -> None:
    await world.begin(EXCLUDE)
    await world.pass_time(AFTER_MS)
    assert await world.idle() == 2
    for step_ms in (-HOUR_MS, HOUR_MS):
        world.store_clock.advance(step_ms)
        await world.pass_time(0)
        assert await world.idle() == 2


async def test_shards_stay_idle_when_the_clock_reaches_the_moments_before_a_set_back_again(
    world: World,
) -> None:
    await world.begin(EXCLUDE)
    world.store_clock.advance(-2 * AFTER_MS)
    await world.pass_time(0)
    await world.pass_time(AFTER_MS)
    assert await world.idle() == 2
    for _ in range(3 * AFTER_MS // 100):
        await world.pass_time(100)
        assert await world.idle() == 2


@pytest.mark.parametrize("is_new", [False, True])
async def test_invariant_4_commits_of_before_a_set_back_prove_nothing_of_the_time_after(
    world: World, is_new: bool
) -> None:
    """The run has died. The clock comes to the moments of its last commits once more, also on a replica
    that starts after the set-back."""
    await world.begin(EXCLUDE, leased=False)
    for _ in range(15):
        await world.commit()
        await world.pass_time(100)
    assert await world.idle() == 2
    await world.pass_time(AFTER_MS)
    assert await world.idle() == 0
    world.store_clock.advance(-4 * AFTER_MS)
    if is_new:
        world.policies = world.new_policies()
    for _ in range(6 * AFTER_MS // 100):
        await world.pass_time(100)
        assert await world.idle() == 0


async def test_commits_of_after_a_set_back_prove_that_a_shard_is_quiet(world: World) -> None:
    await world.begin(EXCLUDE, leased=False)
    await world.commit()
    world.store_clock.advance(-HOUR_MS)
    await world.pass_time(0)
    for _ in range(AFTER_MS // 100 + 1):
        await world.commit()
        await world.pass_time(100)
    assert await world.idle() == 2
