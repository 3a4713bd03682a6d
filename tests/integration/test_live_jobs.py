"""A job's live state may be lost between any two steps of a use case: it comes back, and the use case
goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from service.aggregator import Aggregator, Limits, Precondition, Retention
from service.clock import SystemClock
from service.errors import UnavailableError
from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.frontier.leases import Rank
from service.frontier.timestamps import MIN
from service.ledger.port import Ledger
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.live.port import LiveStore, StateLostError
from service.model.jobs import Census, InstalledJob, JobView, StageView
from service.model.leases import Claim
from service.model.pipeline_spec import decode_spec
from service.model.reports import Report
from service.model.runs import NewRun
from service.telemetry.metrics import Metrics
from tests.support.binaries import WAIT_S

pytestmark = pytest.mark.anyio

SPEC = decode_spec(b'{"stages":{"s":{"shards":["a","b"]}}}')


class Forgetful(MemoryLiveStore):
    """Loses all it has after each release."""

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        released = await super().release(job, tokens)
        await self.remove(job, 1)
        return released


class LostTwice(MemoryLiveStore):
    """Loses a job's state once, and once more while it is being brought up to date."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.losses = 0

    async def stage(self, job: str, stage: str) -> tuple[JobView, StageView, Census]:
        if self.losses == 0:
            self.losses += 1
            raise StateLostError(job)
        return await super().stage(job, stage)

    async def install(self, job: InstalledJob) -> None:
        if self.losses == 1:
            self.losses += 1
            raise StateLostError(job.name)
        await super().install(job)


class Faulty(MemoryLiveStore):
    """Fails once, by an error of its own, when a job is read to be published; then it is away once."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.is_about_to_fail = False
        self._is_away = False

    async def pipeline(self, job: str, stage: str | None = None) -> Pipeline:
        if self._is_away:
            self._is_away = False
            raise UnavailableError("away")
        return await super().pipeline(job, stage)

    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        if self.is_about_to_fail:
            self.is_about_to_fail = False
            self._is_away = True
            raise RuntimeError("a fault of the store")
        return await super().agreements(job, touched)


class Away(MemoryLiveStore):
    """Answers for single jobs alone, while it is away: so a test decides which ones have been read."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.is_away = False

    async def jobs(self) -> Sequence[JobView]:
        if self.is_away:
            raise UnavailableError("away")
        return await super().jobs()


