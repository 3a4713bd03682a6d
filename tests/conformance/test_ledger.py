"""Contract of every ledger. See `service.ledger.port`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from service.errors import (
    InvalidRequestError,
    StaleRunError,
    StoreRefusedError,
    UnknownJobError,
    UnknownRunError,
)
from service.frontier.graph import StageWatermark
from service.frontier.health import Outcome
from service.frontier.ranges import KeyLayout
from service.frontier.timestamps import MAX, MIN
from service.ledger.port import JobRecord, Ledger, NewLayout, Recorded, RejectedValueError
from service.ledger.sql import SqlLedger
from service.model.checkpoints import CHUNK, COLUMNS, CheckpointChunk, Columns
from service.model.history import HistoryPoint, RowCounts
from service.model.jobs import StageView, StoredJob
from service.model.runs import MAX_RUNS, NewRun, RunEnd

SPEC = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":2}}}'
FINER = b'{"stages":{"s":{"shards":["a","b"]},"k":{"inputs":["s"],"ranges":4}}}'
LAYOUT = NewLayout("j", SPEC, ("s", "k"))
Reopen = Callable[[], Ledger]
Past = Callable[..., Sequence[HistoryPoint]]
T = TypeVar("T")


def packed(*promises: int) -> bytes:
    return np.array(promises, dtype="<i8").tobytes()


def inherited(promises: Sequence[int], unfinished: Sequence[int] = ()) -> Mapping[str, Columns]:
    columns = {name: np.full(len(promises), empty) for name, empty in COLUMNS.items()}
    columns["promises"] = np.array(promises)
    columns["unfinished"][list(unfinished)] = 1
    return {"k": columns}


def chunk(
    *promises: int,
    stage: str = "k",
    incarnation: int = 1,
    generation: int = 1,
    layout_since: int = 1,
    number: int = 0,
    stamp: int = 1,
) -> CheckpointChunk:
    return CheckpointChunk(
        "j",
        stage,
        incarnation,
        generation,
        layout_since,
        number,
        stamp,
        {"promises": packed(*promises)},
    )


def record(
    advances: Mapping[str, StageWatermark] | None = None,
    *,
    job: str = "j",
    epochs: Mapping[str, int] | None = None,
    incarnation: int = 1,
    generation: int = 1,
    layout_version: int = 1,
    seen: int = 0,
    counts: Mapping[str, RowCounts] | None = None,
    chunks: tuple[CheckpointChunk, ...] = (),
    unless_newer: bool = False,
) -> JobRecord:
    return JobRecord(
        job=job,
        incarnation=incarnation,
        generation=generation,
        layout_version=layout_version,
        seen=seen,
        advances=advances or {},
        epochs=epochs or {},
        counts=counts or {},
        chunks=chunks,
        unless_newer=unless_newer,
    )


def output(value: int) -> Mapping[str, StageWatermark]:
    return {"s": StageWatermark(MIN, value)}


@pytest.fixture
def ledger(ledgers: Reopen, runner: asyncio.Runner) -> Ledger:
    found = ledgers()
    runner.run(found.open(exclusive=True))
    runner.run(found.create(LAYOUT, 1))
    return found


@pytest.fixture
def revive(ledger: Ledger, runner: asyncio.Runner) -> Callable[[], StoredJob]:
    """Begin the next incarnation of the job: the way to its checkpoint."""

    def begin() -> StoredJob:
        head = runner.run(ledger.head("j"))
        return runner.run(ledger.begin_incarnations({"j": head.incarnation}, 9))["j"]

    return begin


def promises(stored: StoredJob, stage: str = "k") -> list[int] | None:
    return column(stored, "promises", stage)


def column(stored: StoredJob, name: str, stage: str = "k") -> list[int] | None:
    found = stored.installed.stages[stage].columns
    return None if found is None else found[name].tolist()


@pytest.mark.parametrize("epochs", [{}, {"s": 1}])
def test_a_value_out_of_range_is_rejected_and_is_not_an_outage(
    ledger: Ledger, runner: asyncio.Runner, epochs: Mapping[str, int]
) -> None:
    poisoned = record(output(5), epochs=epochs, counts={"s": RowCounts(2**63, 0)})
    with pytest.raises(RejectedValueError, match="the ledger rejects a value"):
        runner.run(ledger.record([poisoned], 1))
    assert list(runner.run(ledger.record([record(output(5), epochs=epochs)], 2))) == ["j"]


def test_each_job_begins_incarnations_of_its_own_and_they_rise(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    first = runner.run(ledger.head("j")).incarnation
    other = runner.run(ledger.create(NewLayout("i", SPEC, ("s", "k")), 1))
    assert other is not None
    assert other.installed.incarnation > first
    again = runner.run(ledger.begin_incarnations({"j": first}, 2))["j"]
    assert again.installed.incarnation > other.installed.incarnation
    assert runner.run(ledger.head("i")).incarnation == other.installed.incarnation
    # Not from one that is over, not of a job that is not there; the others begin all the same.
    second = again.installed.incarnation
    seen = {"i": other.installed.incarnation, "j": first, "x": 0}
    assert list(runner.run(ledger.begin_incarnations(seen, 3))) == ["i"]
    assert runner.run(ledger.head("j")).incarnation == second
    assert runner.run(ledger.head("j")).incarnation == again.installed.incarnation


def test_a_new_incarnation_takes_nothing_that_rests_on_an_older_one(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    runner.run(ledger.checkpoint([chunk(1, 1, stamp=9)], 5))
    stored = revive()
    assert promises(stored) == [1, 1]
    new = stored.installed.incarnation
    assert runner.run(ledger.record([record(output(5), chunks=(chunk(5, 5),))], 3)) == {}
    runner.run(ledger.checkpoint([chunk(6, 6, stamp=99)], 5))
    assert runner.run(ledger.get("j")).installed.stages["s"].view.watermark.output == MIN
    runner.run(ledger.checkpoint([chunk(2, 2, incarnation=new, stamp=1)], 5))
    taken = runner.run(ledger.record([record(output(7), incarnation=new)], 4))
    assert taken["j"].views["s"].watermark.output == 7
    assert promises(revive()) == [2, 2]


def test_heads_tell_where_each_job_is(ledger: Ledger, runner: asyncio.Runner) -> None:
    runner.run(ledger.create(NewLayout("i", SPEC, ("s", "k")), 1))
    run = runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1))
    recorded = runner.run(ledger.record([record(output(5))], 2))["j"]
    runner.run(ledger.replace(NewLayout("j", FINER, ("k",)), 1, 1, 3))
    assert runner.run(ledger.delete("i", 4)) == 1
    [there] = runner.run(ledger.heads())
    assert runner.run(ledger.deleted(["i", "j", "never"])) == {"i": 1}
    assert there == runner.run(ledger.head("j"))
    assert (there.generation, there.layout_version, there.last_run) == (1, 2, run)
    assert there.revision == recorded.revision
    installed = runner.run(ledger.get("j")).installed
    assert (installed.incarnation, installed.last_run) == (there.incarnation, run)
    with pytest.raises(UnknownJobError):
        runner.run(ledger.head("i"))


def test_what_was_recorded_but_never_shown_is_told_again(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    first = runner.run(ledger.record([record(output(5))], 2))["j"]
    both = runner.run(ledger.record([record({"k": StageWatermark(5, 4)})], 3))["j"]
    assert set(both.views) == {"s", "k"}
    assert both.views["s"] == first.views["s"]
    seen = first.revision
    late = runner.run(ledger.record([record(epochs={"k": 1}, seen=seen)], 4))["j"]
    assert set(late.views) == {"k"}
    assert runner.run(ledger.record([record(output(5), seen=late.revision)], 5))["j"].views == {}


def test_what_must_not_be_recorded_after_something_newer_is_not(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    idle = {"s": StageWatermark(MIN, MIN, idle=True)}
    first = runner.run(ledger.record([record(output(5))], 2))["j"]
    stale = record(idle, seen=first.revision - 1, unless_newer=True)
    assert runner.run(ledger.record([stale], 3)) == {}
    assert not runner.run(ledger.get("j")).installed.stages["s"].view.watermark.idle
    seen = first.revision
    for n in range(3):
        # Whoever shows what it was told is up to date, and is heard.
        this = record({"s": StageWatermark(MIN, 6 + n, idle=True)}, seen=seen, unless_newer=True)
        seen = runner.run(ledger.record([this], 4))["j"].revision
    assert runner.run(ledger.head("j")).revision == seen


def test_the_newest_checkpoint_stays_in_whatever_order_they_arrive(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    for stamp in (2, 3, 1):
        runner.run(ledger.checkpoint([chunk(stamp, stamp, stamp=stamp)], 5))
    runner.run(ledger.checkpoint([chunk(5, 5, stamp=5), chunk(4, 4, stamp=4)], 5))
    runner.run(ledger.record([record(chunks=(chunk(3, 3, stamp=3),))], 2))
    assert promises(revive()) == [5, 5]


def test_every_column_of_a_checkpoint_comes_back(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    saved = {name: [10 * n, 10 * n + 1] for n, name in enumerate(COLUMNS, 1)}
    columns = {name: packed(*values) for name, values in saved.items()}
    runner.run(ledger.checkpoint([replace(chunk(stamp=5), columns=columns)], 5))
    stored = revive()
    assert {name: column(stored, name) for name in COLUMNS} == saved


def test_a_column_that_a_checkpoint_lacks_is_not_known(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    newer = {name: packed(1, 1) for name in COLUMNS}
    runner.run(ledger.checkpoint([replace(chunk(stamp=5), columns=newer)], 5))
    runner.run(ledger.checkpoint([chunk(7, 8, stamp=6)], 5))
    assert column(revive(), "raised_at_ms") == [0, 0]


def test_a_job_comes_back_as_it_was(
    ledger: Ledger, ledgers: Reopen, runner: asyncio.Runner
) -> None:
    run = runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1))
    watermarks = {"s": StageWatermark(MIN, 20), "k": StageWatermark(20, MIN)}
    this = record(watermarks, epochs={"k": 7}, chunks=(chunk(10, MIN),))
    runner.run(ledger.record([this], 5))
    again = ledgers()
    runner.run(again.open(exclusive=True))
    stored = runner.run(again.begin_incarnations({"j": 1}, 6))["j"]
    assert stored.spec == SPEC
    job = stored.installed
    assert (job.name, job.generation, job.layout_version) == ("j", 1, 1)
    assert job.stages["s"].view.watermark == StageWatermark(MIN, 20)
    assert job.stages["k"].view.watermark == StageWatermark(20, MIN)
    assert job.stages["k"].view.updated_at_ms == 5
    assert (job.stages["k"].progress.run, job.stages["k"].progress.epoch) == (run, 7)
    assert promises(stored) == [10, MIN]
    assert job.stages["s"].columns is None
    assert runner.run(again.get("j")).installed.stages["k"].columns is None


@pytest.mark.parametrize("epochs", [{}, {"k": 7}])
def test_the_last_rise_of_an_output_is_kept_while_the_input_moves(
    ledger: Ledger, runner: asyncio.Runner, epochs: Mapping[str, int]
) -> None:
    """By one statement for many jobs, and job by job."""

    def moments(at_ms: int, seen: int, watermark: StageWatermark) -> tuple[int, int]:
        this = record({"k": watermark}, seen=seen, epochs=epochs)
        view = runner.run(ledger.record([this], at_ms))["j"].views["k"]
        assert runner.run(ledger.get("j")).installed.stages["k"].view == view
        return view.updated_at_ms, view.advanced_at_ms

    defined_at_ms = runner.run(ledger.get("j")).installed.stages["k"].view.advanced_at_ms
    assert moments(5, 0, StageWatermark(20, MIN)) == (5, defined_at_ms)
    assert moments(6, 1, StageWatermark(20, 10)) == (6, 6)
    assert moments(7, 2, StageWatermark(30, 10)) == (7, 6)
    assert moments(8, 3, StageWatermark(30, 20)) == (8, 8)


def test_a_job_is_created_once(ledger: Ledger, runner: asyncio.Runner) -> None:
    assert runner.run(ledger.create(LAYOUT, 2)) is None


def test_what_is_unknown_is_said_to_be(ledger: Ledger, runner: asyncio.Runner) -> None:
    for ask in (
        lambda: ledger.get("x"),
        lambda: ledger.head("x"),
        lambda: ledger.reset("x", 1),
        lambda: ledger.delete("x", 1),
        lambda: ledger.open_run("x", NewRun(["s"], "driver-1"), 1),
    ):
        with pytest.raises(UnknownJobError):
            runner.run(ask())  # type: ignore[arg-type]


def test_invariant_1_an_advance_never_goes_back(ledger: Ledger, runner: asyncio.Runner) -> None:
    seen = 0

    def put(input_: int, output: int, *, idle: bool = False) -> Mapping[str, StageView]:
        nonlocal seen
        advance = {"k": StageWatermark(input_, output, idle)}
        recorded: Recorded = runner.run(ledger.record([record(advance, seen=seen)], 1))["j"]
        assert recorded.revision > seen
        seen = recorded.revision
        return recorded.views

    first = put(10, 5)["k"]
    assert (first.watermark, first.version) == (StageWatermark(10, 5), 1)
    assert put(10, 5) == {}
    assert put(9, 4) == {}
    mixed = put(9, 6)["k"]
    assert (mixed.watermark, mixed.version) == (StageWatermark(10, 6), 2)
    assert mixed.revision > first.revision
    assert put(MIN, MIN, idle=True)["k"].watermark == StageWatermark(10, 6, idle=True)
    end = put(MAX, MAX)["k"]
    assert (end.watermark, end.version) == (StageWatermark(MAX, MAX), 4)


def test_invariant_8_an_advance_of_an_older_layout_is_not_taken(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    change = NewLayout("j", FINER, ("k",), inherited([1, 1, 2, 2], unfinished=[3]))
    assert runner.run(ledger.replace(change, 1, 9, 2)) is None
    stored = runner.run(ledger.replace(change, 1, 1, 2))
    assert stored is not None
    assert (stored.spec, stored.installed.layout_version) == (FINER, 2)
    assert stored.installed.stages["k"].layout_since == 2
    assert stored.installed.stages["s"].layout_since == 1
    assert runner.run(ledger.record([record(output(9))], 3)) == {}
    new = runner.run(ledger.record([record(output(9), layout_version=2)], 3))
    assert new["j"].views["s"].watermark.output == 9
    revived = revive()
    assert promises(revived) == [1, 1, 2, 2]
    assert column(revived, "unfinished") == [0, 0, 0, 1]


def test_no_shard_joins_a_source_whose_end_is_recorded(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    """It is decided with the layout: until then another replica may record that the source is final."""
    runner.run(ledger.record([record(output(MAX))], 1))
    joining = NewLayout("j", FINER, ("s",), joined="s")
    with pytest.raises(InvalidRequestError, match="no shard can join 's', which is final"):
        runner.run(ledger.replace(joining, 1, 1, 2))
    stored = revive()
    assert (stored.spec, stored.installed.layout_version) == (SPEC, 1), "nothing is half applied"
    other = NewLayout("j", FINER, ("k",), joined="k")
    assert runner.run(ledger.replace(other, 1, 1, 3)) is not None


def test_what_new_ranges_inherit_gives_way_to_what_they_promise(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    change = NewLayout("j", FINER, ("k",), inherited([1, 1, 2, 2]))
    runner.run(ledger.replace(change, 1, 1, 2))
    runner.run(ledger.checkpoint([chunk(3, 3, 3, 3, layout_since=2, stamp=1)], 5))
    assert promises(revive()) == [3, 3, 3, 3]


def test_what_is_saved_after_the_live_store_was_read_is_inherited_too(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    """A report that ends a retirement, and a commit, were answered meanwhile."""
    retired = {"promises": packed(5, 1), "retired": packed(1, 0), "unfinished": packed(0, 1)}
    runner.run(ledger.checkpoint([replace(chunk(stamp=1), columns=retired)], 5))
    read = inherited([5, 5, 1, 1])
    read["k"]["retired"][:] = [1, 1, 0, 0]
    newer = {"promises": packed(6, 4), "retired": packed(0, 0), "unfinished": packed(0, 1)}
    runner.run(ledger.checkpoint([replace(chunk(stamp=2), columns=newer)], 5))
    layouts = {"k": (KeyLayout.tile(2), KeyLayout.tile(4))}
    runner.run(ledger.replace(NewLayout("j", FINER, ("k",), read, layouts), 1, 1, 2))
    revived = revive()
    assert promises(revived) == [6, 6, 4, 4]
    assert column(revived, "retired") == [0, 0, 0, 0]


def test_a_checkpoint_of_another_layout_or_generation_is_left_out(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    runner.run(ledger.replace(NewLayout("j", FINER, ("k",)), 1, 1, 2))
    runner.run(ledger.checkpoint([chunk(9, 9), chunk(9, 9, stage="s", generation=2)], 5))
    stored = revive()
    assert promises(stored, "k") is None
    assert promises(stored, "s") is None


def test_a_stage_with_many_chunks_comes_back(ledgers: Reopen, runner: asyncio.Runner) -> None:
    ledger = ledgers()
    runner.run(ledger.open(exclusive=True))
    size = 2 * CHUNK + 5
    spec = b'{"stages":{"s":{"shards":["a"]},"k":{"inputs":["s"],"ranges":%d}}}' % size
    runner.run(ledger.create(NewLayout("j", spec, ("s", "k")), 1))
    values = list(range(size))
    chunks = [chunk(*values[n * CHUNK : (n + 1) * CHUNK], number=n) for n in (2, 0)]
    runner.run(ledger.checkpoint(chunks, 5))
    stored = runner.run(ledger.begin_incarnations({"j": 1}, 2))["j"]
    back = promises(stored)
    assert back is not None
    assert back[:CHUNK] == values[:CHUNK]
    assert set(back[CHUNK : 2 * CHUNK]) == {MIN}
    assert back[2 * CHUNK :] == values[2 * CHUNK :]


def test_a_reset_starts_over_but_numbers_go_on(ledger: Ledger, runner: asyncio.Runner) -> None:
    first = runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1))
    runner.run(ledger.record([record(output(9), epochs={"k": 3})], 2))
    stored = runner.run(ledger.reset("j", 4))
    assert stored.installed.generation == 2
    stage = stored.installed.stages["k"]
    assert (stage.progress.run, stage.progress.epoch, stage.view.version) == (0, None, 0)
    assert stored.installed.stages["s"].view.watermark == StageWatermark()
    assert runner.run(ledger.record([record(output(9))], 5)) == {}
    assert runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1)) > first


def test_a_run_knows_who_opened_it(ledger: Ledger, runner: asyncio.Runner) -> None:
    first = runner.run(ledger.open_run("j", NewRun(["s", "k"], "driver-1"), 1))
    second = runner.run(ledger.open_run("j", NewRun(["k"], "driver-2"), 1))
    assert runner.run(ledger.run_holder("j", first)) == "driver-1"
    assert runner.run(ledger.run_holder("j", second)) == "driver-2"
    runner.run(ledger.open_run("j", NewRun(["s", "k"], "driver-3"), 1))
    assert runner.run(ledger.run_holder("j", first)) is None
    assert runner.run(ledger.run_holder("nope", 1)) is None


def test_a_run_is_ended_once(ledger: Ledger, ledgers: Reopen, runner: asyncio.Runner) -> None:
    links = {"spark": "http://driver:4040"}
    run = runner.run(ledger.open_run("j", NewRun(["s", "k"], "driver-1", "scores", links), 5))
    end = RunEnd(run, Outcome.FINISHED, 9, holder="driver-1")
    ended = runner.run(ledger.end_run("j", end))
    assert (ended.end, ended.stages) == (end, ["k", "s"])
    again = RunEnd(run, Outcome.FINISHED, 20, "again")
    assert runner.run(ledger.end_run("j", again)).end == end
    with pytest.raises(StaleRunError):
        runner.run(ledger.end_run("j", RunEnd(run, Outcome.FAILED, 21)))
    with pytest.raises(UnknownRunError):
        runner.run(ledger.end_run("j", RunEnd(run + 1, Outcome.FAILED, 21)))
    with pytest.raises(UnknownJobError):
        runner.run(ledger.end_run("nope", end))
    reopened = ledgers()
    runner.run(reopened.open(exclusive=True))
    (found,) = runner.run(reopened.runs("j", 10))
    assert (found.run, found.started_at_ms, found.end, found.epoch) == (run, 5, end, None)
    assert found.opened == NewRun(["k", "s"], "driver-1", "scores", links)
    with pytest.raises(UnknownJobError):
        runner.run(reopened.runs("nope", 10))


def test_the_end_of_a_run_is_restored_with_its_stages(
    ledger: Ledger, runner: asyncio.Runner, revive: Callable[[], StoredJob]
) -> None:
    first = runner.run(ledger.open_run("j", NewRun(["s", "k"], "driver-1"), 1))
    second = runner.run(ledger.open_run("j", NewRun(["s"], "driver-2"), 2))
    end = RunEnd(first, Outcome.FAILED, 3, "out of memory", "driver-1")
    assert runner.run(ledger.end_run("j", end)).stages == ["k"]
    stages = revive().installed.stages
    assert (stages["s"].end, stages["k"].end) == (None, end)
    runner.run(ledger.open_run("j", NewRun(["k"], "driver-3"), 4))
    assert runner.run(ledger.get("j")).installed.stages["k"].end is None
    # As before: whoever retries is told the same, though a newer run has the stage by now.
    assert runner.run(ledger.end_run("j", end)).stages == []
    runner.run(ledger.open_run("j", NewRun(["s"], "driver-4"), 5))
    with pytest.raises(StaleRunError):
        runner.run(ledger.end_run("j", RunEnd(second, Outcome.FINISHED, 6)))


def test_a_run_knows_its_last_epoch(ledger: Ledger, runner: asyncio.Runner) -> None:
    def epochs() -> list[int | None]:
        return [each.epoch for each in runner.run(ledger.runs("j", 10))]

    runner.run(ledger.open_run("j", NewRun(["s", "k"], "driver-1"), 1))
    runner.run(ledger.record([record(epochs={"k": 3})], 2))
    assert epochs() == [3]
    second = runner.run(ledger.open_run("j", NewRun(["k"], "driver-2"), 3))
    assert epochs() == [None, 3]
    runner.run(ledger.record([record(epochs={"k": 5})], 4))
    runner.run(ledger.end_run("j", RunEnd(second, Outcome.FINISHED, 5)))
    assert epochs() == [5, 3]
    runner.run(ledger.reset("j", 6))
    runner.run(ledger.open_run("j", NewRun(["s", "k"], "driver-3"), 7))
    assert epochs() == [None, 5, 3]
    assert len(runner.run(ledger.runs("j", 2))) == 2
    runner.run(ledger.delete("j", 8))
    runner.run(ledger.create(LAYOUT, 9))
    assert epochs() == []


def test_old_runs_are_forgotten_unless_they_have_a_stage(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    first = runner.run(ledger.open_run("j", NewRun(["s"], "driver-1"), 1))
    second = runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1))
    last = second
    for _ in range(MAX_RUNS):
        last = runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1))
    numbers = [each.run for each in runner.run(ledger.runs("j", 2 * MAX_RUNS))]
    assert numbers == [*range(last, second, -1), first]
    with pytest.raises(StaleRunError):
        runner.run(ledger.end_run("j", RunEnd(second, Outcome.FINISHED, 2)))


def test_a_deleted_job_is_gone_and_the_next_of_its_name_is_another(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    run = runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1))
    runner.run(ledger.record([record(output(9))], 2))
    before = runner.run(ledger.head("j"))
    assert runner.run(ledger.delete("j", 3)) == 1
    with pytest.raises(UnknownJobError):
        runner.run(ledger.get("j"))
    stored = runner.run(ledger.create(LAYOUT, 4))
    assert stored is not None
    assert stored.installed.generation == 2
    assert runner.run(ledger.created_at_ms("j")) == 4
    assert stored.installed.incarnation > before.incarnation
    assert stored.installed.revision > before.revision
    assert stored.installed.last_run == run
    assert stored.installed.stages["s"].view.watermark == StageWatermark()
    assert runner.run(ledger.open_run("j", NewRun(["k"], "driver-1"), 1)) > run


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
    stale = record(output(3), job="i", incarnation=2, layout_version=99)
    taken = runner.run(ledger.record([record(output(4)), stale], 2))
    assert set(taken) == {"j"}
    assert runner.run(ledger.get("i")).installed.stages["s"].view.watermark.output == MIN


def test_history_has_a_row_per_advance_and_is_thinned_by_age(
    ledger: Ledger, runner: asyncio.Runner
) -> None:
    minute = 60_000
    for number in range(12):
        at_ms = 10 * minute + number * minute // 4
        runner.run(ledger.record([record(output(number))], at_ms))
    # 4 rows of minute 10 are too old, of minute 11 the last one stays, those of minute 12 all do.
    assert thin(ledger, runner, fine=12 * minute, keep=11 * minute) == 4 + 3
    assert thin(ledger, runner, fine=12 * minute) == 0


def outputs(points: Sequence[HistoryPoint]) -> list[tuple[int, int]]:
    return [(point.at_ms, point.watermark.output) for point in points]


@pytest.fixture
def past(ledger: Ledger, runner: asyncio.Runner) -> Past:
    """The history of the stage `s` of the job `j`, of which all is visible unless told otherwise."""

    def read(
        from_ms: int, until_ms: int, intervals: int, stage: str = "s", **others: int
    ) -> Sequence[HistoryPoint]:
        return runner.run(
            ledger.history(
                "j",
                stage,
                from_ms=from_ms,
                until_ms=until_ms,
                intervals=intervals,
                **{"generation": 1, "newest": MAX} | others,
            )
        )

    return read


def test_history_has_the_rows_up_to_an_advance(
    ledger: Ledger, runner: asyncio.Runner, past: Past
) -> None:
    rows = {"s": RowCounts(7, 1)}
    runner.run(ledger.record([record(output(1), counts=rows)], 1))
    # Another way into the ledger, with another stage in the same record.
    both = {**output(2), "k": StageWatermark(1, 1)}
    more = {"s": RowCounts(9, 2), "k": RowCounts(5, 0)}
    runner.run(ledger.record([record(both, counts=more, epochs={"s": 4})], 2))
    runner.run(ledger.record([record(output(3))], 3))
    assert [each.counts for each in past(0, 9, 9)] == [RowCounts(7, 1), RowCounts(9, 2), None]
    assert [each.counts for each in past(0, 9, 9, stage="k")] == [RowCounts(5, 0)]


def test_history_has_what_held_at_first_then_the_last_of_each_interval(
    ledger: Ledger, runner: asyncio.Runner, past: Past
) -> None:
    for at_ms in (5, 10, 11, 14, 15, 16, 20, 20, 31, 40, 41):
        advanced = record({"s": StageWatermark(at_ms, 100 + at_ms, at_ms == 31)})
        runner.run(ledger.record([advanced], at_ms))
        # Another stage and another job, on both sides in the order of the index.
        runner.run(ledger.record([record({"k": StageWatermark(at_ms, at_ms)})], at_ms))
    runner.run(ledger.create(NewLayout("i", SPEC, ("s", "k")), 1))
    runner.run(ledger.record([record(output(7), job="i", incarnation=2)], 12))
    found = past(10, 40, 6)
    # An interval's end belongs to it: (10, 15], (15, 20], then none in (20, 30], (30, 35], (35, 40].
    assert outputs(found) == [(10, 110), (15, 115), (20, 120), (31, 131), (40, 140)]
    assert [point.after_ms for point in found] == [MIN, 10, 15, 30, 35]
    assert found[3].watermark == StageWatermark(31, 131, idle=True)
    # As many versions as advances: two more have been left out of the first interval.
    assert [point.version for point in found][:2] == [2, 5]
    assert outputs(past(4, 4, 0)) == []
    assert outputs(past(4, 9, 1)) == [(5, 105)]
    assert outputs(past(99, 99, 0)) == [(41, 141)]
    assert outputs(past(99, 199, 3)) == [(41, 141)]
    assert outputs(past(MIN // 2**20, MAX // 2**20, 1)) == [(41, 141)]


def test_history_shows_nothing_newer_than_what_readers_have(
    ledger: Ledger, runner: asyncio.Runner, past: Past
) -> None:
    for at_ms in (1, 2, 3):
        runner.run(ledger.record([record(output(at_ms))], at_ms))
    assert outputs(past(0, 9, 1, newest=2)) == [(2, 2)]
    assert outputs(last(ledger, runner, newest=2)) == [(1, 1), (2, 2)]


def test_history_is_of_one_generation(ledger: Ledger, runner: asyncio.Runner, past: Past) -> None:
    runner.run(ledger.record([record(output(70))], 10))
    runner.run(ledger.record([record(output(71))], 20))
    runner.run(ledger.reset("j", 25))
    assert outputs(past(15, 40, 5, generation=2)) == []
    assert outputs(last(ledger, runner, generation=2)) == []
    runner.run(ledger.record([record(output(3), generation=2)], 30))
    assert outputs(past(15, 40, 5, generation=2)) == [(30, 3)]
    assert outputs(last(ledger, runner, generation=2)) == [(30, 3)]
    # The generation before, to a reader who has not seen the reset.
    assert outputs(past(15, 29, 2)) == [(10, 70), (20, 71)]
    runner.run(ledger.delete("j", 50))
    assert outputs(past(15, 40, 5, generation=2)) == []


def test_whether_there_was_anything_before(ledger: Ledger, runner: asyncio.Runner) -> None:
    def began_after(at_ms: int, generation: int = 1) -> bool:
        return runner.run(ledger.began_after("j", "s", generation=generation, at_ms=at_ms))

    assert not began_after(0)
    runner.run(ledger.record([record({"k": StageWatermark(1, 1)})], 7))
    for at_ms in (10, 11):
        runner.run(ledger.record([record(output(at_ms))], at_ms))
    assert [began_after(at_ms) for at_ms in (9, 10, 11)] == [True, False, False]
    runner.run(ledger.reset("j", 12))
    runner.run(ledger.record([record(output(1), generation=2)], 13))
    assert [began_after(at_ms, 2) for at_ms in (10, 12, 13)] == [True, True, False]
    # The first of the rows that are left may not have been the first of all.
    thin(ledger, runner, fine=60_000)
    runner.run(ledger.record([record(output(2), generation=2)], 60_001))
    thin(ledger, runner, keep=60_000)
    assert not began_after(12, 2)


def test_the_last_advances_begin_with_the_oldest(ledger: Ledger, runner: asyncio.Runner) -> None:
    for at_ms in (59_999, 60_000, 60_001, 60_001):
        runner.run(ledger.record([record(output(at_ms))], at_ms))
        runner.run(ledger.record([record({"k": StageWatermark(at_ms, at_ms)})], at_ms))
    runner.run(ledger.record([record(output(99_999))], 60_001))
    found = last(ledger, runner, limit=3)
    assert outputs(found) == [(60_000, 60_000), (60_001, 60_001), (60_001, 99_999)]
    assert [point.after_ms for point in found] == [59_999] * 3
    assert len(last(ledger, runner, limit=99)) == 4


def last(
    ledger: Ledger, runner: asyncio.Runner, *, generation: int = 1, **others: int
) -> Sequence[HistoryPoint]:
    limits = {"newest": MAX, "limit": 9} | others
    return runner.run(ledger.last_advances("j", "s", generation=generation, **limits))


def thin(ledger: Ledger, runner: asyncio.Runner, *, fine: int = 0, keep: int = 0) -> int:
    """Thin all of the history; return how many rows were deleted."""
    deleted = 0
    while True:
        thinned = runner.run(ledger.thin_history(fine_until_ms=fine, keep_until_ms=keep))
        deleted += thinned.rows
        if not thinned.more:
            return deleted


def test_thinning_goes_on_where_it_was(ledger: Ledger, runner: asyncio.Runner) -> None:
    minute, hour = 60_000, 3_600_000
    for at_ms in (1, 2, hour, hour + 1, hour + minute - 1, hour + minute):
        runner.run(ledger.record([record(output(at_ms))], at_ms))
    # The hour's first minute is not over: which of its rows is the last is not known yet.
    assert thin(ledger, runner, fine=hour + 2) == 1
    assert thin(ledger, runner, fine=2 * hour) == 2
    assert thin(ledger, runner, fine=2 * hour) == 0
    assert thin(ledger, runner, keep=2 * hour) == 3


def test_a_ledger_for_one_process_is_for_one_process(
    ledger_url: str, runner: asyncio.Runner
) -> None:
    one, other = SqlLedger(ledger_url), SqlLedger(ledger_url)
    runner.run(one.open(exclusive=True))
    with pytest.raises(StoreRefusedError, match="one process: stop it, or use TIDEGAUGE_LIVE_URL"):
        runner.run(other.open(exclusive=True))
    runner.run(one.close())
    runner.run(other.open(exclusive=True))
    runner.run(other.create(LAYOUT, 1))
    runner.run(other.close())


def test_a_ledger_in_memory_is_nobody_elses(runner: asyncio.Runner) -> None:
    one, other = SqlLedger("sqlite+aiosqlite://"), SqlLedger("sqlite+aiosqlite:///:memory:")
    for ledger in (one, other):
        runner.run(ledger.open(exclusive=True))
        assert runner.run(ledger.create(LAYOUT, 1)) is not None
        runner.run(ledger.close())


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("nosuch://x", "cannot be used"),
        ("not a url", "cannot be read: use sqlite"),
        ("postgresql://me:secret@db/x", r"use postgresql\+psycopg://me:\*\*\*@db/x"),
        ("postgresql+asyncpg://db/x", r"use postgresql\+psycopg://db/x"),
        ("postgres://db/x", r"use postgresql\+psycopg://db/x"),
        ("sqlite:///x.db", r"use sqlite\+aiosqlite:///x.db"),
    ],
)
def test_a_ledger_that_cannot_be_used_says_what_can(url: str, advice: str) -> None:
    with pytest.raises(StoreRefusedError, match=advice) as refused:
        SqlLedger(url)
    assert "secret" not in refused.value.detail


def test_a_ledger_that_cannot_be_written_says_so(runner: asyncio.Runner) -> None:
    ledger = SqlLedger("sqlite+aiosqlite:////no-such-folder/x.db")
    with pytest.raises(StoreRefusedError, match="cannot write"):
        runner.run(ledger.open(exclusive=True))


def test_postgres_without_its_driver_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreRefusedError, match=r"pip install 'tidegauge\[production\]'"):
        SqlLedger("postgresql+psycopg://db/x")
