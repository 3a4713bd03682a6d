"""Two replicas publish one job: what one works out may be out of date when it is recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from service.clock import SystemClock
from service.frontier.timestamps import MIN
from service.ledger.port import JobRecord, NewLayout, Recorded
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.live.port import Claim, Rank, Report
from service.metrics import Metrics
from service.publisher import Publisher
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

SPEC = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":1}}}'


class Interrupted(SqlLedger):
    """A ledger where something else happens just before a record is taken."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.before: Callable[[], Awaitable[object]] | None = None

    async def record(self, records: Sequence[JobRecord], at_ms: int) -> Mapping[str, Recorded]:
        before, self.before = self.before, None
        if before is not None:
            await before()
        return await super().record(records, at_ms)


async def test_that_somebody_is_idle_is_not_recorded_after_the_word_that_ended_it(tmp_path: Path):
    ledger = Interrupted(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    one, other = (Publisher(live, ledger, SystemClock(), Metrics()) for _ in range(2))
    await ledger.open(exclusive=True)
    stored = await ledger.create(NewLayout("j", SPEC, ("s", "k")), 1)
    assert stored is not None
    await live.begin(stored.installed)
    token = (await live.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
    await live.report("j", "s", Report(token, ["a", "b"], [MIN, MIN], [True, True]))

    async def it_comes_back() -> None:
        await live.report("j", "s", Report(token, ["a", "b"], [6, 7]))
        other.touch("j", ["s"])
        assert await other.round()

    ledger.before = it_comes_back
    one.touch("j", ["s"])
    assert not await one.round(), "what was worked out before is not taken"
    assert await one.round()
    published = (await live.stage("j", "s"))[1].watermark
    assert (published.output, published.idle) == (6, False)
    await ledger.close()


async def test_invariant_4_a_stage_that_was_idle_is_looked_at_before_others_go_on(tmp_path: Path):
    """Its lease has run out, and nobody has noticed yet: the other source has a report."""
    clock = FakeClock()
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(clock)
    publisher = Publisher(live, ledger, clock, Metrics())
    await ledger.open(exclusive=True)
    spec = b'{"stages":{"x":{"shards":["0"]},"y":{"shards":["0"]},"k":{"inputs":["x","y"],"ranges":1}}}'
    stored = await ledger.create(NewLayout("j", spec, ("x", "y", "k")), 1)
    assert stored is not None
    await live.begin(stored.installed)
    x = (await live.claim("j", "x", Claim(None, "w", 1_000, Rank()))).token
    y = (await live.claim("j", "y", Claim(None, "w", 60_000, Rank()))).token
    await live.report("j", "x", Report(x, ["0"], [5]))
    await live.report("j", "x", Report(x, ["0"], [MIN], [True]))
    await live.report("j", "y", Report(y, ["0"], [50]))
    publisher.touch("j", ["x", "y"])
    assert await publisher.round()
    assert (await live.stage("j", "k"))[1].watermark.input == 50
    clock.advance(1_000)
    await live.report("j", "y", Report(y, ["0"], [90]))
    publisher.touch("j", ["y"])
    assert await publisher.round()
    assert (await live.stage("j", "x"))[1].watermark.idle is False
    assert (await live.stage("j", "k"))[1].watermark.input == 50
    await ledger.close()
