"""Contract section 3, reports: what counts, what is behind, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.api import FIRST_TIME, LAST_TIME, LOWER, MAX, UPPER, Api, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["0", "1"]},
    "k": {"inputs": ["s"], "ranges": 2},
    "u": {"inputs": ["k"], "passthrough": True},
}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


@pytest.fixture
async def token(job: Api) -> str:
    """A lease on both shards."""
    return await job.token("s", ttl_ms=600_000)


async def test_an_answer_says_everything(job: Api):
    token = await job.token("s", ttl_ms=20_000)
    answer = await job.report("s", token, {"0": 10, "1": 20})
    assert set(answer) == {"accepted", "behind", "rejected", "expires_in_ms", "watermark"}
    assert (answer["accepted"], answer["behind"], answer["rejected"]) == (2, [], [])
    assert answer["expires_in_ms"] == 20_000
    assert set(answer["watermark"]) == {"input_watermark", "output_watermark", "version"}
    assert answer["watermark"]["input_watermark"] is None
    assert answer["watermark"]["output_watermark"] == 10
    assert answer["watermark"]["version"] == (await job.watermark("s"))["version"]


async def test_an_advance_is_visible_everywhere_once_it_is_answered(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 20})
    assert await job.output("s") == 10
    assert (await job.watermark("k"))["input_watermark"] == 10
    snapshot = await job.snapshot()
    assert snapshot["s"]["output_watermark"] == snapshot["k"]["input_watermark"] == 10


async def test_a_stage_waits_for_every_range(job: Api, token: str):
    answer = await job.report("s", token, {"0": 10})
    assert answer["watermark"]["output_watermark"] is None
    state = await job.watermark("s")
    assert state["status"] == "unknown"
    assert state["ranges"]["reported"] == 1
    assert (await job.report("s", token, {"1": 7}))["watermark"]["output_watermark"] == 7


async def test_below_an_earlier_promise_is_behind_and_no_error(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10})
    answer = await job.report("s", token, {"0": 9, "1": 12})
    assert answer["behind"] == ["0"]
    assert answer["rejected"] == []
    assert await job.promises("s") == {"0": 10, "1": 12}
    assert await job.output("s") == 10
    assert (await job.report("s", token, {"0": 10}))["behind"] == []


async def test_no_watermark_yet_promises_nothing(job: Api, token: str):
    await job.report("s", token, {"0": None, "1": {"watermark": None}})
    assert await job.promises("s") == {"0": None, "1": None}
    assert (await job.watermark("s"))["status"] == "unknown"
    await job.report("s", token, {"0": 5, "1": 5})
    await job.report("s", token, {"0": None})
    assert await job.output("s") == 5


async def test_a_shards_holds(job: Api, token: str):
    await job.report("s", token, {"0": {"watermark": 50, "holds": {"a": 20, "b": 30}}, "1": 99})
    assert await job.output("s") == 20
    # Holds are not monotone: gone, and back again below the promise.
    await job.report("s", token, {"0": {"watermark": 50}})
    assert await job.output("s") == 50
    answer = await job.report("s", token, {"0": {"watermark": 60, "holds": {"a": 10}}})
    assert answer["behind"] == ["0"]
    row = next(row for row in await job.ranges("s") if row["range"] == "0")
    assert (row["promise"], row["holds"]) == (50, {"a": 10})
    assert await job.output("s") == 50


async def test_holds_above_the_watermark_do_not_lift_it(job: Api, token: str):
    await job.report("s", token, {"0": {"watermark": 5, "holds": {"a": 20}}, "1": 99})
    assert await job.output("s") == 5


async def test_final_is_the_end_of_time(job: Api, token: str):
    await job.report("s", token, {"0": {"final": True}, "1": 7})
    assert await job.output("s") == 7
    assert (await job.watermark("s"))["ranges"]["final"] == 1
    await job.report("s", token, {"1": {"final": True}})
    state = await job.watermark("s")
    assert (state["output_watermark"], state["status"]) == (MAX, "final")
    assert state["ranges"]["final"] == 2
    assert (await job.watermark("k"))["input_watermark"] == MAX


async def test_final_whatever_the_holds(job: Api, token: str):
    await job.report("s", token, {"0": {"final": True, "holds": {"a": 1}}})
    assert (await job.promises("s"))["0"] == MAX


async def test_a_watermark_of_max_is_final(job: Api, token: str):
    await job.report("s", token, {"0": MAX, "1": MAX})
    assert (await job.watermark("s"))["status"] == "final"


async def test_final_cannot_be_taken_back(job: Api, token: str):
    await job.report("s", token, {"0": MAX, "1": 1})
    assert (await job.report("s", token, {"0": 5}))["behind"] == ["0"]
    await job.report("s", token, {"0": {"idle": True}, "1": 2})
    assert await job.output("s") == 2
    assert (await job.watermark("s"))["ranges"]["final"] == 1


async def test_idle_leaves_the_minimum_until_the_shard_reports_again(job: Api, token: str):
    await job.report("s", token, {"0": 5, "1": 10})
    await job.report("s", token, {"0": {"idle": True}})
    state = await job.watermark("s")
    assert (state["output_watermark"], state["status"]) == (10, "active")
    assert state["ranges"]["idle"] == 1
    await job.report("s", token, {"1": 20})
    assert await job.output("s") == 20
    # Back with older data: the stage waits where it is until the shard has caught up.
    await job.report("s", token, {"0": 7, "1": 30})
    state = await job.watermark("s")
    assert (state["output_watermark"], state["ranges"]["idle"]) == (20, 0)
    await job.report("s", token, {"0": 25})
    assert await job.output("s") == 25


async def test_a_shard_that_never_promised_may_be_idle(job: Api, token: str):
    await job.report("s", token, {"0": {"idle": True}, "1": 10})
    assert await job.output("s") == 10


async def test_an_idle_word_may_bring_a_watermark(job: Api, token: str):
    await job.report("s", token, {"0": {"watermark": 8, "idle": True}, "1": 10})
    assert (await job.promises("s"))["0"] == 8


async def test_when_every_shard_is_idle_the_stage_stands_still(job: Api, token: str):
    await job.report("s", token, {"0": 5, "1": 10})
    await job.report("s", token, {"0": {"idle": True}, "1": {"idle": True}})
    state = await job.watermark("s")
    assert (state["output_watermark"], state["status"]) == (5, "idle")
    assert (await job.watermark("k"))["input_watermark"] == 5


async def test_a_stage_is_idle_even_before_its_first_output(job: Api, token: str):
    await job.report("s", token, {"0": {"idle": True}, "1": {"idle": True}})
    state = await job.watermark("s")
    assert (state["output_watermark"], state["status"]) == (None, "idle")


async def test_final_and_idle_do_not_jump_to_the_end(job: Api, token: str):
    await job.report("s", token, {"0": 5, "1": 10})
    await job.report("s", token, {"0": {"idle": True}, "1": {"final": True}})
    state = await job.watermark("s")
    assert (state["output_watermark"], state["status"]) == (5, "idle")
    await job.report("s", token, {"0": 20})
    assert await job.output("s") == 20
    await job.report("s", token, {"0": {"final": True}})
    assert await job.output("s") == MAX


async def test_final_and_idle_upstreams_do_not_jump_to_the_end(api: Api):
    await api.define(
        {
            "a": {"shards": ["0"]},
            "b": {"shards": ["0"]},
            "u": {"inputs": ["a", "b"], "passthrough": True},
            "k": {"inputs": ["a", "b"], "ranges": 1},
        }
    )
    a, b = await api.token("a"), await api.token("b")
    await api.report("a", a, {"0": 5})
    await api.report("b", b, {"0": 9})
    await api.report("b", b, {"0": {"idle": True}})
    assert await api.output("u") == 5
    await api.report("a", a, {"0": {"final": True}})
    u, k = await api.watermark("u"), await api.watermark("k")
    assert (u["output_watermark"], u["status"]) == (9, "idle"), "the least of all promises"
    assert (k["input_watermark"], k["status"]) == (9, "unknown")
    await api.report("b", b, {"0": {"final": True}})
    assert (await api.watermark("u"))["status"] == "final"
    assert (await api.watermark("k"))["input_watermark"] == MAX


async def test_an_idle_upstream_is_left_out_downstream(api: Api):
    await api.define(
        {
            "a": {"shards": ["0"]},
            "b": {"shards": ["0"]},
            "u": {"inputs": ["a", "b"], "passthrough": True},
        }
    )
    a, b = await api.token("a"), await api.token("b")
    await api.report("a", a, {"0": {"idle": True}})
    await api.report("b", b, {"0": 50})
    u = await api.watermark("u")
    assert (u["output_watermark"], u["status"]) == (50, "active")
    await api.report("a", a, {"0": 10})
    assert await api.output("u") == 50
    await api.report("b", b, {"0": {"idle": True}})
    await api.report("a", a, {"0": {"idle": True}})
    u = await api.watermark("u")
    assert (u["output_watermark"], u["status"]) == (50, "idle")


@pytest.mark.parametrize("how", ["expired", "released", "superseded"])
async def test_idle_lapses_with_its_lease(job: Api, gauge: InProcess, how: str):
    busy = await job.token("s", ["1"], holder="b", ttl_ms=600_000)
    quiet = await job.token("s", ["0"], holder="a", ttl_ms=5_000)
    await job.report("s", quiet, {"0": {"watermark": 5, "idle": True}})
    await job.report("s", busy, {"1": 10})
    assert await job.output("s") == 10
    if how == "expired":
        gauge.advance(5_001)
    elif how == "released":
        await job.release(quiet)
    else:
        await job.claim("s", ["0"], holder="c", attempt=1)
    assert (await job.watermark("s"))["ranges"]["idle"] == 0
    await job.report("s", busy, {"1": 20})
    assert await job.output("s") == 10
    assert await job.promises("s") == {"0": 5, "1": 20}


async def test_an_expired_lease_goes_on_holding_the_stage(job: Api, gauge: InProcess):
    slow = await job.token("s", ["0"], holder="a", ttl_ms=1_000)
    fast = await job.token("s", ["1"], holder="b", ttl_ms=600_000)
    await job.report("s", slow, {"0": 5})
    await job.report("s", fast, {"1": 10})
    gauge.advance(300_000)
    await job.report("s", fast, {"1": 1_000})
    assert await job.output("s") == 5
    assert (await job.watermark("s"))["ranges"]["leased"] == 1


async def observed(job: Api, token: str, time: int) -> str:
    """The keyed stage's input at `time`; a lease on its ranges."""
    await job.report("s", token, {"0": time, "1": time})
    return await job.token("k", ttl_ms=600_000)


