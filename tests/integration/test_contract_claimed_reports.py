"""Contract section 3, additions: a claim within a report."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import LOWER, UPPER, Api, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["0", "1"]},
    "k": {"inputs": ["s"], "ranges": 2},
    "d": {"shards": ["first"], "dynamic": True},
}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


def claiming(ranges: Any, **members: Any) -> dict[str, Any]:
    claim = {"holder": members.pop("holder", "exec-1"), **members.pop("claim", {})}
    return {"claim": claim, "ranges": ranges, **members}


async def send(api: Api, stage: str, body: dict[str, Any]) -> Any:
    return await api.client.post(f"{api.root}/stages/{stage}/reports", json=body)


async def holders(api: Api, stage: str = "s") -> dict[str, str | None]:
    return {row["range"]: row["holder"] for row in await api.ranges(stage)}


async def test_the_answer_is_that_of_a_report_and_of_a_claim(job: Api) -> None:
    await job.claim("s", ["1"], holder="other", ttl_ms=9_000)
    body = ok(await send(job, "s", claiming({"0": 5, "1": 6}, claim={"ttl_ms": 7_000})))
    assert set(body) == {
        *("accepted", "behind", "rejected", "expires_in_ms", "watermark"),
        *("token", "fence", "granted", "denied"),
    }
    assert (body["accepted"], body["granted"], body["rejected"]) == (1, ["0"], [])
    assert body["expires_in_ms"] == 7_000
    denied = body["denied"][0]
    assert (denied["range"], denied["reason"], denied["holder"]) == ("1", "held", "other")
    assert await holders(job) == {"0": "exec-1", "1": "other"}
    assert ok(await job.post_report("s", body["token"], {"0": 9}))["accepted"] == 1


async def test_an_advance_is_visible_with_the_answer(job: Api) -> None:
    body = ok(await send(job, "s", claiming({"0": 5, "1": 6}, release=True)))
    assert body["watermark"]["output_watermark"] == 5
    assert body["expires_in_ms"] == 0
    assert (await job.watermark("s"))["output_watermark"] == 5
    assert await holders(job) == {"0": None, "1": None}
    assert problem(await job.post_report("s", body["token"], {"0": 9}), 410)["reason"] == "released"


async def test_a_keyed_stage_in_an_epoch(job: Api) -> None:
    run = ok(
        await job.client.post(f"{job.root}/runs", json={"stages": ["k"], "holder": "driver"}), 201
    )["run"]
    ranges = {LOWER: {}, UPPER: {"holds": {"state": 3}}}
    claim = {"run": run, "epoch": 4, "attempt": 9}
    body = ok(await send(job, "k", claiming(ranges, claim=claim, epoch=4)))
    assert body["accepted"] == 2
    commit = {"run": run, "epoch": 4, "stages": {"k": {"input_watermark": None}}}
    assert ok(await job.client.post(f"{job.root}/commits", json=commit))["applied"] == {"k": 2}
    # The epoch is over, and a report of it claims nothing.
    claim = {"run": run, "epoch": 4, "attempt": 10}
    again = await send(job, "k", claiming(ranges, claim=claim, epoch=4, holder="exec-2"))
    problem(again, 409, "stale-epoch")
    assert set((await holders(job, "k")).values()) == {"exec-1"}
    older = claiming(ranges, claim={"run": run + 1, "epoch": 5}, epoch=5, holder="exec-2")
    problem(await send(job, "k", older), 409, "stale-run")
    ahead = claiming(ranges, claim={"run": run, "epoch": 5}, input_watermark=10, holder="exec-2")
    problem(await send(job, "k", ahead), 409, "input-ahead")
    assert set((await holders(job, "k")).values()) == {"exec-1"}


async def test_none_granted_is_a_conflict(job: Api) -> None:
    await job.claim("s", ["0"], holder="other")
    body = problem(await send(job, "s", claiming({"0": 5})), 409, "lease-conflict")
    assert body["denied"][0]["holder"] == "other"
    unknown = problem(await send(job, "s", claiming({"7": 5})), 409, "lease-conflict")
    assert unknown["denied"][0]["reason"] == "unknown"
    metrics = (await job.client.get("/metrics")).text
    assert 'tidegauge_reports_total{result="lease-conflict"} 2.0' in metrics
    assert "tidegauge_denied_ranges_total 2.0" in metrics


async def test_an_expired_lease_is_no_obstacle(job: Api, gauge: InProcess) -> None:
    first = ok(await send(job, "s", claiming({"0": 5}, claim={"ttl_ms": 1_000})))
    gauge.advance(1_001)
    second = ok(await send(job, "s", claiming({"0": 6}, holder="exec-2")))
    assert second["fence"] > first["fence"]


async def test_shards_join_a_dynamic_source_and_hold_it(job: Api) -> None:
    assert ok(await send(job, "d", claiming({"first": 90})))["accepted"] == 1
    body = ok(await send(job, "d", claiming({"first": 95, "second": 20})))
    assert (body["accepted"], sorted(body["granted"])) == (2, ["first", "second"])
    assert (await job.watermark("d"))["output_watermark"] == 90
    row = next(row for row in await job.ranges("d") if row["range"] == "second")
    assert row["promise"] == 20
    assert (await job.watermark("d"))["ranges"]["total"] == 2


async def test_a_report_that_is_refused_lets_no_shard_join(job: Api) -> None:
    problem(await send(job, "d", claiming({"new": 1}, claim={"run": 3})), 409, "stale-run")
    problem(await send(job, "d", claiming({"a b": 1})), 422, "invalid-report")
    commit = {"epoch": 2, "stages": {"d": {}}}
    ok(await job.client.post(f"{job.root}/commits", json=commit))
    problem(await send(job, "d", claiming({"new": 1}, epoch=2)), 409, "stale-epoch")
    assert list(await holders(job, "d")) == ["first"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token": "t"}, "claim and token"),
        ({"ranges": None, "columns": {"watermark": [1, 2]}}, "claim and columns"),
        ({"claim": None}, "token is missing"),
        ({"claim": None, "token": "t", "release": True}, "release is true"),
        ({"release": "yes"}, "release"),
        ({"claim": {"ttl_ms": 5_000}}, "holder"),
        ({"claim": {"holder": "x", "ttl_ms": 10}}, "ttl_ms"),
        ({"claim": {"holder": "a b"}}, "holder"),
        ({"claim": {"holder": "x", "ranges": ["0"]}}, "ranges"),
        ({"ranges": {}}, "ranges"),
        ({"ranges": {"0": "soon"}}, "0"),
    ],
    ids=str,
)
async def test_an_invalid_claim_claims_nothing(
    job: Api, change: dict[str, Any], named: str
) -> None:
    body = {k: v for k, v in {**claiming({"0": 5, "1": 6}), **change}.items() if v is not None}
    assert named in problem(await send(job, "s", body), 422, "invalid-report")["detail"]
    assert await holders(job) == {"0": None, "1": None}
