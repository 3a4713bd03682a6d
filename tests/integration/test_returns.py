"""A range that returns from idleness is answered once no advance without it can still become visible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from service.clock import SystemClock
from service.errors import UnavailableError
from service.ledger.port import JobRecord, Recorded
from service.ledger.sql import SqlLedger
from tests.support.api import Api, eventually, ok, problem
from tests.support.inprocess import InProcess
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

FLOW = {"taps": {"shards": ["a", "b"]}, "counts": {"inputs": ["taps"], "ranges": 1}}


class HeldLedger:
    """Holds the next record that advances a stage, before the database has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_held = asyncio.Event()
        self.let_go = asyncio.Event()
        record = SqlLedger.record

        async def held(
            ledger: SqlLedger, records: Sequence[JobRecord], at_ms: int
        ) -> Mapping[str, Recorded]:
            if any(each.advances for each in records) and not self.is_held.is_set():
                self.is_held.set()
                await self.let_go.wait()
            return await record(ledger, records, at_ms)

        monkeypatch.setattr(SqlLedger, "record", held)


async def idle_shard(job: Api) -> tuple[str, str]:
    """Let shard a be idle at 6, and b at 6; return the tokens of their leases."""
    await job.define(FLOW)
    tokens = [await job.token("taps", [name], ttl_ms=600_000) for name in "ab"]
    await job.report("taps", tokens[1], {"b": 6})
    await job.report("taps", tokens[0], {"a": {"watermark": 6, "idle": True}})
    await eventually(lambda: job.output("taps"), lambda output: output == 6)
    return tokens[0], tokens[1]


Return = Callable[[Api, str], Coroutine[Any, Any, Any]]


async def by_a_report(job: Api, token: str) -> Any:
    return (await job.report("taps", token, {"a": 6}))["watermark"]


async def by_a_claimed_report(job: Api, _token: str) -> Any:
    claim = {"holder": "worker", "ttl_ms": 600_000}
    return ok(await job.post_claimed_report("taps", claim, {"a": 6}))["watermark"]


async def by_a_claim(job: Api, _token: str) -> Any:
    await job.token("taps", ["a"], ttl_ms=600_000)
    return await job.watermark("taps")


RETURNS = [by_a_report, by_a_claimed_report, by_a_claim]


@pytest.mark.parametrize("returns", RETURNS)
async def test_invariant_4_an_answered_return_is_not_passed(
    api: Api, monkeypatch: pytest.MonkeyPatch, returns: Return
):
    """The advance without shard a is on its way into the ledger when the shard returns."""
    idle, other = await idle_shard(api)
    held = HeldLedger(monkeypatch)
    advancing = asyncio.create_task(api.report("taps", other, {"b": 90}))
    await held.is_held.wait()
    answered = asyncio.create_task(returns(api, idle))
    await asyncio.wait([answered], timeout=0.2)
    seen = answered.result()["output_watermark"] if answered.done() else None
    held.let_go.set()
    answer = await answered
    await advancing
    assert seen is None, "answered before the advance was visible"
    assert answer["output_watermark"] == await api.output("taps") == 90


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("stores", ["redis,postgres"], indirect=True)
async def test_invariant_4_nor_is_a_return_that_another_replica_answers(
    tmp_path: Path, stores: Stores, monkeypatch: pytest.MonkeyPatch, returns: Return
):
    async with InProcess(tmp_path, clock=SystemClock(), stores=stores) as first:
        job = first.api()
        idle, other = await idle_shard(job)
        async with InProcess(tmp_path, clock=SystemClock(), stores=stores) as second:
            held = HeldLedger(monkeypatch)
            advancing = asyncio.create_task(job.report("taps", other, {"b": 90}))
            await held.is_held.wait()
            answer = await returns(second.api(), idle)
            held.let_go.set()
            await advancing
            assert await job.output("taps") == answer["output_watermark"] == 6


async def away(*_: Any, **__: Any) -> Any:
    raise UnavailableError("the ledger does not answer")


async def test_a_retried_return_is_not_answered_before_the_ledger_has_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    """The first request has ended the idleness already; only its revision is missing."""
    idle, _ = await idle_shard(api)

    with monkeypatch.context() as outage:
        outage.setattr(SqlLedger, "record", away)
        for _attempt in range(2):
            failed = problem(await api.post_report("taps", idle, {"a": 6}), 503, "unavailable")
            assert "a range is waited for again: retry" in failed["detail"]
        problem(await api.post_claim("taps", ["a"]), 503, "unavailable")
    await eventually(
        lambda: api.post_report("taps", idle, {"a": 6}), lambda answer: answer.status_code != 503
    )


async def by_the_end_of_the_lease(gauge: InProcess, _token: str) -> None:
    gauge.advance(700_000)


async def by_its_release(gauge: InProcess, token: str) -> None:
    await gauge.api().release(token)


@pytest.mark.parametrize("ends", [by_the_end_of_the_lease, by_its_release])
async def test_an_outage_rejects_ranges_that_were_away_alone(
    gauge: InProcess,
    monkeypatch: pytest.MonkeyPatch,
    ends: Callable[[InProcess, str], Coroutine[Any, Any, None]],
):
    """The idleness of a shard ends during the outage. The shard beside it was never idle."""
    api = gauge.api()
    idle, _ = await idle_shard(api)

    with monkeypatch.context() as outage:
        outage.setattr(SqlLedger, "record", away)
        await ends(gauge, idle)
        other = await api.token("taps", ["b"], ttl_ms=600_000)
        await api.report("taps", other, {"b": 7})
        problem(await api.post_claim("taps", ["a"]), 503, "unavailable")
    await eventually(lambda: api.post_claim("taps", ["a"]), lambda answer: answer.status_code < 300)


async def test_invariant_4_nor_is_a_range_passed_whose_idleness_has_ended_without_an_answer(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    """The advance without shard a is on its way when the lease is released, and claimed again."""
    idle, other = await idle_shard(api)
    held = HeldLedger(monkeypatch)
    advancing = asyncio.create_task(api.report("taps", other, {"b": 90}))
    await held.is_held.wait()
    await api.release(idle)
    claimed = asyncio.create_task(api.token("taps", ["a"], ttl_ms=600_000))
    await asyncio.wait([claimed], timeout=0.2)
    is_early = claimed.done()
    held.let_go.set()
    await advancing
    await claimed
    assert not is_early, "answered before the advance was visible"


async def test_who_was_not_away_waits_for_nothing(api: Api, monkeypatch: pytest.MonkeyPatch):
    """Reports that end nobody's idleness cost the ledger nothing, also beside an idle shard."""
    _, other = await idle_shard(api)
    records: list[int] = []
    record = SqlLedger.record

    async def counted(
        ledger: SqlLedger, some: Sequence[JobRecord], at_ms: int
    ) -> Mapping[str, Recorded]:
        records.append(len(some))
        return await record(ledger, some, at_ms)

    monkeypatch.setattr(SqlLedger, "record", counted)
    for _ in range(5):
        await api.report("taps", other, {"b": 6})
    assert not records
