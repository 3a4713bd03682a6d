"""Throttling: how far shards may run, who pauses, and at what rate sources read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.frontier.timestamps import MAX
from tests.support.api import Api, ok, problem

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("stores", ["memory,sqlite", "redis,postgres"], indirect=True),
]

STAGES = {
    "a": {"shards": ["0", "1"]},
    "b": {"shards": ["0"]},
    "c": {"shards": ["0"]},
    "k": {"inputs": ["a", "b"], "ranges": 1},
}
THROTTLE = {"groups": [{"stages": ["a"], "max_drift_ms": 1_000}]}
KEYS = "00000000-100000000"


async def define(api: Api, throttle: Any) -> None:
    ok(await api.client.put(api.root, json={"stages": STAGES, "throttle": throttle}), 201)


async def read(api: Api, **headers: str) -> Any:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return await api.client.get(f"{api.root}/throttle", headers=sent)


async def limit(api: Api) -> int | None:
    [group] = ok(await read(api))["groups"]
    return group["limit"]


async def test_flinks_cases_of_alignment(api: Api) -> None:
    await define(api, THROTTLE)
    token = await api.token("a")
    assert await limit(api) is None, "nobody has promised"
    await api.report("a", token, {"0": 42})
    assert await limit(api) == 1_042
    await api.report("a", token, {"1": 44})
    assert await limit(api) == 1_042
    answer = await api.report("a", token, {"0": 5_000})
    [group] = ok(await read(api))["groups"]
    assert group == {"stages": ["a"], "limit": 1_044, "held_by": {"stage": "a", "range": "1"}}
    assert answer["throttle"].keys() == {"0"}
    asked = answer["throttle"]["0"]
    assert (asked["pause"], asked["until"], asked["rate"]) == (True, 1_044, 1.0)
    assert ok(await read(api))["shards"]["a"].keys() == {"0"}
    await api.report("a", token, {"0": {"final": True}})
    assert await limit(api) == 1_044, "a shard at the end of time does not count"
    assert ok(await read(api))["shards"] == {}
    await api.report("a", token, {"1": {"idle": True, "watermark": 50}})
    assert await limit(api) is None


async def test_no_overflow_at_the_end_of_time(api: Api) -> None:
    await define(api, {"groups": [{"stages": ["a"], "max_drift_ms": 10**12}]})
    await api.report("a", await api.token("a"), {"0": 253_402_300_799_999})
    assert await limit(api) == 253_402_300_799_999 + 10**12 < MAX


async def test_a_packed_report_is_told_of_its_own_shards_alone(api: Api) -> None:
    """It was told of all shards of the stage: the slowest was asked to wait for itself."""
    await define(api, THROTTLE)
    fast, slow = await api.token("a", ["0"]), await api.token("a", ["1"])

    async def packed(token: str, watermark: int) -> Any:
        body = {"token": token, "columns": {"watermark": [watermark]}}
        return ok(await api.client.post(f"{api.root}/stages/a/reports", json=body))

    await packed(slow, 42)
    assert list((await packed(fast, 999_000))["throttle"]) == ["0"]
    assert "throttle" not in await packed(slow, 43)


async def test_groups_are_apart(api: Api) -> None:
    groups = [{"stages": ["a", "b"], "max_drift_ms": 10}, {"stages": ["c"], "max_drift_ms": 10}]
    await define(api, {"groups": groups})
    await api.report("a", await api.token("a"), {"0": 1_000, "1": 1_000})
    await api.report("b", await api.token("b"), {"0": 5})
    await api.report("c", await api.token("c"), {"0": 9_999})
    body = ok(await read(api))
    assert [group["limit"] for group in body["groups"]] == [15, 10_009]
    assert {stage: set(shards) for stage, shards in body["shards"].items()} == {"a": {"0", "1"}}


async def test_back_pressure_slows_down_who_is_ahead(api: Api) -> None:
    await define(api, {"stages": {"k": {"max_lag_ms": 1_000}}})
    a, b = await api.token("a"), await api.token("b")
    await api.report("a", a, {"0": 10_000, "1": 10_000})
    await api.report("b", b, {"0": 5_500})
    k = await api.token("k")
    await api.report("k", k, {KEYS: {"holds": {"state": 5_000}}}, input_watermark=5_500)
    shards = ok(await read(api))["shards"]
    assert {name: one["rate"] for name, one in shards["a"].items()} == {"0": 0.2, "1": 0.2}
    assert "b" not in shards, "it is what k waits for"
    await api.report("b", b, {"0": 10_000})
    await api.report("k", k, {KEYS: {}}, input_watermark=10_000)
    assert ok(await read(api))["shards"] == {}


async def test_a_waiting_reader_hears_of_each_move(api: Api) -> None:
    await define(api, THROTTLE)
    token = await api.token("a")
    await api.report("a", token, {"0": 42, "1": 44})
    first = await read(api)
    etag = first.headers["etag"]
    assert (await read(api, If_None_Match=etag)).status_code == 304
    waiting = asyncio.create_task(read(api, If_None_Match=etag, Prefer="wait=30"))
    await asyncio.sleep(0)
    await api.report("a", token, {"0": 43})
    response = await waiting
    assert ok(response)["groups"][0]["limit"] == 1_043
    assert response.headers["preference-applied"] == "wait=30"
    assert response.headers["etag"] != etag


async def test_without_a_throttle_nothing_is_asked(api: Api) -> None:
    await api.define(STAGES)
    assert "throttle" not in await api.report("a", await api.token("a"), {"0": 5, "1": 9_999})
    body = ok(await read(api))
    assert (body["groups"], body["shards"]) == ([], {})


async def test_the_specification_is_shown_and_compared(api: Api) -> None:
    await define(api, THROTTLE)
    spec = await api.spec()
    assert spec.json()["throttle"] == THROTTLE
    ok(await api.client.put(api.root, json={"stages": STAGES, "throttle": THROTTLE}))
    problem(await api.put(STAGES), 428, "precondition-required")


@pytest.mark.parametrize(
    "throttle",
    [
        {"groups": [{"stages": ["k"], "max_drift_ms": 1}]},
        {"groups": [{"stages": ["nobody"], "max_drift_ms": 1}]},
        {"groups": [{"stages": ["a"], "max_drift_ms": 1}, {"stages": ["a"], "max_drift_ms": 1}]},
        {"groups": [{"stages": ["a"], "max_drift_ms": -1}]},
        {"stages": {"a": {"max_lag_ms": 1}}},
        {"stages": {"k": {"max_lag_ms": 0}}},
        {"colour": 1},
    ],
)
async def test_what_is_no_throttle(api: Api, throttle: Any) -> None:
    response = await api.client.put(api.root, json={"stages": STAGES, "throttle": throttle})
    problem(response, 422, "invalid-pipeline")


async def test_workers_that_obey_stay_together(api: Api) -> None:
    """Four at once, of which one reports ten times as far: ahead by the drift and one report at most."""
    steps = {"0": 1_000, "1": 100, "2": 100, "3": 90}
    shards = {"stages": {"a": {"shards": list(steps)}}}
    throttle = {"groups": [{"stages": ["a"], "max_drift_ms": 2_000}]}
    ok(await api.client.put(api.root, json=shards | {"throttle": throttle}), 201)
    tokens = {shard: await api.token("a", [shard]) for shard in steps}
    at = dict.fromkeys(steps, 1)
    for shard, token in tokens.items():
        await api.report("a", token, {shard: 1})
    spreads: list[int] = []
    pauses = 0

    async def work(shard: str, step: int) -> None:
        nonlocal pauses
        paused = False
        while min(at.values()) < 5_000:
            at[shard] += 0 if paused else step
            answer = await api.report("a", tokens[shard], {shard: at[shard]})
            # Others may be under way: their reports are applied, and not answered yet.
            spreads.append(at[shard] - min(at.values()))
            asked = answer.get("throttle", {}).get(shard)
            paused = asked is not None and asked["pause"]
            pauses += paused

    await asyncio.gather(*(work(shard, step) for shard, step in steps.items()))
    assert max(spreads) <= 2_000 + 1_000
    assert pauses, "the fast one would have been ahead"
