"""Contract section 3, pipelines: what may be put, read, changed, deleted and reset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api import KEYS, LOWER, MAX, UPPER, WHOLE, Api, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

FULL = {
    "mobile": {"shards": ["mobile-0", "mobile-1"]},
    "console": {"shards": ["console-0"], "watermark": "at - INTERVAL 10 MINUTES"},
    "sessions": {"inputs": ["mobile"], "ranges": 4},
    "both": {"inputs": ["sessions", "console"], "passthrough": True},
    "average": {
        "inputs": ["both"],
        "ranges": [{"start": 0, "end": 2_147_483_648}, {"start": 2_147_483_648, "end": KEYS}],
    },
}
SMALL = {"s": {"shards": ["0"]}}


async def range_ids(api: Api, stage: str) -> list[str]:
    return sorted(row["range"] for row in await api.ranges(stage))


async def test_the_contracts_own_example_is_created(api: Api):
    response = await api.put(FULL)
    body = ok(response, 201)
    assert set(body["stages"]) == set(FULL)
    assert body["generation"] == 1
    assert isinstance(body["layout_version"], int)
    assert re.fullmatch(r'"[^"]+"', response.headers["etag"])
    assert await range_ids(api, "sessions") == [
        "00000000-40000000",
        "40000000-80000000",
        "80000000-c0000000",
        "c0000000-100000000",
    ]
    assert await range_ids(api, "average") == [LOWER, UPPER]
    assert await range_ids(api, "mobile") == ["mobile-0", "mobile-1"]


def without_health(response: httpx.Response) -> dict[str, Any]:
    """The specification alone: a job's health is not part of it."""
    return {name: value for name, value in ok(response).items() if name != "health"}


async def test_get_answers_what_put_answered(api: Api):
    put = await api.put(FULL)
    got = await api.spec()
    assert without_health(got) == put.json()
    assert set(ok(got)["health"].values()) <= {"silent", "waiting"}
    assert got.headers["etag"] == put.headers["etag"]


async def test_the_answer_to_get_can_be_put_again_unchanged(api: Api):
    created = await api.define(FULL)
    again = ok(await api.put(created["stages"]))
    assert again["layout_version"] == created["layout_version"]


async def test_an_equal_spec_changes_nothing_whatever_if_match_says(api: Api):
    created = await api.put(FULL)
    for etag in (None, created.headers["etag"], '"long-gone"'):
        again = await api.put(FULL, etag=etag)
        assert ok(again) == created.json()
        assert again.headers["etag"] == created.headers["etag"]


async def test_another_watermark_of_a_source_is_a_change(api: Api):
    first = await api.put({"s": {"shards": ["0"], "watermark": "at - INTERVAL 1 HOUR"}})
    other = {"s": {"shards": ["0"], "watermark": "at - INTERVAL 2 HOURS"}}
    problem(await api.put(other), 428, "precondition-required")
    ok(await api.put(other, etag=first.headers["etag"]))
    assert (await api.spec()).json()["stages"] == other
    etag = (await api.spec()).headers["etag"]
    ok(await api.put(SMALL, etag=etag))
    assert (await api.spec()).json()["stages"] == SMALL


async def test_a_change_needs_the_current_etag(api: Api):
    first = await api.put(SMALL)
    changed = {"s": {"shards": ["0", "1"]}}
    problem(await api.put(changed), 428, "precondition-required")
    problem(await api.put(changed, etag='"nonsense"'), 412, "precondition-failed")
    assert without_health(await api.spec()) == first.json()

    second = await api.put(changed, etag=first.headers["etag"])
    assert ok(second)["layout_version"] > first.json()["layout_version"]
    assert second.headers["etag"] != first.headers["etag"]
    problem(
        await api.put({"s": {"shards": ["9"]}}, etag=first.headers["etag"]),
        412,
        "precondition-failed",
    )
    assert await range_ids(api, "s") == ["0", "1"]


async def test_if_match_on_a_job_that_does_not_exist(api: Api):
    problem(await api.put(SMALL, etag='"1"'), 412, "precondition-failed")
    problem(await api.spec(), 404, "unknown-job")