async def test_a_keyed_promise_is_capped_by_what_was_observed(job: Api, token: str):
    keyed = await observed(job, token, 10)
    await job.report("k", keyed, {LOWER: {}, UPPER: {"holds": {}}}, input_watermark=10)
    assert await job.output("k") == 10
    await job.report("s", token, {"0": 20, "1": 20})
    await job.report("k", keyed, {LOWER: {}}, input_watermark=20)
    await job.report("k", keyed, {UPPER: {"holds": {"state": 99}}}, input_watermark=10)
    assert await job.output("k") == 10
    await job.report("k", keyed, {UPPER: {"holds": {"state": 15}}}, input_watermark=20)
    assert await job.output("k") == 15
    assert await job.output("u") == 15


async def test_a_keyed_report_needs_the_input_it_has_observed(job: Api, token: str):
    keyed = await observed(job, token, 10)
    problem(await job.post_report("k", keyed, {LOWER: {}}), 422, "invalid-report")
    assert await job.promises("k") == {LOWER: None, UPPER: None}


async def test_an_input_that_was_never_published_is_refused(job: Api, token: str):
    keyed = await job.token("k")
    problem(await job.post_report("k", keyed, {LOWER: {}}, input_watermark=0), 409, "input-ahead")
    await job.report("k", keyed, {LOWER: {}}, input_watermark=None)
    await observed(job, token, 10)
    keyed = await job.token("k")
    for epoch in ({}, {"epoch": 1}):
        response = await job.post_report("k", keyed, {LOWER: {}}, input_watermark=11, **epoch)
        problem(response, 409, "input-ahead")
    assert await job.promises("k") == {LOWER: None, UPPER: None}


