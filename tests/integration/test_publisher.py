"""Two replicas publish one job: what one works out may be out of date when it is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from service.clock import SystemClock
from service.consistency import publisher
from service.consistency.publisher import Publisher
from service.consistency.reconciler import Reconciler
from service.errors import UnavailableError
from service.frontier.agreement import Agreement
from service.frontier.graph import StageWatermark
from service.frontier.leases import Rank
from service.frontier.timestamps import MIN
from service.ledger.port import JobRecord, NewLayout, Recorded, RejectedValueError
from service.ledger.sql import SqlLedger
from service.live.memory import MemoryLiveStore
from service.model.history import RowCounts
from service.model.jobs import JobView, StoredJob
from service.model.leases import Claim
from service.model.reports import Report
from service.telemetry.metrics import Metrics
from tests.support.binaries import WAIT_S
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

SPEC = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":1}}}'


class Interrupted(SqlLedger):
    """A ledger where something else happens just before a record is taken."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.before: Callable[[], Awaitable[object]] | None = None
        self.records = 0

    async def record(self, records: Sequence[JobRecord], at_ms: int) -> Mapping[str, Recorded]:
        self.records += 1
        before, self.before = self.before, None
        if before is not None:
            await before()
        return await super().record(records, at_ms)


async def define(
    ledger: SqlLedger,
    live: MemoryLiveStore,
    spec: bytes = SPEC,
    stages: Sequence[str] = ("s", "k"),
) -> None:
    """Open the ledger, and let there be a job `j` in both stores."""
    await ledger.open(exclusive=True)
    stored = await ledger.create(NewLayout("j", spec, stages), 1)
    assert stored is not None
    await live.begin(stored.installed)


