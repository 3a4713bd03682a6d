"""An unchanged value costs one step of the live store: readers poll it ten times a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from service.frontier.explain import STALLED_AFTER
from tests.support.api import Api, eventually, ok
from tests.support.inprocess import InProcess
from tests.support.steps import count_steps, counted_steps

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("stores", ["memory,sqlite", "redis,postgres"], indirect=True),
]

FLOW: dict[str, Any] = {
    "s": {"shards": ["a", "b"], "percentiles": [50]},
    "k": {"inputs": ["s"], "ranges": 2},
}
GROUPS = {"groups": [{"stages": ["s"], "max_drift_ms": 10}]}


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    count_steps(monkeypatch)


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(FLOW)
    token = await api.token("s")
    await api.report("s", token, {"a": 10, "b": 20})
    return api


async def polled(job: Api, path: str, headers: Mapping[str, str]) -> tuple[int, list[str]]:
    """The status of an answer, and the steps that it took."""
    with counted_steps() as steps:
        response = await job.client.get(f"{job.root}/{path}", headers=headers)
    return response.status_code, steps


@pytest.mark.parametrize("prefer", [{}, {"Prefer": "wait=0"}], ids=["at once", "waiting"])
@pytest.mark.parametrize("stage", ["s", "k"])
async def test_a_watermark_that_has_not_changed(
    job: Api, gauge: InProcess, stage: str, prefer: dict[str, str]
) -> None:
    path = f"stages/{stage}/watermark"
    response = await job.get_watermark(stage)
    known = {"If-None-Match": response.headers["etag"]} | prefer
    for _ in range(3):
        # Soft values are computed again by then, if at all.
        gauge.advance(200)
        status, steps = await polled(job, path, known)
        assert (status, len(steps)) == (304, 1), steps
    status, steps = await polled(job, path, {"If-None-Match": '"0-0"'})
    assert status == 200
    assert len(steps) > 1, "a body has what is computed for readers"


async def test_a_long_poll_looks_at_what_is_published_alone(job: Api) -> None:
    known = (await job.get_watermark("s")).headers["etag"]
    headers = {"If-None-Match": known, "Prefer": "wait=1"}
    status, steps = await polled(job, "stages/s/watermark", headers)
    assert status == 304
    assert len(steps) <= 2, "once at the beginning, and once in the end"


async def test_a_body_has_soft_values_however_it_was_asked_for(job: Api) -> None:
    plain = ok(await job.get_watermark("s"))
    assert plain["processing_watermark"] is not None
    for headers in ({"If-None-Match": '"0-0"'}, {"If-None-Match": '"0-0"', "Prefer": "wait=5"}):
        response = await job.client.get(f"{job.root}/stages/s/watermark", headers=headers)
        body = ok(response)
        assert body.keys() == plain.keys()
        assert body["processing_watermark"] >= plain["processing_watermark"]
        assert body["health"] == plain["health"]
    response = await job.client.get(
        f"{job.root}/stages/s/watermark?at_least=5", headers={"Prefer": "wait=5"}
    )
    assert ok(response)["processing_watermark"] >= plain["processing_watermark"]


async def test_soft_values_that_readers_have_are_joined_without_a_step(
    job: Api, gauge: InProcess
) -> None:
    ok(await job.get_watermark("s"))
    gauge.advance(200)
    status, steps = await polled(job, "stages/s/watermark", {})
    assert (status, len(steps)) == (200, 2), steps
    await job.report("s", await job.token("s"), {"a": 11, "b": 21})
    status, steps = await polled(job, "stages/s/watermark", {})
    assert (status, steps.count("raise_marks")) == (200, 1), steps


async def test_a_body_of_a_job_that_has_not_changed_takes_one_step(
    job: Api, gauge: InProcess
) -> None:
    path = "stages/s/watermark"
    ok(await job.get_watermark("s"))
    # Its values were raised by the last read; from now on they stand.
    gauge.advance(200)
    before = ok(await job.get_watermark("s"))
    gauge.advance(300)
    status, steps = await polled(job, path, {})
    assert (status, len(steps)) == (200, 1), steps
    after = ok(await job.get_watermark("s"))
    clocks = ("system_lag_ms", "data_lag_ms")
    assert all(after[member] == value for member, value in before.items() if member not in clocks)


async def test_work_that_becomes_stalled_by_the_passage_of_time_alone(
    api: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    await api.define({"s": {"shards": ["a"]}})
    token = await api.token("s", ttl_ms=600_000)
    for watermark in (10, 11):
        gauge.advance(1_000)
        await api.report("s", token, {"a": {"watermark": watermark, "oldest_work": 1_000}})
    for _ in range(2):
        assert ok(await api.client.get("/v1/problems"))["problems"] == []
        assert ok(await api.get_watermark("s"))["health"] == "ok"
    gauge.advance(STALLED_AFTER * 1_000)
    assert ok(await api.get_watermark("s"))["health"] == "stalled"
    [found] = ok(await api.client.get("/v1/problems"))["problems"]
    assert found["health"] == "stalled"


async def test_problems_of_jobs_that_have_not_changed_are_not_looked_for_again(
    job: Api, gauge: InProcess
) -> None:
    first = ok(await job.client.get("/v1/problems"))
    assert first["problems"], "nobody has claimed the ranges of `k`"
    gauge.advance(20_000)
    with counted_steps() as steps:
        assert ok(await job.client.get("/v1/problems")) == first
    assert "observe" not in steps
    await job.token("k")
    gauge.advance(20_000)
    with counted_steps() as steps:
        assert ok(await job.client.get("/v1/problems")) != first
    assert steps.count("observe") == 1


async def test_a_throttle_that_has_not_changed(api: Api) -> None:
    put = await api.client.put(api.root, json={"stages": FLOW, "throttle": GROUPS})
    ok(put, 201)
    await api.report("s", await api.token("s"), {"a": 10, "b": 2_000})
    response = await api.client.get(f"{api.root}/throttle")
    assert ok(response)["shards"]["s"]["b"]["pause"]
    known = {"If-None-Match": response.headers["etag"]}
    for headers in (known, known | {"Prefer": "wait=0"}):
        status, steps = await polled(api, "throttle", headers)
        assert (status, len(steps)) == (304, 1), steps


async def test_a_stream_looks_at_soft_values_seldom(api: Api) -> None:
    """With a throttle it looks ten times a second, and for changes of health every two."""
    ok(await api.client.put(api.root, json={"stages": FLOW, "throttle": GROUPS}), 201)
    await api.report("s", await api.token("s"), {"a": 10, "b": 20})
    with counted_steps() as steps:
        async with api.client.stream("GET", f"{api.root}/events") as stream:
            lines = stream.aiter_lines()
            while not (await anext(lines)).startswith("event: throttle"):
                pass
            await eventually(lambda: number_of(steps, "observe"), lambda looks: looks >= 22)
    # Each look reads what is published, and what the shards have promised.
    assert steps.count("raise_marks") <= number_of_looks(steps) / 2, steps


async def number_of(steps: Sequence[str], name: str) -> int:
    return steps.count(name)


def number_of_looks(steps: Sequence[str]) -> int:
    return steps.count("read") + steps.count("snapshot")