async def test_a_source_observes_no_input(job: Api, token: str):
    response = await job.post_report("s", token, {"0": 1}, input_watermark=1)
    problem(response, 422, "invalid-report")
    assert await job.promises("s") == {"0": None, "1": None}


async def test_a_passthrough_stage_takes_no_report(job: Api, token: str):
    problem(await job.post_report("u", token, {"0": 1}), 422)


async def test_what_the_lease_does_not_cover_is_rejected(job: Api):
    token = await job.token("s", ["0"], holder="a")
    await job.claim("s", ["1"], holder="b")
    answer = await job.report("s", token, {"0": 10, "1": 10, "nope": 10})
    assert answer["accepted"] == 1
    reasons = {item["range"]: item["reason"] for item in answer["rejected"]}
    assert set(reasons) == {"1", "nope"}
    assert reasons["nope"] == "unknown"
    assert await job.promises("s") == {"0": 10, "1": None}


async def test_a_lease_that_covers_none_of_the_ranges(job: Api):
    token = await job.token("s", ["0"])
    for ranges in ({"1": 10}, {"nope": 10}, {"1": 10, "nope": 10}):
        body = problem(await job.post_report("s", token, ranges), 410, "lease-lost")
        assert isinstance(body["reason"], str)
    assert await job.promises("s") == {"0": None, "1": None}


