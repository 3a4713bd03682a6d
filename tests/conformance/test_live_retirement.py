"""Retirement in the live stores: a range counts as final until its next report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from service.errors import InvalidRequestError, UnknownRangeError, UnknownStageError
from service.frontier.agreement import FINAL, Agreement
from service.frontier.facts import ReportedFacts
from service.frontier.leases import Rank
from service.frontier.ranges import KeyLayout, ShardLayout
from service.frontier.timestamps import MAX, MIN
from service.live.port import LiveStore
from service.model.checkpoints import Columns, joined_columns
from service.model.jobs import Census
from service.model.observations import Settled
from service.model.reports import RangeView
from tests.conformance.test_live import LEFT, RIGHT, Worker, installed, pipeline

STAND_STILL = Agreement(MIN)


@pytest.fixture
def worker(live: LiveStore, runner: asyncio.Runner) -> Worker:
    runner.run(live.begin(installed(pipeline())))
    return Worker(live, runner)


def retire(worker: Worker, name: str, stage: str = "s") -> bool:
    return worker.run(worker.live.retire("j", stage, name))


def views(worker: Worker, stage: str = "s") -> list[RangeView]:
    return list(worker.run(worker.live.range_views("j", stage, [0, 1])))


def census(worker: Worker, stage: str = "s") -> Census:
    return worker.run(worker.live.stage("j", stage))[2]


def saved(worker: Worker, stage: str = "s") -> Columns:
    chunks = [c for c in worker.run(worker.live.unsaved()) if c.stage == stage]
    worker.run(worker.live.note_saved(chunks))
    return joined_columns(2, ((chunk.chunk, chunk.columns) for chunk in chunks))


def test_a_retired_range_is_not_waited_for_until_its_next_report(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    assert retire(worker, "a"), "the agreement is ahead of what is published"
    assert worker.agreement() == Agreement(9)
    assert worker.agreement().leaves_out
    assert census(worker) == Census(2, 2, 0, 0, 2, 1)
    a, b = views(worker)
    assert (a.promise, a.retired, a.idle) == (5, True, False)
    assert (b.promise, b.retired) == (9, False)
    seen = worker.observe()
    assert (seen.promises.tolist(), set(seen.retired)) == ([MAX, 9], {0})
    assert not worker.report(token, {"b": 12}).ends_retirement
    assert worker.agreement() == Agreement(12)
    assert worker.report(token, {"a": 6}).ends_retirement
    assert worker.agreement() == Agreement(6), "it holds from where it is"
    assert not worker.agreement().leaves_out
    assert census(worker) == Census(2, 2, 0, 0, 2, 0)
    assert not views(worker)[0].retired
    saved(worker)
    assert not worker.report(token, {"a": 7}).ends_retirement


@pytest.mark.parametrize("promise", [MIN, 3, 5])
def test_a_report_that_promises_nothing_new_ends_it_too(worker: Worker, promise: int) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    retire(worker, "a")
    assert worker.report(token, {"a": promise}).ends_retirement
    assert worker.agreement() == Agreement(5)


def test_one_that_never_reported_may_be_retired(worker: Worker) -> None:
    token = worker.claim(["a"]).token
    worker.report(token, {"a": 5})
    assert worker.agreement() == STAND_STILL
    retire(worker, "b")
    assert worker.agreement() == Agreement(5)
    assert census(worker) == Census(2, 2, 0, 0, 1, 1)
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("abc")), layout_version=2)))
    assert census(worker) == Census(3, 2, 0, 0, 1, 1)
    retire(worker, "c")
    columns = worker.run(worker.live.columns("j", "s"))
    worker.run(worker.live.remove("j", 1))
    flow = pipeline(ShardLayout.of("abc"))
    worker.run(worker.live.begin(installed(flow, incarnation=2, columns={"s": columns})))
    assert census(worker) == Census(3, 3, 0, 0, 0, 2)
    token = worker.claim(["b"]).token
    assert worker.agreement() == Agreement(5), "a claim is not a report"
    worker.report(token, {"b": MIN})
    assert worker.agreement() == STAND_STILL
    assert census(worker) == Census(3, 2, 0, 0, 1, 1)


def test_a_retired_range_does_not_count_among_those_that_rest(worker: Worker) -> None:
    """Retired counts as final: so with an idle one, the least promise of the idle ones holds."""
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9}, idle=["b"])
    retire(worker, "a")
    assert worker.agreement() == Agreement(9, idle=True)
    retire(worker, "b")
    assert worker.agreement() == FINAL
    assert census(worker) == Census(2, 2, 0, 0, 2, 2)
    worker.report(token, {"b": 10}, idle=["b"])
    assert worker.agreement() == Agreement(10, idle=True)
    assert census(worker) == Census(2, 2, 1, 0, 2, 1)
    worker.report(token, {"a": MAX})
    assert census(worker) == Census(2, 2, 1, 1, 2, 0)


def test_key_ranges_are_retired_too(worker: Worker) -> None:
    token = worker.claim(None, stage="k").token
    worker.report(token, {LEFT: 5, RIGHT: 9}, stage="k", idle=[LEFT, RIGHT])
    assert worker.agreement("k") == Agreement(5, idle=True)
    retire(worker, LEFT, "k")
    assert worker.agreement("k") == Agreement(9, idle=True)
    retire(worker, RIGHT, "k")
    assert worker.agreement("k") == FINAL
    assert worker.observe("k").promises.tolist() == [MAX, MAX]
    worker.report(token, {LEFT: 7}, stage="k", observed=None)
    assert worker.agreement("k") == Agreement(7)
    assert [view.promise for view in views(worker, "k")] == [7, 9]


def test_the_end_of_a_lease_does_not_end_it(worker: Worker, advance: Callable[[int], None]) -> None:
    grant = worker.claim(None, ttl_ms=1_000)
    worker.report(grant.token, {"a": 5, "b": 9}, idle=["a"])
    retire(worker, "a")
    worker.report(worker.claim(["b"]).token, {"b": 10})
    advance(1_500)
    worker.run(worker.live.expire())
    assert worker.agreement() == Agreement(10)
    token = worker.claim(["a"], rank=Rank(epoch=1)).token
    assert worker.agreement() == Agreement(10)
    worker.run(worker.live.release("j", [token]))
    assert worker.agreement() == Agreement(10)


def test_a_report_for_an_epoch_ends_it_at_once(worker: Worker) -> None:
    """Its worker lives, also if the epoch is never committed."""
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    retire(worker, "a")
    assert worker.report(token, {"a": 20, "b": 20}, epoch=1).ends_retirement
    assert worker.agreement() == Agreement(5)
    worker.commit(1, s=None)
    assert worker.agreement() == Agreement(20)


def test_a_report_from_before_ends_it_with_its_commit(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    worker.report(token, {"a": 6}, epoch=1)
    retire(worker, "a")
    assert worker.agreement() == Agreement(9)
    worker.commit(1, s=None)
    assert worker.agreement() == Agreement(6)


def test_a_policy_decides_nothing_about_a_retired_range(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    seen = worker.observe()
    decision = Settled(0, int(seen.owners[0]), None, idle=True, promise=MIN)
    retire(worker, "a")
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [decision]))
    assert (census(worker).idle, census(worker).retired) == (0, 1)
    assert worker.agreement() == Agreement(9)


def test_work_of_a_retired_range_is_not_waited_for(worker: Worker) -> None:
    token = worker.claim(None).token
    facts = {name: ReportedFacts(oldest_work_ms=1, backlog=7) for name in "ab"}
    worker.report(token, {"a": 5, "b": 9}, facts=facts)
    retire(worker, "a")
    assert set(worker.observe().facts) == {1}
    worker.report(token, {"a": 6}, facts=facts)
    assert set(worker.observe().facts) == {0, 1}


def test_a_second_retirement_and_one_of_a_final_range_change_nothing(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": MAX})
    retire(worker, "a")
    retire(worker, "a")
    retire(worker, "b")
    assert census(worker) == Census(2, 2, 0, 1, 2, 1)
    worker.report(token, {"a": 6})
    assert worker.agreement() == Agreement(6)


def test_what_cannot_be_retired_is_refused(worker: Worker) -> None:
    with pytest.raises(UnknownRangeError, match="stage 's' has no range 'c'"):
        retire(worker, "c")
    with pytest.raises(UnknownStageError):
        retire(worker, "a", "other")
    with pytest.raises(InvalidRequestError, match="passthrough"):
        retire(worker, "a", "u")


def test_a_retirement_comes_back_from_the_ledger(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    assert saved(worker)["retired"].tolist() == [0, 0]
    retire(worker, "a")
    columns = saved(worker)
    assert columns["retired"].tolist() == [1, 0]
    assert columns["promises"].tolist() == [5, 9], "its own promise is kept"
    assert worker.run(worker.live.columns("j", "s"))["retired"].tolist() == [1, 0]
    worker.run(worker.live.remove("j", 1))
    worker.run(worker.live.begin(installed(pipeline(), incarnation=2, columns={"s": columns})))
    assert worker.agreement() == Agreement(9)
    assert census(worker) == Census(2, 2, 0, 0, 0, 1)
    worker.report(worker.claim(None).token, {"a": 6, "b": 9})
    assert worker.agreement() == Agreement(6)
    assert saved(worker)["retired"].tolist() == [0, 0]


def test_the_end_of_a_retirement_is_saved_even_if_its_promise_is_the_same(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    retire(worker, "a")
    assert saved(worker)["retired"].tolist() == [1, 0]
    worker.report(token, {"a": 5})
    assert saved(worker)["retired"].tolist() == [0, 0]


def test_the_end_of_a_retirement_is_reported_until_it_is_saved(worker: Worker) -> None:
    """The first report may be applied and not answered, so the next one is the one that is answered."""
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    retire(worker, "a")
    saved(worker)
    worker.report(token, {"b": 10})
    before = worker.run(worker.live.unsaved())
    worker.report(token, {"a": 6})
    assert worker.report(token, {"a": 6}).ends_retirement
    assert worker.report(token, {"a": 7, "b": 11}).ends_retirement
    assert worker.report(token, {"a": 7}, epoch=1).ends_retirement
    assert not worker.report(token, {"b": 11}).ends_retirement
    worker.run(worker.live.note_saved(before))
    assert worker.report(token, {"a": 7}).ends_retirement
    chunks = worker.run(worker.live.unsaved())
    worker.report(token, {"a": 8})
    worker.run(worker.live.note_saved(chunks))
    assert not worker.report(token, {"a": 9}).ends_retirement, (
        "what has changed since is another change"
    )


def test_a_checkpoint_names_the_ranges_that_have_returned_until_it_is_saved(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    retire(worker, "a")
    retire(worker, "b")
    assert returned(worker) == []
    worker.report(token, {"b": 10})
    assert returned(worker) == ["b"]
    worker.report(token, {"a": 6})
    assert returned(worker) == ["a", "b"]
    retire(worker, "b")
    assert returned(worker) == ["a"], "the other one is retired again"
    saved(worker)
    worker.report(token, {"a": 7})
    assert returned(worker) == []


def returned(worker: Worker) -> list[str]:
    chunks = worker.run(worker.live.unsaved())
    return sorted(name for chunk in chunks for name in chunk.returned)


def test_the_holder_that_has_ended_a_retirement_is_kept_until_it_is_saved(worker: Worker) -> None:
    first, second = (worker.claim([name], holder=f"w-{name}").token for name in "ab")
    worker.report(first, {"a": 5})
    worker.report(second, {"b": 9})
    retire(worker, "a")
    retire(worker, "b")
    worker.report(first, {"a": 6})
    worker.report(second, {"b": 9}, epoch=1)
    ended = {"a": "w-a", "b": "w-b"}
    assert [chunk.returned for chunk in worker.run(worker.live.unsaved()) if chunk.returned] == [
        ended
    ]
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("0abc")), layout_version=2)))
    assert [chunk.returned for chunk in worker.run(worker.live.unsaved()) if chunk.returned] == [
        ended
    ]


def test_the_end_of_a_retirement_is_reported_until_it_is_saved_in_another_layout(
    worker: Worker,
) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    retire(worker, "b")
    saved(worker)
    worker.report(token, {"b": 9})
    of_the_first = worker.run(worker.live.unsaved())
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("0abc")), layout_version=2)))
    worker.run(worker.live.note_saved(of_the_first))
    assert worker.report(token, {"b": 10}).ends_retirement
    assert not worker.report(token, {"a": 10}).ends_retirement
    worker.run(worker.live.note_saved(worker.run(worker.live.unsaved())))
    assert not worker.report(token, {"b": 10}).ends_retirement


def test_a_retired_shard_stays_so_in_another_layout(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    retire(worker, "b")
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("0abc")), layout_version=2)))
    seen = worker.observe()
    assert {seen.layout.name(index) for index in seen.retired} == {"b"}
    assert census(worker) == Census(4, 2, 0, 0, 2, 1)
    assert worker.report(token, {"b": 10}).ends_retirement
    assert census(worker).retired == 0


def test_a_key_range_that_is_split_is_waited_for_again(worker: Worker) -> None:
    token = worker.claim(None, stage="k").token
    worker.report(token, {LEFT: 5, RIGHT: 9}, stage="k")
    retire(worker, LEFT, "k")
    finer = pipeline(keys=KeyLayout.tile(4))
    worker.run(worker.live.install(installed(finer, layout_version=2)))
    assert worker.agreement("k") == Agreement(5)
    assert census(worker, "k").retired == 0


def test_many_ranges_report_beside_a_retired_one(live: LiveStore, runner: asyncio.Runner) -> None:
    """As many as are joined by array operations."""
    names = [f"{n:04}" for n in range(300)]
    runner.run(live.begin(installed(pipeline(ShardLayout.of(names)))))
    worker = Worker(live, runner)
    token = worker.claim(None, ttl_ms=600_000).token
    for at in (10, 20):
        worker.report(token, dict.fromkeys(names, at))
    retire(worker, "0007")
    others = [name for name in names if name != "0007"]
    for at in (30, 40):
        assert not worker.report(token, dict.fromkeys(others, at)).ends_retirement
        assert worker.agreement() == Agreement(at)
    assert worker.report(token, dict.fromkeys(names, 35)).ends_retirement
    assert worker.agreement() == Agreement(35)
    assert worker.observe().promises.tolist() == [35 if n == 7 else 40 for n in range(300)]
