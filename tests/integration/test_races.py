"""Concurrent events: changes amid reports, and many who want the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.api import Api, eventually, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC: dict[str, Any] = {
    "s": {"shards": ["0"]},
    "t": {"shards": ["0"]},
    "u": {"inputs": ["s"], "passthrough": True},
}
ROUNDS = 15


class Reporter:
    """Reports rising times for `s` for as long as it is let."""

    def __init__(self, api: Api, token: str, start: int) -> None:
        self.api = api
        self.token = token
        self.time = start
        self.answers: list[int] = []

    async def run(self) -> None:
        while not self.answers or self.answers[-1] == 200:
            self.time += 1
            response = await self.api.post_report("s", self.token, {"0": self.time})
            self.answers.append(response.status_code)

    async def more(self, count: int) -> None:
        """Wait for some more answers, or for the first that is a refusal."""
        wanted = len(self.answers) + count

        async def answers() -> int:
            return len(self.answers) if self.answers[-1:] in ([], [200]) else wanted

        await eventually(answers, lambda have: have >= wanted, what="answers to the reports")


@asynccontextmanager
async def reporting(api: Api, start: int = 0) -> AsyncGenerator[list[Reporter]]:
    """Three who report under one lease, while the block runs."""
    token = await api.token("s", ttl_ms=600_000)
    reporters = [Reporter(api, token, start) for _ in range(3)]
    tasks = [asyncio.create_task(one.run()) for one in reporters]
    await reporters[0].more(2)
    try:
        yield reporters
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()


async def stands(api: Api, stage: str, reporters: list[Reporter]) -> None:
    """From now on the stage's output does not move, however much is reported."""
    before = await api.output(stage)
    for reporter in reporters:
        await reporter.more(5)
    assert await api.output(stage) == before


async def change(stages: dict[str, Any], stage: str, api: Api, reporters: list[Reporter]) -> None:
    await api.change(stages)
    await stands(api, stage, reporters)
    await api.change(SPEC)


DEEDS: dict[str, Callable[[Api, list[Reporter]], Awaitable[None]]] = {
    "a new shard": lambda api, r: change(SPEC | {"s": {"shards": ["0", "1"]}}, "s", api, r),
    "a new edge": lambda api, r: change(
        SPEC | {"u": {"inputs": ["s", "t"], "passthrough": True}}, "u", api, r
    ),
}


@pytest.mark.parametrize("deed", DEEDS)
async def test_once_a_layout_change_is_answered_the_watermark_stands(api: Api, deed: str):
    await api.define(SPEC)
    async with reporting(api) as reporters:
        for _ in range(ROUNDS):
            await DEEDS[deed](api, reporters)
            for reporter in reporters:
                await reporter.more(2)
        assert {answer for one in reporters for answer in one.answers} == {200}
    moved = await api.output("u")
    assert moved is not None
    assert moved > 0


async def test_once_a_reset_is_answered_nothing_of_before_is_left(gauge: InProcess):
    for index in range(ROUNDS):
        api = gauge.api(f"job-{index}")
        await api.define(SPEC)
        async with reporting(api) as reporters:
            ok(await api.reset())
            assert await api.output("s") is None
            await stands(api, "u", reporters)
            assert await api.promises("s") == {"0": None}


async def test_once_a_run_is_answered_older_leases_are_void(gauge: InProcess):
    for index in range(ROUNDS):
        api = gauge.api(f"job-{index}")
        await api.define(SPEC)
        async with reporting(api) as reporters:
            await api.run("s")
            promised = await api.promises("s")
            for reporter in reporters:
                await reporter.more(5)
            assert await api.promises("s") == promised
            # A request taken before may become visible after; no more than that.
            await eventually(
                lambda api=api: api.output("u"),
                lambda seen, promised=promised: seen == promised["0"],
            )
            assert all(409 in reporter.answers for reporter in reporters)


async def test_a_job_deleted_amid_reports(gauge: InProcess):
    for index in range(ROUNDS):
        api = gauge.api(f"job-{index}")
        await api.define(SPEC)
        async with reporting(api) as reporters:
            ok(await api.delete(), 204)
            for reporter in reporters:
                await reporter.more(5)
            assert all(404 in reporter.answers for reporter in reporters)
        again = ok(await api.put(SPEC), 201)
        assert again["generation"] == 2
        assert await api.output("s") is None


