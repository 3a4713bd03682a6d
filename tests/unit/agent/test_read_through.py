"""Instants through which a query has read what was available: never past what it has not read."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.writer import ONCE, Trigger
from spark_agent.sources.admission import Admission, ShardLimit, Wanted
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.read_through import ReadThrough
from tests.unit.agent.queries import CONTINUOUS, NIGHTLY, source, started

STAGE = "s"
ONE_BATCH = Trigger(ONCE)
SHARDS = ("a", "b")


def query(
    *,
    reads_all: bool = True,
    by_shard: bool = False,
    nightly: bool = False,
    trigger: Trigger = CONTINUOUS,
) -> StartedQuery:
    return started(
        [source(STAGE)],
        trigger=NIGHTLY if nightly else trigger,
        reads_all=reads_all,
        by_shard={STAGE} if by_shard else (),
    )


def batch(epoch: int, triggered_ms: int = 0, *, read_nothing: bool = False) -> CommittedBatch:
    return CommittedBatch(epoch, 0, read_nothing, triggered_ms=triggered_ms)


def of(read: ReadThrough) -> int | None:
    return read.of(STAGE, ["a"]).get("a")


def test_nothing_is_read_before_the_first_trigger_has_ended() -> None:
    read = ReadThrough(query(), 100)
    assert of(read) is None
    read.note_poll("gate", 110, None)
    assert of(read) is None


def test_a_trigger_that_finds_nothing_proves_what_was_available_before_it() -> None:
    read = ReadThrough(query(reads_all=False), 100)
    for now_ms, through_ms in ((110, None), (120, 100), (130, 110), (140, 120)):
        read.note_poll("gate", now_ms, None)
        assert of(read) == through_ms


def test_polls_of_one_trigger_are_one() -> None:
    """Another reader is polled in the same trigger, and so is one that was to retry."""
    read = ReadThrough(query(), 100)
    read.note_poll("gate", 110, None)
    read.note_poll("other", 115, None)
    read.note_poll("gate", 119, None, is_retry=True)
    assert of(read) is None
    read.note_poll("gate", 120, None)
    assert of(read) == 100


def test_a_batch_that_reads_all_proves_what_was_there_when_it_was_triggered() -> None:
    read = ReadThrough(query(), 100)
    read.note_poll("gate", 110, None)
    read.note_batch(batch(0, 109))
    assert of(read) == 109


def test_a_poll_brings_the_batch_before_the_listener_does() -> None:
    read = ReadThrough(query(), 100)
    read.note_poll("gate", 110, None)
    read.note_poll("gate", 210, batch(0, 109))
    assert of(read) == 109


def test_a_batch_that_may_have_left_something_proves_nothing() -> None:
    read = ReadThrough(query(reads_all=False), 100)
    read.note_poll("gate", 110, None)
    read.note_poll("gate", 210, batch(0, 109))
    assert of(read) is None
    read.note_poll("gate", 310, batch(1, 209))
    assert of(read) is None
    read.note_poll("gate", 410, batch(1, 209))
    assert of(read) == 210


def test_a_batch_that_has_read_nothing_proves_it_also_where_batches_are_limited() -> None:
    read = ReadThrough(query(reads_all=False), 100)
    read.note_poll("gate", 110, None)
    read.note_poll("gate", 210, batch(0, 109, read_nothing=True))
    assert of(read) == 109


def test_a_repeated_batch_proves_nothing() -> None:
    """Its sources were listed by the driver before this one; the files since are unread."""
    read = ReadThrough(query(), 100)
    read.note_batch(batch(7, 105))
    assert of(read) is None
    read.note_poll("gate", 110, batch(7, 105))
    assert of(read) is None
    read.note_poll("gate", 210, batch(8, 109))
    assert of(read) == 109


def test_the_second_batch_of_a_run_is_not_a_repeated_one() -> None:
    """A query without a control source has batches alone."""
    read = ReadThrough(query(), 100)
    for epoch, triggered_ms, through_ms in (
        (7, 105, 100),
        (8, 205, 205),
        (8, 205, 205),
        (9, 305, 305),
    ):
        read.note_batch(batch(epoch, triggered_ms))
        assert read.all_ms == through_ms


def test_a_run_that_ends_covers_what_was_there_at_its_start() -> None:
    read = ReadThrough(query(nightly=True), 100)
    read.note_poll("gate", 110, None)
    read.note_poll("gate", 210, batch(0, 109))
    assert of(read) == 100
    unread = ReadThrough(query(nightly=True, reads_all=False), 100)
    unread.note_poll("gate", 110, None)
    assert of(unread) is None
    unread.note_end()
    assert of(unread) == 100


def test_a_run_of_one_batch_that_repeats_one_has_read_nothing_of_what_came_since() -> None:
    """The end of the batch is that of its plan, from a run before."""
    repeating = ReadThrough(query(trigger=ONE_BATCH), 100)
    repeating.note_batch(batch(7, 105))
    repeating.note_end()
    assert of(repeating) is None
    read = ReadThrough(query(trigger=ONE_BATCH), 100)
    read.note_poll("gate", 110, None)
    read.note_batch(batch(7, 109))
    read.note_end()
    assert of(read) == 109


def test_the_clock_alone_does_not_keep_a_run_going_that_ends() -> None:
    read = ReadThrough(query(nightly=True), 100)
    read.note_poll("gate", 110, None)
    read.note_poll("gate", 210, batch(0, 109))
    assert read.polled_ms == 210
    read.note_poll("gate", 310, batch(1, 209, read_nothing=True))
    assert read.polled_ms == 210


def test_a_shard_with_unread_files_waits_alone() -> None:
    read = ReadThrough(query(by_shard=True, reads_all=False), 100)
    read.note_listing(STAGE, 110, Wanted({"a": 3}, most=1), Admission())
    assert read.of(STAGE, SHARDS) == {"b": 100}
    read.note_listing(STAGE, 210, Wanted({"a": 2}, most=1), Admission())
    assert read.of(STAGE, SHARDS) == {"b": 110}
    read.note_listing(STAGE, 310, Wanted({"a": 1}, most=1), Admission())
    assert read.of(STAGE, SHARDS) == {"b": 210}
    read.note_listing(STAGE, 410, Wanted({"a": 1}, most=1), Admission())
    assert read.of(STAGE, SHARDS) == {"a": 210, "b": 310}, "a new file: all of the others are read"


def test_a_shard_that_is_held_back_does_not_advance() -> None:
    read = ReadThrough(query(by_shard=True), 100)
    held = Admission({"a": ShardLimit(0, "it is ahead")})
    for now_ms in (110, 210, 310):
        read.note_listing(STAGE, now_ms, Wanted({"a": 1}), held)
    assert read.of(STAGE, SHARDS) == {"b": 210}


@pytest.mark.parametrize(("most", "limits"), [(1, {}), (None, {"a": ShardLimit(1, "it is ahead")})])
def test_the_oldest_work_is_that_of_files_that_a_batch_has_left(
    most: int | None, limits: Mapping[str, ShardLimit]
) -> None:
    """Each batch made it look younger, however many files waited."""
    read = ReadThrough(query(by_shard=True), 100)
    found: list[int] = []
    for epoch, unread in enumerate(({"a": 3, "b": 1}, {"a": 2}, {"a": 1})):
        now_ms = 200 + 100 * epoch
        latest = batch(epoch - 1, now_ms - 100) if epoch else None
        read.note_poll("gate", now_ms + 10, latest)
        held = limits if len(found) < 2 else {}
        read.note_listing(STAGE, now_ms + 20, Wanted(unread, most), Admission(held))
        found.append(read.all_ms)
    assert found == [100, 100, 100]
    read.note_poll("gate", 510, batch(2, 400))
    read.note_listing(STAGE, 520, Wanted({"b": 1}, most), Admission())
    assert read.all_ms == 400, "all of them are read"


@pytest.mark.parametrize("trigger", [ONE_BATCH, NIGHTLY])
def test_the_end_of_a_run_proves_nothing_of_a_shard_that_was_held_back(trigger: Trigger) -> None:
    """Its files were there at the start, and a run of one batch ends without them."""
    read = ReadThrough(query(by_shard=True, trigger=trigger), 100)
    read.note_poll("gate", 110, None)
    held = Admission({"a": ShardLimit(0, "it is ahead")})
    read.note_listing(STAGE, 115, Wanted({"a": 1, "b": 1}, ends=trigger == NIGHTLY), held)
    read.note_batch(batch(7, 109))
    read.note_end()
    assert read.of(STAGE, SHARDS) == {"b": 100}


@given(st.data())
def test_no_instant_passes_an_unread_file(data: st.DataObject) -> None:
    """A model of Spark: files arrive at any moment, a trigger lists them at one and polls at another."""
    limit = data.draw(st.one_of(st.none(), st.integers(1, 3)), label="files a batch")
    by_shard = data.draw(st.booleans(), label="logs in folders")
    read = ReadThrough(query(reads_all=limit is None, by_shard=by_shard), 0)
    now_ms, epoch = 0, -1
    latest: CommittedBatch | None = None
    unread = [-1] * data.draw(st.integers(0, 2), label="there at the start")

    def pass_time() -> int:
        nonlocal now_ms
        through_ms = of(read)
        assert through_ms is None or all(arrived_ms >= through_ms for arrived_ms in unread)
        now_ms += 1
        unread.extend([now_ms] * data.draw(st.integers(0, 2), label="arrive"))
        now_ms += 1
        return now_ms

    for _ in range(data.draw(st.integers(1, 8), label="triggers")):
        triggered_ms = pass_time()
        lists_first = data.draw(st.booleans(), label="the source is polled first")
        if not lists_first:
            read.note_poll("gate", pass_time(), latest)
        listed = list(unread)
        if by_shard:
            pass_time()
            wanted = Wanted({"a": len(listed)} if listed else {}, most=limit)
            read.note_listing(STAGE, now_ms, wanted, Admission())
        if lists_first:
            read.note_poll("gate", pass_time(), latest)
        taken = listed if limit is None else listed[:limit]
        if taken:
            pass_time()
            for each in taken:
                unread.remove(each)
            epoch += 1
            latest = batch(epoch, triggered_ms)
        elif data.draw(st.booleans(), label="a control source has news"):
            epoch += 1
            latest = batch(epoch, triggered_ms, read_nothing=not taken)
        if latest is not None and data.draw(st.booleans(), label="the listener is in time"):
            read.note_batch(latest)
        pass_time()
