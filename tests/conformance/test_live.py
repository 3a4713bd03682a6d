"""Contract of every live store. See `service.live.port`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.errors import (
    EpochsWaitingError,
    InputAheadError,
    InvalidReportError,
    InvalidRequestError,
    LeaseConflictError,
    LeaseLostError,
    StaleEpochError,
    StaleRunError,
    UnknownStageError,
)
from service.frontier.agreement import FINAL, STAND_STILL, Agreement
from service.frontier.epochs import MAX_WAITING_EPOCHS
from service.frontier.facts import UNFINISHED, Counts, ReportedFacts
from service.frontier.graph import Pipeline, Stage, StageWatermark
from service.frontier.health import Outcome
from service.frontier.idleness import Commits
from service.frontier.leases import Rank
from service.frontier.policies import IdlePolicy, StagePolicy
from service.frontier.ranges import KeyLayout, Layout, ShardLayout
from service.frontier.timestamps import MAX, MIN
from service.live.port import MAX_DEPARTED, LiveStore, StateLostError
from service.model.checkpoints import COLUMNS, Columns, joined_columns, packed_column
from service.model.jobs import Census, InstalledJob, InstalledStage, StageProgress, StageView
from service.model.leases import Claim, Grant
from service.model.observations import Settled, StageObservation
from service.model.reports import (
    Commit,
    Committed,
    CommittedHolds,
    RangeNote,
    Report,
    Reported,
    StageCommit,
)
from service.model.runs import RunEnd

SHARDS = ShardLayout.of(["a", "b"])
KEYS = KeyLayout.tile(2)
LEFT, RIGHT = KEYS.names
NO_RANK = Rank()


def pipeline(shards: Layout = SHARDS, keys: Layout = KEYS) -> Pipeline:
    return Pipeline({"s": Stage((), shards), "k": Stage(("s",), keys), "u": Stage(("k",))})


def installed(
    flow: Pipeline,
    *,
    incarnation: int = 1,
    generation: int = 1,
    layout_version: int = 1,
    revision: int = 0,
    views: Mapping[str, StageView] | None = None,
    columns: Mapping[str, Columns] | None = None,
    progress: StageProgress | None = None,
) -> InstalledJob:
    return InstalledJob(
        "j",
        flow,
        incarnation,
        generation,
        layout_version,
        revision,
        0 if progress is None else progress.run,
        {
            name: InstalledStage(
                (views or {}).get(name, StageView(StageWatermark(), 0, 0, 0, 0)),
                progress or StageProgress(),
                layout_version,
                (columns or {}).get(name),
            )
            for name in flow.stages
        },
    )


class Worker:
    """Speaks to a live store as the use cases do."""

    def __init__(self, live: LiveStore, runner: asyncio.Runner) -> None:
        self.live = live
        self.run = runner.run

    def claim(
        self,
        ranges: Iterable[str] | None,
        *,
        stage: str = "s",
        holder: str = "x",
        rank: Rank = NO_RANK,
        ttl_ms: int = 10_000,
        watched: bool = True,
    ) -> Grant:
        names = None if ranges is None else list(ranges)
        return self.run(self.live.claim("j", stage, Claim(names, holder, ttl_ms, rank, watched)))

    def report(
        self,
        token: str,
        promises: Mapping[str, int],
        *,
        stage: str = "s",
        epoch: int | None = None,
        observed: int | None = None,
        capped_at_commit: bool = False,
        idle: Iterable[str] = (),
        holds: Mapping[str, dict[str, int]] | None = None,
        facts: Mapping[str, ReportedFacts] | None = None,
    ) -> Reported:
        asleep = set(idle)
        names = list(promises)
        report = Report(
            token,
            names,
            list(promises.values()),
            [name in asleep for name in names] if asleep else None,
            None if holds is None else [RangeNote(holds.get(name, {})) for name in names],
            epoch,
            observed,
            capped_at_commit,
            None if facts is None else [facts.get(name) for name in names],
        )
        return self.run(self.live.report("j", stage, report))

    def commit(
        self, epoch: int, run: int = 0, *, age_ms: int = 0, **observed: int | None
    ) -> Mapping[str, int]:
        stages = {stage: StageCommit(value) for stage, value in observed.items()}
        return self.run(self.live.commit("j", Commit(run, epoch, stages, age_ms))).applied

    def lease_ms(self) -> int:
        """The instant that leases run by."""
        return self.run(self.live.observe("j", ["s"]))[0].lease_ms

    def observe(self, stage: str = "s") -> StageObservation:
        return self.run(self.live.observe("j", [stage]))[1][stage]

    def agreement(self, stage: str = "s") -> Agreement:
        return self.run(self.live.agreements("j", frozenset([stage])))[1][stage]

    def publish(self, version: int = 1, generation: int = 1, **watermarks: StageWatermark) -> None:
        views = {n: StageView(w, version, version, version, version) for n, w in watermarks.items()}
        self.run(self.live.publish("j", generation, version, views, {}))

    def lost(self, token: str) -> str | None:
        renewed, lost = self.run(self.live.renew("j", [token]))
        assert len(renewed) + len(lost) == 1
        return lost[0].reason if lost else None


@pytest.fixture
def worker(live: LiveStore, runner: asyncio.Runner) -> Worker:
    runner.run(live.begin(installed(pipeline())))
    return Worker(live, runner)


def test_what_is_unknown_is_said_to_be(worker: Worker) -> None:
    with pytest.raises(StateLostError):
        worker.run(worker.live.job("other"))
    assert worker.run(worker.live.head("other")) is None
    with pytest.raises(UnknownStageError):
        worker.run(worker.live.stage("j", "other"))
    with pytest.raises(InvalidRequestError, match="passthrough"):
        worker.claim(None, stage="u")


# ---- leases


def test_fences_rise_and_tokens_differ(worker: Worker) -> None:
    grants = [worker.claim(["a"]) for _ in range(5)]
    fences = [grant.fence for grant in grants]
    assert fences == sorted(set(fences))
    assert len({grant.token for grant in grants}) == 5


def test_a_held_range_is_denied_and_the_rest_granted(worker: Worker) -> None:
    worker.claim(["a"], holder="x")
    grant = worker.claim(None, holder="y")
    assert list(grant.granted) == ["b"]
    assert [(d.range, d.reason, d.holder) for d in grant.denied] == [("a", "held", "x")]
    with pytest.raises(LeaseConflictError):
        worker.claim(["a", "nope"], holder="y")


@pytest.mark.parametrize(
    ("first", "second", "granted"),
    [
        (Rank(), Rank(), False),
        (Rank(0, 5, 0), Rank(0, 5, 1), True),
        (Rank(0, 5, 3), Rank(0, 6, 0), True),
        (Rank(0, 6, 0), Rank(0, 5, 9), False),
    ],
)
def test_a_greater_rank_takes_over(
    worker: Worker, first: Rank, second: Rank, granted: bool
) -> None:
    before = worker.claim(["a"], rank=first)
    if granted:
        worker.claim(["a"], holder="y", rank=second)
        assert worker.lost(before.token) == "superseded"
    else:
        with pytest.raises(LeaseConflictError):
            worker.claim(["a"], holder="y", rank=second)
        assert worker.lost(before.token) is None


def test_the_same_holder_is_granted_anew(worker: Worker) -> None:
    before = worker.claim(None)
    after = worker.claim(["a"])
    assert worker.report(before.token, {"b": 1}).accepted == 1
    with pytest.raises(LeaseLostError):
        worker.report(before.token, {"a": 1})
    assert worker.report(after.token, {"a": 1}).accepted == 1


def test_a_lease_ends_at_its_deadline_and_is_never_renewed(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    grant = worker.claim(None, ttl_ms=1_000)
    advance(500)
    assert worker.lost(grant.token) is None
    advance(1_000)
    assert worker.lost(grant.token) == "expired"
    with pytest.raises(LeaseLostError) as lost:
        worker.report(grant.token, {"a": 1})
    assert lost.value.members["reason"] == "expired"
    assert worker.run(worker.live.expire()) == {"j": {"s": 1}}
    assert worker.run(worker.live.expire()) == {}
    assert worker.lost(grant.token) == "expired"


def test_the_last_holders_of_leases_that_have_run_out_are_kept(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    worker.claim(["a"], holder="exec-1", ttl_ms=1_000)
    released = worker.claim(["b"], holder="exec-2", ttl_ms=1_000)
    worker.run(worker.live.release("j", [released.token]))
    advance(1_500)
    worker.run(worker.live.expire())
    seen = worker.observe()
    assert seen.departed == [(int(seen.held_since_ms[0]), "exec-1")]
    for number in range(MAX_DEPARTED + 1):
        worker.claim(["a"], holder=f"next-{number}", ttl_ms=1_000)
        advance(1_500)
        worker.run(worker.live.expire())
    names = [holder for _, holder in worker.observe().departed]
    assert names == [f"next-{number}" for number in range(MAX_DEPARTED, 0, -1)]


def test_a_lease_whose_end_is_found_by_the_way_is_told_of_once(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    worker.claim(["a"], ttl_ms=1_000)
    advance(1_500)
    worker.run(worker.live.agreements("j", frozenset({"s"})))
    assert worker.run(worker.live.expire("j")) == {"j": {"s": 1}}
    assert worker.run(worker.live.expire()) == {}


def test_a_report_renews_its_lease(worker: Worker, advance: Callable[[int], None]) -> None:
    grant = worker.claim(None, ttl_ms=1_000)
    for value in range(5):
        advance(500)
        assert worker.report(grant.token, {"a": value}).expires_in_ms == 1_000


def test_a_released_lease_is_over(worker: Worker) -> None:
    grant = worker.claim(None)
    assert worker.run(worker.live.release("j", [grant.token, grant.token, "no-such-token"])) == 1
    assert worker.lost(grant.token) == "released"
    assert worker.lost("no-such-token") == "unknown"
    worker.claim(None, holder="y")


def test_a_new_run_voids_what_older_ones_hold(worker: Worker) -> None:
    old = worker.claim(None)
    other = worker.claim(None, stage="k")
    worker.report(old.token, {"a": 5, "b": 5}, epoch=1)
    worker.run(worker.live.open_run("j", ["s"], 3))
    with pytest.raises(StaleRunError):
        worker.report(old.token, {"a": 6})
    for run in (0, 2, 4):
        with pytest.raises(StaleRunError):
            worker.claim(None, holder="y", rank=Rank(run))
        with pytest.raises(StaleRunError):
            worker.commit(1, run=run, s=None)
    new = worker.claim(None, holder="y", rank=Rank(3))
    assert new.fence > old.fence
    assert worker.commit(1, run=3, s=None) == {"s": 0}
    assert worker.lost(other.token) is None
    worker.run(worker.live.open_run("j", ["s"], 2))
    assert worker.lost(new.token) is None


def test_a_run_that_ends_gives_its_leases_back(
    worker: Worker, live: LiveStore, runner: asyncio.Runner
) -> None:
    runner.run(live.open_run("j", ["s", "k"], 3))
    lease = worker.claim(None, rank=Rank(3))
    other = worker.claim(None, stage="k", rank=Rank(3))
    worker.report(lease.token, {"a": 5, "b": 6})
    worker.report(lease.token, {"a": 7, "b": 8}, epoch=1)
    before = worker.observe()
    end = RunEnd(3, Outcome.FINISHED, 9, "it is done")
    runner.run(live.end_run("j", ["s", "no-such-stage"], end))
    assert worker.lost(lease.token) == "released"
    assert worker.lost(other.token) is None
    after = worker.observe()
    assert (before.end, after.end) == (None, end)
    assert after.promises.tolist() == before.promises.tolist()
    assert after.owners.tolist() == [0, 0]
    assert after.census == Census(total=2, reported=2, idle=0, final=0, leased=0)
    # A report that waits for its commit still does.
    assert worker.commit(1, run=3, s=None) == {"s": 2}
    # One of another run changes nothing.
    claimed = worker.claim(None, rank=Rank(3))
    for run in (2, 4):
        runner.run(live.end_run("j", ["s"], RunEnd(run, Outcome.FAILED, 10)))
        assert worker.observe().end == end
    assert worker.lost(claimed.token) is None
    runner.run(live.open_run("j", ["s"], 4))
    assert worker.observe().end is None


def test_the_end_of_a_run_wakes_its_readers(
    worker: Worker, live: LiveStore, runner: asyncio.Runner
) -> None:
    async def woken() -> None:
        with live.watch("j") as watch:
            watch.rearm()
            await live.end_run("j", ["s"], RunEnd(0, Outcome.FINISHED, 9))
            async with asyncio.timeout(60):
                await watch.wait()

    runner.run(woken())


def test_the_end_of_a_run_comes_from_the_ledger(live: LiveStore, runner: asyncio.Runner) -> None:
    def end() -> RunEnd | None:
        return runner.run(live.observe("j", ["s"]))[1]["s"].end

    def with_end(job: InstalledJob, end: RunEnd) -> InstalledJob:
        return replace(job, stages={n: replace(s, end=end) for n, s in job.stages.items()})

    first, second = RunEnd(3, Outcome.STOPPED, 9), RunEnd(4, Outcome.FINISHED, 11, "done")
    runner.run(live.begin(with_end(installed(pipeline(), progress=StageProgress(3)), first)))
    assert end() == first
    wider = pipeline(ShardLayout.of(["a", "b", "c"]))
    changed = installed(wider, progress=StageProgress(3), layout_version=2)
    runner.run(live.install(with_end(changed, first)))
    assert end() == first
    caught_up = installed(wider, progress=StageProgress(4), layout_version=2)
    runner.run(live.install(with_end(caught_up, second)))
    assert end() == second
    runner.run(live.install(installed(wider, generation=2, layout_version=2)))
    assert end() is None


def test_a_range_knows_since_when_nobody_holds_it(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    worker.claim(["a"], ttl_ms=1_000)
    token = worker.claim(["b"], ttl_ms=1_200_000).token
    began = worker.observe().held_since_ms.tolist()
    advance(600_000)
    worker.run(worker.live.expire())
    seen = worker.observe()
    assert seen.owners.tolist()[0] == 0
    # When it ran out, not when somebody noticed.
    assert worker.lease_ms() - seen.held_since_ms[0] >= 599_000
    assert seen.held_since_ms[1] == began[1]
    worker.run(worker.live.release("j", [token]))
    assert worker.lease_ms() - worker.observe().held_since_ms[1] < 599_000


def test_the_progress_of_a_stage(worker: Worker) -> None:
    def progress(stage: str) -> tuple[int, StageProgress]:
        return worker.run(worker.live.progress("j", stage))

    for stage in ("s", "k", "u"):
        assert progress(stage) == (1, StageProgress())
    assert worker.commit(0, s=None) == {"s": 0}
    # The ledger does not have it yet: it may still be lost, and must not be shown to whoever restarts.
    assert progress("s") == (1, StageProgress())
    worker.run(worker.live.publish("j", 1, 1, {}, {"s": 0}))
    assert progress("s") == (1, StageProgress(0, 0))
    worker.run(worker.live.open_run("j", ["s", "u"], 3))
    assert worker.commit(2**53, run=3, s=None) == {"s": 0}
    worker.run(worker.live.publish("j", 1, 2, {}, {"s": 2**53}))
    assert progress("s") == (1, StageProgress(3, 2**53))
    assert progress("k") == (1, StageProgress())
    assert progress("u") == (1, StageProgress(3))
    with pytest.raises(UnknownStageError):
        progress("none")
    with pytest.raises(StateLostError):
        worker.run(worker.live.progress("none", "s"))
    worker.run(worker.live.install(installed(pipeline(), generation=2)))
    assert progress("s") == (2, StageProgress())


def test_progress_is_restored_from_the_ledger(live: LiveStore, runner: asyncio.Runner) -> None:
    runner.run(live.begin(installed(pipeline(), progress=StageProgress(3, 41))))
    assert runner.run(live.progress("j", "k")) == (1, StageProgress(3, 41))


# ---- reports


def test_a_stage_agrees_once_every_range_has_spoken(worker: Worker) -> None:
    token = worker.claim(None).token
    assert worker.report(token, {"a": 10}).advances is False
    assert worker.agreement() == STAND_STILL
    assert worker.report(token, {"b": 7}).advances is True
    assert worker.agreement() == Agreement(7)


def test_a_promise_never_goes_back(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 10, "b": 10})
    reported = worker.report(token, {"a": 5, "b": 11})
    assert list(reported.behind) == ["a"]
    assert worker.agreement() == Agreement(10)


def test_a_lease_lost_in_part_applies_the_rest(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.claim(["a"], holder="y", rank=Rank(0, 1))
    reported = worker.report(token, {"a": 9, "b": 9, "zz": 9})
    assert reported.accepted == 1
    assert sorted(reported.rejected) == [("a", "superseded"), ("zz", "unknown")]
    assert list(worker.run(worker.live.columns("j", "s"))["promises"]) == [MIN, 9]


def test_an_expired_lease_holds_its_range_at_its_last_promise(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    token = worker.claim(["a"], ttl_ms=1_000).token
    worker.report(token, {"a": 10})
    other = worker.claim(["b"], holder="y", ttl_ms=60_000).token
    advance(5_000)
    worker.run(worker.live.expire())
    worker.report(other, {"b": 50})
    assert worker.agreement() == Agreement(10)


def test_idle_leaves_the_minimum_until_it_reports_or_its_lease_ends(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    token = worker.claim(["a"], ttl_ms=1_000).token
    other = worker.claim(["b"], holder="y", ttl_ms=60_000).token
    worker.report(token, {"a": 10})
    worker.report(other, {"b": 50})
    worker.report(token, {"a": MIN}, idle=["a"])
    assert worker.agreement() == Agreement(50)
    worker.report(token, {"a": 20})
    assert worker.agreement() == Agreement(20)
    worker.report(token, {"a": MIN}, idle=["a"])
    advance(1_000)
    worker.run(worker.live.expire())
    assert worker.agreement() == Agreement(20)


def test_idle_lapses_when_the_lease_is_taken_over_or_released(worker: Worker) -> None:
    for lose in ("takeover", "release"):
        token = worker.claim(None, rank=Rank(0, 1)).token
        worker.report(token, {"a": MIN, "b": MIN}, idle=["a", "b"])
        assert worker.agreement() == Agreement(MIN, idle=True)
        if lose == "takeover":
            token = worker.claim(None, holder="y", rank=Rank(0, 2)).token
        worker.run(worker.live.release("j", [token]))
        assert worker.agreement() == STAND_STILL


def test_final_and_idle_do_not_jump_to_the_end(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": MAX, "b": 5}, idle=["b"])
    assert worker.agreement() == Agreement(5, idle=True)
    worker.report(token, {"b": MAX})
    assert worker.agreement() == FINAL


def test_late_rows_of_a_commit_count_once(worker: Worker) -> None:
    def commit(epoch: int, **late: int) -> None:
        stages = {stage: StageCommit(late=rows) for stage, rows in late.items()}
        worker.run(worker.live.commit("j", Commit(0, epoch, stages)))

    token = worker.claim(None).token
    waiting = {"a": ReportedFacts(records=4, late=1)}
    worker.report(token, {"a": 5}, epoch=2, facts=waiting)
    commit(2, s=3, k=0)
    assert (worker.observe().counts, worker.observe("k").counts) == (Counts(4, 4), Counts())
    commit(2, s=3, k=7)
    assert (worker.observe().counts, worker.observe("k").counts) == (Counts(4, 4), Counts())
    commit(3, s=2, k=2**53)
    assert (worker.observe().counts, worker.observe("k").counts) == (Counts(4, 6), Counts(0, 2**53))
    worker.report(token, {"a": 6}, facts={"a": ReportedFacts(late=1)})
    assert worker.observe().counts == Counts(4, 7)


def test_a_refused_commit_counts_no_late_rows(worker: Worker) -> None:
    worker.commit(4, s=None)
    ahead = {"s": StageCommit(late=3), "k": StageCommit(99, late=3)}
    with pytest.raises(InputAheadError):
        worker.run(worker.live.commit("j", Commit(0, 5, ahead)))
    with pytest.raises(StaleEpochError):
        worker.run(worker.live.commit("j", Commit(0, 3, {"s": StageCommit(late=3)})))
    assert (worker.observe().counts, worker.observe("k").counts) == (Counts(), Counts())
    worker.run(worker.live.commit("j", Commit(0, 5, {"s": StageCommit(late=3)})))
    assert worker.observe().counts == Counts(0, 3)


def test_corrections_of_a_commit_count_once(worker: Worker) -> None:
    def commit(epoch: int, **corrections: int) -> None:
        stages = {stage: StageCommit(corrections=count) for stage, count in corrections.items()}
        worker.run(worker.live.commit("j", Commit(0, epoch, stages)))

    token = worker.claim(None).token
    worker.report(token, {"a": 5}, epoch=2, facts={"a": ReportedFacts(records=4, late=1)})
    commit(2, s=0, k=3)
    assert (worker.observe().counts, worker.observe("k").counts) == (Counts(4, 1), Counts(0, 0, 3))
    commit(2, s=7, k=3)
    assert (worker.observe().counts, worker.observe("k").counts) == (Counts(4, 1), Counts(0, 0, 3))
    both = StageCommit(late=2, corrections=2**53)
    worker.run(worker.live.commit("j", Commit(0, 3, {"k": both})))
    assert worker.observe("k").counts == Counts(0, 2, 3 + 2**53)
    token = worker.claim(None, stage="k").token
    worker.report(token, {LEFT: 6}, stage="k", facts={LEFT: ReportedFacts(records=1)})
    assert worker.observe("k").counts == Counts(1, 2, 3 + 2**53)


def test_agreements_have_the_rows_of_their_stages(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 5}, facts={"a": ReportedFacts(records=4, late=1)})
    found = worker.agreement()
    assert (found.records, found.late) == (4, 1)
    worker.report(token, {"a": 6}, facts={"a": ReportedFacts(records=2, late=2)})
    found = worker.agreement()
    assert (found.records, found.late) == (6, 3)
    below = worker.agreement("k")
    assert (below.records, below.late) == (0, 0)


def test_counts_end_at_the_largest_integer_of_the_ledger(worker: Worker) -> None:
    """Beyond it the ledger rejects the record, with the advances in it."""
    many = [f"{number:04}" for number in range(1_024)]
    worker.run(worker.live.begin(installed(pipeline(ShardLayout.of(many)), incarnation=2)))
    token = worker.claim(many).token
    each = ReportedFacts(records=2**53, late=2**53)
    worker.report(token, dict.fromkeys(many, 5), facts=dict.fromkeys(many, each))
    assert worker.observe().counts == Counts(MAX, MAX)
    worker.report(token, {many[0]: 6}, facts={many[0]: ReportedFacts(records=1, late=0)})
    stages = {"s": StageCommit(late=1, corrections=2**53)}
    worker.run(worker.live.commit("j", Commit(0, 1, stages)))
    assert worker.observe().counts == Counts(MAX, MAX, 2**53)
    _, agreements = worker.run(worker.live.agreements("j", frozenset({"s"})))
    found = agreements["s"]
    assert (found.watermark, found.records, found.late) == (5, MAX, MAX)


def test_a_refused_commit_counts_no_corrections(worker: Worker) -> None:
    worker.commit(4, s=None)
    ahead = {"s": StageCommit(corrections=3), "k": StageCommit(99, corrections=3)}
    with pytest.raises(InputAheadError):
        worker.run(worker.live.commit("j", Commit(0, 5, ahead)))
    with pytest.raises(StaleEpochError):
        worker.run(worker.live.commit("j", Commit(0, 3, {"s": StageCommit(corrections=3)})))
    assert (worker.observe().counts, worker.observe("k").counts) == (Counts(), Counts())
    worker.run(worker.live.commit("j", Commit(0, 5, {"s": StageCommit(corrections=3)})))
    assert worker.observe().counts == Counts(0, 0, 3)


def test_nobody_observes_what_was_not_published(worker: Worker) -> None:
    token = worker.claim(None, stage="k").token
    worker.publish(k=StageWatermark(10, MIN))
    with pytest.raises(InputAheadError):
        worker.report(token, {LEFT: 11}, stage="k", observed=11)
    assert worker.report(token, {LEFT: 10}, stage="k", observed=10).accepted == 1


def test_holds_of_a_commit_are_of_all_ranges_until_the_next(worker: Worker) -> None:
    worker.publish(k=StageWatermark(90, 0))
    token = worker.claim(None, stage="k").token
    everywhere = dict.fromkeys(KEYS.names, MAX)
    for epoch, holds in (1, {"join": 30, "output": 40}), (2, {}):
        worker.report(token, everywhere, stage="k", epoch=epoch, capped_at_commit=True)
        commit = StageCommit(90, holds)
        worker.run(worker.live.commit("j", Commit(0, epoch, {"k": commit})))
        shown = worker.run(worker.live.ranges("j", "k", limit=10, order="range"))
        assert {view.promise for view in shown} == {min(holds.values(), default=90)}
        assert [view.note.holds for view in shown] == [holds, holds]
        assert worker.observe("k").kept == (CommittedHolds(90, holds) if holds else None)


def test_a_range_that_keeps_something_of_its_own_says_more(worker: Worker) -> None:
    worker.publish(k=StageWatermark(90, 0))
    token = worker.claim(None, stage="k").token
    worker.report(token, {LEFT: MAX}, stage="k", epoch=1, capped_at_commit=True)
    worker.run(worker.live.commit("j", Commit(0, 1, {"k": StageCommit(90, {"join": 30})})))
    worker.report(token, {LEFT: 35}, stage="k", holds={LEFT: {"own": 35}})
    shown = worker.run(worker.live.range_views("j", "k", [0, 1]))
    # Nothing of the second was applied: it does not wait for the commit's hold.
    assert [view.note.holds for view in shown] == [{"own": 35}, {}]


def test_holds_are_shown_as_said_last(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5}, holds={"a": {"state": 5}})
    shown = worker.run(worker.live.ranges("j", "s", limit=10, order="range"))
    assert [view.note.holds for view in shown] == [{"state": 5}, {}]
    worker.report(token, {"a": 6})
    shown = worker.run(worker.live.ranges("j", "s", limit=1, order="range"))
    assert shown[0].note.holds == {}
    assert (shown[0].promise, shown[0].holder) == (6, "x")


def packed(worker: Worker, token: str, **holds: list[int]) -> None:
    """Report for all ranges of a lease at once; MAX is no hold. As where reports are read, the promises
    are the holds themselves where those are of one component.
    """
    columns = {name: np.array(each, dtype=np.int64) for name, each in holds.items()}
    first, *others = columns.values()
    promises = [50] * len(first) if others or first.max() == MAX else first
    worker.run(worker.live.report("j", "s", Report(token, None, promises, hold_columns=columns)))


def held(worker: Worker) -> list[Mapping[str, int]]:
    shown = worker.run(worker.live.ranges("j", "s", limit=10, order="range"))
    return [view.note.holds for view in shown]


@pytest.mark.parametrize("ending", ["release", "claim", "takeover", "run", "expiry"])
def test_holds_of_a_packed_report_outlast_its_lease(
    worker: Worker, advance: Callable[[int], None], ending: str
) -> None:
    token = worker.claim(None).token
    packed(worker, token, state=[40, MAX], output=[MAX, 45])
    said = [{"state": 40}, {"output": 45}]
    assert held(worker) == said
    match ending:
        case "release":
            worker.run(worker.live.release("j", [token]))
        case "claim":
            worker.claim(None)
        case "takeover":
            worker.claim(["a"], holder="y", rank=Rank(0, 1, 1))
        case "run":
            worker.run(worker.live.open_run("j", ["s"], 1))
        case _:
            advance(20_000)
            worker.run(worker.live.expire("j"))
    assert held(worker) == said


def test_what_a_range_has_said_last_is_shown_however_it_said_it(worker: Worker) -> None:
    both = worker.claim(None).token
    packed(worker, both, state=[40, 41])
    one = worker.claim(["a"]).token
    packed(worker, one, state=[42])
    assert held(worker) == [{"state": 42}, {"state": 41}]
    worker.report(one, {"a": 50})
    assert held(worker) == [{}, {"state": 41}]
    worker.report(one, {"a": 50}, holds={"a": {"own": 9}})
    assert held(worker) == [{"own": 9}, {"state": 41}]
    packed(worker, worker.claim(None).token, state=[43, MAX])
    assert held(worker) == [{"state": 43}, {}]


def test_a_range_shows_no_holds_of_a_report_that_was_rejected_for_it(worker: Worker) -> None:
    """Else an explanation would name a hold that whoever has the range now has never said."""
    old = worker.claim(None).token
    packed(worker, old, state=[40, 41])
    new = worker.claim(["a"], holder="y", rank=Rank(0, 1, 1)).token
    packed(worker, old, state=[7, 42])
    assert held(worker) == [{"state": 40}, {"state": 42}], "as the first one said last"
    packed(worker, new, timer=[50])
    packed(worker, old, state=[8, MAX])
    assert held(worker) == [{"timer": 50}, {}]
    packed(worker, old, **{'state "of" it': [9, 43], "output": [9, MAX]})
    assert held(worker) == [{"timer": 50}, {'state "of" it': 43}]
    packed(worker, new, timer=[MAX])
    packed(worker, worker.claim(["b"], holder="z", rank=Rank(0, 1, 2)).token, state=[44])
    assert held(worker) == [{}, {"state": 44}]


def test_of_two_reports_that_come_together_the_second_is_shown(worker: Worker) -> None:
    token = worker.claim(None).token

    async def both() -> None:
        first = Report(token, ["a"], [5], notes=[RangeNote({"state": 5})])
        second = Report(token, ["a"], [6])
        await asyncio.gather(*(worker.live.report("j", "s", each) for each in (first, second)))

    worker.run(both())
    shown = worker.run(worker.live.ranges("j", "s", limit=1, order="range"))
    assert (shown[0].promise, shown[0].note.holds) == (6, {})


@pytest.mark.parametrize("over", ["takeover", "release", "run"])
def test_who_has_lost_its_lease_hears_of_that_and_not_of_its_columns(
    worker: Worker, over: str
) -> None:
    """A change of the layout has taken one of its ranges, so that they do not fit, either."""
    token = worker.claim(None).token
    packed(worker, token, state=[40, 41])
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("bc")), layout_version=2)))
    with pytest.raises(InvalidReportError, match="claim again"):
        packed(worker, token, state=[42, 43])
    match over:
        case "takeover":
            worker.claim(None, holder="y", rank=Rank(0, 1, 1))
        case "release":
            worker.run(worker.live.release("j", [token]))
        case _:
            worker.run(worker.live.open_run("j", ["s"], 1))
    with pytest.raises(StaleRunError if over == "run" else LeaseLostError):
        packed(worker, token, state=[42, 43])


def test_holds_of_packed_reports_are_shown_under_however_many_leases(
    live: LiveStore, runner: asyncio.Runner
) -> None:
    names = [f"{n:03}" for n in range(100)]
    runner.run(live.begin(installed(pipeline(ShardLayout.of(names)))))
    worker = Worker(live, runner)
    # Each is claimed twice, as by the tasks of two batches.
    for rank in (Rank(0, 1, 1), Rank(0, 2, 1)):
        for n, name in enumerate(names):
            packed(worker, worker.claim([name], rank=rank).token, state=[n + 1 + rank.epoch])
    shown = runner.run(live.ranges("j", "s", limit=100, order="range"))
    assert [view.note.holds for view in shown] == [{"state": n + 3} for n in range(100)]


def test_holds_of_a_packed_report_move_with_their_ranges(worker: Worker) -> None:
    packed(worker, worker.claim(None).token, state=[40, MAX], output=[MAX, 45])
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("bc")), layout_version=2)))
    assert held(worker) == [{"output": 45}, {}]
    packed(worker, worker.claim(None).token, state=[MAX, 46])
    assert held(worker) == [{}, {"state": 46}]


def test_ranges_that_hold_the_stage_back_come_first(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 9, "b": 3})
    shown = worker.run(worker.live.ranges("j", "s", limit=5, order="promise"))
    assert [view.name for view in shown] == ["b", "a"]


def test_many_ranges_at_once_are_the_same_as_one_by_one(
    live: LiveStore, runner: asyncio.Runner
) -> None:
    shards = ShardLayout.of(f"n{i}" for i in range(500))
    worker = Worker(live, runner)
    runner.run(live.begin(installed(pipeline(shards))))
    token = worker.claim(None).token
    worker.report(token, {name: 100 + i for i, name in enumerate(shards.names)})
    assert worker.agreement() == Agreement(100)
    reported = worker.report(
        token, {name: 50 + 2 * i for i, name in enumerate(shards.names)}, idle=["n0"]
    )
    assert len(reported.behind) == 50
    _, _, census = runner.run(live.stage("j", "s"))
    assert (census.total, census.reported, census.idle, census.leased) == (500, 500, 1, 500)
    worker.report(token, dict.fromkeys(shards.names, MAX))
    assert worker.agreement() == FINAL
    _, _, census = runner.run(live.stage("j", "s"))
    assert (census.idle, census.final) == (0, 500)


# ---- epochs


def test_a_report_of_an_epoch_waits_for_its_commit(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 10, "b": 20}, epoch=4)
    assert worker.agreement() == STAND_STILL
    assert worker.commit(4, s=None) == {"s": 2}
    assert worker.agreement() == Agreement(10)
    assert worker.commit(4, s=None) == {"s": 0}
    with pytest.raises(StaleEpochError):
        worker.commit(3, s=None)
    with pytest.raises(StaleEpochError):
        worker.report(token, {"a": 30}, epoch=4)


def test_the_smallest_promise_of_an_epoch_counts(worker: Worker) -> None:
    first = worker.claim(None, rank=Rank(0, 1, 0)).token
    worker.report(first, {"a": 10, "b": 30}, epoch=1)
    second = worker.claim(None, holder="y", rank=Rank(0, 1, 1)).token
    worker.report(second, {"a": 20, "b": 20}, epoch=1)
    worker.commit(1, s=None)
    assert list(worker.run(worker.live.columns("j", "s"))["promises"]) == [10, 20]


def test_an_epochs_reports_may_come_in_any_order(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"b": 20}, epoch=1)
    worker.report(token, {"a": 10}, epoch=1)
    assert worker.commit(1, s=None) == {"s": 2}
    assert list(worker.run(worker.live.columns("j", "s"))["promises"]) == [10, 20]


def test_idle_in_an_epoch_counts_only_under_a_current_lease(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": MIN, "b": 5}, epoch=1, idle=["a"])
    worker.commit(1, s=None)
    assert worker.agreement() == Agreement(5)
    worker.report(token, {"a": MIN, "b": 6}, epoch=2, idle=["a"])
    worker.claim(["a"], holder="y", rank=Rank(0, 3))
    worker.commit(2, s=None)
    assert worker.agreement() == STAND_STILL


def test_an_idle_word_does_not_count_once_its_lease_has_run_out(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    token = worker.claim(None, ttl_ms=1_000).token
    worker.report(token, {"a": MIN, "b": 5}, epoch=1, idle=["a"])
    advance(1_000)
    worker.commit(1, s=None)
    assert worker.agreement() == STAND_STILL


def test_an_idle_word_whose_lease_is_gone_leaves_its_watermark(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 7, "b": 5}, epoch=1, idle=["a"])
    worker.claim(["a"], holder="y", rank=Rank(0, 3))
    assert worker.commit(1, s=None) == {"s": 2}
    assert worker.agreement() == Agreement(5)
    assert list(worker.run(worker.live.columns("j", "s"))["promises"]) == [7, 5]


def test_the_commit_brings_the_input_that_caps_the_promises(worker: Worker) -> None:
    token = worker.claim(None, stage="k").token
    worker.publish(k=StageWatermark(100, MIN))
    worker.report(token, {LEFT: MAX, RIGHT: 70}, stage="k", epoch=1, capped_at_commit=True)
    with pytest.raises(InvalidRequestError, match="input_watermark"):
        worker.commit(1, k=None)
    with pytest.raises(InputAheadError):
        worker.commit(1, k=101)
    assert worker.commit(1, k=90) == {"k": 2}
    assert list(worker.run(worker.live.columns("j", "k"))["promises"]) == [90, 70]


def test_a_refused_commit_applies_nothing_to_any_stage(worker: Worker) -> None:
    source, keyed = worker.claim(None).token, worker.claim(None, stage="k").token
    worker.report(source, {"a": 1, "b": 1}, epoch=1)
    worker.report(keyed, {LEFT: MAX, RIGHT: MAX}, stage="k", epoch=1, capped_at_commit=True)
    with pytest.raises(InputAheadError):
        worker.commit(1, s=None, k=5)
    assert worker.agreement() == STAND_STILL
    assert worker.commit(1, s=None, k=MIN) == {"s": 2, "k": 2}


def test_epochs_that_wait_are_bounded(worker: Worker) -> None:
    token = worker.claim(None).token
    for epoch in range(MAX_WAITING_EPOCHS):
        worker.report(token, {"a": 1}, epoch=epoch)
    with pytest.raises(EpochsWaitingError):
        worker.report(token, {"a": 1}, epoch=MAX_WAITING_EPOCHS)
    worker.commit(5, s=None)
    worker.report(token, {"a": 1}, epoch=MAX_WAITING_EPOCHS)


# ---- layouts, generations, incarnations


def test_a_layout_change_keeps_what_is_unchanged(worker: Worker) -> None:
    token = worker.claim(None).token
    keyed = worker.claim(None, stage="k").token
    worker.report(token, {"a": 10, "b": 20})
    worker.publish(k=StageWatermark(10, MIN))
    worker.report(keyed, {LEFT: 10, RIGHT: 10}, stage="k", observed=10)
    worker.report(keyed, {LEFT: 10, RIGHT: 10}, stage="k", observed=10, epoch=1)
    finer = KeyLayout.at((0, 2**30, 2**31, 2**32))
    change = installed(pipeline(ShardLayout.of(["b", "c"]), finer), layout_version=2)
    worker.run(worker.live.install(change))
    assert list(worker.run(worker.live.columns("j", "s"))["promises"]) == [20, MIN]
    assert list(worker.run(worker.live.columns("j", "k"))["promises"]) == [10, 10, 10]
    assert worker.agreement() == STAND_STILL
    assert worker.report(token, {"b": 21, "a": 5}).accepted == 1
    reported = worker.report(keyed, {LEFT: 10, RIGHT: 10}, stage="k", observed=10)
    assert reported.accepted == 1
    assert [name for name, _ in reported.rejected] == [LEFT]
    assert worker.commit(1, k=10) == {"k": 1}


def test_an_older_layout_changes_nothing(worker: Worker) -> None:
    worker.run(worker.live.install(installed(pipeline(ShardLayout.of("abc")), layout_version=3)))
    worker.run(worker.live.install(installed(pipeline(), layout_version=2)))
    assert len(worker.run(worker.live.columns("j", "s"))["promises"]) == 3


def test_a_reset_starts_over(worker: Worker) -> None:
    grant = worker.claim(None)
    worker.report(grant.token, {"a": 10, "b": 10})
    worker.publish(s=StageWatermark(MIN, 10), version=4)
    worker.run(worker.live.install(installed(pipeline(), generation=2)))
    assert worker.lost(grant.token) == "superseded"
    assert worker.agreement() == STAND_STILL
    view, stage, census = worker.run(worker.live.stage("j", "s"))
    assert (view.generation, stage.watermark.output, census.leased) == (2, MIN, 0)
    worker.publish(s=StageWatermark(MIN, 11), version=5, generation=1)
    assert worker.run(worker.live.stage("j", "s"))[1].watermark.output == MIN
    assert worker.claim(None).fence > grant.fence


def test_a_job_comes_back_from_the_ledger(worker: Worker) -> None:
    fence = worker.claim(None).fence
    worker.run(worker.live.remove("j", 1))
    view = StageView(StageWatermark(MIN, 5), 7, 7, 7, 6)
    saved = {"promises": np.array([5, 9]), "raised_at_ms": np.array([40, 0])}
    packed = {name: packed_column(column) for name, column in saved.items()}
    columns = joined_columns(2, [(0, packed)])
    back = installed(
        pipeline(),
        incarnation=2,
        views={"s": view},
        columns={"s": columns},
        progress=StageProgress(3, 12),
    )
    with pytest.raises(StateLostError):
        worker.run(worker.live.install(back))
    worker.run(worker.live.begin(back))
    assert worker.agreement() == Agreement(5)
    assert worker.run(worker.live.stage("j", "s"))[1] == view
    views = worker.run(worker.live.range_views("j", "s", [0, 1]))
    assert [(view.promise, view.raised_at_ms) for view in views] == [(5, 40), (9, None)]
    grant = worker.claim(None, rank=Rank(3))
    assert grant.fence > fence
    with pytest.raises(StaleEpochError):
        worker.report(grant.token, {"a": 6}, epoch=12)


def test_what_a_range_has_unfinished_comes_back_from_the_ledger(worker: Worker) -> None:
    """Else a loss would make it look quiet, and a policy would let the watermark pass it."""
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 5})

    def saved() -> Columns:
        chunks = [c for c in worker.run(worker.live.unsaved()) if c.stage == "s"]
        worker.run(worker.live.note_saved(chunks))
        return joined_columns(2, ((chunk.chunk, chunk.columns) for chunk in chunks))

    assert saved()["unfinished"].tolist() == [0, 0]
    # Its promise stays the same, and it has to be saved all the same.
    for said in (
        ReportedFacts(keeps_back=True),
        ReportedFacts(backlog=1),
        ReportedFacts(pending=b"x"),
    ):
        worker.report(token, {"b": 5}, facts={"b": said})
        columns = saved()
        assert columns["unfinished"].tolist() == [0, 1]
        worker.report(token, {"b": 5}, facts={"b": ReportedFacts(records=0, pending=b"")})
        assert saved()["unfinished"].tolist() == [0, 0]
    worker.run(worker.live.remove("j", 1))
    worker.run(worker.live.begin(installed(pipeline(), incarnation=2, columns={"s": columns})))
    assert worker.observe().facts == {1: UNFINISHED}
    token = worker.claim(None).token
    worker.report(token, {"b": 5}, facts={"b": ReportedFacts(records=0)})
    assert not worker.observe().facts[1].is_unfinished


# ---- publishing, reading, saving


def test_nothing_is_published_of_a_job_that_is_gone(worker: Worker) -> None:
    worker.run(worker.live.remove("j", 1))
    with pytest.raises(StateLostError):
        worker.publish(s=StageWatermark(output=5))


def test_an_older_version_is_not_published(worker: Worker) -> None:
    worker.publish(s=StageWatermark(MIN, 9), version=2)
    worker.publish(s=StageWatermark(MIN, 8), version=1)
    assert worker.run(worker.live.stage("j", "s"))[1].watermark.output == 9


def test_a_watch_wakes_at_each_change(worker: Worker) -> None:
    async def scenario() -> None:
        with worker.live.watch("j", "s") as one, worker.live.watch("j") as all_of_them:
            view = StageView(StageWatermark(5, MIN), 1, 1, 1, 1)
            await worker.live.publish("j", 1, 1, {"k": view}, {})
            await asyncio.wait_for(all_of_them.wait(), 5)
            one.rearm()
            view = StageView(StageWatermark(MIN, 5), 1, 2, 1, 1)
            await worker.live.publish("j", 1, 2, {"s": view}, {})
            await asyncio.wait_for(one.wait(), 5)
            for watch in (one, all_of_them):
                watch.rearm()
            await worker.live.remove("j", 1)
            await asyncio.wait_for(one.wait(), 5)
            await asyncio.wait_for(all_of_them.wait(), 5)

    worker.run(scenario())


def test_changed_promises_are_unsaved_until_they_are_saved(worker: Worker) -> None:
    worker.run(worker.live.note_saved(worker.run(worker.live.unsaved())))
    token = worker.claim(None).token
    worker.report(token, {"a": 1, "b": 2})
    [before] = worker.run(worker.live.unsaved("j"))
    assert (before.stage, before.chunk, before.incarnation) == ("s", 0, 1)
    assert np.frombuffer(before.columns["promises"], "<i8").tolist() == [1, 2]
    worker.report(token, {"a": 3})
    worker.run(worker.live.note_saved([before]))
    [after] = worker.run(worker.live.unsaved())
    assert np.frombuffer(after.columns["promises"], "<i8").tolist() == [3, 2]
    assert after.stamp > before.stamp
    worker.run(worker.live.note_saved([after]))
    assert list(worker.run(worker.live.unsaved())) == []
    worker.report(token, {"a": 3, "b": 1})
    assert list(worker.run(worker.live.unsaved())) == []


def test_a_checkpoint_has_every_column(worker: Worker) -> None:
    worker.report(worker.claim(None).token, {"a": 5})
    [chunk] = worker.run(worker.live.unsaved("j"))
    columns = joined_columns(2, [(0, chunk.columns)])
    seen = worker.run(worker.live.observe("j", ["s"]))[1]["s"]
    assert chunk.columns.keys() == COLUMNS.keys()
    assert columns["promises"].tolist() == [5, MIN]
    assert columns["raised_at_ms"].tolist() == seen.raised_at_ms.tolist()
    assert seen.raised_at_ms[0] > 0


def test_an_idle_range_is_saved_with_its_promise(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 7, "b": MAX})
    worker.report(token, {"a": MIN}, idle=["a"])
    [chunk] = worker.run(worker.live.unsaved("j"))
    assert np.frombuffer(chunk.columns["promises"], "<i8").tolist() == [7, MAX]


def test_an_epoch_is_unrecorded_until_the_ledger_has_it(worker: Worker) -> None:
    def commit() -> Committed:
        return worker.run(worker.live.commit("j", Commit(0, 3, {"s": StageCommit()})))

    assert list(commit().unrecorded) == ["s"]
    assert list(commit().unrecorded) == ["s"]
    worker.run(worker.live.publish("j", 1, 1, {}, {"s": 3}))
    assert list(commit().unrecorded) == []


def test_what_the_ledger_knows_more_of_is_caught_up_with(worker: Worker) -> None:
    token = worker.claim(None).token
    view = StageView(StageWatermark(MIN, 5), 3, 7, 7, 6)
    more = installed(pipeline(), views={"s": view}, progress=StageProgress(2), revision=7)
    worker.run(worker.live.install(more))
    head = worker.run(worker.live.head("j"))
    assert head is not None
    assert (head.revision, head.last_run) == (7, 2)
    assert worker.run(worker.live.stage("j", "s"))[1] == view
    assert worker.lost(token) == "superseded"
    worker.claim(None, rank=Rank(2))
    worker.run(worker.live.install(installed(pipeline())))
    after = worker.run(worker.live.head("j"))
    assert after is not None
    assert replace(after, changes=head.changes) == head
    assert worker.run(worker.live.stage("j", "s"))[1] == view


def test_an_incarnation_begins_once(worker: Worker) -> None:
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 5})
    worker.run(worker.live.begin(installed(pipeline())))
    assert worker.agreement() == Agreement(5)
    assert worker.lost(token) is None
    worker.run(worker.live.begin(installed(pipeline(), incarnation=2)))
    assert worker.agreement() == STAND_STILL
    assert worker.lost(token) == "unknown"
    worker.run(worker.live.install(installed(pipeline(), layout_version=2)))
    assert worker.run(worker.live.heads())["j"].layout_version == 1


def test_a_later_generation_is_not_removed(worker: Worker) -> None:
    worker.run(worker.live.install(installed(pipeline(), generation=2)))
    worker.run(worker.live.remove("j", 1))
    assert worker.run(worker.live.job("j")).generation == 2


def test_leases_end_before_an_agreement_is_drawn(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    token = worker.claim(None, ttl_ms=1_000).token
    worker.report(token, {"a": 5, "b": 50})
    worker.report(token, {"a": MIN}, idle=["a"])
    assert worker.agreement() == Agreement(50)
    advance(1_000)
    assert worker.agreement() == Agreement(5)


def test_far_apart_ranges_are_as_near_ones(live: LiveStore, runner: asyncio.Runner) -> None:
    keys = KeyLayout.tile(20_000)
    worker = Worker(live, runner)
    runner.run(live.begin(installed(pipeline(keys=keys))))
    names = list(keys.names)
    token = worker.claim(None, stage="k").token
    worker.publish(k=StageWatermark(10_000, MIN))
    for start in (0, 10_000):
        part = names[start : start + 10_000]
        worker.report(token, dict.fromkeys(part, 100), stage="k", observed=10_000)
    assert worker.agreement("k") == Agreement(100)
    rest = {name: 100 + i for i, name in enumerate(names)}
    scattered = {names[i]: rest.pop(names[i]) for i in range(0, 20_000, 97)}
    shuffled = sorted(scattered, key=lambda name: name[::-1])
    worker.report(token, {n: scattered[n] for n in shuffled}, stage="k", observed=10_000)
    assert worker.agreement("k") == Agreement(100)
    for start in range(0, len(rest), 10_000):
        part = list(rest)[start : start + 10_000]
        worker.report(token, {n: rest[n] for n in part}, stage="k", observed=10_000)
    assert worker.agreement("k") == Agreement(100)
    worker.report(token, {names[0]: 10_000}, stage="k", observed=10_000)
    assert worker.agreement("k") == Agreement(101)
    assert list(runner.run(live.columns("j", "k"))["promises"])[1:] == [
        100 + i for i in range(1, 20_000)
    ]


def test_a_quiet_range_is_settled_only_if_it_is_as_it_was_observed(worker: Worker) -> None:
    token = worker.claim(["a"]).token
    quiet, busy = {"a": ReportedFacts(records=0)}, {"a": ReportedFacts(records=1)}
    worker.report(token, {"a": 5}, facts=quiet)

    def settle() -> bool:
        seen = worker.observe()
        facts = seen.facts[0]
        worker.report(token, {"a": 5}, facts=quiet)
        decision = Settled(0, int(seen.owners[0]), facts.quiet_since_ms, True, MIN)
        worker.run(worker.live.settle("j", "s", worker.observe().layout, [decision]))
        return bool(worker.observe().idle[0])

    assert settle(), "a quiet report changes nothing"
    worker.report(token, {"a": 5}, facts=busy)
    assert not worker.observe().idle[0]
    seen = worker.observe()
    stale = Settled(0, int(seen.owners[0]), seen.facts[0].quiet_since_ms - 1, True, MIN)
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [stale]))
    assert not worker.observe().idle[0], "records came after it was observed"
    stranger = Settled(0, 12_345, seen.facts[0].quiet_since_ms, True, MIN)
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [stranger]))
    assert not worker.observe().idle[0], "it is under another lease"


@pytest.mark.parametrize(
    "unfinished",
    [{"keeps_back": True}, {"oldest_work_ms": 5}, {"pending": b"rows"}],
    ids=["hold", "oldest work", "pending"],
)
@pytest.mark.parametrize("decided", [(True, MIN), (False, 90)], ids=["idle", "promise"])
def test_the_watermark_does_not_pass_what_a_quiet_range_has_left_unfinished_since_the_observation(
    worker: Worker, unfinished: dict[str, Any], decided: tuple[bool, int]
) -> None:
    token = worker.claim(["a"]).token
    worker.report(token, {"a": 5}, facts={"a": ReportedFacts(records=0)})
    seen = worker.observe()
    worker.report(token, {"a": 5}, facts={"a": ReportedFacts(records=0, **unfinished)})
    decision = Settled(0, int(seen.owners[0]), seen.facts[0].quiet_since_ms, *decided)
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [decision]))
    after = worker.observe()
    assert (after.idle[0], after.promises[0]) == (False, 5)
    assert after.facts[0].quiet_since_ms == seen.facts[0].quiet_since_ms


def test_the_commits_of_a_run_that_has_ended_prove_nothing(worker: Worker) -> None:
    stages = {**pipeline().stages}
    stages["s"] = replace(stages["s"], policy=StagePolicy(idle=IdlePolicy(60_000)))
    worker.run(worker.live.begin(installed(Pipeline(stages), incarnation=2)))
    worker.run(worker.live.open_run("j", ["s"], 3))
    for epoch in (1, 2):
        worker.commit(epoch, run=3, s=None)
    commits = worker.observe().commits
    assert commits is not None
    assert commits.count == 2
    worker.run(worker.live.end_run("j", ["s"], RunEnd(2, Outcome.STOPPED, 10)))
    assert worker.observe().commits == commits, "another run has ended"
    worker.run(worker.live.end_run("j", ["s"], RunEnd(3, Outcome.STOPPED, 10)))
    assert worker.observe().commits is None


def test_a_commit_is_dated_by_the_age_of_its_evidence(worker: Worker) -> None:
    stages = {**pipeline().stages}
    stages["s"] = replace(stages["s"], policy=StagePolicy(idle=IdlePolicy(60_000)))
    worker.run(worker.live.begin(installed(Pipeline(stages), incarnation=2)))

    def commit(epoch: int, age_ms: int) -> Commits:
        begin_ms = worker.lease_ms()
        worker.commit(epoch, age_ms=age_ms, s=None)
        found = worker.observe().commits
        assert found is not None
        assert begin_ms <= found.last_ms + age_ms <= worker.lease_ms()
        return found

    first = commit(1, 50_000)
    assert first.before_ms == first.last_ms == first.since_ms - 50_000
    second = commit(2, 20_000)
    assert (second.since_ms, second.count, second.before_ms) == (first.since_ms, 2, first.last_ms)
    # A retry may have been faster than the attempt that the store has taken, and not the reverse.
    retried = commit(2, 30_000)
    assert retried == replace(second, last_ms=retried.last_ms)
    worker.commit(2, age_ms=10_000, s=None)
    assert worker.observe().commits == retried


def test_a_range_that_is_reported_idle_is_so_by_its_workers_word(worker: Worker) -> None:
    """Also if it was idle by policy: its next report ends the idleness."""
    token = worker.claim(["a"]).token
    quiet = {"a": ReportedFacts(records=0)}
    for word_facts in (quiet, None):
        worker.report(token, {"a": 5}, facts=quiet)
        seen = worker.observe()
        decision = Settled(0, int(seen.owners[0]), seen.facts[0].quiet_since_ms, True, MIN)
        worker.run(worker.live.settle("j", "s", worker.observe().layout, [decision]))
        assert worker.observe().idle_by_policy == {0}
        worker.report(token, {"a": 5}, idle={"a"}, facts=word_facts)
        seen = worker.observe()
        assert (bool(seen.idle[0]), seen.idle_by_policy) == (True, set())
        worker.report(token, {"a": 5}, facts=quiet)
        assert not worker.observe().idle[0]


def test_a_lease_that_nobody_has_ended_yet_leaves_a_gap(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    """Nobody has watched from its end to the next claim, though both leases are on record."""
    worker.claim(["a"], ttl_ms=1_000)
    worker.claim(["b"], ttl_ms=60_000)
    before = worker.observe().held_since_ms.tolist()
    advance(1_005)
    while worker.lease_ms() <= before[1]:
        pass
    now_ms = worker.lease_ms()
    assert worker.observe().owners[0], "it has run out, and nobody has ended it"
    worker.claim(["a", "b"], rank=Rank(epoch=1), ttl_ms=60_000)
    after = worker.observe().held_since_ms.tolist()
    assert after[0] >= now_ms
    assert after[1] == before[1], "it was taken over while it was current"
    worker.claim(["a", "b"], holder="y", rank=Rank(epoch=2))
    assert worker.observe().held_since_ms.tolist() == after


def test_records_that_wait_for_a_commit_end_the_quiet(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    token = worker.claim(["a"], ttl_ms=60_000).token
    worker.report(token, {"a": 5}, facts={"a": ReportedFacts(records=0)})
    before = worker.observe().facts[0]
    advance(2)
    worker.report(token, {"a": 6}, epoch=1, facts={"a": ReportedFacts(records=3)})
    after = worker.observe()
    assert after.facts[0].quiet_since_ms >= before.quiet_since_ms
    assert after.facts[0].reported_at_ms == before.reported_at_ms, "it is not applied yet"
    stale = Settled(0, int(after.owners[0]), before.quiet_since_ms - 1, True, MIN)
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [stale]))
    assert not worker.observe().idle[0]
    worker.commit(1, s=None)
    assert worker.observe().counts.records == 3


@pytest.mark.parametrize("dropped_by", ["a run", "an epoch"])
@pytest.mark.parametrize(
    "unfinished", [{"keeps_back": True}, {"backlog": 1}, {"oldest_work_ms": 1}, {"pending": b"x"}]
)
def test_the_unfinished_work_of_an_epoch_that_is_dropped_remains(
    worker: Worker, dropped_by: str, unfinished: dict[str, Any]
) -> None:
    """Its rows are still to come: the watermark must not pass them when the range is found quiet."""
    token = worker.claim(["a", "b"], ttl_ms=60_000).token
    quiet = ReportedFacts(records=0)
    worker.report(token, {"a": 5, "b": 5}, facts={"a": quiet, "b": quiet})
    left = {"a": ReportedFacts(records=0, **unfinished)}
    worker.report(token, {"a": 5}, epoch=1, facts=left)
    if dropped_by == "a run":
        worker.run(worker.live.open_run("j", ["s"], 1))
    else:
        worker.report(token, {"b": 6}, epoch=2, facts={"b": quiet})
        worker.commit(2, s=None)
    seen = worker.observe()
    assert seen.facts[0].is_unfinished
    assert not seen.facts[1].is_unfinished
    leaves = Settled(0, int(seen.owners[0]), seen.facts[0].quiet_since_ms, True, MIN)
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [leaves]))
    assert not worker.observe().idle[0]
    [chunk] = [c for c in worker.run(worker.live.unsaved("j")) if c.stage == "s"]
    assert joined_columns(2, [(0, chunk.columns)])["unfinished"].tolist() == [1, 0]
    run = 1 if dropped_by == "a run" else 0
    token = worker.claim(["a"], rank=Rank(run, 3)).token
    worker.report(token, {"a": 5}, facts={"a": ReportedFacts(records=0, pending=b"")})
    assert not worker.observe().facts[0].is_unfinished


@pytest.mark.parametrize("applied_by", ["a commit", "a report"])
def test_the_unfinished_work_of_a_waiting_epoch_outlasts_what_is_applied_before(
    worker: Worker, applied_by: str
) -> None:
    token = worker.claim(["a", "b"], ttl_ms=60_000).token
    quiet = ReportedFacts(records=0)
    worker.report(token, {"a": 5, "b": 5}, epoch=1, facts={"a": quiet, "b": quiet})
    backlog = ReportedFacts(records=0, backlog=1)
    worker.report(token, {"a": 5, "b": 5}, epoch=2, facts={"a": backlog, "b": quiet})
    if applied_by == "a commit":
        worker.commit(1, s=None)
    else:
        worker.report(token, {"a": 5, "b": 5}, facts={"a": quiet, "b": quiet})
    seen = worker.observe()
    assert seen.facts[0].is_unfinished
    assert not seen.facts[1].is_unfinished
    # Its own commit brings what it has reported, and the next one without backlog ends the work.
    worker.commit(2, s=None)
    assert worker.observe().facts[0].is_unfinished
    worker.report(token, {"a": 5, "b": 5}, epoch=3, facts={"a": quiet, "b": quiet})
    worker.commit(3, s=None)
    assert not worker.observe().facts[0].is_unfinished


def test_an_observation_has_the_soft_values_that_readers_have(worker: Worker) -> None:
    """Not the series of commits, nor the holds of the last one, which are stored beside these."""
    flow = pipeline()
    stages = {**flow.stages, "k": replace(flow.stages["k"], policy=StagePolicy(idle=IdlePolicy(9)))}
    worker.run(worker.live.begin(installed(Pipeline(stages), incarnation=2)))
    worker.publish(k=StageWatermark(5, MIN))
    worker.run(worker.live.commit("j", Commit(0, 1, {"k": StageCommit(3, {"window": 2})})))
    seen = worker.observe("k")
    assert (seen.marks, seen.generation) == ({}, 1)
    marks = {"k": {"processing": 8, "p99": MIN, "p50": MAX}}
    worker.run(worker.live.raise_marks("j", 1, marks))
    seen = worker.observe("k")
    assert seen.marks == marks["k"]
    assert seen.kept == CommittedHolds(3, {"window": 2})
    worker.run(worker.live.install(installed(flow, incarnation=2, generation=2)))
    assert (worker.observe("k").marks, worker.observe("k").generation) == ({}, 2)
