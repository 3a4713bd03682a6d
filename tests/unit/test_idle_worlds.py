"""Idleness by policy in simulated worlds: it never makes an on-time record late.

A record of event time e can be read from its shard at most `DELAY_MS` after e. Shards have busy and
quiet times; workers read what there is and report, or only renew their leases; they die, are
replaced, and are paused with a backlog, or in a batch, under a lease that proves nothing. Throttling
asks for pauses, too; then they know of no backlog, only keep their leases, and go on a moment after
they no longer have to. Whatever is read must not be behind the watermark that was published before.

There is one window that no policy can close, and that the contract names: a lease proves that its
worker lives until it runs out. So what arrives on a quiet shard between the death of its worker and
the end of the lease may not be waited for; nor what came while it paused, if it died before it went on.
Those records are counted, not forgotten: they are few.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from service.aggregator.idleness import decide, in_turns
from service.errors import LeaseConflictError
from service.frontier.facts import ReportedFacts
from service.frontier.graph import Pipeline, Stage, StageWatermark
from service.frontier.idleness import next_sample
from service.frontier.leases import Rank
from service.frontier.policies import IdlePolicy, StagePolicy
from service.frontier.ranges import ShardLayout
from service.live.memory import MemoryLiveStore
from service.model.jobs import InstalledJob, InstalledStage, StageProgress, StageView
from service.model.leases import Claim
from service.model.reports import Report
from tests.support.clock import FakeClock

WORLDS = 1_000
STEPS, STEP_MS = 60, 100
DELAY_MS = 300
POLICY = IdlePolicy(after_ms=500)
TTL_MS = 1_000


@dataclass
class Shard:
    name: str
    random: random.Random
    token: str | None = None
    is_busy: bool = True
    is_paused: bool = False
    is_in_batch: bool = False
    """True if its worker pauses under an unwatched lease, and reports nothing meanwhile."""
    is_throttled: bool = False
    has_backlog: bool = False
    """True if its last report had a backlog."""
    heard: bool = False
    heeds: bool = False
    """True if its worker pauses: it acts a step after the request."""
    dead_until_ms: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """For each death of a worker: the instant since which records came that the worker had neither read
    nor reported as backlog, and the latest end of its lease."""
    unread: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(arrival, event time) of each record that is not read yet."""
    watermark: int = 0


@dataclass
class World:
    seed: int
    late: int = 0
    idle_steps: int = 0
    read: int = 0
    in_the_window: int = 0

    async def run(self) -> None:
        rng = random.Random(self.seed)
        clock = FakeClock(1_000_000)
        store = MemoryLiveStore(clock, tokens=lambda: str(rng.random()))
        shards = [Shard(str(k), random.Random(rng.random())) for k in range(rng.randint(2, 4))]
        stage = Stage((), ShardLayout.of(s.name for s in shards), StagePolicy(idle=POLICY))
        start = InstalledStage(StageView(StageWatermark(), 0, 0, 0, 0), StageProgress(), 1)
        flow = Pipeline({"s": stage})
        await store.begin(InstalledJob("j", flow, 1, 1, 1, 0, 0, {"s": start}))
        output, version, samples = StageWatermark(), 0, None
        for _ in range(STEPS):
            clock.advance(STEP_MS)
            now = clock.now_ms
            for shard in shards:
                self.arrive(shard, now)
                await self.work(store, shard, now, output.output)
            await store.expire()
            instant, observed = await store.observe("j", ["s"])
            idle = observed["s"].idle.tolist()
            asked = [s.name for s, i in zip(shards, idle, strict=True) if s.is_throttled and not i]
            for shard in shards:
                shard.heeds, shard.heard = shard.heard, shard.name in asked
            samples = next_sample(samples, instant.lease_ms, asked, after_ms=POLICY.after_ms)
            self.idle_steps += int(observed["s"].idle.sum())
            for turn in [*in_turns(decide(POLICY, observed["s"], instant, samples)), ()]:
                _, agreements = await store.agreements("j", frozenset("s"))
                reached, version = agreements["s"], version + 1
                output = output.advance(output.input, reached.watermark, idle=reached.idle)
                view = StageView(output, version, version, now, now)
                await store.publish("j", 1, version, {"s": view}, {})
                await store.settle("j", "s", observed["s"].layout, turn)

    def arrive(self, shard: Shard, now: int) -> None:
        if shard.random.random() < 0.08:
            shard.is_busy = not shard.is_busy
        if shard.is_busy and shard.random.random() < 0.7:
            shard.unread.append((now, now - shard.random.randint(0, DELAY_MS)))

    async def work(self, store: MemoryLiveStore, shard: Shard, now: int, published: int) -> None:
        chance = shard.random.random()
        if now < shard.dead_until_ms:
            return
        if chance < 0.01:
            shard.dead_until_ms = now + shard.random.choice([400, 3_000])
            shard.token = None
            unreported = shard.unread and not shard.has_backlog
            shard.windows.append((shard.unread[0][0] if unreported else now, now + TTL_MS))
            return
        if chance < 0.04:
            shard.is_paused = not shard.is_paused
            in_batch = shard.is_paused and shard.random.random() < 0.5
            if in_batch != shard.is_in_batch:
                shard.is_in_batch, shard.token = in_batch, None
        if not await self.claim(store, shard, now):
            return
        if shard.random.random() < 0.05:
            shard.is_throttled = not shard.is_throttled
        if shard.heeds or shard.is_in_batch:
            await store.renew("j", [shard.token or ""])
        elif shard.is_paused:
            facts = ReportedFacts(records=0, backlog=len(shard.unread))
            await self.report(store, shard, facts)
        else:
            await self.read_all(store, shard, now, published)

    async def claim(self, store: MemoryLiveStore, shard: Shard, now: int) -> bool:
        if shard.token is None:
            watched = not shard.is_in_batch
            claim = Claim([shard.name], f"w{now}", TTL_MS, Rank(epoch=now), watched)
            try:
                shard.token = (await store.claim("j", "s", claim)).token
            except LeaseConflictError:
                return False
        return True

    async def read_all(
        self, store: MemoryLiveStore, shard: Shard, now: int, published: int
    ) -> None:
        fresh, shard.unread = shard.unread, []
        for arrival, event_time in fresh:
            self.read += 1
            if event_time < published:
                if any(since <= arrival <= end for since, end in shard.windows):
                    self.in_the_window += 1
                else:
                    self.late += 1
        if fresh:
            # Whatever arrives from now on is at most so late.
            shard.watermark = max(shard.watermark, now - DELAY_MS)
        elif shard.random.random() < 0.5:
            await store.renew("j", [shard.token or ""])
            return
        await self.report(store, shard, ReportedFacts(records=len(fresh)))

    async def report(self, store: MemoryLiveStore, shard: Shard, facts: ReportedFacts) -> None:
        assert shard.token is not None
        shard.has_backlog = facts.backlog > 0
        report = Report(shard.token, [shard.name], [shard.watermark], facts=[facts])
        await store.report("j", "s", report)


def test_no_on_time_record_is_late_in_a_thousand_worlds() -> None:
    worlds = [World(seed) for seed in range(WORLDS)]
    for world in worlds:
        asyncio.run(world.run())
    assert [world.seed for world in worlds if world.late] == []
    read = sum(world.read for world in worlds)
    assert sum(world.idle_steps for world in worlds) > WORLDS, (
        "shards are idle often enough to tell"
    )
    assert sum(world.in_the_window for world in worlds) < read / 100