async def test_jobs_are_listed(gauge: InProcess):
    empty = ok(await gauge.client.get("/v1/jobs"))
    assert "a" not in str(empty["jobs"])
    for name in ("a", "b"):
        await gauge.api(name).define(SMALL)
    listed = ok(await gauge.client.get("/v1/jobs"))["jobs"]
    names = [item if isinstance(item, str) else item["job"] for item in listed]
    assert sorted(names) == ["a", "b"]


async def test_delete_and_a_job_of_the_same_name_again(api: Api):
    await api.define(SMALL)
    token = await api.token("s")
    await api.report("s", token, {"0": 100})
    ok(await api.delete(), 204)

    problem(await api.spec(), 404, "unknown-job")
    problem(await api.delete(), 404, "unknown-job")
    problem(await api.get_watermark("s"), 404, "unknown-job")
    problem(await api.post_report("s", token, {"0": 200}), 404, "unknown-job")

    again = await api.define(SMALL)
    assert again["generation"] == 2
    assert await api.output("s") is None
    problem(await api.post_report("s", token, {"0": 200}), 410, "lease-lost")


async def test_a_reset_starts_the_next_generation(api: Api):
    created = await api.define(FULL)
    run = await api.run("mobile")
    lease = await api.claim("mobile", run=run)
    token = lease["token"]
    await api.report("mobile", token, {"mobile-0": 50, "mobile-1": 60})
    await api.report("mobile", token, {"mobile-0": 70}, epoch=3)
    await api.commit(3, {"mobile": {}}, run=run)
    before = await api.watermark("mobile")
    assert before["output_watermark"] == 60

    assert ok(await api.reset())["generation"] == created["generation"] + 1
    after = await api.watermark("mobile")
    assert after["generation"] == before["generation"] + 1
    assert (after["output_watermark"], after["status"]) == (None, "unknown")
    assert after["ranges"] == {"total": 2, "reported": 0, "idle": 0, "final": 0, "leased": 0}
    problem(await api.post_report("mobile", token, {"mobile-0": 80}), 410, "lease-lost")
    problem(await api.post_claim("mobile", run=run), 409, "stale-run")

    # Epochs start over; runs and fences go on rising.
    fresh = await api.claim("mobile")
    assert fresh["fence"] > lease["fence"]
    await api.report("mobile", fresh["token"], {"mobile-0": 5, "mobile-1": 6}, epoch=0)
    await api.commit(0, {"mobile": {}})
    assert await api.output("mobile") == 5
    assert await api.run("mobile") > run


async def test_resetting_what_is_not_there(api: Api):
    problem(await api.reset(), 404, "unknown-job")


async def test_a_new_shard_holds_the_stage_until_it_has_promised(api: Api):
    await api.define(SMALL)
    token = await api.token("s")
    await api.report("s", token, {"0": 10})
    await api.change({"s": {"shards": ["0", "1"]}})
    assert (await api.report("s", token, {"0": 20}))["watermark"]["output_watermark"] == 10
    await api.report("s", await api.token("s", ["1"], holder="other"), {"1": 15})
    assert await api.output("s") == 15


async def test_removing_the_slowest_shard_lets_the_stage_go_on(api: Api):
    await api.define({"s": {"shards": ["0", "1"]}})
    await api.report("s", await api.token("s"), {"0": 10, "1": 20})
    await api.change({"s": {"shards": ["1"]}})
    assert await api.output("s") == 20


async def keyed(api: Api, ranges: Any, observed: int) -> str:
    """A keyed stage `k` over a source at `observed`; a token for all of it."""
    await api.define({"src": {"shards": ["0"]}, "k": {"inputs": ["src"], "ranges": ranges}})
    await api.report("src", await api.token("src", ttl_ms=600_000), {"0": observed})
    return await api.token("k", ttl_ms=600_000)


async def test_children_of_a_split_range_inherit_its_promise(api: Api):
    token = await keyed(api, 1, 100)
    await api.report("k", token, {WHOLE: {"holds": {"state": 40}}}, input_watermark=100)
    await api.change({"src": {"shards": ["0"]}, "k": {"inputs": ["src"], "ranges": 2}})
    assert await api.promises("k") == {LOWER: 40, UPPER: 40}
    problem(await api.post_report("k", token, {WHOLE: {}}, input_watermark=100), 410, "lease-lost")
    assert (await api.watermark("k"))["ranges"]["leased"] == 0
    lower = await api.token("k", [LOWER])
    await api.report("k", lower, {LOWER: {}}, input_watermark=100)
    assert await api.output("k") == 40
    assert await api.promises("k") == {LOWER: 100, UPPER: 40}


