"""The changes of a job, for readers of the job: its runs, resets, retirements and specifications."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.support.api import Api, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC: dict[str, Any] = {
    "s": {"shards": ["0", "1"]},
    "s2": {"shards": ["0"]},
    "u": {"inputs": ["s", "s2"], "passthrough": True},
}
BECAUSE = "closed: for good"


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


def ms(instant: str) -> int:
    return round(datetime.fromisoformat(instant).timestamp() * 1_000)


async def test_each_change_is_there_with_its_words(job: Api, gauge: InProcess):
    gauge.advance(1_000)
    run = await job.run("s", "s2")
    gauge.advance(1_000)
    await job.end(run, "failed", because="out of memory")
    gauge.advance(1_000)
    await job.retire("s", "1", because=BECAUSE)
    gauge.advance(1_000)
    await job.change({**SPEC, "v": {"inputs": ["u"], "passthrough": True}})
    gauge.advance(1_000)
    ok(await job.reset())
    found = await job.changes()
    assert "next" not in found
    times = [ms(each.pop("at")) for each in found["changes"]]
    assert times == sorted(times, reverse=True)
    assert found["changes"] == [
        _line("reset-job", "the job was reset: its next generation began"),
        _line("change-job", "the specification changed: layout 2; v: new", stages=["v"]),
        _line("retire-range", "range 1 of s was retired", stages=["s"], range="1", because=BECAUSE),
        _line(
            "end-run",
            f"run {run} failed",
            stages=["s", "s2"],
            run=run,
            outcome="failed",
            because="out of memory",
        ),
        _line(
            "open-run",
            f"run {run} of s, s2 was opened by driver",
            stages=["s", "s2"],
            run=run,
        ),
        _line("create-job", "the job was created"),
    ]


def _line(action: str, detail: str, **members: Any) -> dict[str, Any]:
    none = dict.fromkeys(("stages", "run", "outcome", "range", "because"))
    return none | {"action": action, "detail": detail} | members


async def test_the_changes_of_a_stage_are_its_own_and_those_of_the_job(job: Api):
    await job.run("s")
    await job.run("s2")
    await job.retire("s", "0")
    await job.retire("s2", "0")
    found = (await job.changes("?stage=s"))["changes"]
    assert sorted((each["action"], each["stages"]) for each in found if each["stages"]) == [
        ("open-run", ["s"]),
        ("retire-range", ["s"]),
    ]
    assert [each["action"] for each in found if each["stages"] is None] == ["create-job"]


async def test_a_change_of_the_specification_is_one_of_its_stages(job: Api):
    """Each chart had its mark, and its words were the number of the layout."""
    await job.change({**SPEC, "s": {"shards": ["0", "1", "9"]}})
    found = {
        stage: [each["detail"] for each in (await job.changes(f"?stage={stage}"))["changes"]]
        for stage in ("s", "s2")
    }
    created = "the job was created"
    assert found == {
        "s": ["the specification changed: layout 2; s: + shard 9", created],
        "s2": [created],
    }


async def test_a_long_change_of_the_specification_is_one_of_its_stages(api: Api):
    """Beyond a thousand characters, the change was cut, and was on the chart of each stage."""
    stages = {f"stage-{k:03}": {"shards": ["0"]} for k in range(100)}
    await api.define({**stages, "apart": {"shards": ["0"]}})
    await api.change(
        {"apart": {"shards": ["0"]}} | {each: {"shards": ["0", "9"]} for each in stages}
    )
    (newest, created) = (await api.changes())["changes"]
    assert newest["stages"] == list(stages)
    assert "; stage-099: changed" not in newest["detail"]
    assert len(newest["detail"]) < 1_100
    assert (await api.changes("?stage=apart"))["changes"] == [created]
    assert (await api.changes("?stage=stage-099"))["changes"] == [newest, created]


async def test_a_throttle_is_changed_for_its_stages(api: Api):
    stages: dict[str, Any] = {
        "m": {"shards": ["0"]},
        "n": {"shards": ["0"]},
        "z": {"shards": ["0"]},
    }
    stages["k"] = {"inputs": ["m"], "ranges": 1}

    def throttled(drift_ms: int, lag_ms: int | None = None) -> Any:
        limit = {} if lag_ms is None else {"stages": {"k": {"max_lag_ms": lag_ms}}}
        return {"groups": [{"stages": ["m", "n"], "max_drift_ms": drift_ms}], **limit}

    await api.define(stages, throttle=throttled(60_000))
    await api.change({**stages, "z": {"shards": ["0", "1"]}}, throttle=throttled(1_000))
    (newest, *_) = (await api.changes())["changes"]
    assert newest["stages"] == ["m", "n", "z"]
    assert newest["detail"].endswith("; m: another throttle; n: another throttle; z: + shard 1")
    await api.change({**stages, "z": {"shards": ["0", "1"]}}, throttle=throttled(1_000, 5_000))
    (newest, *_) = (await api.changes())["changes"]
    assert (newest["stages"], newest["detail"].partition("; ")[2]) == (["k"], "k: a throttle")
    await api.change({**stages, "z": {"shards": ["0", "1"]}}, throttle=throttled(1_000))
    (newest, *_) = (await api.changes())["changes"]
    assert newest["detail"].endswith("; k: no throttle any more")


async def test_stages_are_told_apart_by_the_case_of_their_letters(api: Api):
    await api.define({"taps": {"shards": ["a"]}, "TAPS": {"shards": ["a"]}})
    await api.run("taps")
    await api.retire("taps", "a", BECAUSE)
    await api.change({"taps": {"shards": ["a", "b"]}, "TAPS": {"shards": ["a"]}})
    found = (await api.changes("?stage=TAPS"))["changes"]
    assert [each["action"] for each in found] == ["create-job"]
    assert len((await api.changes("?stage=taps"))["changes"]) == 4
    assert ok(await api.client.get(f"{api.root}/runs?stage=TAPS"))["runs"] == []


async def test_changes_within_a_span(job: Api, gauge: InProcess):
    gauge.advance(1_000)
    run = await job.run("s")
    gauge.advance(10_000)
    await job.end(run, "stopped")
    ended, opened, created = (ms(each["at"]) for each in (await job.changes())["changes"])
    assert created < opened < ended
    within = (await job.changes(f"?from={opened}&to={opened}"))["changes"]
    assert [each["action"] for each in within] == ["open-run"]
    assert (await job.changes(f"?from={ended}"))["changes"][0]["action"] == "end-run"
    problem(await job.client.get(f"{job.root}/changes?from=2&to=1"), 422, "invalid-request")


async def test_pages_are_whole_also_within_a_millisecond(job: Api):
    # The clock stands still, so that all are of one moment.
    runs = [await job.run("s") for _ in range(3)]
    await job.end(runs[-1], "finished")
    await job.retire("s", "0")
    await job.retire("s", "1")
    whole = (await job.changes())["changes"]
    assert len(whole) == 7
    for limit in (1, 2, 3, 7):
        pages: list[Any] = []
        query = f"?limit={limit}"
        while True:
            found = await job.changes(query)
            assert 1 <= len(found["changes"]) <= limit
            pages += found["changes"]
            if "next" not in found:
                break
            query = f"?limit={limit}&cursor={found['next']}"
        assert pages == whole


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "cursor=5", "cursor=x.1", "cursor=5.x", "stage=a%20b", "from=x"],
)
async def test_a_query_that_does_not_fit_is_refused(job: Api, query: str):
    problem(await job.client.get(f"{job.root}/changes?{query}"), 422, "invalid-request")


async def test_a_stage_that_is_not_there(job: Api, gauge: InProcess):
    gauge.advance(1_000)
    run = await job.run("s2")
    gauge.advance(1_000)
    await job.change({"s": SPEC["s"]})
    for path in ("changes", "runs"):
        problem(await job.client.get(f"{job.root}/{path}?stage=other"), 404, "unknown-stage")
        ok(await job.client.get(f"{job.root}/{path}?stage=s"))
        removed = ok(await job.client.get(f"{job.root}/{path}?stage=s2"))[path]
        assert run in {each["run"] for each in removed}, "a removed stage has had it"
    newest = await job.changes("?stage=s2&limit=1")
    assert newest["changes"][0]["action"] == "change-job", "newer than the run"
    page = await job.changes(f"?stage=s2&limit=3&cursor={newest['next']}")
    assert [each["action"] for each in page["changes"]] == ["open-run", "create-job"]
    before = ms(page["changes"][0]["at"]) - 1
    assert (await job.changes(f"?stage=s2&to={before}"))["changes"][-1]["action"] == "create-job"


async def test_a_job_that_is_gone(job: Api):
    other = await job.client.get("/v1/jobs/other/changes")
    problem(other, 404, "unknown-job")
    ok(await job.delete(), 204)
    problem(await job.client.get(f"{job.root}/changes"), 404, "unknown-job")
    await job.define(SPEC)
    actions = [each["action"] for each in (await job.changes())["changes"]]
    assert sorted(actions) == ["create-job", "create-job", "delete-job"]
