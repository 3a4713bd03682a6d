"""Reports of many ranges, which a replica joins itself where it can: Redis has what memory has."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import ProblemError
from service.frontier.graph import Pipeline, Stage
from service.frontier.leases import Rank
from service.frontier.ranges import KeyLayout, ShardLayout
from service.frontier.timestamps import MAX, MIN
from service.live.memory import MemoryLiveStore
from service.live.port import LiveStore
from service.live.redis import spans
from service.live.redis.store import RedisLiveStore
from service.model.leases import Claim
from service.model.reports import Commit, Report, Reported, StageCommit
from tests.conformance.test_live import installed
from tests.support.clock import FakeClock
from tests.support.redis_server import RedisServer

COUNT = 300
NAMES = {"s": tuple(f"{n:03}" for n in range(COUNT)), "k": tuple(KeyLayout.tile(COUNT).names)}
FLOW = Pipeline(
    {
        "s": Stage((), ShardLayout.of(NAMES["s"])),
        "k": Stage(("s",), KeyLayout.tile(COUNT)),
    }
)
LEASES = ((0, 10), (10, 150), (150, 290), (290, COUNT))
"""Ranges that are leased, and have reported, before a script begins."""
PARTS = ((0, COUNT), (10, 150), (150, 290), (64, 192), (0, 64), (290, COUNT))
TIMES = (MIN, *range(1, 9), MAX)
Step = tuple[Any, ...]

times = st.one_of(st.sampled_from(TIMES), st.lists(st.sampled_from(TIMES), min_size=1, max_size=5))
claims = st.tuples(st.just("claim"), st.sampled_from(PARTS), st.integers(0, 2))
reports = st.tuples(
    st.just("report"), st.integers(0, 5), times, st.sampled_from(["named", "packed", "turned"]),
    st.sampled_from([False, False, False, True]), st.sampled_from([None, None, None, 1, 2]),
)  # fmt: skip
advances = st.tuples(
    st.just("advance"), st.integers(0, 5), st.sampled_from([0, 1, 1, 1, 2, 2, MAX])
)
commits = st.tuples(st.just("commit"), st.integers(1, 2))
several = st.one_of(
    st.lists(advances, min_size=1, max_size=6),
    st.lists(advances, min_size=1, max_size=6),
    *(each.map(lambda one: [one]) for each in (claims, reports, commits)),
)
"""Steps that one replica takes."""
scripts = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1]), several), min_size=1, max_size=12)


class Side:
    """A job on one kind of store, as two processes see it."""

    def __init__(self, *stores: LiveStore) -> None:
        self.stores = stores
        self.grants: list[tuple[str, tuple[str, ...]]] = []
        self.time = 10

    async def begin(self) -> None:
        await self.stores[0].begin(installed(FLOW))

    async def go(self, which: int, stage: str, step: Step) -> object:
        """Take one step, and return what is known of it."""
        store = self.stores[which % len(self.stores)]
        names = NAMES[stage]
        try:
            match step:
                case ("claim", (first, last), attempt):
                    ranges = names[first:last]
                    holder = f"{first}-{attempt}"
                    claim = Claim(ranges, holder, 60_000, Rank(attempt=attempt))
                    grant = await store.claim("j", stage, claim)
                    self.grants.append((grant.token, tuple(grant.granted)))
                    return grant.granted
                case ("report", k, said, form, idle, epoch):
                    return await self._report(store, stage, (k, said, form, idle, epoch))
                case ("advance", k, by):
                    # As most reports are: some ranges are further than before, and none is behind.
                    self.time += by % MAX
                    said = [self.time, min(self.time + by, MAX), self.time]
                    return await self._report(store, stage, (k, said, "packed", False, None))
                case ("commit", epoch):
                    capped = StageCommit(5 if stage == "k" else None)
                    committed = await store.commit("j", Commit(0, epoch, {stage: capped}))
                    return committed.applied
                case _:
                    raise AssertionError(step)
        except ProblemError as error:
            return type(error)

    async def _report(self, store: LiveStore, stage: str, words: tuple[Any, ...]) -> object:
        k, said, form, idle, epoch = words
        token, names = self.grants[k % len(self.grants)]
        promises = np.resize(np.array(said, dtype=np.int64), len(names))
        flags = [bool(n % 3 == 0) for n in range(len(names))] if idle else None
        turned = form == "turned"
        report = Report(
            token,
            None if form == "packed" else list(names[::-1] if turned else names),
            promises[::-1].copy() if turned else promises,
            idle=flags,
            epoch=epoch,
            observed_input=None if stage == "s" or epoch else MIN,
            capped_at_commit=stage == "k" and epoch is not None,
        )
        done: Reported = await store.report("j", stage, report)
        return done.accepted, sorted(done.behind), done.rejected, done.advances

    async def state(self, stage: str) -> object:
        """Return all that there is to know of the stage, but for times and tokens."""
        store = self.stores[0]
        _, _, census = await store.stage("j", stage)
        _, agreements = await store.agreements("j", frozenset([stage]))
        views = await store.ranges("j", stage, limit=COUNT, order="range")
        # A final range is never shown as idle.
        told = [
            (v.promise, v.idle and v.promise != MAX, v.holder, v.raised_at_ms is None)
            for v in views
        ]
        promises = (await store.columns("j", stage))["promises"].tolist()
        return census, agreements, told, promises

    async def save(self) -> object:
        """Save what has changed; return what that is, without its moments."""
        chunks = await self.stores[0].unsaved()
        await self.stores[0].note_saved(chunks)
        return sorted((chunk.stage, chunk.chunk, chunk.columns["promises"]) for chunk in chunks)


@pytest.fixture
def sent_joined(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Number of reports that were joined by their replica, and that were left to the script."""
    counted: Counter[bool] = Counter()
    join = spans._joined

    def counting(*args: Any) -> Any:
        found = join(*args)
        counted[found is not None] += 1
        return found

    monkeypatch.setattr(spans, "_joined", counting)
    return counted