async def test_merged_ranges_take_the_minimum(api: Api):
    token = await keyed(api, 2, 100)
    await api.report("k", token, {LOWER: {"holds": {"state": 40}}, UPPER: {}}, input_watermark=100)
    await api.change({"src": {"shards": ["0"]}, "k": {"inputs": ["src"], "ranges": 1}})
    assert await api.promises("k") == {WHOLE: 40}


async def test_a_merge_with_a_range_that_never_promised_is_unknown(api: Api):
    token = await keyed(api, 2, 100)
    await api.report("k", token, {LOWER: {}}, input_watermark=100)
    await api.change({"src": {"shards": ["0"]}, "k": {"inputs": ["src"], "ranges": 1}})
    assert await api.promises("k") == {WHOLE: None}


async def test_a_lease_on_an_unchanged_range_lives_on(api: Api):
    await keyed(api, 2, 100)
    lower = await api.token("k", [LOWER])
    upper = await api.token("k", [UPPER])
    await api.change(
        {
            "src": {"shards": ["0"]},
            "k": {
                "inputs": ["src"],
                "ranges": [
                    {"start": 0, "end": KEYS // 2},
                    {"start": KEYS // 2, "end": KEYS - 16},
                    {"start": KEYS - 16, "end": KEYS},
                ],
            },
        }
    )
    await api.report("k", lower, {LOWER: {}}, input_watermark=100)
    problem(await api.post_report("k", upper, {UPPER: {}}, input_watermark=100), 410, "lease-lost")


async def test_a_new_edge_holds_the_input_until_the_upstream_has_promised(api: Api):
    spec = {
        "a": {"shards": ["0"]},
        "b": {"shards": ["0"]},
        "u": {"inputs": ["a"], "passthrough": True},
    }
    await api.define(spec)
    a = await api.token("a")
    await api.report("a", a, {"0": 10})
    await api.change(spec | {"u": {"inputs": ["a", "b"], "passthrough": True}})
    await api.report("a", a, {"0": 20})
    assert await api.output("u") == 10
    await api.report("b", await api.token("b"), {"0": 15})
    assert await api.output("u") == 15


async def test_a_stage_that_is_taken_away_is_unknown(api: Api):
    await api.define(SMALL | {"t": {"shards": ["0"]}})
    await api.change(SMALL)
    problem(await api.get_watermark("t"), 404, "unknown-stage")
    problem(await api.post_claim("t"), 404, "unknown-stage")
    assert set(await api.snapshot()) == {"s"}


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "a cycle": (
        {
            "x": {"inputs": ["y"], "passthrough": True},
            "y": {"inputs": ["x"], "passthrough": True},
        },
        "x|y",
    ),
    "a stage that feeds itself": ({"x": {"inputs": ["x"], "ranges": 1}}, "x"),
    "an unknown input": ({"x": {"inputs": ["nowhere"], "ranges": 1}}, "x"),
    "a hole at the start": (
        SMALL | {"x": {"inputs": ["s"], "ranges": [{"start": 1, "end": KEYS}]}},
        "x",
    ),
    "a hole at the end": (
        SMALL | {"x": {"inputs": ["s"], "ranges": [{"start": 0, "end": KEYS - 1}]}},
        "x",
    ),
    "a hole in the middle": (
        SMALL
        | {
            "x": {
                "inputs": ["s"],
                "ranges": [{"start": 0, "end": 10}, {"start": 11, "end": KEYS}],
            }
        },
        "x",
    ),
    "an overlap": (
        SMALL
        | {
            "x": {
                "inputs": ["s"],
                "ranges": [{"start": 0, "end": 11}, {"start": 10, "end": KEYS}],
            }
        },
        "x",
    ),
    "the same range twice": (
        SMALL
        | {
            "x": {"inputs": ["s"], "ranges": [{"start": 0, "end": KEYS}, {"start": 0, "end": KEYS}]}
        },
        "x",
    ),
    "an empty range": (
        SMALL
        | {"x": {"inputs": ["s"], "ranges": [{"start": 0, "end": 0}, {"start": 0, "end": KEYS}]}},
        "x",
    ),
    "a range beyond the key space": (
        SMALL | {"x": {"inputs": ["s"], "ranges": [{"start": 0, "end": KEYS + 1}]}},
        "x",
    ),
    "no ranges": (SMALL | {"x": {"inputs": ["s"], "ranges": 0}}, "x"),
    "no ranges, listed": (SMALL | {"x": {"inputs": ["s"], "ranges": []}}, "x"),
    "more ranges than allowed": (SMALL | {"x": {"inputs": ["s"], "ranges": 1_000_001}}, "x"),
    "no shards": ({"x": {"shards": []}}, "x"),
    "a shard twice": ({"x": {"shards": ["0", "0"]}}, "x"),
    "a malformed shard": ({"x": {"shards": ["a b"]}}, "x"),
    "no kind at all": ({"x": {}}, "x"),
    "shards and inputs": (SMALL | {"x": {"shards": ["0"], "inputs": ["s"]}}, "x"),
    "ranges without inputs": ({"x": {"ranges": 4}}, "x"),
    "passthrough without inputs": ({"x": {"passthrough": True}}, "x"),
    "no inputs": ({"x": {"inputs": [], "ranges": 1}}, "x"),
    "an input twice": (SMALL | {"x": {"inputs": ["s", "s"], "ranges": 1}}, "x"),
    "inputs only": (SMALL | {"x": {"inputs": ["s"]}}, "x"),
    "ranges and passthrough": (
        SMALL | {"x": {"inputs": ["s"], "ranges": 1, "passthrough": True}},
        "x",
    ),
    "a watermark of a keyed stage": (
        SMALL | {"x": {"inputs": ["s"], "ranges": 1, "watermark": "at"}},
        "x.*watermark. is for a source",
    ),
    "a watermark without text": ({"x": {"shards": ["0"], "watermark": ""}}, "watermark"),
    "a long watermark": ({"x": {"shards": ["0"], "watermark": "a" * 1_001}}, "watermark"),
    "a watermark of the wrong type": ({"x": {"shards": ["0"], "watermark": 5}}, "watermark"),
    "an unknown member": ({"x": {"shards": ["0"], "colour": "blue"}}, "x|colour"),
    "a bad stage name": ({"-x": {"shards": ["0"]}}, "stages"),
    "a long stage name": ({"x" * 129: {"shards": ["0"]}}, "x"),
    "a range count of the wrong type": (SMALL | {"x": {"inputs": ["s"], "ranges": "4"}}, "x"),
    "a range count that is no integer": (SMALL | {"x": {"inputs": ["s"], "ranges": 1.5}}, "x"),
    "a negative start": (
        SMALL | {"x": {"inputs": ["s"], "ranges": [{"start": -1, "end": KEYS}]}},
        "x",
    ),
}


@pytest.mark.parametrize("case", INVALID)
async def test_an_invalid_pipeline_is_refused_and_names_its_stage(api: Api, case: str):
    spec, named = INVALID[case]
    body = problem(await api.put(spec), 422, "invalid-pipeline")
    assert re.search(named, str(body)), body
    problem(await api.spec(), 404, "unknown-job")


async def test_an_invalid_change_changes_nothing(api: Api):
    created = await api.put(SMALL)
    for case, (spec, _) in INVALID.items():
        response = await api.put(spec, etag=created.headers["etag"])
        assert response.status_code == 422, case
    assert without_health(await api.spec()) == created.json()


async def test_more_stages_than_allowed(api: Api):
    stages = {f"s{i}": {"shards": ["0"]} for i in range(1_001)}
    problem(await api.put(stages), 422, "invalid-pipeline")
    stages.popitem()
    ok(await api.put(stages), 201)


async def test_the_largest_stage_is_accepted(api: Api):
    await api.define(SMALL | {"x": {"inputs": ["s"], "ranges": 1_000_000}})
    assert (await api.watermark("x"))["ranges"]["total"] == 1_000_000


@pytest.mark.parametrize(
    "body",
    [[], 1, "x", {}, {"stages": []}, {"stages": {}}, {"stages": SMALL, "more": 1}],
    ids=repr,
)
async def test_a_body_that_is_no_pipeline(api: Api, body: Any):
    problem(await api.client.put(api.root, json=body), 422, "invalid-pipeline", "invalid-request")
    problem(await api.spec(), 404, "unknown-job")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"nonsense"], ids=repr)
