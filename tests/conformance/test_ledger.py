"""What every ledger does. See `service.ledger.port`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import pytest
from sqlalchemy import create_engine, func, select

from service.errors import StoreRefusedError, UnknownJobError
from service.frontier.graph import StageWatermark
from service.frontier.timestamps import MAX, MIN
from service.ledger.migrate import upgrade
from service.ledger.port import JobRecord, Ledger, NewLayout
from service.ledger.sql import SqlLedger
from service.ledger.tables import history, metadata
from service.state import CHUNK, PromiseChunk

SPEC = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":2}}}'
FINER = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":4}}}'
LAYOUT = NewLayout("j", SPEC, ("s", "k"))
Reopen = Callable[[], Ledger]
T = TypeVar("T")


def packed(*promises: int) -> bytes:
    return np.array(promises, dtype="<i8").tobytes()


def record(
    advances: Mapping[str, StageWatermark] | None = None,
    *,
    epochs: Mapping[str, int] | None = None,
    generation: int = 1,
    layout_version: int = 1,
    chunks: tuple[PromiseChunk, ...] = (),
) -> JobRecord:
    return JobRecord("j", generation, layout_version, advances or {}, epochs or {}, chunks)


@pytest.fixture
def ledger(ledgers: Reopen, runner: asyncio.Runner) -> Ledger:
    found = ledgers()
    runner.run(found.open(0))
    runner.run(found.create(LAYOUT, 1))
    return found


def test_incarnations_rise(ledgers: Reopen, runner: asyncio.Runner) -> None:
    numbers = [runner.run(ledgers().open(0)) for _ in range(3)]
    assert numbers == sorted(set(numbers))


def test_a_job_comes_back_as_it_was(
    ledger: Ledger, ledgers: Reopen, runner: asyncio.Runner
) -> None:
    run = runner.run(ledger.open_run("j", ["k"]))
    chunk = PromiseChunk("j", "k", 1, 1, 0, packed(10, MIN))
    watermarks = {"s": StageWatermark(MIN, 20), "k": StageWatermark(20, MIN)}
    runner.run(ledger.record([record(watermarks, epochs={"k": 7}, chunks=(chunk,))], 5))
    again = ledgers()
    runner.run(again.open(6))
    [stored] = runner.run(again.load())
    assert stored.spec == SPEC
    job = stored.installed
    assert (job.name, job.generation, job.layout_version) == ("j", 1, 1)
    assert job.stages["s"].view.watermark == StageWatermark(MIN, 20)
    assert job.stages["k"].view.watermark == StageWatermark(20, MIN)
    assert job.stages["k"].view.updated_at_ms == 5
    assert (job.stages["k"].progress.run, job.stages["k"].progress.epoch) == (run, 7)
    assert list(job.stages["k"].promises or ()) == [10, MIN]
    assert job.stages["s"].promises is None


def test_a_job_is_created_once(ledger: Ledger, runner: asyncio.Runner) -> None:
    assert runner.run(ledger.create(LAYOUT, 2)) is None


def test_what_is_unknown_is_said_to_be(ledger: Ledger, runner: asyncio.Runner) -> None:
    for ask in (
        lambda: ledger.get("x"),
        lambda: ledger.reset("x", 1),
        lambda: ledger.delete("x", 1),
        lambda: ledger.open_run("x", ["s"]),
    ):
        with pytest.raises(UnknownJobError):
            runner.run(ask())  # type: ignore[arg-type]


def test_invariant_1_an_advance_never_goes_back(ledger: Ledger, runner: asyncio.Runner) -> None:
    def put(input_: int, output: int, *, idle: bool = False) -> Mapping[str, object]:
        watermark = StageWatermark(input_, output, idle)
        return runner.run(ledger.record([record({"k": watermark})], 1))["j"]

    first = runner.run(ledger.record([record({"k": StageWatermark(10, 5)})], 1))["j"]["k"]
    assert (first.watermark, first.version) == (StageWatermark(10, 5), 1)
    assert put(10, 5) == {}
    assert put(9, 4) == {}
    mixed = runner.run(ledger.record([record({"k": StageWatermark(9, 6)})], 2))["j"]["k"]
    assert (mixed.watermark, mixed.version) == (StageWatermark(10, 6), 2)
    assert mixed.revision > first.revision
    assert put(MIN, MIN, idle=True) != {}
    end = runner.run(ledger.record([record({"k": StageWatermark(MAX, MAX)})], 2))["j"]["k"]
    assert (end.watermark, end.version) == (StageWatermark(MAX, MAX), 4)


def test_invariant_8_an_advance_of_an_older_layout_is_not_taken(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    change = NewLayout("j", FINER, ("k",), {"k": packed(1, 1, 2, 2)})
    assert runner.run(ledger.replace(change, 1, 9, 2)) is None
    stored = runner.run(ledger.replace(change, 1, 1, 2))
    assert stored is not None
    assert (stored.spec, stored.installed.layout_version) == (FINER, 2)
    assert stored.installed.stages["k"].layout_since == 2
    assert stored.installed.stages["s"].layout_since == 1
    old = runner.run(ledger.record([record({"s": StageWatermark(MIN, 9)})], 3))
    assert old == {}
    new = runner.run(ledger.record([record({"s": StageWatermark(MIN, 9)}, layout_version=2)], 3))
    assert new["j"]["s"].watermark.output == 9
    [job] = runner.run(ledger.load())
    assert list(job.installed.stages["k"].promises or ()) == [1, 1, 2, 2]


def test_a_checkpoint_of_an_older_layout_is_left_out(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    runner.run(ledger.replace(NewLayout("j", FINER, ("k",)), 1, 1, 2))
    runner.run(
        ledger.checkpoint(
            [
                PromiseChunk("j", "k", 1, 1, 0, packed(9, 9)),
                PromiseChunk("j", "s", 2, 1, 0, packed(9, 9)),
            ]
        )
    )
    [job] = runner.run(ledger.load())
    assert job.installed.stages["k"].promises is None
    assert job.installed.stages["s"].promises is None


def test_a_stage_with_many_chunks_comes_back(ledgers: Reopen, runner: asyncio.Runner) -> None:
    ledger = ledgers()
    runner.run(ledger.open(0))
    size = 2 * CHUNK + 5
    spec = b'{"stages":{"s":{"shards":["a"]},"k":{"inputs":["s"],"ranges":%d}}}' % size
    runner.run(ledger.create(NewLayout("j", spec, ("s", "k")), 1))
    promises = np.arange(size, dtype="<i8")
    chunks = [
        PromiseChunk("j", "k", 1, 1, n, promises[n * CHUNK : (n + 1) * CHUNK].tobytes())
        for n in (0, 2)
    ]
    runner.run(ledger.checkpoint(chunks))
    [job] = runner.run(ledger.load())
    back = job.installed.stages["k"].promises
    assert back is not None
    assert list(back[:CHUNK]) == list(range(CHUNK))
    assert set(back[CHUNK : 2 * CHUNK]) == {MIN}
    assert list(back[2 * CHUNK :]) == list(range(2 * CHUNK, size))


def test_a_reset_starts_over_but_numbers_go_on(ledger: Ledger, runner: asyncio.Runner) -> None:
    first = runner.run(ledger.open_run("j", ["k"]))
    runner.run(ledger.record([record({"s": StageWatermark(MIN, 9)}, epochs={"k": 3})], 2))
    stored = runner.run(ledger.reset("j", 4))
    assert stored.installed.generation == 2
    stage = stored.installed.stages["k"]
    assert (stage.progress.run, stage.progress.epoch, stage.view.version) == (0, None, 0)
    assert stored.installed.stages["s"].view.watermark == StageWatermark()
    assert runner.run(ledger.record([record({"s": StageWatermark(MIN, 9)})], 5)) == {}
    assert runner.run(ledger.open_run("j", ["k"])) > first


def test_a_deleted_job_is_gone_and_the_next_of_its_name_is_another(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    run = runner.run(ledger.open_run("j", ["k"]))
    runner.run(ledger.record([record({"s": StageWatermark(MIN, 9)})], 2))
    runner.run(ledger.delete("j", 3))
    assert list(runner.run(ledger.load())) == []
    stored = runner.run(ledger.create(LAYOUT, 4))
    assert stored is not None
    assert stored.installed.generation == 2
    assert stored.installed.stages["s"].view.watermark == StageWatermark()
    assert runner.run(ledger.open_run("j", ["k"])) > run


def test_a_stage_that_was_taken_out_comes_back_where_it_was(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    runner.run(ledger.record([record({"s": StageWatermark(MIN, 9), "k": StageWatermark(9, 8)})], 2))
    alone = b'{"stages":{"s":{"shards":["a","b"]}}}'
    stored = runner.run(ledger.replace(NewLayout("j", alone, ()), 1, 1, 3))
    assert stored is not None
    assert set(stored.installed.stages) == {"s"}
    stored = runner.run(ledger.replace(NewLayout("j", SPEC, ("k",)), 1, 2, 4))
    assert stored is not None
    assert stored.installed.stages["k"].view.watermark == StageWatermark(9, 8)


def test_an_epoch_never_goes_back(ledger: Ledger, runner: asyncio.Runner) -> None:
    runner.run(ledger.record([record(epochs={"k": 5})], 1))
    runner.run(ledger.record([record(epochs={"k": 4})], 1))
    assert runner.run(ledger.get("j")).installed.stages["k"].progress.epoch == 5


def test_jobs_that_are_recorded_together_stay_apart(ledger: Ledger, runner: asyncio.Runner) -> None:
    runner.run(ledger.create(NewLayout("i", SPEC, ("s", "k")), 1))
    stale = JobRecord("i", 1, 99, {"s": StageWatermark(MIN, 3)}, {})
    taken = runner.run(ledger.record([record({"s": StageWatermark(MIN, 4)}), stale], 2))
    assert set(taken) == {"j"}
    assert runner.run(ledger.get("i")).installed.stages["s"].view.watermark.output == MIN


def test_history_has_a_row_per_advance_and_is_thinned_by_age(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    minute = 60_000
    for number in range(12):
        at_ms = 10 * minute + number * minute // 4
        runner.run(ledger.record([record({"s": StageWatermark(MIN, number)})], at_ms))
    thinned = runner.run(ledger.thin_history(fine_until_ms=12 * minute, keep_until_ms=11 * minute))
    # 4 rows of minute 10 are too old, of minute 11 the last one stays, those of minute 12 all do.
    assert thinned == 4 + 3
    assert runner.run(ledger.thin_history(fine_until_ms=12 * minute, keep_until_ms=0)) == 0


def test_an_sqlite_ledger_is_for_one_process(
    tmp_path_factory: pytest.TempPathFactory, runner: asyncio.Runner
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('lock')}/ledger.db"
    one, other = SqlLedger(url), SqlLedger(url)
    runner.run(one.open(0))
    with pytest.raises(StoreRefusedError, match="one process"):
        runner.run(other.open(0))
    runner.run(one.close())
    runner.run(other.open(0))
    runner.run(other.close())


def test_a_ledger_that_cannot_be_used_says_so(runner: asyncio.Runner) -> None:
    with pytest.raises(StoreRefusedError, match="cannot be used"):
        SqlLedger("nosuch://x")
    with pytest.raises(StoreRefusedError, match="cannot write"):
        runner.run(SqlLedger("sqlite+aiosqlite:////no-such-folder/x.db").open(0))


def test_the_migrations_make_the_tables_that_the_code_declares() -> None:
    migrated, declared = create_engine("sqlite://"), create_engine("sqlite://")
    with migrated.begin() as connection:
        upgrade(connection)
        rows = connection.exec_driver_sql(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'alembic_version'"
        ).all()
        assert connection.scalar(select(func.count()).select_from(history)) == 0
    with declared.begin() as connection:
        metadata.create_all(connection)
        expected = connection.exec_driver_sql(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
        ).all()
    assert sorted(map(tuple, rows)) == sorted(map(tuple, expected))
    migrated.dispose()
    declared.dispose()
