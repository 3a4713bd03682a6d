"""Contract section 3, runs: a newer run of a stage fences the older one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import Api, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["0", "1"]},
    "t": {"shards": ["0"]},
    "u": {"inputs": ["s", "t"], "passthrough": True},
}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


async def test_run_numbers_rise_over_restarts_and_crashes(job: Api, gauge: InProcess):
    numbers = [await job.run("s"), await job.run("t"), await job.run("s", "t")]
    await gauge.restart()
    numbers.append(await gauge.api().run("s"))
    await gauge.crash()
    numbers.append(await gauge.api().run("s"))
    assert numbers == sorted(set(numbers))


async def test_a_stage_with_a_run_takes_claims_of_that_run_alone(job: Api):
    first = await job.run("s")
    problem(await job.post_claim("s"), 409, "stale-run")
    problem(await job.post_claim("s", run=first + 1), 409, "stale-run")
    second = await job.run("s")
    problem(await job.post_claim("s", run=first), 409, "stale-run")
    assert (await job.watermark("s"))["ranges"]["leased"] == 0
    await job.claim("s", run=second)


async def test_a_stage_without_a_run_takes_claims_without_one(job: Api):
    problem(await job.post_claim("s", run=1), 409, "stale-run")
    await job.claim("s")
    run = await job.run("t")
    problem(await job.post_claim("s", ["0"], run=run), 409, "stale-run")


async def test_a_new_run_voids_older_leases_at_once(job: Api):
    without = await job.token("s", ["0"])
    first = await job.run("s")
    problem(await job.post_report("s", without, {"0": 10}), 409, "stale-run")
    old = await job.token("s", run=first, ttl_ms=600_000)
    await job.report("s", old, {"0": 5, "1": 5})
    await job.run("s")
    problem(await job.post_report("s", old, {"0": 10, "1": 10}), 409, "stale-run")
    renewal = await job.renew(old)
    assert renewal["renewed"] == []
    assert [item["token"] for item in renewal["lost"]] == [old]
    state = await job.watermark("s")
    assert state["output_watermark"] == 5
    assert state["ranges"]["leased"] == 0


async def test_whoever_is_fenced_is_told_by_whom(job: Api, gauge: InProcess):
    first = await job.run("s")
    token = await job.token("s", run=first)
    second = ok(await job.open_run(["s"], holder="driver-2"), 201)["run"]
    for refused in (
        await job.post_claim("s", run=first),
        await job.post_report("s", token, {"0": 10}),
        await job.post_commit(1, {"s": {}}, run=first),
    ):
        found = problem(refused, 409, "stale-run")
        assert (found["run"], found["holder"]) == (second, "driver-2")
        assert f"driver-2 opened run {second}" in found["detail"]
    await gauge.crash()
    again = problem(await gauge.api().post_claim("s", run=first), 409, "stale-run")
    assert again["holder"] == "driver-2"


async def test_a_run_concerns_its_stages_only(job: Api):
    token = await job.token("t")
    await job.run("s")
    await job.report("t", token, {"0": 10})
    assert await job.output("t") == 10


async def test_waiting_reports_of_an_older_run_are_void(job: Api):
    first = await job.run("s")
    token = await job.token("s", run=first)
    await job.report("s", token, {"0": 10, "1": 10}, epoch=1)
    second = await job.run("s")
    problem(await job.post_commit(1, {"s": {}}, run=first), 409, "stale-run")
    answer = await job.commit(1, {"s": {}}, run=second)
    assert answer["applied"] == {"s": 0}
    assert await job.output("s") is None


async def test_a_run_survives_a_restart(job: Api, gauge: InProcess):
    run = await job.run("s")
    await gauge.crash()
    again = gauge.api()
    problem(await again.post_claim("s"), 409, "stale-run")
    await again.claim("s", run=run)


async def test_a_run_of_several_stages_is_all_or_nothing(job: Api):
    problem(await job.open_run(["s", "nope"]), 404, "unknown-stage")
    await job.claim("s")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"stages": []},
        {"stages": ["s"]},
        {"holder": "d"},
        {"stages": "s", "holder": "d"},
        {"stages": ["s"], "holder": "no good"},
        {"stages": ["s"], "holder": 1},
        {"stages": ["s"], "holder": "d", "colour": 1},
        {"stages": ["s", 1], "holder": "d"},
        [],
    ],
    ids=repr,
)
async def test_an_invalid_run(job: Api, body: Any):
    problem(await job.client.post(f"{job.root}/runs", json=body), 422, "invalid-request")
    await job.claim("s")


async def test_a_run_that_is_no_json(job: Api):
    problem(await job.client.post(f"{job.root}/runs", content=b"{"), 400)
