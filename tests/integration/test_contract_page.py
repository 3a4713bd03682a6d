"""Endpoints of the page: all jobs at a glance, a graph, ranges in buckets, the key's owner."""

from __future__ import annotations

from typing import Any

import pytest

from service.frontier.timestamps import iso
from tests.support.api import MAX, Api, ok, problem, tile_ids
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

T = 1_767_225_600_000
MINUTE = 60_000


async def overview(gauge: InProcess, query: str = "") -> Any:
    return ok(await gauge.client.get(f"/v1/overview{query}"))


async def summary(api: Api, stage: str, query: str = "") -> Any:
    return ok(await api.client.get(f"{api.root}/stages/{stage}/range-summary{query}"))


async def test_the_slowest_stage_and_what_stands_still_first(gauge: InProcess):
    for name in ("moving", "still", "done"):
        job = gauge.api(name)
        await job.define({"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 1}})
        token = await job.token("s")
        await job.report("s", token, {"0": T})
        if name == "done":
            await job.report("s", token, {"0": MAX})
            keys = await job.token("k")
            await job.report("k", keys, {"00000000-100000000": {}}, input_watermark=MAX)
        gauge.advance(1_000)
    moving = gauge.api("moving")
    await moving.report("s", await moving.token("s"), {"0": T + MINUTE})
    keys = await moving.token("k")
    whole = {"00000000-100000000": {}}
    await moving.report("k", keys, whole, input_watermark=T + MINUTE)
    found = await overview(gauge)
    assert [(job["job"], job["slowest"], job["status"]) for job in found["jobs"]] == [
        ("still", "k", "unknown"),
        # The first upstream of equal ones: stages below wait for it.
        ("moving", "s", "active"),
        ("done", "s", "final"),
    ]
    assert [job["output_watermark"] for job in found["jobs"]] == [None, T + MINUTE, MAX]
    assert found["jobs"][0]["data_lag_ms"] is None
    assert found["jobs"][0]["since"] < found["jobs"][1]["since"]
    assert found["matching"] == found["total"] == 3


async def test_jobs_are_searched_and_limited(gauge: InProcess):
    for name in ("alpha", "alphabet", "beta"):
        await gauge.api(name).define({"s": {"shards": ["0"]}})
    found = await overview(gauge, "?search=ALPHA&limit=1")
    assert [job["job"] for job in found["jobs"]] == ["alpha"]
    assert (found["matching"], found["total"]) == (2, 3)
    for query in ("?limit=0", "?limit=x", f"?search={'x' * 129}"):
        problem(await gauge.client.get(f"/v1/overview{query}"), 422, "invalid-request")


async def test_the_graph_has_no_names_of_shards(api: Api):
    await api.define(
        {
            "k": {"inputs": ["1", "2"], "ranges": 3},
            "1": {"shards": ["a", "b"]},
            "2": {"shards": ["c"]},
            "through": {"inputs": ["k"], "passthrough": True},
        }
    )
    graph = ok(await api.client.get(f"{api.root}/graph"))
    order = [node["stage"] for node in graph["stages"]]
    assert order.index("k") > max(order.index("1"), order.index("2"))
    assert {
        node["stage"]: (node["inputs"], node["kind"], node["ranges"]) for node in graph["stages"]
    } == {
        "1": ([], "source", 2),
        "2": ([], "source", 1),
        "k": (["1", "2"], "keyed", 3),
        "through": (["k"], "passthrough", 0),
    }
    problem(await api.client.get("/v1/jobs/none/graph"), 404, "unknown-job")


async def test_each_range_has_one_condition(api: Api):
    shards = ["active", "expired", "final", "idle", "retired", "silent"]
    await api.define({"s": {"shards": shards}})
    await api.retire("s", "retired")
    gone = await api.token("s", ["expired"], holder="gone")
    await api.report("s", gone, {"expired": T})
    await api.release(gone)
    token = await api.token("s", ["active", "final", "idle", "silent"], holder="worker")
    reported = {"active": T + MINUTE, "final": {"final": True}, "idle": {"idle": True}}
    await api.report("s", token, reported)
    found = await summary(api, "s", "?show=all")
    assert found["total"] == found["matching"] == 6
    assert {each["range"]: each["condition"] for each in found["listed"]} == {
        "active": "active",
        "expired": "expired",
        "final": "final",
        "idle": "idle",
        "retired": "retired",
        "silent": "never_reported",
    }
    assert found["counts"] == dict.fromkeys(
        ("active", "expired", "final", "idle", "never_reported", "retired"), 1
    )
    for condition, name in {
        "expired": "expired",
        "never_reported": "silent",
        "idle": "idle",
        "retired": "retired",
    }.items():
        one = await summary(api, "s", f"?show={condition}")
        assert [each["range"] for each in one["listed"]] == [name]
        assert one["matching"] == 1
    slowest = await summary(api, "s")
    assert [each["range"] for each in slowest["listed"]] == ["silent", "expired", "active"]


async def test_who_holds_a_range_and_since_when(gauge: InProcess, api: Api):
    gauge.skip_on_redis()
    await api.define({"s": {"shards": ["0", "1"]}})
    began = gauge.clock.wall_ms()
    token = await api.token("s", ["0"], holder="worker", ttl_ms=10_000)
    gauge.advance(4_000)
    await api.report("s", token, {"0": T})
    gauge.advance(3_000)
    held, free = (await summary(api, "s", "?show=all"))["listed"]
    assert held["holder"] == "worker"
    assert held["held_since"] == iso(began)
    assert held["reported_at"] == held["since"] == iso(began + 4_000)
    assert held["expires_in_ms"] == 7_000
    assert (free["holder"], free["held_since"], free["reported_at"]) == (None, None, None)


async def test_since_when_a_range_stands_is_known_after_a_loss(gauge: InProcess, api: Api):
    async def since() -> dict[str, str | None]:
        found = await summary(gauge.api(), "s", "?show=all")
        return {each["range"]: each["since"] for each in found["listed"]}

    await api.define({"s": {"shards": ["0", "1"]}})
    await api.report("s", await api.token("s", ["0"]), {"0": T})
    before = await since()
    assert (before["0"] is None, before["1"]) == (False, None)
    await gauge.restart()
    assert await since() == before


async def test_buckets_count_every_range_once(api: Api):
    ids = tile_ids(1_000)
    await api.define({"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 1_000}})
    await api.report("s", await api.token("s"), {"0": T + MINUTE})
    token = await api.token("k")
    ranges: dict[str, Any] = {name: {} for name in ids[:-1]}
    ranges[ids[345]] = {"holds": {"state": T}}
    await api.report("k", token, ranges, input_watermark=T + MINUTE)
    found = await summary(api, "k", "?buckets=7")
    buckets = found["buckets"]
    assert sum(bucket["ranges"] for bucket in buckets) == 1_000
    assert {bucket["ranges"] for bucket in buckets} <= {142, 143}
    assert [bucket["index"] for bucket in buckets] == [1_000 * k // 7 for k in range(7)]
    assert [bucket["first"] for bucket in buckets] == [ids[1_000 * k // 7] for k in range(7)]
    assert [bucket["lowest"] for bucket in buckets] == [
        T if k == 2 else None if k == 6 else T + MINUTE for k in range(7)
    ]
    assert [bucket["never_reported"] for bucket in buckets] == [0] * 6 + [1]
    assert all(bucket["highest"] == T + MINUTE for bucket in buckets)
    # A part of them, so close that each has a bucket of its own.
    part = await summary(api, "k", "?from=340&to=350&buckets=100&show=all")
    assert [bucket["first"] for bucket in part["buckets"]] == list(ids[340:350])
    assert [bucket["lowest"] for bucket in part["buckets"]].index(T) == 5
    assert [each["index"] for each in part["listed"]] == list(range(340, 350))
    assert part["total"] == 1_000
    assert sum(part["counts"].values()) == 10


async def test_nothing_is_waited_for(api: Api):
    await api.define({"s": {"shards": ["0", "1"]}, "t": {"inputs": ["s"], "passthrough": True}})
    await api.report("s", await api.token("s"), {"0": {"final": True}, "1": {"idle": True}})
    [bucket] = (await summary(api, "s", "?buckets=1"))["buckets"]
    assert (bucket["lowest"], bucket["highest"]) == (MAX, None)
    through = await summary(api, "t")
    assert (through["total"], through["buckets"], through["listed"]) == (0, [], [])


@pytest.mark.parametrize(
    "query",
    ["buckets=0", "buckets=2001", "from=2", "from=1&to=1", "show=odd", "limit=1001", "to=0"],
)
async def test_a_summary_that_is_none(api: Api, query: str):
    await api.define({"k": {"inputs": ["s"], "ranges": 2}, "s": {"shards": ["0"]}})
    response = await api.client.get(f"{api.root}/stages/k/range-summary?{query}")
    detail = problem(response, 422, "invalid-request")["detail"]
    assert query.partition("=")[0] in detail


async def test_an_unknown_stage(api: Api):
    await api.define({"k": {"inputs": ["s"], "ranges": 2}, "s": {"shards": ["0"]}})
    response = await api.client.get(f"{api.root}/stages/none/range-summary")
    problem(response, 404, "unknown-stage")


async def test_who_am_i_without_keys(gauge: InProcess):
    me = ok(await gauge.client.get("/v1/whoami"))
    assert (me["name"], me["role"], me["jobs"]) == (None, "admin", "*")
    assert me["now"] == gauge.clock.wall_ms()


async def test_who_am_i_and_what_may_i_see(gauge: InProcess):
    for name in ("mine", "theirs"):
        await gauge.api(name).define({"s": {"shards": ["0"]}})
    admin = ok(await gauge.client.post("/v1/keys", json={"name": "a", "role": "admin"}), 201)
    as_admin = {"Authorization": f"Bearer {admin['secret']}"}
    body = {"name": "reader", "role": "read", "jobs": "mi*"}
    made = ok(await gauge.client.post("/v1/keys", json=body, headers=as_admin), 201)
    as_reader = {"Authorization": f"Bearer {made['secret']}"}
    me = ok(await gauge.client.get("/v1/whoami", headers=as_reader))
    assert (me["name"], me["role"], me["jobs"]) == ("reader", "read", "mi*")
    seen = ok(await gauge.client.get("/v1/overview", headers=as_reader))
    assert [job["job"] for job in seen["jobs"]] == ["mine"]
    # Not even how many others there are.
    assert (seen["matching"], seen["total"]) == (1, 1)
    problem(await gauge.client.get("/v1/whoami"), 401, "unauthenticated")


# ---- the page itself


async def test_the_page_needs_no_key_and_runs_nothing_inline(gauge: InProcess):
    ok(await gauge.client.post("/v1/keys", json={"name": "a", "role": "admin"}), 201)
    response = await gauge.client.get("/")
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "<style" not in response.text


async def test_the_page_is_asked_for_again_only_if_it_has_changed(gauge: InProcess):
    first = await gauge.client.get("/site/main.js")
    assert first.status_code == 200
    assert first.headers["content-type"].startswith("text/javascript")
    assert first.headers["cache-control"] == "no-cache"
    again = await gauge.client.get(
        "/site/main.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    problem(await gauge.client.get("/", headers={"Host": "evil.example"}), 421, "unknown-host")
