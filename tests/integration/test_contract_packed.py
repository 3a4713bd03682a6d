"""Packed reports: columns in the order of the lease, and what they are refused for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import Api, ok, problem
from tests.support.byte_columns import as_bytes, as_flags
from tests.support.inprocess import InProcess
from tests.support.sketches import pending

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("stores", ["memory,sqlite", "redis,postgres"], indirect=True),
]

FLOW = {"s": {"shards": ["c", "a", "b"]}, "k": {"inputs": ["s"], "ranges": 4}}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(FLOW)
    return api


async def post(job: Api, stage: str, token: str, columns: Any, **members: Any) -> Any:
    body = {"token": token, "columns": columns} | members
    return await job.client.post(f"{job.root}/stages/{stage}/reports", json=body)


async def test_columns_are_in_the_order_of_granted(job: Api) -> None:
    lease = await job.claim("s", ["b", "c"])
    sent = {"watermark": [20, None], "idle": [False, False], "records": [1, 2]}
    assert ok(await post(job, "s", lease["token"], sent))["accepted"] == 2
    expected = dict(zip(lease["granted"], [20, None], strict=True))
    assert await job.promises("s") == {"a": None, **expected}
    assert (await job.watermark("s"))["records"] == 3


async def test_a_packed_report_says_the_same_as_a_named_one(api: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    bodies: list[Any] = []
    for name in ("named", "packed", "bytes"):
        job = gauge.api(name)
        await job.define(FLOW)
        s = await job.claim("s")
        holds = {"state": 3}
        rows = [
            {"watermark": 5, "holds": holds, "records": 4, "pending": pending([7])},
            {"watermark": None, "idle": True, "holds": {}, "records": 0, "pending": None},
            {"final": True, "watermark": 9, "holds": {}, "records": 0, "late": 3, "pending": None},
        ]
        if name == "named":
            await job.report("s", s["token"], dict(zip(s["granted"], rows, strict=True)))
        else:
            columns = {
                "watermark": [5, None, 9],
                "idle": [False, True, False],
                "final": [False, False, True],
                "holds": {"state": [3, None, None]},
                "records": [4, 0, 0],
                "late": [0, 0, 3],
                "pending": [pending([7]), None, None],
            }
            if name == "bytes":
                columns |= {
                    "watermark": as_bytes([5, None, 9]),
                    "idle": as_flags([False, True, False]),
                    "final": as_flags([False, False, True]),
                    "holds": {"state": as_bytes([3, None, None])},
                }
            ok(await post(job, "s", s["token"], columns))
        rows_shown = await job.ranges("s")
        shown = await job.watermark("s")
        bodies.append(
            (
                [{k: v for k, v in row.items() if k != "fence"} for row in rows_shown],
                {k: v for k, v in shown.items() if k != "job"},
            )
        )
    assert bodies[0] == bodies[1] == bodies[2]


async def test_columns_of_a_keyed_stage(job: Api) -> None:
    s, k = await job.token("s"), await job.claim("k")
    await job.report("s", s, {"a": 100, "b": 100, "c": 100})
    columns = {"holds": {"state": [50, None, 70, 100], "out": [60, 40, None, None]}}
    ok(await post(job, "k", k["token"], columns, input_watermark=100))
    promises = await job.promises("k")
    assert [promises[name] for name in k["granted"]] == [50, 40, 70, 100]
    assert [row["holds"] for row in await job.ranges("k")] == [
        {"state": 50, "out": 60}, {"out": 40}, {"state": 70}, {"state": 100},
    ]  # fmt: skip
    ok(await post(job, "k", k["token"], {}, input_watermark=100))
    assert await job.output("k") == 100, "no hold, so all that was observed"


async def test_bytes_and_arrays_stand_side_by_side(job: Api) -> None:
    s, k = await job.claim("s"), await job.claim("k")
    sent = {"watermark": as_bytes([100, 100, None]), "idle": as_flags([False, False, True])}
    sent |= {"records": [1, 2, 3], "oldest_work": as_bytes([5, None, 6])}
    assert ok(await post(job, "s", s["token"], sent))["accepted"] == 3
    shown = await job.watermark("s")
    assert (shown["output_watermark"], shown["records"], shown["processing_watermark"]) == (
        100,
        6,
        5,
    )
    columns = {"holds": {"state": as_bytes([50, None, 70, 100]), "out": [60, 40, None, None]}}
    ok(await post(job, "k", k["token"], columns, input_watermark=100))
    promises = await job.promises("k")
    assert [promises[name] for name in k["granted"]] == [50, 40, 70, 100]
    assert [row["holds"] for row in await job.ranges("k")] == [
        {"state": 50, "out": 60}, {"out": 40}, {"state": 70}, {"state": 100},
    ]  # fmt: skip
    whole = {"holds": {"state": as_bytes([80, 81, 82, 83])}, "idle": "AAAAAA=="}
    ok(await post(job, "k", k["token"], whole, input_watermark=100))
    assert await job.output("k") == 80


async def test_bytes_in_an_epoch(job: Api) -> None:
    lease = await job.claim("s")
    ok(await post(job, "s", lease["token"], {"watermark": as_bytes([1, 2, 3])}, epoch=4))
    await job.commit(4, {"s": {}})
    assert await job.output("s") == 1


async def test_the_holds_shown_are_those_of_the_last_report(job: Api) -> None:
    s, k = await job.token("s"), await job.claim("k")
    await job.report("s", s, {"a": 100, "b": 100, "c": 100})
    first, second = k["granted"][:2]

    async def shown() -> list[Any]:
        return [row["holds"] for row in (await job.ranges("k"))[:2]]

    await job.report("k", k["token"], {first: {"holds": {"old": 9}}}, input_watermark=100)
    columns = {"holds": {"state": [50, 60, None, None]}}
    ok(await post(job, "k", k["token"], columns, input_watermark=100))
    assert await shown() == [{"state": 50}, {"state": 60}]
    await job.report("k", k["token"], {first: {"holds": {}}}, input_watermark=100)
    assert await shown() == [{}, {"state": 60}]
    await job.report("k", k["token"], {second: {"holds": {"out": 7}}}, input_watermark=100)
    assert await shown() == [{}, {"out": 7}]
    ok(await post(job, "k", k["token"], {"holds": {"other": [1, None, 1, 1]}}, input_watermark=100))
    assert await shown() == [{"other": 1}, {}]


async def test_columns_in_an_epoch(job: Api) -> None:
    lease = await job.claim("s")
    ok(await post(job, "s", lease["token"], {"watermark": [1, 2, 3]}, epoch=4))
    assert await job.output("s") is None
    await job.commit(4, {"s": {}})
    assert await job.output("s") == 1


async def test_a_range_that_was_taken_over_is_rejected(job: Api) -> None:
    lease = await job.claim("s")
    await job.claim("s", ["b"], holder="other", epoch=1)
    answer = ok(await post(job, "s", lease["token"], {"watermark": [1, 2, 3]}))
    assert answer["rejected"] == [{"range": "b", "reason": "superseded"}]
    shown = await job.promises("s")
    assert shown.pop("b") is None
    assert sorted(v for v in shown.values() if v is not None) == [1, 3]


async def test_after_a_change_of_layout_the_lease_must_be_claimed_again(job: Api) -> None:
    lease = await job.claim("s")
    await job.change(FLOW | {"s": {"shards": ["a", "b", "d"]}})
    answer = problem(
        await post(job, "s", lease["token"], {"watermark": [1, 2, 3]}), 422, "invalid-report"
    )
    assert "claim again" in answer["detail"]


REFUSED: dict[str, Any] = {
    "too short": {"columns": {"watermark": [1, 2]}},
    "too long": {"columns": {"watermark": [1, 2, 3, 4]}},
    "of two lengths": {"columns": {"watermark": [1, 2, 3], "records": [1]}},
    "no columns at all": {"columns": {}},
    "an empty column": {"columns": {"watermark": []}},
    "ranges and columns": {"columns": {"watermark": [1, 2, 3]}, "ranges": {"a": 5}},
    "neither": {},
    "an unknown column": {"columns": {"watermark": [1, 2, 3], "colour": [1, 2, 3]}},
    "idle and final": {"columns": {"idle": [True] * 3, "final": [True] * 3}},
    "neither watermark nor idle nor final": {"columns": {"records": [1, 2, 3]}},
    "a value that is no time": {"columns": {"watermark": [1, 2**62, 3]}},
    "a value beyond 64 bits": {"columns": {"watermark": [1, 2**70, 3]}},
    "a hold that is text": {"columns": {"watermark": [1, 2, 3], "holds": {"x": [1, "2", 3]}}},
    "bytes of too few": {"columns": {"watermark": as_bytes([1, 2])}},
    "bytes of too many": {"columns": {"watermark": as_bytes([1, 2, 3, 4])}},
    "bytes and an array of another length": {
        "columns": {"watermark": as_bytes([1, 2, 3]), "records": [1]}
    },
    "half a number": {"columns": {"watermark": as_bytes([1, 2, 3])[:28]}},
    "no bytes": {"columns": {"watermark": ""}},
    "bytes of no time": {"columns": {"watermark": as_bytes([1, 2**62, 3])}},
    "a hold of bytes of no time": {
        "columns": {"watermark": [1, 2, 3], "holds": {"x": as_bytes([1, None, 2**62])}}
    },
    "base64 for addresses": {"columns": {"watermark": as_bytes([-1, 2, 3]).replace("/", "_")}},
    "base64 with a line break": {"columns": {"watermark": as_bytes([1, 2, 3]) + "\n"}},
    "a flag of two": {"columns": {"watermark": [1, 2, 3], "idle": "AAEC"}},
    "idle and final as bytes": {"columns": {"idle": "AQEB", "final": "AQEB"}},
    "records as bytes": {"columns": {"watermark": [1, 2, 3], "records": as_bytes([1, 2, 3])}},
    "a hold that is no time": {
        "columns": {"watermark": [1, 2, 3], "holds": {"x": [1, None, 2**62]}}
    },
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_does_not_fit_applies_nothing(job: Api, case: str) -> None:
    token = await job.token("s")
    body = {"token": token} | REFUSED[case]
    response = await job.client.post(f"{job.root}/stages/s/reports", json=body)
    problem(response, 422, "invalid-report")
    assert set((await job.promises("s")).values()) == {None}


async def test_a_hold_that_does_not_fit_is_named(job: Api) -> None:
    """The whole of the first of two columns was quoted."""
    token = await job.token("s")
    columns = {"watermark": [1, 2, 3], "holds": {"state": [1, None, 3], "timer": [1, 2, "17"]}}
    answer = problem(await post(job, "s", token, columns), 422, "invalid-report")
    assert answer["detail"].startswith('columns.holds.timer, entry 2, is "17": Expected')


async def test_a_packed_report_under_a_token_that_is_lost(job: Api) -> None:
    token = await job.token("s")
    assert await job.release(token) == 1
    answer = problem(await post(job, "s", token, {"watermark": [1, 2, 3]}), 410, "lease-lost")
    assert answer["reason"] == "released"
    problem(await post(job, "s", "nobody", {"watermark": [1, 2, 3]}), 410, "lease-lost")


async def test_final_is_a_sources_word(job: Api) -> None:
    token = await job.token("k")
    response = await post(job, "k", token, {"final": [True] * 4}, input_watermark=None)
    problem(response, 422, "invalid-report")


async def test_without_columns_it_speaks_for_no_more_ranges_than_with_them(api: Api) -> None:
    await api.define({"s": {"shards": ["a"]}, "k": {"inputs": ["s"], "ranges": 10_001}})
    await api.report("s", (await api.claim("s"))["token"], {"a": 5})
    lease = await api.claim("k")
    refused = await post(api, "k", lease["token"], {}, input_watermark=5)
    assert problem(refused, 413, "payload-too-large")["detail"].startswith("the lease is on 10001")
    assert (await api.watermark("k"))["output_watermark"] is None
    fewer = await api.claim("k", lease["granted"][:10_000])
    assert ok(await post(api, "k", fewer["token"], {}, input_watermark=5))["accepted"] == 10_000


async def test_a_hold_is_its_own_whatever_its_name(job: Api) -> None:
    await job.report("s", (await job.claim("s"))["token"], dict.fromkeys("abc", 100))
    lease = await job.claim("k")
    holds = {"a": [90, 90, 90, 90], "a\0": [5, 6, 7, 8]}
    ok(await post(job, "k", lease["token"], {"holds": holds}, input_watermark=100))
    assert (await job.watermark("k"))["output_watermark"] == 5
