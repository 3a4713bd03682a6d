"""Contract section 3, the listing of a stage's ranges: what an operator looks at."""

from __future__ import annotations

import pytest

from tests.support.api import KEYS, LOWER, MAX, UPPER, Api, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["a", "b", "c", "d"]},
    "k": {"inputs": ["s"], "ranges": 2},
    "u": {"inputs": ["k"], "passthrough": True},
}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


async def test_a_key_range_shows_its_bounds(job: Api):
    rows = await job.ranges("k")
    assert [(row["range"], row["start"], row["end"]) for row in rows] == [
        (LOWER, 0, KEYS // 2),
        (UPPER, KEYS // 2, KEYS),
    ]


async def test_a_row_says_everything(job: Api, gauge: InProcess):
    grant = await job.claim("s", ["a"], holder="exec-3", ttl_ms=9_000)
    await job.report("s", grant["token"], {"a": {"watermark": 9, "holds": {"state": 5}}})
    gauge.advance(4_000)
    row = next(row for row in await job.ranges("s") if row["range"] == "a")
    assert (row["promise"], row["holds"]) == (5, {"state": 5})
    assert (row["holder"], row["fence"]) == ("exec-3", grant["fence"])
    assert 4_000 < row["expires_in_ms"] <= 5_000
    assert row["status"] == "active"
    assert "token" not in row
    assert any(isinstance(value, str) and "T" in value for value in row.values()), row


async def test_a_row_of_a_range_that_nobody_has(job: Api, gauge: InProcess):
    await job.claim("s", ["a"], ttl_ms=1_000)
    gauge.advance(1_001)
    for row in await job.ranges("s"):
        assert row["promise"] is None
        assert row["holder"] is None
        assert row["expires_in_ms"] is None
        assert row["holds"] == {}
        assert row["status"] == "unknown"


async def test_statuses(job: Api):
    token = await job.token("s")
    await job.report("s", token, {"a": 5, "b": {"watermark": 7, "idle": True}, "c": MAX})
    assert {row["range"]: row["status"] for row in await job.ranges("s")} == {
        "a": "active",
        "b": "idle",
        "c": "final",
        "d": "unknown",
    }


async def test_the_order_of_promises_shows_first_what_holds_the_stage(job: Api):
    token = await job.token("s")
    await job.report("s", token, {"a": 9, "b": 3, "c": MAX})
    rows = await job.ranges("s", "?order=promise")
    assert [row["range"] for row in rows] == ["d", "b", "a", "c"]
    rows = await job.ranges("s", "?order=promise&limit=2")
    assert [row["range"] for row in rows] == ["d", "b"]


async def test_a_limit(job: Api):
    assert len(await job.ranges("s", "?limit=3")) == 3
    assert len(await job.ranges("s")) == 4


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=-1", "limit=x", "limit=1.5", "order=colour", "limit=100000000"]
)
async def test_an_invalid_question(job: Api, query: str):
    problem(await job.client.get(f"{job.root}/stages/s/ranges?{query}"), 422, "invalid-request")


async def test_a_passthrough_stage_has_no_ranges(job: Api):
    assert await job.ranges("u") == []
    assert (await job.watermark("u"))["ranges"]["total"] == 0