@pytest.mark.parametrize("stage", ["s", "k"])
def test_a_report_that_a_replica_has_joined_leaves_what_the_rules_say(
    stage: str, redis_server: RedisServer, sent_joined: Counter[bool]
) -> None:
    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    @given(scripts)
    def check(script: list[tuple[int, list[Step]]]) -> None:
        redis_server.command("FLUSHALL")

        async def scenario() -> None:
            clock = FakeClock()
            redis = [RedisLiveStore(redis_server.url, clock) for _ in range(2)]
            memory = MemoryLiveStore(clock)
            here, there = Side(memory), Side(*redis)
            await here.begin()
            await there.begin()
            try:
                begin = [("claim", part, 0) for part in LEASES]
                begin += [("advance", k, 1) for k in range(len(LEASES))]
                for which, several in [(0, begin), *script]:
                    for step in several:
                        done = await here.go(0, stage, step)
                        assert await there.go(which, stage, step) == done, step
                    assert await there.save() == await here.save()
                assert await there.state(stage) == await here.state(stage)
            finally:
                for store in redis:
                    await store.close()

        asyncio.run(scenario())

    check()
    assert sent_joined[True] > 20, "the test is about these"
    assert sent_joined[False] > 20


def test_what_a_replica_expects_is_compared_with_what_there_is(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas report under one lease: neither knows what the other's report has left."""
    redis_server.command("FLUSHALL")
    joined: list[bool] = []
    join = spans._joined

    def wrong(*args: Any) -> Any:
        found = join(*args)
        joined.append(found is not None)
        for _, _, _, minima, _ in found[1] if found else ():
            minima[:] = [1e15] * len(minima)
        return found

    monkeypatch.setattr(spans, "_joined", wrong)

    async def scenario() -> None:
        one, other = (RedisLiveStore(redis_server.url, FakeClock()) for _ in range(2))
        await one.begin(installed(FLOW))
        token = (await one.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token

        async def say(store: LiveStore, time: int) -> int:
            promises = np.full(COUNT, time, dtype=np.int64)
            await store.report("j", "s", Report(token, None, promises))
            _, agreements = await store.agreements("j", frozenset(["s"]))
            return agreements["s"].watermark

        assert await say(one, 5) == 5
        assert await say(other, 7) == 7
        # It expects 5: so results that it has derived from that do not count.
        assert await say(one, 9) == 9
        # Now it is right about what there is, and is believed.
        assert await say(one, 10) == 10**15
        assert joined == [False, False, True, True]
        for store in (one, other):
            await store.close()

    asyncio.run(scenario())
