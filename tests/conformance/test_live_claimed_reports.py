"""Reports that bring their claim: one step that is a claim, a report and perhaps a release.

The law: a store in which each claim comes within its report is, after each step, as a store in which the
claim, the report and the release are steps of their own. A report that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from service.errors import (
    EpochsWaitingError,
    InputAheadError,
    LeaseConflictError,
    LeaseLostError,
    ProblemError,
    StaleEpochError,
    StaleRunError,
)
from service.frontier.epochs import Arrival, arrival
from service.frontier.facts import ReportedFacts
from service.frontier.graph import Pipeline, Stage, StageWatermark
from service.frontier.leases import Rank, is_of_run
from service.frontier.policies import IdlePolicy, StagePolicy
from service.frontier.ranges import ShardLayout
from service.frontier.reports import may_observe
from service.frontier.timestamps import MAX, MIN
from service.live.port import LiveStore, UnknownShardsError
from service.model.jobs import StageView
from service.model.leases import Claim, Denied
from service.model.reports import Commit, RangeNote, Report, Reported, StageCommit
from tests.conformance.test_live import LEFT, RIGHT, SHARDS, Worker, installed, pipeline

STEPS = 60
EPOCHS = 6
INPUT = 50
"""The published input of the keyed stage."""


@pytest.fixture
def worker(live: LiveStore, runner: asyncio.Runner) -> Worker:
    runner.run(live.begin(installed(pipeline())))
    return Worker(live, runner)


def claiming(
    ranges: Sequence[str],
    promises: Sequence[int],
    *,
    holder: str = "x",
    rank: Rank | None = None,
    ttl_ms: int = 10_000,
    **members: Any,
) -> Report:
    claim = Claim(list(ranges), holder, ttl_ms, rank or Rank())
    return Report("", list(ranges), list(promises), claim=claim, **members)


def reported(worker: Worker, report: Report, stage: str = "s") -> Reported:
    return worker.run(worker.live.report("j", stage, report))


def held(worker: Worker) -> dict[str, str | None]:
    views = worker.run(worker.live.ranges("j", "s", limit=10, order="range"))
    return {view.name: view.holder for view in views}


# ---- the law


@dataclass
class Twin:
    """A job that does what the other does, with the same tokens by name."""

    live: LiveStore
    runner: asyncio.Runner
    job: str

    def __post_init__(self) -> None:
        self.tokens: list[str] = []
        layouts = {"s": Stage((), SHARDS, StagePolicy(idle=IdlePolicy(1_000)))}
        flow = Pipeline({**pipeline().stages, **layouts})
        self.run(self.live.begin(replace(installed(flow), name=self.job)))
        view = StageView(StageWatermark(INPUT, MIN), 1, 1, 1, 1)
        self.run(self.live.publish(self.job, 1, 1, {"k": view}, {}))

    def run(self, step: Any) -> Any:
        return self.runner.run(step)

    def together(self, stage: str, report: Report) -> Reported:
        result: Reported = self.run(self.live.report(self.job, stage, report))
        assert result.grant is not None
        self.tokens.append(result.grant.token)
        return result

    def apart(self, stage: str, report: Report) -> Reported:
        assert report.claim is not None
        grant = self.run(self.live.claim(self.job, stage, report.claim))
        self.tokens.append(grant.token)
        kept = [k for k, name in enumerate(report.ranges or ()) if name in set(grant.granted)]
        own = Report(
            grant.token,
            [(report.ranges or ())[k] for k in kept],
            [report.promises[k] for k in kept] if not isinstance(report.promises, int) else 0,
            idle=None if report.idle is None else [report.idle[k] for k in kept],
            notes=None if report.notes is None else [report.notes[k] for k in kept],
            epoch=report.epoch,
            observed_input=report.observed_input,
            capped_at_commit=report.capped_at_commit,
            facts=None if report.facts is None else [report.facts[k] for k in kept],
        )
        result = self.run(self.live.report(self.job, stage, own))
        if report.releases:
            assert self.run(self.live.release(self.job, [grant.token])) == 1
        return result

    def state(self) -> list[Any]:
        """Return all that the steps decide, without instants, which differ between two jobs."""
        found: list[Any] = []
        for stage in ("s", "k"):
            ranges = self.run(self.live.ranges(self.job, stage, limit=10, order="range"))
            indices = range(len(ranges))
            singly = self.run(self.live.range_views(self.job, stage, list(indices)))
            found += [
                (
                    view.name,
                    view.promise,
                    view.idle,
                    view.note,
                    view.holder,
                    view.fence,
                    view.reported_at_ms is None,
                    None if view.facts is None else (view.facts.backlog, view.facts.oldest_work_ms),
                    one.waiting_promise,
                )
                for view, one in zip(ranges, singly, strict=True)
            ]
            view, _, census = self.run(self.live.stage(self.job, stage))
            found += [view.generation, census]
            found.append(self.run(self.live.observe(self.job, [stage]))[1][stage].counts)
        view, agreements = self.run(self.live.agreements(self.job, frozenset({"s", "k"})))
        renewed, lost = self.run(self.live.renew(self.job, self.tokens))
        order = {token: n for n, token in enumerate(self.tokens)}
        found += [agreements, view.revision]
        found += [(order[each.token], tuple(each.ranges)) for each in renewed]
        found += [(order[each.token], each.reason) for each in lost]
        return found


@dataclass
class Story:
    """Draws steps, and keeps what decides their refusals."""

    random: Random
    run: int = 0
    committed: int | None = None

    def report(self, stage: str) -> Report:
        draw = self.random
        names = ["a", "b"] if stage == "s" else [LEFT, RIGHT]
        ranges = draw.choice([names, names[1:], [*names[::-1], "unknown"]])
        count = len(ranges)
        epoch = draw.choice([None, draw.randrange(EPOCHS)])
        is_keyed = stage == "k"
        is_capped = is_keyed and epoch is not None and draw.random() < 0.5
        promises = [draw.choice([MIN, MAX, *range(40)]) for _ in ranges]
        facts = [
            ReportedFacts(records=draw.randrange(3), backlog=draw.randrange(2)) for _ in ranges
        ]
        return claiming(
            ranges,
            [min(each, INPUT) for each in promises] if is_keyed else promises,
            holder=draw.choice(["x", "y"]),
            rank=Rank(draw.choice([self.run] * 5 + [7]), draw.randrange(3), draw.randrange(3)),
            ttl_ms=draw.choice([2_000, 10_000]),
            idle=[draw.random() < 0.4 for _ in range(count)],
            notes=[RangeNote({"state": 5}) if draw.random() < 0.5 else None for _ in range(count)],
            epoch=epoch,
            observed_input=None if stage == "s" or is_capped else INPUT + (draw.random() < 0.2),
            capped_at_commit=is_capped,
            facts=draw.choice([None, facts]),
            releases=draw.random() < 0.3,
        )

    def refusal(self, report: Report, waiting: Sequence[int]) -> type[ProblemError] | None:
        assert report.claim is not None
        if not is_of_run(report.claim.rank.run, self.run):
            return StaleRunError
        if report.epoch is not None:
            match arrival(report.epoch, self.committed, waiting):
                case Arrival.STALE:
                    return StaleEpochError
                case Arrival.TOO_MANY:
                    return EpochsWaitingError
                case Arrival.WAITS:
                    pass
        return None if may_observe(report.observed_input, INPUT) else InputAheadError


@pytest.mark.parametrize("seed", range(6))
def test_a_claim_within_a_report_is_as_one_before_it(
    live: LiveStore, runner: asyncio.Runner, advance: Callable[[int], None], seed: int
) -> None:
    one, two = Twin(live, runner, "one"), Twin(live, runner, "two")
    story = Story(Random(seed))
    outcomes: set[str] = set()
    for _ in range(STEPS):
        match story.random.randrange(12):
            case 0:
                advance(story.random.choice([500, 3_000]))
                # As the use cases do before each step.
                runner.run(live.expire())
            case 1:
                _commit_both(story, one, two)
            case 2:
                number = story.run + story.random.randrange(2)
                story.run = max(story.run, number)
                for job in (one, two):
                    job.run(live.open_run(job.job, ["s", "k"], number))
            case 3 if one.tokens:
                place = story.random.randrange(len(one.tokens))
                for job in (one, two):
                    job.run(live.release(job.job, [job.tokens[place]]))
            case 4 if one.tokens:
                place = story.random.randrange(len(one.tokens))
                for job in (one, two):
                    with suppress(LeaseLostError, StaleRunError):
                        job.run(live.report(job.job, "s", Report(job.tokens[place], ["b"], [3])))
            case _:
                stage = story.random.choice("ssk")
                outcomes.add(_report_both(story, stage, one, two))
        assert one.state() == two.state()
    assert {"applied", "conflict", "refused"} <= outcomes


def _commit_both(story: Story, one: Twin, two: Twin) -> None:
    epoch = story.random.randrange(EPOCHS)
    commit = Commit(story.run, epoch, {"s": StageCommit(), "k": StageCommit(INPUT)})
    applied: list[Any] = []
    for job in (one, two):
        with suppress(StaleEpochError):
            applied.append(job.run(job.live.commit(job.job, commit)).applied)
            story.committed = epoch
    assert applied[:1] == applied[1:]


def _report_both(story: Story, stage: str, one: Twin, two: Twin) -> str:
    report = story.report(stage)
    refusal = story.refusal(report, ())
    if refusal is not None:
        before = one.state()
        with pytest.raises(refusal):
            one.together(stage, report)
        assert one.state() == before
        return "refused"
    try:
        apart = two.apart(stage, report)
    except LeaseConflictError as error:
        with pytest.raises(LeaseConflictError) as together:
            one.together(stage, report)
        return _same_conflict(together.value, error)
    found = one.together(stage, report)
    assert (found.accepted, found.behind, found.view) == (apart.accepted, apart.behind, apart.view)
    assert found.rejected == []
    assert found.expires_in_ms == (0 if report.releases else apart.expires_in_ms)
    return "applied"


def _same_conflict(one: LeaseConflictError, two: LeaseConflictError) -> str:
    assert one.total == two.total
    assert _without_times(one.denied) == _without_times(two.denied)
    return "conflict"


def _without_times(denied: Sequence[object]) -> list[Denied]:
    return [replace(each, expires_in_ms=None) for each in denied if isinstance(each, Denied)]


# ---- single cases


def test_a_claim_within_a_report_is_granted_and_reported(worker: Worker) -> None:
    other = worker.claim(["a"], holder="other")
    found = reported(worker, claiming(["b", "a", "c"], [7, 8, 9]))
    assert found.grant is not None
    assert (list(found.grant.granted), found.accepted, found.rejected) == (["b"], 1, [])
    denied = {each.range: (each.reason, each.holder) for each in found.grant.denied}
    assert denied == {"a": ("held", "other"), "c": ("unknown", None)}
    assert found.grant.fence > other.fence
    # The lease is as any other.
    assert worker.report(found.grant.token, {"b": 9}).accepted == 1
    assert worker.report(other.token, {"a": 10}).accepted == 1
    assert worker.agreement().watermark == 9


def test_a_claim_within_a_report_fences_the_lease_that_it_takes(worker: Worker) -> None:
    old = worker.claim(None, rank=Rank(0, 1))
    found = reported(worker, claiming(["a"], [5], holder="y", rank=Rank(0, 1, 1)))
    assert found.accepted == 1
    with pytest.raises(LeaseLostError):
        worker.report(old.token, {"a": 9})
    assert worker.report(old.token, {"b": 9}).accepted == 1


def test_a_released_claim_leaves_its_ranges_free(worker: Worker) -> None:
    found = reported(worker, claiming(["a", "b"], [5, 6], releases=True))
    assert found.grant is not None
    assert found.expires_in_ms == 0
    assert worker.lost(found.grant.token) == "released"
    assert held(worker) == {"a": None, "b": None}
    assert worker.agreement().watermark == 5


def test_a_claim_ends_the_idleness_that_another_lease_has_said(worker: Worker) -> None:
    """Also if both come in one call of the store: the first report makes it idle."""

    async def both() -> Sequence[Reported]:
        idle = claiming(["a"], [MIN], holder="x", idle=[True])
        taking = claiming(["a"], [MIN], holder="x", rank=Rank(0, 1), epoch=3)
        step = worker.live.report
        return await asyncio.gather(step("j", "s", idle), step("j", "s", taking))

    worker.report(worker.claim(["b"]).token, {"b": 9})
    _, taken = worker.run(both())
    assert taken.accepted == 1
    assert worker.agreement().watermark == MIN, "shard a is waited for again"


def test_shards_that_have_not_joined_are_told_of_before_anything_is_applied(
    live: LiveStore, runner: asyncio.Runner
) -> None:
    dynamic = Stage((), SHARDS, StagePolicy(is_dynamic=True))
    runner.run(live.begin(installed(Pipeline({**pipeline().stages, "s": dynamic}))))
    worker = Worker(live, runner)
    report = claiming(["a", "c"], [5, 6])
    with pytest.raises(UnknownShardsError) as refused:
        reported(worker, report)
    assert list(refused.value.shards) == ["c"]
    assert held(worker) == {"a": None, "b": None}
    with pytest.raises(StaleRunError):
        reported(worker, claiming(["c"], [5], rank=Rank(3)))
    worker.run(live.commit("j", Commit(0, 4, {"s": StageCommit()})))
    with pytest.raises(StaleEpochError):
        reported(worker, claiming(["c"], [5], epoch=4))
    larger = Pipeline({**pipeline().stages, "s": replace(dynamic, layout=ShardLayout.of("abc"))})
    runner.run(live.install(installed(larger, layout_version=2)))
    assert reported(worker, report).accepted == 2