async def test_an_unknown_token(job: Api):
    body = problem(await job.post_report("s", "never-seen", {"0": 1}), 410, "lease-lost")
    assert body["reason"] == "unknown"


INVALID_SOURCE: dict[str, Any] = {
    "a float": {"0": 1.5},
    "a whole float": {"0": 1.0},
    "a string": {"0": "1"},
    "a boolean": {"0": True},
    "a list": {"0": [1]},
    "before the year 1": {"0": FIRST_TIME - 1},
    "after the year 9999": {"0": LAST_TIME + 1},
    "below MAX": {"0": MAX - 1},
    "above MAX": {"0": MAX + 1},
    "far above MAX": {"0": 10**30},
    "the least integer": {"0": -MAX - 1},
    "an object too late": {"0": {"watermark": LAST_TIME + 1}},
    "a hold too late": {"0": {"watermark": 1, "holds": {"a": LAST_TIME + 1}}},
    "a hold that is null": {"0": {"watermark": 1, "holds": {"a": None}}},
    "a hold that is text": {"0": {"watermark": 1, "holds": {"a": "1"}}},
    "holds that are a list": {"0": {"watermark": 1, "holds": [1]}},
    "holds that are null": {"0": {"watermark": 1, "holds": None}},
    "idle and final": {"0": {"idle": True, "final": True}},
    "an idle that is no boolean": {"0": {"idle": 1}},
    "a final that is text": {"0": {"final": "true"}},
    "nothing said": {"0": {}},
    "only holds": {"0": {"holds": {"a": 1}}},
    "not idle and no watermark": {"0": {"idle": False}},
    "an unknown member": {"0": {"watermark": 1, "colour": 1}},
    "no ranges": None,
    "ranges as a list": ["0"],
    "one bad among good": {"1": 5, "0": "bad"},
}


@pytest.mark.parametrize("case", INVALID_SOURCE)
async def test_an_invalid_source_report_applies_nothing(job: Api, token: str, case: str):
    response = await job.post_report("s", token, INVALID_SOURCE[case])
    problem(response, 422, "invalid-report", "invalid-request")
    assert await job.promises("s") == {"0": None, "1": None}


INVALID_KEYED: dict[str, Any] = {
    "an integer": 5,
    "a null": None,
    "a watermark": {"watermark": 5},
    "an idle that is no boolean": {"idle": 1},
    "final": {"final": True},
    "a bad hold": {"holds": {"a": 1.5}},
    "an unknown member": {"colour": 1},
}


@pytest.mark.parametrize("case", INVALID_KEYED)
async def test_an_invalid_keyed_report_applies_nothing(job: Api, token: str, case: str):
    keyed = await observed(job, token, 10)
    response = await job.post_report(
        "k", keyed, {UPPER: {}, LOWER: INVALID_KEYED[case]}, input_watermark=10
    )
    problem(response, 422, "invalid-report", "invalid-request")
    assert await job.promises("k") == {LOWER: None, UPPER: None}