class Slow(MemoryLiveStore):
    """Installs new jobs once it may."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.begins = asyncio.Event()
        self.may_begin = asyncio.Event()

    async def begin(self, job: InstalledJob) -> None:
        self.begins.set()
        await self.may_begin.wait()
        await super().begin(job)


def made(live: LiveStore, ledger: Ledger) -> Aggregator:
    return Aggregator(
        live,
        ledger,
        clock=SystemClock(),
        metrics=Metrics(),
        checkpoint_interval_ms=60_000,
        retention=Retention(fine_ms=1, keep_ms=1),
        limits=Limits(jobs=9, ranges_per_job=9, ranges=9),
    )


@pytest.fixture
async def aggregator(tmp_path: Path) -> AsyncIterator[Aggregator]:
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    gauge = made(Forgetful(SystemClock()), ledger)
    await gauge.open()
    yield gauge
    await gauge.close()


async def test_a_state_that_is_lost_after_a_release_is_restored(aggregator: Aggregator) -> None:
    await aggregator.definitions.define("j", SPEC, Precondition())
    grant = await aggregator.claim("j", "s", Claim(None, "x", 60_000, Rank()))
    assert await aggregator.release("j", [grant.token]) == 1
    again = await aggregator.claim("j", "s", Claim(None, "y", 60_000, Rank()))
    reported, _ = await aggregator.report("j", "s", Report(again.token, ["a", "b"], [5, 7]))
    assert reported.accepted == 2
    assert (await aggregator.reader.stage("j", "s")).view.watermark.output == 5


async def test_a_lost_job_is_in_every_list(tmp_path: Path) -> None:
    """A page without the job would read as a job that nobody has declared."""
    live, ledger = MemoryLiveStore(SystemClock()), SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/db")
    gauge = made(live, ledger)
    await gauge.open()
    await gauge.definitions.define("j", SPEC, Precondition())
    await live.remove("j", 1)
    assert [each.name for each in await gauge.definitions.jobs()] == ["j"]
    await live.remove("j", 1)
    assert [each.name for each in await gauge.reader.jobs()] == ["j"]
    await gauge.close()


async def test_an_advance_that_an_unexpected_error_held_up_is_published_by_the_next_comparison(
    tmp_path: Path,
) -> None:
    """No report comes after it."""
    live, ledger = Faulty(), SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/db")
    gauge = made(live, ledger)
    await gauge.open()
    await gauge.definitions.define("j", SPEC, Precondition())
    token = (await gauge.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
    live.is_about_to_fail = True
    with pytest.raises(RuntimeError, match="a fault of the store"):
        await gauge.report("j", "s", Report(token, ["a", "b"], [5, 7]))
    state = await gauge.reader.wait("j", "s", lambda seen: seen.view.watermark.output == 5, WAIT_S)
    assert state.view.watermark.output == 5
    await gauge.close()


async def test_a_list_without_the_live_store_has_every_job_or_fails(tmp_path: Path) -> None:
    """Metrics have the jobs that can be read: a series without a sample reads as unknown."""
    live, ledger = Away(), SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/db")
    gauge = made(live, ledger)
    await gauge.open()
    for job in ("i", "j"):
        await gauge.definitions.define(job, SPEC, Precondition())
    await gauge.reader.job("i")
    live.is_away = True
    with pytest.raises(UnavailableError):
        await gauge.overviews.read(lambda _: True, "", 9)
    assert [each.name for each in await gauge.reader.readable_jobs()] == ["i"]
    assert len(await gauge.definitions.jobs()) == 2
    await gauge.reader.job("j")
    assert (await gauge.overviews.read(lambda _: True, "", 9)).total == 2
    await gauge.close()


FINDERS: Sequence[Callable[[Aggregator], Awaitable[object]]] = (
    lambda gauge: gauge.reader.jobs(),
    lambda gauge: gauge.definitions.jobs(),
    lambda gauge: gauge.reader.stage("j", "s"),
    lambda gauge: gauge._reconciler.reconcile(),  # pyright: ignore[reportPrivateUsage]
)


@pytest.mark.parametrize("begin", FINDERS, ids=["list", "names", "request", "comparison"])
async def test_a_lost_job_is_restored_once_by_all_who_find_it(
    begin: Callable[[Aggregator], Awaitable[object]], tmp_path: Path
) -> None:
    """A second incarnation would void the leases that were granted under the first."""
    live, ledger = Slow(), SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    gauge = made(live, ledger)
    await gauge.open()
    live.may_begin.set()
    await gauge.definitions.define("j", SPEC, Precondition())
    live.may_begin.clear()
    live.begins.clear()
    await live.remove("j", 1)
    first = asyncio.ensure_future(begin(gauge))
    await live.begins.wait()
    others = [asyncio.ensure_future(each(gauge)) for each in FINDERS]
    await asyncio.wait(others, timeout=0.1)
    live.may_begin.set()
    await asyncio.gather(first, *others)
    [head] = await ledger.heads()
    assert head.incarnation == 2
    await gauge.close()


async def test_a_state_that_is_lost_again_while_it_is_restored_is_restored(tmp_path: Path) -> None:
    """As when another replica begins the next incarnation between the two."""
    live, ledger = LostTwice(), SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    gauge = made(live, ledger)
    await gauge.open()
    await gauge.definitions.define("j", SPEC, Precondition())
    # The live store is behind the ledger now, and so has something to be brought up to date with.
    await ledger.open_run("j", NewRun(["s"], "driver-1"), 1)
    assert (await gauge.reader.stage("j", "s")).view.watermark.output == MIN
    assert live.losses == 2
    await gauge.close()


async def test_a_job_that_is_being_created_is_not_taken_for_lost(tmp_path: Path) -> None:
    """Between its two writes, a comparison or a request would begin its next incarnation, and void what
    is granted from the end of the creation on.
    """
    live, ledger = Slow(), SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    gauge = made(live, ledger)
    await gauge.open()
    creation = asyncio.ensure_future(gauge.definitions.define("j", SPEC, Precondition()))
    await live.begins.wait()
    comparison = asyncio.ensure_future(gauge._reconciler.reconcile())  # pyright: ignore[reportPrivateUsage]
    request = asyncio.ensure_future(gauge.claim("j", "s", Claim(None, "x", 60_000, Rank())))
    await asyncio.wait([comparison, request], timeout=0.1)
    live.may_begin.set()
    await asyncio.gather(creation, comparison)
    grant = await request
    [head] = await ledger.heads()
    position = await live.head("j")
    assert (head.incarnation, position and position.incarnation) == (1, 1)
    assert [each.token for each in (await gauge.renew("j", [grant.token]))[0]] == [grant.token]
    await gauge.close()