async def test_a_body_that_is_no_json(api: Api, body: bytes):
    problem(await api.client.put(api.root, content=body), 400)


@pytest.mark.parametrize("job", ["-x", "x" * 129, ".x", "a b", "a:b", "%C3%A4", "x%00"])
async def test_a_malformed_job_name(gauge: InProcess, job: str):
    problem(await gauge.client.put(f"/v1/jobs/{job}", json={"stages": SMALL}), 422)


async def test_names_may_use_all_that_is_allowed(gauge: InProcess):
    name = "9" + "Az0._-" * 21 + "x"
    assert len(name) == 128
    api = gauge.api(name)
    await api.define({name: {"shards": [name]}})
    await api.report(name, await api.token(name, [name], holder=name), {name: MAX})
    assert await api.output(name) == MAX


async def test_unknown_stages_and_jobs(api: Api, gauge: InProcess):
    await api.define(SMALL)
    for path in ("watermark", "ranges"):
        problem(await api.client.get(f"{api.root}/stages/t/{path}"), 404, "unknown-stage")
        problem(await api.client.get(f"/v1/jobs/nobody/stages/s/{path}"), 404, "unknown-job")
    nobody = gauge.api("nobody")
    for path in ("", "/watermarks", "/events"):
        problem(await api.client.get(nobody.root + path), 404, "unknown-job")
    problem(await nobody.open_run(["s"]), 404, "unknown-job")
    problem(await nobody.post_claim("s"), 404, "unknown-job")
    problem(await nobody.post_commit(1, {"s": {}}), 404, "unknown-job")
    for path in ("renew", "release"):
        response = await api.client.post(f"{nobody.root}/leases/{path}", json={"tokens": ["x"]})
        problem(response, 404, "unknown-job")
    problem(await api.open_run(["t"]), 404, "unknown-stage")
    problem(await api.post_claim("t"), 404, "unknown-stage")
    problem(await api.post_report("t", "x", {"0": 1}), 404, "unknown-stage")
    problem(await api.post_commit(1, {"t": {}}), 404, "unknown-stage")


