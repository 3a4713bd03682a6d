"""Contract section 3, watermarks: plain, by ETag, by long poll, and all of a job at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api import LOWER, MAX, UPPER, Api, ok, problem
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
    return await job.token("s", ttl_ms=600_000)


async def still_waiting(poll: asyncio.Task[httpx.Response], api: Api) -> None:
    """Let the poll arrive and all else happen that is going to: it must not have answered."""
    for _ in range(3):
        await api.snapshot()
    assert not poll.done()


def polling(request: Awaitable[httpx.Response]) -> asyncio.Task[httpx.Response]:
    async def poll() -> httpx.Response:
        return await request

    return asyncio.create_task(poll())


async def answered(poll: asyncio.Task[httpx.Response]) -> httpx.Response:
    async with asyncio.timeout(60):
        return await poll


async def test_the_answer_says_everything(job: Api, token: str):
    await job.report("s", token, {"0": 10})
    response = await job.get_watermark("s")
    body = ok(response)
    assert body == {
        "job": "job",
        "stage": "s",
        "generation": 1,
        "version": body["version"],
        "status": "unknown",
        "input_watermark": None,
        "output_watermark": None,
        "ranges": {"total": 2, "reported": 1, "idle": 0, "final": 0, "leased": 2},
        "updated_at": body["updated_at"],
        "health": "silent",
        "processing_watermark": None,
        "system_lag_ms": None,
        "data_lag_ms": None,
        "records": 0,
        "late": 0,
        "corrections": 0,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", body["updated_at"])
    tag = rf'"1-{body["version"]}-[0-9a-f]{{8}}"'
    assert re.fullmatch(tag, response.headers["etag"])


async def test_a_fresh_stage_is_unknown(job: Api):
    for stage in SPEC:
        body = await job.watermark(stage)
        assert (body["status"], body["input_watermark"], body["output_watermark"]) == (
            "unknown",
            None,
            None,
        )


async def test_the_version_rises_with_each_change_only(job: Api, token: str):
    versions = [(await job.watermark("s"))["version"]]

    async def version_after(**ranges: Any) -> None:
        await job.report("s", token, {name[1:]: value for name, value in ranges.items()})
        versions.append((await job.watermark("s"))["version"])

    await version_after(_0=10)  # the stage waits for 1
    assert versions[-1] == versions[-2]
    await version_after(_1=20)  # output 10
    assert versions[-1] > versions[-2]
    await version_after(_1=30)
    assert versions[-1] == versions[-2]
    await version_after(_0={"idle": True})  # output 30
    assert versions[-1] > versions[-2]
    await version_after(_1={"idle": True})  # status
    assert versions[-1] > versions[-2]
    await version_after(_1=30)  # status
    assert versions[-1] > versions[-2]


async def test_the_version_rises_when_the_input_alone_moves(job: Api, token: str):
    before = await job.watermark("k")
    await job.report("s", token, {"0": 10, "1": 10})
    after = await job.watermark("k")
    assert after["version"] > before["version"]
    assert (after["input_watermark"], after["output_watermark"]) == (10, None)
    assert after["status"] == "unknown"


async def test_updated_at_is_when_it_changed(job: Api, token: str, gauge: InProcess):
    await job.report("s", token, {"0": 10, "1": 10})
    first = await job.watermark("s")
    gauge.advance(1_234)
    assert (await job.watermark("s"))["updated_at"] == first["updated_at"]
    await job.report("s", token, {"0": 20, "1": 20})
    assert (await job.watermark("s"))["updated_at"] > first["updated_at"]


async def test_if_none_match(job: Api, token: str):
    etag = (await job.get_watermark("s")).headers["etag"]
    response = await job.get_watermark("s", If_None_Match=etag)
    assert response.status_code == 304
    assert response.content == b""
    assert response.headers["etag"] == etag
    for others in (f'"x", {etag}', f"W/{etag}", "*"):
        assert (await job.get_watermark("s", If_None_Match=others)).status_code == 304, others
    await job.report("s", token, {"0": 10, "1": 10})
    response = await job.get_watermark("s", If_None_Match=etag)
    assert ok(response)["output_watermark"] == 10
    assert response.headers["etag"] != etag


async def test_an_etag_of_generation_and_version_alone_is_understood(job: Api, token: str):
    """As readers made it before it had a checksum, and as a reporter can make it of its answer."""
    short = f'"1-{(await job.watermark("s"))["version"]}"'
    assert (await job.get_watermark("s", If_None_Match=short)).status_code == 304
    await job.report("s", token, {"0": 10, "1": 10})
    ok(await job.get_watermark("s", If_None_Match=short))


async def test_another_ledger_does_not_come_to_the_etag_of_a_lost_one(tmp_path: Path):
    """It counts up to the same versions again, and a reader kept the old watermark for good."""
    lives = [({"s": {"shards": ["0", "1"]}}, 10), ({"s": {"shards": ["0", "2"]}}, 20)]
    specs: list[str] = []
    watermarks: list[str] = []
    for life, (spec, watermark) in enumerate(lives):
        folder = tmp_path / str(life)
        folder.mkdir()
        async with InProcess(folder) as service:
            api = service.api()
            put = await api.put(spec)
            token = await api.token("s", ttl_ms=600_000)
            await api.report("s", token, dict.fromkeys(spec["s"]["shards"], watermark))
            specs.append(put.headers["etag"])
            if watermarks:
                found = await api.get_watermark("s", If_None_Match=watermarks[0])
                assert ok(found)["output_watermark"] == watermark
                problem(await api.put(lives[0][0], etag=specs[0]), 412, "precondition-failed")
            found = await api.get_watermark("s")
            watermarks.append(found.headers["etag"])
    versions = {each.rpartition("-")[0] for each in watermarks}
    assert len(versions) == 1, "else the test would prove nothing"


async def test_a_long_poll_answers_when_the_etag_changes(job: Api, token: str):
    etag = (await job.get_watermark("s")).headers["etag"]
    poll = polling(job.get_watermark("s", If_None_Match=etag, Prefer="wait=60"))
    await still_waiting(poll, job)
    await job.report("s", token, {"0": 10})  # changes nothing of the stage
    await still_waiting(poll, job)
    await job.report("s", token, {"1": 20})
    response = await answered(poll)
    assert ok(response)["output_watermark"] == 10
    assert response.headers["etag"] != etag
    assert response.headers["preference-applied"] == "wait=60"


async def test_a_long_poll_downstream(job: Api, token: str):
    etag = (await job.get_watermark("k")).headers["etag"]
    poll = polling(job.get_watermark("k", If_None_Match=etag, Prefer="wait=60"))
    await still_waiting(poll, job)
    await job.report("s", token, {"0": 10, "1": 10})
    assert ok(await answered(poll))["input_watermark"] == 10


async def test_a_long_poll_of_an_old_etag_answers_at_once(job: Api):
    response = await job.get_watermark("s", If_None_Match='"0-0"', Prefer="wait=60")
    assert ok(response)["status"] == "unknown"


async def test_a_long_poll_without_an_etag_does_not_wait(job: Api):
    ok(await job.get_watermark("s", Prefer="wait=60"))


async def test_a_long_poll_ends_with_304(job: Api):
    etag = (await job.get_watermark("s")).headers["etag"]
    async with asyncio.timeout(60):
        response = await job.get_watermark("s", If_None_Match=etag, Prefer="wait=1")
    assert response.status_code == 304
    assert response.headers["preference-applied"] == "wait=1"


async def test_waiting_is_clamped_to_a_minute(job: Api, token: str):
    etag = (await job.get_watermark("s")).headers["etag"]
    poll = polling(job.get_watermark("s", If_None_Match=etag, Prefer="wait=3600"))
    await still_waiting(poll, job)
    await job.report("s", token, {"0": 10, "1": 10})
    assert (await answered(poll)).headers["preference-applied"] == "wait=60"


@pytest.mark.parametrize("prefer", ["respond-async", "wait=", "wait=x", "wait=-1", ""])
async def test_a_preference_that_is_none_is_ignored(job: Api, prefer: str):
    etag = (await job.get_watermark("s")).headers["etag"]
    response = await job.get_watermark("s", If_None_Match=etag, Prefer=prefer)
    assert response.status_code == 304
    assert "preference-applied" not in response.headers


async def test_wait_among_other_preferences(job: Api, token: str):
    etag = (await job.get_watermark("s")).headers["etag"]
    prefer = "respond-async, wait=60; x=y, handling=lenient"
    poll = polling(job.get_watermark("s", If_None_Match=etag, Prefer=prefer))
    await still_waiting(poll, job)
    await job.report("s", token, {"0": 10, "1": 10})
    assert ok(await answered(poll))["output_watermark"] == 10


async def test_at_least(job: Api, token: str):
    poll = polling(job.get_watermark("s", "?at_least=15", Prefer="wait=60"))
    await still_waiting(poll, job)
    await job.report("s", token, {"0": 14, "1": 99})
    await still_waiting(poll, job)
    await job.report("s", token, {"0": 15})
    response = await answered(poll)
    assert ok(response)["output_watermark"] == 15
    assert response.headers["preference-applied"] == "wait=60"
    assert ok(await job.get_watermark("s", "?at_least=15", Prefer="wait=60"))


async def test_at_least_answers_with_what_there_is_in_the_end(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10})
    async with asyncio.timeout(60):
        response = await job.get_watermark("s", "?at_least=15", Prefer="wait=1")
    assert ok(response)["output_watermark"] == 10
    assert ok(await job.get_watermark("s", "?at_least=15"))["output_watermark"] == 10


async def test_at_least_of_the_end_of_time(job: Api, token: str):
    poll = polling(job.get_watermark("s", f"?at_least={MAX}", Prefer="wait=60"))
    await job.report("s", token, {"0": {"final": True}, "1": {"final": True}})
    assert ok(await answered(poll))["status"] == "final"


@pytest.mark.parametrize(
    "value",
    ["x", "1.5", "", str(1 << 62), str(10**30), "2026-01-01", "2026-01-01T00:00:00",
     "2026-02-30T00:00:00Z", "2026-01-01T00:00:00.0001Z", "0001-01-01T00:00:00%2B01:00"],
)  # fmt: skip
async def test_an_invalid_at_least(job: Api, value: str):
    problem(await job.get_watermark("s", f"?at_least={value}"), 422, "invalid-request")


@pytest.mark.parametrize(
    "text",
    ["2026-01-01T00:00:00Z", "2026-01-01t00:00:00.000000z", "2026-01-01T01:30:00%2B01:30",
     "2026-01-01T01:30:00+01:30", "2025-12-31T23:00:00-01:00"],
)  # fmt: skip
async def test_at_least_in_rfc_3339(job: Api, token: str, text: str):
    poll = polling(job.get_watermark("s", f"?at_least={text}", Prefer="wait=60"))
    await job.report("s", token, {"0": 1767225599999, "1": 1767225599999})
    await still_waiting(poll, job)
    await job.report("s", token, {"0": 1767225600000, "1": 1767225600000})
    response = await answered(poll)
    assert ok(response)["output_watermark"] == 1767225600000
    assert response.headers["tidegauge-at-least"] == "2026-01-01T00:00:00.000Z"


async def test_a_poller_hears_of_a_reset(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10})
    etag = (await job.get_watermark("s")).headers["etag"]
    poll = polling(job.get_watermark("s", If_None_Match=etag, Prefer="wait=60"))
    await still_waiting(poll, job)
    ok(await job.reset())
    response = await answered(poll)
    assert ok(response)["generation"] == 2
    assert response.headers["etag"].startswith('"2-')


async def test_a_poller_hears_of_the_end_of_its_job(job: Api):
    etag = (await job.get_watermark("s")).headers["etag"]
    poll = polling(job.get_watermark("s", If_None_Match=etag, Prefer="wait=60"))
    await still_waiting(poll, job)
    ok(await job.delete(), 204)
    problem(await answered(poll), 404, "unknown-job")


async def test_many_pollers_all_hear(job: Api, token: str):
    etag = (await job.get_watermark("s")).headers["etag"]
    polls = [
        polling(job.get_watermark("s", If_None_Match=etag, Prefer="wait=60")) for _ in range(50)
    ]
    await still_waiting(polls[-1], job)
    await job.report("s", token, {"0": 10, "1": 10})
    for poll in polls:
        assert ok(await answered(poll))["output_watermark"] == 10


async def test_the_snapshot_holds_every_stage(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10})
    keyed = await job.token("k")
    await job.report("k", keyed, {LOWER: {}, UPPER: {"holds": {"x": 4}}}, input_watermark=10)
    snapshot = await job.snapshot()
    assert set(snapshot) == set(SPEC)
    for stage, state in snapshot.items():
        assert state == await job.watermark(stage)
    assert snapshot["k"]["input_watermark"] == 10
    assert snapshot["u"]["input_watermark"] == snapshot["u"]["output_watermark"] == 4


async def test_every_snapshot_is_consistent_while_reports_come_in(api: Api):
    depth = 6
    stages: dict[str, Any] = {"p0": {"shards": ["0"]}}
    for i in range(1, depth):
        stages[f"p{i}"] = {"inputs": [f"p{i - 1}"], "passthrough": True}
    await api.define(stages)
    token = await api.token("p0", ttl_ms=600_000)
    done = False

    async def watch() -> int:
        seen = 0
        while not done:
            snapshot = await api.snapshot()
            for i in range(1, depth):
                upstream = snapshot[f"p{i - 1}"]["output_watermark"]
                mine = snapshot[f"p{i}"]["input_watermark"]
                assert mine is None or (upstream is not None and mine <= upstream), snapshot
            seen += 1
        return seen

    watcher = asyncio.create_task(watch())
    for time in range(200):
        await api.report("p0", token, {"0": time})
    done = True
    assert await watcher > 0
    assert await api.output(f"p{depth - 1}") == 199


async def test_watermarks_stand_after_restart_and_crash(job: Api, token: str, gauge: InProcess):
    await job.report("s", token, {"0": 10, "1": 20})
    keyed = await job.token("k")
    await job.report("k", keyed, {LOWER: {}, UPPER: {"holds": {"x": 4}}}, input_watermark=10)
    before = await job.snapshot()
    for again in (gauge.restart, gauge.crash):
        await again()
        after = await gauge.api().snapshot()
        for stage, state in before.items():
            for member in ("generation", "input_watermark", "output_watermark", "status"):
                assert after[stage][member] == state[member]
            assert after[stage]["version"] >= state["version"]


async def test_promises_survive_a_shutdown(job: Api, token: str, gauge: InProcess):
    await job.report("s", token, {"0": 10, "1": 20})
    await job.report("s", token, {"0": {"watermark": 30, "holds": {"h": 12}}})
    await gauge.restart()
    assert await gauge.api().promises("s") == {"0": 12, "1": 20}


async def test_the_answer_says_which_instant_was_understood(job: Api, token: str):
    """A request with seconds is answered at once, as with an instant of 1970. The answer shows it."""
    await job.report("s", token, {"0": 1_767_225_600_000, "1": 1_767_225_600_000})
    path = f"{job.root}/stages/s/watermark?at_least=1767225600"
    response = await job.client.get(path, headers={"Prefer": "wait=30"})
    assert ok(response)["output_watermark"] == 1_767_225_600_000
    assert response.headers["tidegauge-at-least"] == "1970-01-21T10:53:45.600Z"
    assert response.headers["preference-applied"] == "wait=30"
    etag = response.headers["etag"]
    assert etag == (await job.get_watermark("s")).headers["etag"]
    unchanged = await job.client.get(path, headers={"If-None-Match": etag})
    assert unchanged.status_code == 304
    assert unchanged.headers["tidegauge-at-least"] == "1970-01-21T10:53:45.600Z"
    last = await job.client.get(f"{job.root}/stages/s/watermark?at_least={MAX}")
    assert last.headers["tidegauge-at-least"] == str(MAX)
    assert "tidegauge-at-least" not in (await job.get_watermark("s")).headers
