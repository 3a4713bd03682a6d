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


async def test_a_run_is_ended_with_its_outcome(job: Api, gauge: InProcess):
    run = await job.run("s", "t")
    token = await job.token("s", run=run, ttl_ms=600_000)
    await job.report("s", token, {"0": 5, "1": 6})
    before = await job.get_watermark("s")
    ended = await job.end(run, "failed", because="out of memory")
    assert (ended["run"], ended["outcome"], ended["because"]) == (run, "failed", "out of memory")
    after = await job.get_watermark("s")
    assert after.headers["etag"] == before.headers["etag"]
    assert ok(after)["output_watermark"] == 5
    assert await job.promises("s") == {"0": 5, "1": 6}
    assert ok(after)["ranges"]["leased"] == 0
    assert [lost["reason"] for lost in (await job.renew(token))["lost"]] == ["released"]
    gauge.advance(1_000)
    again = await job.end(run, "failed", because="another word")
    assert again == ended
    [newest, *_] = ok(await job.client.get("/v1/audit?job=job"))["records"]
    assert newest["detail"] == f"run {run} of s, t failed: out of memory"
    problem(await job.post_end(run, "finished"), 409, "stale-run")
    problem(await job.post_end(run + 1, "finished"), 404, "unknown-run")
    problem(await gauge.api("other").post_end(run, "finished"), 404, "unknown-job")


async def test_a_fenced_run_cannot_be_ended(job: Api):
    first = await job.run("s", "t")
    second = await job.run("s")
    token = await job.token("s", run=second, ttl_ms=600_000)
    # It still has t.
    await job.end(first, "stopped")
    assert (await job.renew(token))["lost"] == [], "another run has s"
    third = await job.run("s")
    problem(await job.post_end(second, "finished"), 409, "stale-run")
    runs = await job.runs()
    assert [run["outcome"] for run in runs] == [None, None, "stopped"]
    assert [run.get("fenced") for run in runs] == [None, True, None]
    assert [run["run"] for run in await job.runs()] == [third, second, first]


async def test_a_reset_ends_the_runs_that_go_on(job: Api, gauge: InProcess):
    ended, open_run = await job.run("s"), await job.run("t")
    await job.end(ended, "failed", because="out of memory")
    gauge.advance(5_000)
    ok(await job.reset())
    because = "the job was reset: generation 2 began"
    newest, before = await job.runs()
    assert (newest["outcome"], newest["fenced"], newest["because"]) == (None, True, because)
    assert newest["started_at"] < newest["ended_at"]
    assert (before["outcome"], before["because"]) == ("failed", "out of memory")
    records = ok(await gauge.client.get("/v1/audit?job=job&limit=2"))["records"]
    assert [(each["action"], each["detail"]) for each in records] == [
        ("reset-job", "generation 2"),
        ("end-run", f"run {open_run} of t was fenced: {because}"),
    ]
    found = (await job.changes("?stage=t"))["changes"]
    [change] = [each for each in found if each["action"] == "end-run"]
    assert (change["detail"], change["because"]) == (f"run {open_run} was fenced", because)
    problem(await job.post_end(open_run, "finished"), 409, "stale-run")
    ok(await job.reset())
    assert (await job.runs())[0] == newest


async def test_a_commit_that_comes_after_the_end_counts(job: Api):
    run = await job.run("s")
    token = await job.token("s", run=run)
    await job.report("s", token, {"0": 5, "1": 6}, epoch=1)
    await job.end(run, "finished")
    await job.commit(1, {"s": {}}, run=run)
    assert await job.output("s") == 5


async def test_the_runs_of_a_job_are_kept_over_restarts(job: Api, gauge: InProcess):
    links = {"spark": "https://driver:4040/a", "logs": "http://logs/?q=1"}
    first = ok(await job.open_run(["s"], program="scores", links=links), 201)["run"]
    await job.commit(7, {"s": {}}, run=first)
    await job.end(first, "finished", because="drained")
    second = await job.run("s", "t")
    await gauge.crash()
    api = gauge.api()
    newest, oldest = await api.runs()
    assert await api.runs("?limit=1") == [newest]
    assert newest | {"started_at": ""} == {
        "run": second,
        "stages": ["s", "t"],
        "holder": "driver",
        "program": None,
        "links": {},
        "started_at": "",
        "ended_at": None,
        "outcome": None,
        "because": None,
        "epoch": None,
    }
    assert (oldest["program"], oldest["links"], oldest["epoch"]) == ("scores", links, 7)
    assert (oldest["outcome"], oldest["because"]) == ("finished", "drained")
    assert oldest["started_at"] <= oldest["ended_at"]
    problem(await api.client.get(f"{api.root}/runs?limit=0"), 422, "invalid-request")
    problem(await gauge.api("other").client.get("/v1/jobs/other/runs"), 404, "unknown-job")


async def test_the_runs_of_a_stage(job: Api):
    first = await job.run("s", "t")
    second = await job.run("s")
    third = await job.run("t")
    assert [run["run"] for run in await job.runs("?stage=s")] == [second, first]
    found = ok(await job.client.get(f"{job.root}/runs?stage=t&limit=1"))
    assert [run["run"] for run in found["runs"]] == [third]
    assert [run["run"] for run in await job.runs(f"?stage=t&cursor={found['next']}")] == [first]
    # Part of a name is another stage.
    assert await job.runs("?stage=u") == []
    problem(await job.client.get(f"{job.root}/runs?stage=a%22b"), 422, "invalid-request")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"outcome": "done"},
        {"outcome": "failed", "because": "x" * 1_001},
        {"outcome": "failed", "because": "a\0b"},
        {"outcome": "failed", "why": "x"},
    ],
)
async def test_an_end_that_does_not_fit_is_refused(job: Api, body: dict[str, Any]):
    run = await job.run("s")
    problem(await job.client.post(f"{job.root}/runs/{run}/end", json=body), 422, "invalid-request")
    assert (await job.runs())[0]["outcome"] is None


async def test_an_optional_member_may_be_null(job: Api):
    run = ok(await job.open_run(["s"], links=None, program=None), 201)["run"]
    assert (await job.end(run, "failed", because=None))["because"] is None
    assert (await job.runs())[0]["links"] == {}


async def test_a_run_that_does_not_fit_is_refused(job: Api):
    refused: list[dict[str, Any]] = [
        {"links": {"spark": "javascript:alert(1)"}},
        {"links": {"spark": "http://a b"}},
        {"links": {"": "http://a"}},
        {"links": {str(k): "http://a" for k in range(11)}},
        {"program": "x" * 257},
    ]
    for members in refused:
        problem(await job.open_run(["s"], **members), 422, "invalid-request")
    for number in ("0", "x", "-1"):
        end = await job.client.post(f"{job.root}/runs/{number}/end", json={"outcome": "failed"})
        problem(end, 422, "invalid-request")
    assert await job.runs() == []