async def test_of_many_claims_at_once_one_wins(api: Api):
    await api.define(SPEC)
    for attempt in range(ROUNDS):
        claims = [api.post_claim("s", holder=f"w{i}", attempt=attempt) for i in range(10)]
        granted = [r for r in await asyncio.gather(*claims) if r.status_code == 201]
        assert len(granted) == 1


async def test_an_answered_report_is_visible_to_all_who_ask_after_it(api: Api):
    shards = [str(i) for i in range(8)]
    await api.define({"s": {"shards": shards}, "u": {"inputs": ["s"], "passthrough": True}})
    delivered = dict.fromkeys(shards, -1)

    async def work(shard: str) -> None:
        token = await api.token("s", [shard], holder=f"w{shard}")
        for time in range(30):
            answer = await api.report("s", token, {shard: time})
            delivered[shard] = time
            least = min(delivered.values())
            if least >= 0:
                seen = answer["watermark"]["output_watermark"]
                assert seen is not None
                snapshot = await api.snapshot()
                assert snapshot["s"]["output_watermark"] >= max(least, seen)
                assert snapshot["u"]["output_watermark"] >= least

    await asyncio.gather(*(work(shard) for shard in shards))
    assert await api.output("u") == 29


async def test_the_same_commit_twice_at_once_applies_once(api: Api):
    await api.define(SPEC)
    token = await api.token("s")
    for epoch in range(ROUNDS):
        await api.report("s", token, {"0": epoch}, epoch=epoch)
        both = await asyncio.gather(*(api.commit(epoch, {"s": {}}) for _ in range(3)))
        assert sum(answer["applied"]["s"] for answer in both) == 1
        assert await api.output("s") == epoch


async def test_two_specs_at_once_with_one_etag(api: Api):
    await api.define(SPEC)
    for index in range(ROUNDS):
        etag = (await api.spec()).headers["etag"]
        puts = [api.put(SPEC | {"t": {"shards": [f"{index}-{i}"]}}, etag=etag) for i in range(4)]
        answers = await asyncio.gather(*puts)
        assert sorted(answer.status_code for answer in answers) == [200, 412, 412, 412]
        for answer in answers:
            if answer.status_code == 412:
                problem(answer, 412, "precondition-failed")


async def test_one_job_created_by_many_at_once(gauge: InProcess):
    for index in range(ROUNDS):
        api = gauge.api(f"job-{index}")
        answers = await asyncio.gather(*(api.put(SPEC) for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]


async def test_runs_opened_at_once_have_numbers_of_their_own(api: Api):
    await api.define(SPEC)
    numbers = await asyncio.gather(*(api.run("s") for _ in range(10)))
    assert len(set(numbers)) == 10
    problem(await api.post_claim("s", run=min(numbers)), 409, "stale-run")
    await api.claim("s", run=max(numbers))


async def test_a_shutdown_amid_publishing_still_writes_the_last_checkpoint(gauge: InProcess):
    """A release moves the stage's status after its answer: the shutdown comes right into that."""
    api = gauge.api()
    await api.define(SPEC)
    for time in range(ROUNDS):
        token = await api.token("s")
        await api.report("s", token, {"0": time})
        await api.report("s", token, {"0": {"watermark": time, "idle": True}})
        await api.release(token)
        await gauge.restart()
        api = gauge.api()
        assert await api.promises("s") == {"0": time}
        await eventually(lambda api=api: api.watermark("s"), lambda w: w["status"] == "active")


async def test_a_client_that_gives_up_does_not_lock_the_ledger(api: Api):
    """A handler may be cancelled in the middle of its transaction; the next one goes on."""
    await api.define(SPEC)
    for index in range(ROUNDS):
        request = asyncio.create_task(api.run("t"))
        for _ in range(index):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        await api.report("s", await api.token("s", run=await api.run("s")), {"0": index})
        assert await api.output("s") == index