async def test_a_small_request_cannot_take_all_memory(api: Api):
    """388 bytes: eight stages of a million ranges each, more than one job may have."""
    stages: dict[str, Any] = {"s": {"shards": ["0"]}}
    stages |= {f"k{n}": {"inputs": ["s"], "ranges": 1_000_000} for n in range(8)}
    body = problem(await api.put(stages), 422, "limit-reached")
    assert body["setting"] == "TIDEGAUGE_MAX_RANGES_PER_JOB"
    assert body["limit"] == 2_000_000
    assert "8,000,001" in body["detail"]
    problem(await api.spec(), 404, "unknown-job")


async def test_a_service_keeps_so_many_jobs_and_ranges(tmp_path: Path):
    def flow(ranges: int) -> dict[str, Any]:
        return {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": ranges}}

    limits: dict[str, Any] = {"max_jobs": 3, "max_ranges": 20, "max_ranges_per_job": 15}
    async with InProcess(tmp_path, **limits) as service:
        one, two, three, four = (service.api(name) for name in ("one", "two", "three", "four"))
        await one.define(flow(9))
        refused = problem(await two.put(flow(10)), 422, "limit-reached")
        assert refused["setting"] == "TIDEGAUGE_MAX_RANGES"
        await two.define(flow(4))
        # A job that shrinks, or stays as it is, is never refused, and what it leaves is free.
        await one.change(flow(9))
        await one.change(flow(5))
        await three.define(flow(7))
        refused = problem(await four.put(flow(1)), 422, "limit-reached")
        assert refused["setting"] == "TIDEGAUGE_MAX_JOBS"
        etag = (await two.spec()).headers["etag"]
        problem(await two.put(flow(6), etag=etag), 422, "limit-reached")
        ok(await one.delete(), 204)
        ok(await two.put(flow(6), etag=etag))
        await four.define(flow(1))
    # Stored jobs stay, also under smaller limits.
    async with InProcess(tmp_path, max_jobs=1, max_ranges=1, max_ranges_per_job=1) as service:
        assert await service.api("two").output("s") is None
        await service.api("two").token("k")
