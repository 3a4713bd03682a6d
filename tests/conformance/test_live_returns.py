"""Ranges that return: answers to them wait for the next revision. See `service.frontier.agreement`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from service.frontier.graph import StageWatermark
from service.frontier.ranges import ShardLayout
from service.frontier.timestamps import MAX
from service.live.port import LiveStore
from tests.conformance.test_live import LEFT, RIGHT, Worker, installed, pipeline


@pytest.fixture
def worker(live: LiveStore, runner: asyncio.Runner) -> Worker:
    runner.run(live.begin(installed(pipeline())))
    return Worker(live, runner)


def idle_shard(worker: Worker, ttl_ms: int = 10_000) -> str:
    """Let shard a be idle beside b; return the token of its lease."""
    token = worker.claim(["a"], ttl_ms=ttl_ms).token
    worker.report(token, {"a": 5}, idle=["a"])
    return token


def release(worker: Worker, token: str) -> None:
    worker.run(worker.live.release("j", [token]))


def idle_keys(worker: Worker, idle: Iterable[str]) -> str:
    """Let key ranges be idle; return the token of the lease on both."""
    worker.publish(k=StageWatermark(input=MAX))
    token = worker.claim(None, stage="k").token
    worker.report(token, {LEFT: 5, RIGHT: 5}, stage="k", observed=MAX, idle=idle)
    return token


def test_who_was_not_away_waits_for_nothing(worker: Worker) -> None:
    other = worker.claim(["b"]).token
    release(worker, idle_shard(worker))
    assert worker.agreement().has_returned
    assert not worker.report(other, {"b": 7}).returned
    assert not worker.claim(["b"]).returned
    claimed = worker.claim(["a"])
    assert claimed.returned
    assert worker.report(claimed.token, {"a": 7}).returned
    worker.publish()
    assert not worker.agreement().has_returned
    assert not worker.report(claimed.token, {"a": 7}).returned
    assert not worker.claim(["a"]).returned


def test_a_claim_of_several_ranges_waits_for_the_one_that_has_returned(worker: Worker) -> None:
    release(worker, idle_shard(worker))
    both = worker.claim(None)
    assert both.returned
    assert worker.report(both.token, {"a": 6, "b": 6}).returned
    assert not worker.report(both.token, {"b": 6}).returned


def test_returns_before_and_after_a_revision_wait_each_for_its_own(worker: Worker) -> None:
    release(worker, idle_shard(worker))
    worker.publish(1)
    other = worker.claim(["b"]).token
    worker.report(other, {"b": 5}, idle=["b"])
    assert worker.report(other, {"b": 5}).returned
    assert not worker.claim(["a"]).returned


def test_returns_of_one_revision_are_all_kept(worker: Worker) -> None:
    first = idle_shard(worker)
    other = worker.claim(["b"]).token
    worker.report(other, {"b": 5}, idle=["b"])
    assert worker.report(other, {"b": 5}).returned
    assert worker.report(first, {"a": 5}).returned
    assert worker.report(other, {"b": 5}).returned


def test_a_shard_that_is_final_returns_no_more(worker: Worker) -> None:
    token = idle_shard(worker)
    assert not worker.report(token, {"a": MAX}).returned
    release(worker, token)
    assert not worker.agreement().has_returned


def test_an_expired_lease_returns_its_idle_ranges(
    worker: Worker, advance: Callable[[int], None]
) -> None:
    idle_shard(worker, ttl_ms=1_000)
    advance(1_001)
    assert worker.agreement().has_returned
    assert worker.claim(["a"]).returned


def test_a_key_range_of_a_stage_that_is_not_idle_does_not_return(worker: Worker) -> None:
    token = idle_keys(worker, [LEFT])
    assert not worker.report(token, {LEFT: 5}, stage="k", observed=MAX).returned
    assert not worker.agreement("k").has_returned


def test_key_ranges_that_were_idle_together_return_together(worker: Worker) -> None:
    token = idle_keys(worker, [LEFT, RIGHT])
    assert worker.report(token, {LEFT: 5}, stage="k", observed=MAX).returned
    assert worker.report(token, {RIGHT: 5}, stage="k", observed=MAX, idle=[RIGHT]).returned
    worker.publish(2, k=StageWatermark(input=MAX, output=5))
    assert not worker.report(token, {RIGHT: 5}, stage="k", observed=MAX).returned


def test_key_ranges_return_together_also_in_one_report(worker: Worker) -> None:
    token = idle_keys(worker, [LEFT, RIGHT])
    assert worker.report(token, {LEFT: 6, RIGHT: 6}, stage="k", observed=MAX).returned


def test_the_end_of_a_retirement_returns_the_key_ranges_that_were_idle_beside_it(
    worker: Worker,
) -> None:
    token = idle_keys(worker, [LEFT])
    worker.run(worker.live.retire("j", "k", RIGHT))
    assert worker.agreement("k").idle
    assert worker.report(token, {RIGHT: 5}, stage="k", observed=MAX).returned
    assert worker.report(token, {LEFT: 5}, stage="k", observed=MAX).returned


def test_after_a_change_of_the_layout_each_range_of_the_stage_waits(worker: Worker) -> None:
    release(worker, idle_shard(worker))
    more = pipeline(shards=ShardLayout.of(["a0", "a", "b"]))
    worker.run(worker.live.install(installed(more, layout_version=2)))
    assert worker.agreement().has_returned
    assert worker.claim(["a"]).returned
    worker.publish(1)
    assert not worker.claim(["a"]).returned


def test_many_returns_are_kept(live: LiveStore, runner: asyncio.Runner) -> None:
    """As of a source whose worker is replaced."""
    names = [f"{number:05}" for number in range(3_000)]
    runner.run(live.begin(installed(pipeline(shards=ShardLayout.of(names)))))
    worker = Worker(live, runner)
    token = worker.claim(names[:2_000]).token
    worker.report(token, dict.fromkeys(names[:2_000], 5), idle=names[:2_000])
    release(worker, token)
    assert worker.claim(names[:1]).returned
    assert worker.claim(names[1_999:2_000]).returned
    worker.publish()
    assert not worker.claim(names[:1]).returned