async def test_that_somebody_is_idle_is_not_recorded_after_the_word_that_ended_it(tmp_path: Path):
    ledger = Interrupted(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    one, other = (Publisher(live, ledger, SystemClock(), Metrics()) for _ in range(2))
    await define(ledger, live)
    token = (await live.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
    await live.report("j", "s", Report(token, ["a", "b"], [MIN, MIN], [True, True]))

    async def it_comes_back() -> None:
        await live.report("j", "s", Report(token, ["a", "b"], [6, 7]))
        other.touch("j", ["s"])
        assert await other.round()

    ledger.before = it_comes_back
    one.touch("j", ["s"])
    assert await one.round()
    # Its own was not taken; and when it looked again there was nothing left to record.
    assert ledger.records == 2
    published = (await live.stage("j", "s"))[1].watermark
    assert (published.output, published.idle) == (6, False)
    await ledger.close()


@pytest.mark.parametrize("epochs", [{}, {"s": 1}])
async def test_invariant_4_nothing_passes_a_retired_range_that_reports_again(
    tmp_path: Path, epochs: Mapping[str, int]
):
    """The report is answered once its replica has recorded it: from then on the range holds."""
    ledger = Interrupted(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    one, other = (Publisher(live, ledger, SystemClock(), Metrics()) for _ in range(2))
    await define(ledger, live)
    token = (await live.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
    await live.report("j", "s", Report(token, ["a", "b"], [6, 90]))
    await live.retire("j", "s", "a")

    async def it_reports() -> None:
        reported = await live.report("j", "s", Report(token, ["a"], [7]))
        assert reported.ends_retirement
        other.touch("j", ["s"], saves=True)
        assert await other.round()

    ledger.before = it_reports
    one.touch_epochs("j", (1, 1), epochs)
    one.touch("j", ["s"])
    assert await one.round()
    assert (await live.stage("j", "s"))[1].watermark.output == 7
    await ledger.close()


async def test_what_another_recorded_and_never_showed_is_shown_by_the_next(tmp_path: Path):
    ledger = Interrupted(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    one = Publisher(live, ledger, SystemClock(), Metrics())
    await define(ledger, live)
    token = (await live.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
    await live.report("j", "s", Report(token, ["a", "b"], [6, 7]))

    async def another_dies() -> None:
        advance = {"s": StageWatermark(MIN, 6)}
        await SqlLedger.record(ledger, [JobRecord("j", 1, 1, 1, 0, advance, {})], 1)

    ledger.before = another_dies
    one.touch("j", ["s"])
    assert await one.round()
    shown = await live.job("j")
    assert shown.revision == (await ledger.head("j")).revision == 2
    views = {name: stage.view for name, stage in (await ledger.get("j")).installed.stages.items()}
    assert views == shown.stages
    assert views["s"].watermark.output == 6
    assert views["k"].watermark.input == 6
    await ledger.close()


async def test_two_replicas_that_advance_two_inputs_at_once_advance_what_is_behind_both(
    tmp_path: Path,
):
    """Each has worked out what is behind both while the other's input still stood."""
    ledger = Interrupted(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    one, other = (Publisher(live, ledger, SystemClock(), Metrics()) for _ in range(2))
    spec = b'{"stages":{"x":{"shards":["0"]},"y":{"shards":["0"]},"k":{"inputs":["x","y"],"ranges":1}}}'
    await define(ledger, live, spec, ("x", "y", "k"))
    state = (1, 1)

    async def report(stage: str, promise: int) -> None:
        token = (await live.claim("j", stage, Claim(None, "w", 60_000, Rank()))).token
        await live.report("j", stage, Report(token, ["0"], [promise]))

    async def the_other_commits() -> None:
        await report("y", 9)
        other.touch_epochs("j", state, {"y": 1})
        assert await other.round()

    await report("x", 5)
    ledger.before = the_other_commits
    one.touch_epochs("j", state, {"x": 1})
    waiting = asyncio.create_task(one.flush("j"))
    await asyncio.sleep(0)
    assert await one.round()
    assert (await live.stage("j", "k"))[1].watermark.input == 5
    shown = await waiting
    assert shown is not None
    assert shown.stages["k"].watermark.input == 5
    # The other's record, its own, and what is behind both: the epoch is not recorded twice.
    assert ledger.records == 3
    assert (await ledger.get("j")).installed.stages["x"].progress.epoch == 1
    await ledger.close()


async def test_invariant_4_a_stage_that_was_idle_is_looked_at_before_others_go_on(tmp_path: Path):
    """Its lease has run out, and nobody has noticed yet: the other source has a report."""
    clock = FakeClock()
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(clock)
    publisher = Publisher(live, ledger, clock, Metrics())
    spec = b'{"stages":{"x":{"shards":["0"]},"y":{"shards":["0"]},"k":{"inputs":["x","y"],"ranges":1}}}'
    await define(ledger, live, spec, ("x", "y", "k"))
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


class Seen(MemoryLiveStore):
    """Notes the jobs that are read to be published."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.jobs_read: list[str] = []

    async def agreements(
        self, job: str, touched: frozenset[str]
    ) -> tuple[JobView, Mapping[str, Agreement]]:
        self.jobs_read.append(job)
        return await super().agreements(job, touched)


async def test_a_job_for_which_a_request_waits_is_in_the_next_round_of_many(tmp_path: Path):
    """As after a loss, when all jobs are touched."""
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = Seen()
    one = Publisher(live, ledger, SystemClock(), Metrics())
    await define(ledger, live)
    names = [f"j{number:03}" for number in range(220)]
    for name in names:
        stored = await ledger.create(NewLayout(name, SPEC, ("s", "k")), 1)
        assert stored is not None
        await live.begin(stored.installed)
        one.touch(name, ["s"])
    one.touch("j", ["s"])
    waiting = asyncio.create_task(one.flush("j"))
    await asyncio.sleep(0)
    assert await one.round()
    assert await waiting is not None
    assert 0 < len(live.jobs_read) <= 101
    await one.publish_all()
    # Each of the others has its turn, once.
    assert sorted(live.jobs_read) == ["j", *names]
    await ledger.close()


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[tuple[Publisher, MemoryLiveStore, list[str]]]:
    """A publisher at work, its store, and the tokens of a job's two shards."""
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    at_work = Publisher(live, ledger, SystemClock(), Metrics())
    await define(ledger, live)
    tokens = [
        (await live.claim("j", "s", Claim([shard], shard, 60_000, Rank()))).token for shard in "ab"
    ]
    running = asyncio.create_task(at_work.run())
    yield at_work, live, tokens
    at_work.stop()
    await running
    await ledger.close()


class Poisoned(SqlLedger):
    """A ledger for which the record of one job has a count that no column can keep."""

    async def record(self, records: Sequence[JobRecord], at_ms: int) -> Mapping[str, Recorded]:
        counts = {"s": RowCounts(2**63, 0)}
        poisoned = [replace(r, counts=counts) if r.job == "j" else r for r in records]
        return await super().record(poisoned, at_ms)


async def test_invariant_9_a_job_whose_values_are_rejected_does_not_block_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ledger = Poisoned(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    publisher = Publisher(live, ledger, SystemClock(), Metrics())
    await define(ledger, live)
    for job in ("a", "z"):
        stored = await ledger.create(NewLayout(job, SPEC, ("s", "k")), 1)
        assert stored is not None
        await live.begin(stored.installed)
    for job in ("a", "j", "z"):
        token = (await live.claim(job, "s", Claim(None, "x", 60_000, Rank()))).token
        await live.report(job, "s", Report(token, ["a", "b"], [6, 7]))
        publisher.touch(job, ["s"])
    waits = asyncio.ensure_future(publisher.flush("j"))
    await asyncio.sleep(0)
    assert await publisher.round()
    outputs = {job: (await live.stage(job, "s"))[1].watermark.output for job in ("a", "j", "z")}
    assert outputs == {"a": 6, "j": MIN, "z": 6}
    with pytest.raises(RejectedValueError, match="the ledger rejects a value"):
        await waits
    assert "cannot record job j" in caplog.text
    # The reconciler retries it.
    assert publisher.failures.take_dropped() == {"j"}
    await ledger.close()


class Unreadable(SqlLedger):
    """A ledger that fails to read one job."""

    async def get(self, job: str) -> StoredJob:
        if job == "a":
            raise ValueError("damaged")
        return await super().get(job)


async def test_invariant_9_a_job_that_cannot_be_compared_does_not_keep_another_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ledger = Unreadable(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    publisher = Publisher(live, ledger, SystemClock(), Metrics())
    reconciler = Reconciler(live, ledger, publisher, SystemClock(), Metrics())
    await define(ledger, live)
    stored = await ledger.create(NewLayout("a", SPEC, ("s", "k")), 1)
    assert stored is not None
    await live.begin(stored.installed)
    for job, read in (("a", stored), ("j", await ledger.get("j"))):
        advance = {"s": StageWatermark(MIN, 6)}
        await ledger.record([JobRecord(job, read.installed.incarnation, 1, 1, 0, advance, {})], 1)
    await reconciler.reconcile()
    await reconciler.reconcile()
    assert (await live.stage("j", "s"))[1].watermark.output == 6
    assert "cannot compare job a" in caplog.text
    await ledger.close()


async def test_who_is_alone_waits_for_nobody(
    shared: tuple[Publisher, MemoryLiveStore, list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher, "_GATHER_S", WAIT_S)
    at_work, live, (a, b) = shared
    await live.report("j", "s", Report(b, ["b"], [100]))
    for value in range(5):
        await live.report("j", "s", Report(a, ["a"], [value]))
        at_work.touch("j", ["s"])
        shown = await asyncio.wait_for(at_work.flush("j"), WAIT_S / 4)
        assert shown is not None
        assert shown.stages["s"] == (await live.stage("j", "s"))[1]
        assert shown.stages["s"].watermark.output == value


async def test_a_round_waits_for_those_whom_the_last_one_answered(
    shared: tuple[Publisher, MemoryLiveStore, list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher, "_GATHER_S", WAIT_S)
    at_work, live, tokens = shared

    async def say(shard: int, value: int) -> int:
        await live.report("j", "s", Report(tokens[shard], ["ab"[shard]], [value]))
        at_work.touch("j", ["s"])
        shown = await at_work.flush("j")
        assert shown is not None
        return shown.stages["s"].watermark.output

    assert await asyncio.gather(say(0, 1), say(1, 2)) == [1, 1]
    first = asyncio.create_task(say(0, 5))
    done, _ = await asyncio.wait([first], timeout=0.2)
    assert not done
    assert await asyncio.wait_for(say(1, 6), WAIT_S / 4) == 5
    assert await first == 5
    # Nobody waits for long, and the next round expects no more than came.
    monkeypatch.setattr(publisher, "_GATHER_S", 0.001)
    assert await asyncio.wait_for(say(1, 7), WAIT_S / 4) == 5
    monkeypatch.setattr(publisher, "_GATHER_S", WAIT_S)
    assert await asyncio.wait_for(say(0, 8), WAIT_S / 4) == 7


@pytest.mark.parametrize("is_newer_commit_first", [False, True])
async def test_an_epoch_is_not_answered_if_its_state_was_lost_and_restored_before_it_was_recorded(
    tmp_path: Path, is_newer_commit_first: bool
):
    """Nothing of it is left, neither in the live store nor in the ledger: the commit must be retried."""
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    one = Publisher(live, ledger, SystemClock(), Metrics())
    await define(ledger, live)
    before = (await live.job("j")).incarnation
    stored = (await ledger.begin_incarnations({"j": before}, 2))["j"]
    await live.begin(stored.installed)
    if is_newer_commit_first:
        one.touch_epochs("j", (stored.installed.incarnation, 1), {"s": 8})
    one.touch_epochs("j", (before, 1), {"s": 7})
    waiting = asyncio.create_task(one.flush("j"))
    await asyncio.sleep(0)
    assert await one.round()
    with pytest.raises(UnavailableError, match="was lost: retry"):
        await waiting
    assert (await ledger.get("j")).installed.stages["s"].progress.epoch in (None, 8)
    # The next one is none of its business.
    one.touch_epochs("j", (stored.installed.incarnation, 1), {"s": 9})
    waiting = asyncio.create_task(one.flush("j"))
    await asyncio.sleep(0)
    assert await one.round()
    assert await waiting is not None
    assert (await ledger.get("j")).installed.stages["s"].progress.epoch == 9
    await ledger.close()


async def test_a_job_that_another_replica_records_delays_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each attempt at job j is overtaken; job i is published in the next round nevertheless."""
    monkeypatch.setattr(publisher, "_RETRY_FIRST_S", 3_600)
    ledger = Interrupted(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")
    live = MemoryLiveStore(SystemClock())
    one = Publisher(live, ledger, SystemClock(), Metrics())
    await define(ledger, live)
    other = await ledger.create(NewLayout("i", SPEC, ("s", "k")), 1)
    assert other is not None
    await live.begin(other.installed)
    token = (await live.claim("j", "s", Claim(None, "x", 60_000, Rank()))).token
    # A record that leaves out an idle shard is taken only if nothing newer is recorded.
    await live.report("j", "s", Report(token, ["a", "b"], [6, 9], [True, False]))

    was_overtaken = asyncio.Event()

    async def overtake() -> None:
        await SqlLedger.record(ledger, [JobRecord("j", 1, 1, 1, 0, {}, {"s": ledger.records})], 1)
        ledger.before = overtake
        if ledger.records == 2:
            was_overtaken.set()

    ledger.before = overtake
    running = asyncio.create_task(one.run())
    one.touch("j", ["s"])
    async with asyncio.timeout(WAIT_S):
        await was_overtaken.wait()
        token = (await live.claim("i", "s", Claim(None, "x", 60_000, Rank()))).token
        await live.report("i", "s", Report(token, ["a", "b"], [6, 7]))
        one.touch("i", ["s"])
        published = await one.flush("i")
    assert published is not None
    assert published.stages["s"].watermark.output == 6
    assert (await live.stage("j", "s"))[1].watermark.output == MIN
    one.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await ledger.close()
