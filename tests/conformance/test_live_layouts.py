"""Layouts that become smaller, and policies that end, in every live store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from service.frontier.agreement import Agreement
from service.frontier.graph import Pipeline
from service.frontier.policies import NO_POLICY, IdlePolicy, StagePolicy
from service.frontier.ranges import ShardLayout
from service.frontier.timestamps import MIN
from service.live.port import LiveStore
from service.model.checkpoints import CHUNK
from service.model.observations import Settled
from tests.conformance.test_live import Worker, installed, pipeline

MANY = [f"{number:05}" for number in range(CHUNK + 10)]


def test_a_stage_may_become_smaller_than_its_unsaved_chunks(
    live: LiveStore, runner: asyncio.Runner
) -> None:
    """On Redis, the read of a chunk behind the end was taken for a loss of the job's state."""
    runner.run(live.begin(installed(pipeline(ShardLayout.of(MANY)))))
    worker = Worker(live, runner)
    token = worker.claim([MANY[0], MANY[-1]]).token
    worker.report(token, {MANY[0]: 5, MANY[-1]: 7})
    assert {chunk.chunk for chunk in worker.run(live.unsaved("j"))} == {0, 1}
    worker.run(live.install(installed(pipeline(ShardLayout.of(MANY[:2])), layout_version=2)))
    chunks = worker.run(live.unsaved("j"))
    assert {(chunk.stage, chunk.chunk) for chunk in chunks if chunk.stage == "s"} == {("s", 0)}
    assert worker.report(token, {MANY[0]: 6}).accepted == 1, "the lease is still there"


def test_a_stage_that_is_gone_has_nothing_to_save(live: LiveStore, runner: asyncio.Runner) -> None:
    runner.run(live.begin(installed(pipeline(ShardLayout.of(MANY)))))
    worker = Worker(live, runner)
    token = worker.claim([MANY[-1]]).token
    worker.report(token, {MANY[-1]: 7})
    flow = pipeline()
    without = Pipeline({"k": replace(flow.stages["s"], layout=flow.stages["s"].layout)})
    worker.run(live.install(installed(without, layout_version=2)))
    worker.run(live.install(installed(flow, layout_version=3)))
    chunks = worker.run(live.unsaved("j"))
    assert ("s", 1) not in {(chunk.stage, chunk.chunk) for chunk in chunks}


def with_policy(policy: StagePolicy, shards: str = "ab") -> Pipeline:
    flow = pipeline(ShardLayout.of(shards))
    return Pipeline({**flow.stages, "s": replace(flow.stages["s"], policy=policy)})


@pytest.mark.parametrize("after", [NO_POLICY, StagePolicy(idle=IdlePolicy(1_000, slack_ms=5))])
@pytest.mark.parametrize("shards", ["ab", "abc"])
def test_idleness_by_policy_ends_with_its_policy(
    live: LiveStore, runner: asyncio.Runner, after: StagePolicy, shards: str
) -> None:
    excluding = StagePolicy(idle=IdlePolicy(1_000))
    runner.run(live.begin(installed(with_policy(excluding))))
    worker = Worker(live, runner)
    token = worker.claim(["a", "b"]).token
    worker.report(token, {"a": 5, "b": 9})
    worker.run(live.release("j", [token]))
    worker.run(live.settle("j", "s", worker.observe().layout, [Settled(0, 0, None, True, MIN)]))
    assert worker.observe().idle_by_policy == {0}
    assert worker.agreement() == Agreement(9)
    longer = with_policy(StagePolicy(idle=IdlePolicy(2_000)))
    worker.run(live.install(installed(longer, layout_version=2)))
    assert worker.observe().idle_by_policy == {0}, "the policy goes on, with another time"
    worker.run(live.install(installed(with_policy(after, shards), layout_version=3)))
    seen = worker.observe()
    assert (seen.idle_by_policy, seen.idle.any()) == (set(), False)
    assert worker.agreement() == Agreement(5 if shards == "ab" else MIN)
    assert seen.census is not None
    assert seen.census.idle == 0


def test_a_decision_about_ranges_of_another_layout_is_void(
    live: LiveStore, runner: asyncio.Runner
) -> None:
    excluding = StagePolicy(idle=IdlePolicy(1_000))
    runner.run(live.begin(installed(with_policy(excluding))))
    worker = Worker(live, runner)
    token = worker.claim(None).token
    worker.report(token, {"a": 5, "b": 9})
    worker.run(live.release("j", [token]))
    layout = worker.observe().layout
    worker.run(live.install(installed(with_policy(excluding, "0ab"), layout_version=2)))
    # Index 1 was of b, and is of a.
    worker.run(live.settle("j", "s", layout, [Settled(1, 0, None, True, MIN)]))
    assert not worker.observe().idle.any()


def test_a_word_of_a_worker_does_not_end_with_a_policy(
    live: LiveStore, runner: asyncio.Runner
) -> None:
    runner.run(live.begin(installed(with_policy(StagePolicy(idle=IdlePolicy(1_000))))))
    worker = Worker(live, runner)
    token = worker.claim(["a", "b"]).token
    worker.report(token, {"a": 5, "b": 9}, idle=["a"])
    worker.run(live.install(installed(with_policy(NO_POLICY), layout_version=2)))
    assert worker.observe().idle.tolist() == [True, False]
    assert worker.agreement() == Agreement(9)
