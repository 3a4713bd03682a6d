"""Contract section 3, leases: who may report for what, until when, and who takes it over."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import LOWER, UPPER, Api, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["0", "1", "2"]},
    "k": {"inputs": ["s"], "ranges": 2},
    "u": {"inputs": ["k"], "passthrough": True},
}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


async def held_by(api: Api, stage: str = "s") -> dict[str, str | None]:
    return {row["range"]: row["holder"] for row in await api.ranges(stage)}


async def test_a_grant_says_everything(job: Api):
    grant = await job.claim("s", ["1", "0"], holder="a", ttl_ms=7_000)
    assert set(grant) == {"token", "fence", "expires_in_ms", "granted", "denied"}
    assert grant["expires_in_ms"] == 7_000
    assert sorted(grant["granted"]) == ["0", "1"]
    assert grant["denied"] == []
    assert len(grant["token"]) >= 16
    assert isinstance(grant["fence"], int)
    assert await held_by(job) == {"0": "a", "1": "a", "2": None}
    assert (await job.watermark("s"))["ranges"]["leased"] == 2


async def test_all_is_every_range(job: Api):
    assert sorted((await job.claim("s"))["granted"]) == ["0", "1", "2"]
    assert sorted((await job.claim("k"))["granted"]) == [LOWER, UPPER]


async def test_the_default_time_to_live_is_ten_seconds(job: Api, gauge: InProcess):
    grant = await job.claim("s")
    assert grant["expires_in_ms"] == 10_000
    gauge.advance(9_000)
    await job.report("s", grant["token"], {"0": 1})
    gauge.advance(10_001)
    body = problem(await job.post_report("s", grant["token"], {"0": 2}), 410, "lease-lost")
    assert body["reason"] == "expired"


async def test_what_another_holds_is_denied(job: Api, gauge: InProcess):
    await job.claim("s", ["0"], holder="a", ttl_ms=8_000)
    gauge.advance(3_000)
    grant = await job.claim("s", holder="b")
    assert sorted(grant["granted"]) == ["1", "2"]
    [denied] = grant["denied"]
    assert 4_000 < denied.pop("expires_in_ms") <= 5_000
    assert denied == {"range": "0", "reason": "held", "holder": "a"}
    refused = problem(await job.post_claim("s", ["0"], holder="b"), 409, "lease-conflict")
    assert [(each["range"], each["reason"]) for each in refused["denied"]] == [("0", "held")]
    assert await held_by(job) == {"0": "a", "1": "b", "2": "b"}


async def test_an_expired_lease_is_free_for_all(job: Api, gauge: InProcess):
    await job.claim("s", ["0"], holder="a", ttl_ms=1_000)
    gauge.advance(1_001)
    assert (await job.claim("s", ["0"], holder="b"))["granted"] == ["0"]


async def test_the_same_holder_takes_its_range_again(job: Api):
    old = await job.claim("s", ["0", "1"], holder="a", epoch=5, attempt=5)
    new = await job.claim("s", ["0"], holder="a")
    assert new["granted"] == ["0"]
    assert new["fence"] > old["fence"]
    assert new["token"] != old["token"]
    # The old lease keeps what was not granted anew.
    answer = await job.report("s", old["token"], {"0": 5, "1": 5})
    assert answer["accepted"] == 1
    assert answer["rejected"] == [{"range": "0", "reason": "superseded"}]
    assert await job.promises("s") == {"0": None, "1": 5, "2": None}


@pytest.mark.parametrize(
    ("rank", "taker", "wins"),
    [
        ({}, {}, False),
        ({}, {"epoch": 0, "attempt": 0}, False),
        ({}, {"attempt": 1}, True),
        ({"attempt": 1}, {"attempt": 1}, False),
        ({"attempt": 2}, {"attempt": 1}, False),
        ({"attempt": 9}, {"epoch": 1}, True),
        ({"epoch": 1}, {"attempt": 9}, False),
        ({"epoch": 1, "attempt": 1}, {"epoch": 1, "attempt": 2}, True),
        ({"epoch": 2, "attempt": 0}, {"epoch": 1, "attempt": 2}, False),
        ({"epoch": 2}, {"epoch": 10}, True),
    ],
    ids=repr,
)
async def test_outranking(job: Api, rank: Any, taker: Any, wins: bool):
    old = await job.claim("s", ["0"], holder="a", **rank)
    response = await job.post_claim("s", ["0"], holder="b", **taker)
    if wins:
        new = ok(response, 201)
        assert new["fence"] > old["fence"]
        lost = problem(await job.post_report("s", old["token"], {"0": 1}), 410, "lease-lost")
        assert lost["reason"] == "superseded"
        await job.report("s", new["token"], {"0": 2})
    else:
        problem(response, 409, "lease-conflict")
        await job.report("s", old["token"], {"0": 1})


async def test_outranking_within_a_run(job: Api):
    run = await job.run("s")
    await job.claim("s", ["0"], holder="a", run=run, epoch=3, attempt=1)
    problem(
        await job.post_claim("s", ["0"], holder="b", run=run, epoch=3, attempt=1),
        409,
        "lease-conflict",
    )
    await job.claim("s", ["0"], holder="b", run=run, epoch=3, attempt=2)


async def test_a_claim_of_an_unknown_range(job: Api):
    grant = await job.claim("s", ["0", "nope"])
    assert grant["granted"] == ["0"]
    assert [(d["range"], d["reason"]) for d in grant["denied"]] == [("nope", "unknown")]
    refused = problem(await job.post_claim("s", ["nope"]), 409, "lease-conflict")
    assert [(d["range"], d["reason"]) for d in refused["denied"]] == [("nope", "unknown")]


async def test_a_claim_on_a_passthrough_stage(job: Api):
    problem(await job.post_claim("u"), 422)


@pytest.mark.parametrize(
    "change",
    [
        {"ttl_ms": 999},
        {"ttl_ms": 600_001},
        {"ttl_ms": 1_000.5},
        {"ttl_ms": "1000"},
        {"ttl_ms": True},
        {"ranges": []},
        {"ranges": "some"},
        {"ranges": [1]},
        {"ranges": {"0": 1}},
        {"holder": ""},
        {"holder": "no good"},
        {"holder": "x" * 129},
        {"holder": None},
        {"run": "7"},
        {"run": -1},
        {"epoch": -1},
        {"epoch": 1.5},
        {"epoch": 1 << 63},
        {"attempt": -1},
        {"attempt": "0"},
        {"colour": "blue"},
    ],
    ids=repr,
)
async def test_an_invalid_claim(job: Api, change: Any):
    body = {"ranges": ["0"], "holder": "a"} | change
    response = await job.client.post(f"{job.root}/stages/s/leases", json=body)
    problem(response, 422, "invalid-request")
    assert (await job.watermark("s"))["ranges"]["leased"] == 0


@pytest.mark.parametrize("body", [{}, {"holder": "a"}, {"ranges": ["0"]}, [], "x"], ids=repr)
async def test_an_incomplete_claim(job: Api, body: Any):
    response = await job.client.post(f"{job.root}/stages/s/leases", json=body)
    problem(response, 422, "invalid-request")


@pytest.mark.parametrize("path", ["stages/s/leases", "leases/renew", "leases/release"])
async def test_what_is_no_json(job: Api, path: str):
    problem(await job.client.post(f"{job.root}/{path}", content=b"{]"), 400)


@pytest.mark.parametrize("ttl", [1_000, 600_000])
async def test_the_bounds_of_the_time_to_live(job: Api, ttl: int):
    assert (await job.claim("s", ttl_ms=ttl))["expires_in_ms"] == ttl


async def test_renewing(job: Api, gauge: InProcess):
    grant = await job.claim("s", ["0", "1"], ttl_ms=5_000)
    gauge.advance(4_000)
    answer = await job.renew(grant["token"])
    assert answer["lost"] == []
    (renewed,) = answer["renewed"]
    assert set(renewed) == {"token", "expires_in_ms", "ranges"}
    assert renewed["token"] == grant["token"]
    assert renewed["expires_in_ms"] == 5_000
    assert sorted(renewed["ranges"]) == ["0", "1"]
    gauge.advance(4_000)
    await job.report("s", grant["token"], {"0": 1})


async def test_a_report_renews_its_lease(job: Api, gauge: InProcess):
    token = await job.token("s", ttl_ms=5_000)
    for time in range(4):
        gauge.advance(4_000)
        assert (await job.report("s", token, {"0": time}))["expires_in_ms"] == 5_000


async def test_an_expired_lease_is_never_renewed(job: Api, gauge: InProcess):
    token = await job.token("s", ttl_ms=1_000)
    gauge.advance(1_001)
    for _ in range(2):
        assert await job.renew(token) == {
            "renewed": [],
            "lost": [{"token": token, "reason": "expired"}],
        }


async def test_why_a_lease_was_lost(job: Api, gauge: InProcess):
    kept = await job.token("s", ["2"], holder="d", ttl_ms=600_000)
    superseded = await job.token("s", ["0"], holder="a")
    await job.token("s", ["0"], holder="b", attempt=1)
    released = await job.token("s", ["1"], holder="c")
    assert await job.release(released) == 1
    expired = await job.token("s", ["1"], holder="c", ttl_ms=1_000)
    gauge.advance(1_001)
    answer = await job.renew(kept, superseded, released, expired, "never-seen")
    assert {item["token"]: item["reason"] for item in answer["lost"]} == {
        superseded: "superseded",
        released: "released",
        expired: "expired",
        "never-seen": "unknown",
    }
    assert [item["token"] for item in answer["renewed"]] == [kept]
    for token, reason in ((superseded, "superseded"), (released, "released"), (expired, "expired")):
        body = problem(await job.post_report("s", token, {"0": 1, "1": 1}), 410, "lease-lost")
        assert body["reason"] == reason


async def test_renewing_shows_what_is_left(job: Api):
    token = await job.token("s", ["0", "1"], holder="a")
    await job.claim("s", ["1"], holder="b", attempt=1)
    (renewed,) = (await job.renew(token))["renewed"]
    assert renewed["ranges"] == ["0"]


async def test_releasing(job: Api):
    token = await job.token("s", ["0", "1"], holder="a")
    assert await job.release(token, "never-seen") == 1
    assert await job.release(token) == 0
    assert (await job.claim("s", ["0"], holder="b"))["granted"] == ["0"]
    problem(await job.post_report("s", token, {"1": 1}), 410, "lease-lost")


async def test_releasing_what_was_taken_over_frees_nothing(job: Api):
    old = await job.token("s", ["0"], holder="a")
    new = await job.token("s", ["0"], holder="b", attempt=1)
    await job.release(old)
    problem(await job.post_claim("s", ["0"], holder="c"), 409, "lease-conflict")
    await job.report("s", new, {"0": 1})


async def test_a_token_is_good_for_its_own_stage_and_job_only(job: Api, gauge: InProcess):
    token = await job.token("s")
    problem(await job.post_report("k", token, {LOWER: {}}, input_watermark=None), 410, "lease-lost")
    other = gauge.api("other")
    await other.define(SPEC)
    problem(await other.post_report("s", token, {"0": 1}), 410, "lease-lost")
    assert (await other.renew(token))["lost"] == [{"token": token, "reason": "unknown"}]
    assert await other.release(token) == 0
    await job.report("s", token, {"0": 1})


@pytest.mark.parametrize("path", ["renew", "release"])
@pytest.mark.parametrize(
    "body", [{}, [], {"tokens": "x"}, {"tokens": [1]}, {"tokens": ["x"], "colour": 1}], ids=repr
)
async def test_an_invalid_renewal_or_release(job: Api, path: str, body: Any):
    response = await job.client.post(f"{job.root}/leases/{path}", json=body)
    problem(response, 422, "invalid-request")


async def test_no_answer_but_a_grant_shows_a_token(job: Api, gauge: InProcess):
    token = await job.token("s", ["0"], holder="a")
    refused = await job.post_claim("s", ["0"], holder="b")
    partial = await job.post_claim("s", holder="b")
    report = await job.post_report("s", token, {"0": 1})
    answers = [refused, partial, report, await job.spec(), await job.get_watermark("s")]
    readable = (f"{job.root}/watermarks", f"{job.root}/stages/s/ranges", "/metrics", "/v1/jobs")
    answers += [await gauge.client.get(path) for path in readable]
    for answer in answers:
        assert answer.status_code in {200, 201, 409}
        assert token not in answer.text


async def test_tokens_do_not_repeat_and_do_not_count(job: Api):
    tokens = [await job.token("s", ["0"], holder="a") for _ in range(50)]
    assert len(set(tokens)) == 50
    common = [pair for pair in zip(tokens[0], tokens[1], strict=False) if pair[0] == pair[1]]
    assert len(common) < len(tokens[0]) * 0.6, "two tokens in a row look alike"


async def test_fences_rise_over_everything(job: Api, gauge: InProcess):
    fences = [(await job.claim("s", ["0"], holder="a"))["fence"]]
    fences.append((await job.claim("k", [LOWER], holder="a"))["fence"])
    await job.run("s")
    fences.append((await job.claim("k", [UPPER], holder="a"))["fence"])
    await gauge.restart()
    fences.append((await gauge.api().claim("k", holder="b"))["fence"])
    ok(await gauge.api().reset())
    fences.append((await gauge.api().claim("k", holder="b"))["fence"])
    await gauge.crash()
    fences.append((await gauge.api().claim("k", holder="b"))["fence"])
    assert fences == sorted(set(fences))


async def test_leases_are_void_after_a_restart(job: Api, gauge: InProcess):
    token = await job.token("s", ttl_ms=600_000)
    await job.report("s", token, {"0": 1, "1": 1, "2": 1})
    for again in (gauge.restart, gauge.crash):
        await again()
        job = gauge.api()
        problem(await job.post_report("s", token, {"0": 5}), 410, "lease-lost")
        assert [item["token"] for item in (await job.renew(token))["lost"]] == [token]
        state = await job.watermark("s")
        assert state["ranges"]["leased"] == 0
        assert state["output_watermark"] == 1