@pytest.mark.parametrize(
    "change",
    [
        {"token": None},
        {"token": 1},
        {"epoch": -1},
        {"epoch": 1.5},
        {"epoch": "1"},
        {"epoch": True},
        {"epoch": 1 << 63},
        {"input_watermark": "1"},
        {"input_watermark": 1.5},
        {"colour": "blue"},
    ],
    ids=repr,
)
async def test_an_invalid_member_applies_nothing(job: Api, token: str, change: Any):
    body = {"token": token, "ranges": {"0": 5}} | change
    response = await job.client.post(f"{job.root}/stages/s/reports", json=body)
    problem(response, 422, "invalid-report", "invalid-request")
    assert await job.promises("s") == {"0": None, "1": None}


@pytest.mark.parametrize("body", [[], 1, {}, {"ranges": {"0": 1}}, {"token": "x"}], ids=repr)
async def test_a_body_that_is_no_report(job: Api, body: Any):
    response = await job.client.post(f"{job.root}/stages/s/reports", json=body)
    problem(response, 422, "invalid-report", "invalid-request")


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"token": "x", "ranges": {"0": NaN}}', b"\xff", b"[1,]"], ids=repr
)
async def test_what_is_no_json(job: Api, body: bytes):
    problem(await job.client.post(f"{job.root}/stages/s/reports", content=body), 400)


@pytest.mark.parametrize("time", [FIRST_TIME, -1, 0, LAST_TIME, MAX])
async def test_the_bounds_of_time(job: Api, token: str, time: int):
    await job.report("s", token, {"0": time, "1": {"watermark": time, "holds": {"h": time}}})
    assert await job.output("s") == time


async def test_at_least_one_range_and_at_most_ten_thousand(api: Api):
    shards = [f"p{i}" for i in range(10_001)]
    await api.define({"s": {"shards": shards}})
    token = await api.token("s")
    problem(await api.post_report("s", token, dict.fromkeys(shards, 1)), 413)
    problem(await api.post_report("s", token, {}), 422, "invalid-report")
    assert (await api.watermark("s"))["ranges"]["reported"] == 0
    assert (await api.report("s", token, dict.fromkeys(shards[1:], 1)))["accepted"] == 10_000
    assert (await api.watermark("s"))["ranges"]["reported"] == 10_000


async def test_a_body_that_is_too_large(job: Api, token: str):
    body = json.dumps({"token": token, "ranges": {"0": 1}}) + " " * (16 << 20)
    response = await job.client.post(f"{job.root}/stages/s/reports", content=body.encode())
    problem(response, 413)
    assert await job.promises("s") == {"0": None, "1": None}


async def test_a_refused_report_does_not_renew(job: Api, gauge: InProcess):
    token = await job.token("s", ttl_ms=5_000)
    gauge.advance(4_000)
    problem(await job.post_report("s", token, {"0": "bad"}), 422)
    problem(await job.post_report("s", token, {"nope": 1}), 410)
    gauge.advance(1_001)
    problem(await job.post_report("s", token, {"0": 1}), 410, "lease-lost")


async def test_jobs_are_apart(job: Api, token: str, gauge: InProcess):
    other = gauge.api("other")
    await other.define(SPEC)
    await job.report("s", token, {"0": 10, "1": 10})
    assert await other.output("s") is None
    await other.report("s", await other.token("s"), {"0": 3, "1": 3})
    assert (await job.output("s"), await other.output("s")) == (10, 3)


@pytest.mark.parametrize("ranges", [1, 32, 63, 64, 65])
@pytest.mark.parametrize("holds", [1, 2, 64])
async def test_any_number_of_ranges_and_holds(api: Api, ranges: int, holds: int):
    """Large reports are read as arrays, small ones one by one: what comes of it is the same."""
    await api.define({"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": ranges}})
    await api.report("s", await api.token("s"), {"0": 100})
    claim = await api.claim("k")
    reported = {
        name: {"holds": {f"component-{n}": 50 + n for n in range(holds)}}
        for name in claim["granted"]
    }
    answer = await api.report("k", claim["token"], reported, input_watermark=100)
    assert answer["watermark"]["output_watermark"] == 50
    assert await api.output("k") == 50
    assert {row["promise"] for row in await api.ranges("k")} == {50}
