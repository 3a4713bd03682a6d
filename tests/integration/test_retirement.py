"""An operator retires a range that is gone for good, and its next report ends this."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from service.aggregator.definitions import Definitions
from service.clock import SystemClock
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError
from service.ledger.sql import SqlLedger
from tests.support.api import MAX, Api, eventually, ok, problem
from tests.support.inprocess import InProcess
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

FLOW = {
    "taps": {"shards": ["t-0", "t-1", "t-2"]},
    "clicks": {"shards": ["c-0"]},
    "counts": {"inputs": ["taps", "clicks"], "ranges": 2},
    "all": {"inputs": ["counts"], "passthrough": True},
}
LEFT, RIGHT = "00000000-80000000", "80000000-100000000"
BECAUSE = "the site was closed"


@pytest.fixture
async def job(api: Api) -> Api:
    """Taps at 100, 40 and never; clicks at 70; counts have observed nothing."""
    await api.define(FLOW)
    token = await api.token("taps", ttl_ms=600_000)
    await api.report("taps", token, {"t-0": 100, "t-1": 40})
    token = await api.token("clicks", ttl_ms=600_000)
    await api.report("clicks", token, {"c-0": 70})
    return api


async def standing(job: Api) -> dict[str, tuple[Any, Any, str]]:
    return {
        name: (each["input_watermark"], each["output_watermark"], each["status"])
        for name, each in (await job.snapshot()).items()
    }


async def test_what_will_move_is_shown_before_and_then_moves(job: Api) -> None:
    before = await standing(job)
    shown = await job.retire("taps", "t-2", BECAUSE, dry_run=True)
    assert await standing(job) == before
    assert (shown["retired"], shown["promise"], shown["holder"]) == (False, None, "worker")
    assert shown["moves"] == [
        {
            "stage": "taps",
            "before": {"input_watermark": None, "output_watermark": None, "status": "unknown"},
            "after": {"input_watermark": None, "output_watermark": 40, "status": "active"},
        },
        {
            "stage": "counts",
            "before": {"input_watermark": None, "output_watermark": None, "status": "unknown"},
            "after": {"input_watermark": 40, "output_watermark": None, "status": "unknown"},
        },
    ]
    assert shown["held_by"] == "t-1"
    assert await job.retire("taps", "t-2", BECAUSE) == shown | {"retired": True}
    assert (await standing(job))["taps"] == (None, 40, "active")
    assert (await standing(job))["counts"] == (40, None, "unknown")
    counts = (await job.watermark("taps"))["ranges"]
    assert counts == {
        "total": 3, "reported": 3, "idle": 0, "final": 0, "leased": 3, "retired": 1
    }  # fmt: skip
    again = await job.retire("taps", "t-2", "once more")
    assert (again["retired"], again["moves"]) == (True, [])


async def test_its_next_report_holds_from_where_it_is(job: Api) -> None:
    await job.retire("taps", "t-2", BECAUSE)
    await job.retire("taps", "t-1", BECAUSE)
    assert await job.output("taps") == 100
    assert (await job.retire("taps", "t-0", BECAUSE, dry_run=True))["held_by"] is None
    token = await job.token("taps", ranges=["t-1"])
    await job.report("taps", await job.token("taps", ranges=["t-0"]), {"t-0": 150})
    assert await job.output("taps") == 150, "a claim does not end it"
    await job.report("taps", token, {"t-1": 60})
    await job.report("taps", await job.token("taps", ranges=["t-0"]), {"t-0": 300})
    assert await job.output("taps") == 150, "it stands, and does not go back"
    assert (await job.watermark("taps"))["ranges"]["retired"] == 1
    await job.report("taps", await job.token("taps", ranges=["t-1"]), {"t-1": 200})
    assert await job.output("taps") == 200


async def test_the_last_range_that_is_waited_for_ends_the_stage(job: Api) -> None:
    shown = await job.retire("clicks", "c-0", BECAUSE, dry_run=True)
    assert [(m["stage"], m["after"]["output_watermark"]) for m in shown["moves"]] == [
        ("clicks", MAX)
    ]
    await job.retire("clicks", "c-0", BECAUSE)
    assert (await job.watermark("clicks"))["status"] == "final"


async def test_a_return_to_a_stage_that_is_final_is_explained(job: Api, gauge: InProcess) -> None:
    await job.retire("clicks", "c-0", BECAUSE)
    gauge.advance(1_000)
    await job.report("clicks", await job.token("clicks", ttl_ms=10_000), {"c-0": 80})
    late = (
        f"range c-0 of clicks has reported again after its retirement ({BECAUSE}): it is at"
        " 1970-01-01T00:00:00.080Z, and all its rows are late, since clicks is final"
    )
    explained = await job.explain("clicks")
    assert explained["because"] == f"clicks is final: nothing more will come; {late}"
    assert explained["remedy"].startswith("Reset the job")
    assert explained["path"] == [{"stage": "clicks", "reason": "final"}]
    counts = await job.explain("counts")
    assert counts["because"].endswith(f"; {late}")
    assert re.search(r" For clicks: Reset the job, .*\.$", counts["remedy"])
    assert late not in (await job.explain("taps"))["because"]
    gauge.skip_on_redis()
    gauge.advance(20_000)
    assert ", has no worker, and all its rows" in (await job.explain("clicks"))["because"]


async def test_late_ranges_are_those_that_report(job: Api, gauge: InProcess) -> None:
    """A shard that has never reported was one, and so was a range whose last report was lost."""
    await job.retire("clicks", "c-0", BECAUSE)
    await job.change({**FLOW, "clicks": {"shards": ["c-0", "c-1"]}})
    gauge.advance(1_000)
    assert "late_ranges" not in await job.watermark("clicks")
    assert "late" not in (await job.explain("clicks"))["because"]
    await job.report("clicks", await job.token("clicks", ["c-0"]), {"c-0": 80})
    await eventually(lambda: _late(job), lambda found: found == 1)
    text = (await gauge.client.get("/metrics")).text
    assert 'tidegauge_late_ranges{job="job",stage="clicks"} 1.0' in text
    assert (await job.problems())["late_ranges"] == 1
    every = await eventually(
        lambda: _every_problem(gauge), lambda found: found.get("late_ranges") is not None
    )
    assert every["late_ranges"] == {"job": 1}
    overview = ok(await gauge.client.get("/v1/overview"))["jobs"]
    assert [each["late_ranges"] for each in overview] == [1]
    await job.report("clicks", await job.token("clicks", ["c-1"]), {"c-1": None})
    await eventually(lambda: _late(job), lambda found: found == 2)
    assert "(so are the rows of range c-0)" in (await job.explain("clicks"))["because"]


@pytest.mark.parametrize("promise", [60, 70, 80])
async def test_a_late_range_outlasts_the_live_store(
    job: Api, gauge: InProcess, promise: int
) -> None:
    """A report that raises its promise, and reports that do not, count alike."""
    await job.retire("clicks", "c-0", BECAUSE)
    gauge.advance(1_000)
    await job.report("clicks", await job.token("clicks"), {"c-0": promise})
    await gauge.crash()
    job = gauge.api()
    assert await _late(job) == 1
    assert f"again after its retirement ({BECAUSE})" in (await job.explain("clicks"))["because"]


async def _every_problem(gauge: InProcess) -> dict[str, Any]:
    return ok(await gauge.client.get("/v1/problems"))


async def _late(job: Api) -> int:
    return (await job.watermark("clicks")).get("late_ranges", 0)


async def test_a_range_whose_last_report_was_lost_is_not_late(job: Api, gauge: InProcess) -> None:
    """The stage was final, and its range is restored as it was before: not a retirement has ended."""
    gauge.skip_on_redis()
    run = await job.run("clicks")
    token = await job.token("clicks", ttl_ms=600_000, run=run)
    await job.report("clicks", token, {"c-0": 75}, epoch=1)
    # Its checkpoint is in the ledger with the response.
    await job.commit(1, {"clicks": {}}, run=run)
    gauge.advance(5_000)
    await job.report("clicks", token, {"c-0": {"watermark": 80, "final": True}})
    assert (await job.watermark("clicks"))["status"] == "final"
    await gauge.crash()
    job = gauge.api()
    assert (await job.watermark("clicks"))["status"] == "final"
    assert await _late(job) == 0
    assert (await job.watermark("clicks"))["system_lag_ms"] == 0
    assert (await job.explain("clicks"))["because"] == "clicks is final: nothing more will come"


async def test_a_change_beside_a_late_range_keeps_the_reason_of_its_retirement(
    job: Api, gauge: InProcess
) -> None:
    await job.retire("clicks", "c-0", BECAUSE)
    gauge.advance(1_000)
    await job.report("clicks", await job.token("clicks"), {"c-0": 80})
    await job.change({**FLOW, "clicks": {"shards": ["c-0", "c-1"]}})
    again = f"again after its retirement ({BECAUSE})"
    assert again in (await job.explain("clicks"))["because"]
    await job.report("clicks", await job.token("clicks", ["c-1"]), {"c-1": 50})
    assert (await job.retire("clicks", "c-1", dry_run=True))["held_by"] is None, "it is final"


@pytest.mark.parametrize("begins", ["reset", "another shard"])
async def test_the_reason_of_a_retirement_of_another_life_is_left_out(
    job: Api, gauge: InProcess, begins: str
) -> None:
    await job.retire("clicks", "c-0", "first year")
    if begins == "reset":
        ok(await job.reset())
    else:
        await job.change({**FLOW, "clicks": {"shards": ["c-1"]}})
        await job.change({**FLOW, "clicks": {"shards": ["c-0", "c-1"]}})
    shards = ["c-0"] if begins == "reset" else ["c-1"]
    token = await job.token("clicks", shards, ttl_ms=600_000)
    await job.report("clicks", token, {shard: {"final": True} for shard in shards})
    if begins == "reset":
        await job.change({**FLOW, "clicks": {"shards": ["c-0", "c-1"]}})
    gauge.advance(1_000)
    late = "c-1" if begins == "reset" else "c-0"
    await job.report("clicks", await job.token("clicks", [late]), {late: 80})
    await eventually(lambda: _late(job), lambda found: found == 1)
    assert (
        f"range {late} of clicks has reported since clicks is final: "
        in ((await job.explain("clicks"))["because"])
    )


async def test_a_return_to_a_stage_that_is_final_does_not_age(job: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    await job.retire("clicks", "c-0", BECAUSE)
    await job.report("clicks", await job.token("clicks"), {"c-0": 80})
    gauge.advance(60_000)
    assert (await job.watermark("clicks"))["system_lag_ms"] == 0


async def test_it_is_in_the_audit_and_in_each_view(job: Api, gauge: InProcess) -> None:
    await job.retire("taps", "t-2", BECAUSE)
    records = ok(await gauge.client.get("/v1/audit?job=job"))["records"]
    assert (records[0]["action"], records[0]["detail"]) == ("retire-range", f"taps t-2: {BECAUSE}")
    explained = await job.explain("counts")
    assert [
        {name: each[name] for name in ("stage", "range", "because", "by")}
        for each in explained["retired"]
    ] == [{"stage": "taps", "range": "t-2", "because": BECAUSE, "by": records[0]["by"]}]
    assert "retired" not in explained["because"], "it holds nothing back"
    own = (await job.explain("taps"))["because"]
    assert own.endswith(f"; range t-2 of taps is retired ({BECAUSE})")
    gauge.advance(1_000)
    await job.retire("taps", "t-0", "sold")
    own = (await job.explain("taps"))["because"]
    assert own.endswith("; range t-0 of taps is retired (sold), and 1 more range"), (
        "the newest first"
    )
    assert "retired" not in await job.explain("clicks")
    ranges = {each["range"]: each for each in await job.ranges("taps")}
    assert (ranges["t-2"]["status"], ranges["t-2"]["retired"]) == ("final", True)
    assert "retired" not in ranges["t-1"]
    summary = ok(await gauge.client.get(f"{job.root}/stages/taps/range-summary?show=retired"))
    assert summary["counts"]["retired"] == 2
    assert {each["range"] for each in summary["listed"]} == {"t-0", "t-2"}
    text = (await gauge.client.get("/metrics")).text
    assert 'tidegauge_retired_ranges{job="job",stage="taps"} 2.0' in text
    assert 'tidegauge_retired_ranges{job="job",stage="clicks"} 0.0' in text


async def test_its_end_is_in_the_audit_and_in_the_changes_once(job: Api, gauge: InProcess) -> None:
    await job.retire("taps", "t-2", BECAUSE)
    gauge.advance(1_000)
    token = await job.token("taps", ranges=["t-2"])
    await job.report("taps", token, {"t-2": 10})
    await job.report("taps", token, {"t-2": 11})
    assert (await job.explain("taps"))["because"].startswith(
        "taps waits for range t-2 (holder worker), which is the lowest, at 1970-01-01T00:00:00.011Z,"
        " behind 1970-01-01T00:00:00.040Z, before which its rows are late"
    )
    newest, before, *_ = ok(await gauge.client.get("/v1/audit?job=job"))["records"]
    assert newest["action"] == "return-range"
    assert newest["detail"] == "taps t-2: reports again, by worker"
    assert (newest["by"], newest["address"]) == ("the range itself", "")
    assert before["action"] == "retire-range"
    (change, *_) = (await job.changes("?stage=taps"))["changes"]
    assert (
        change["detail"] == "range t-2 of taps reports again, by worker: its retirement has ended"
    )
    assert (change["range"], change["because"], change["holder"]) == ("t-2", None, "worker")
    others = (await job.changes("?stage=clicks"))["changes"]
    assert "return-range" not in {each["action"] for each in others}


async def test_a_retired_range_is_not_a_problem(api: Api, gauge: InProcess) -> None:
    await api.define({"taps": {"shards": ["t-0", "t-1"]}})
    token = await api.token("taps", ranges=["t-0"], ttl_ms=600_000)
    await api.report("taps", token, {"t-0": 100})
    assert await api.health("taps") == "silent"
    await api.retire("taps", "t-1", BECAUSE)
    assert await eventually(lambda: api.health("taps"), lambda found: found != "silent") == "ok"
    assert (await api.problems())["problems"] == []


async def test_lags_do_not_wait_for_work_of_a_retired_range(job: Api, gauge: InProcess) -> None:
    token = await job.token("clicks", ttl_ms=600_000)
    now_ms = gauge.clock.wall_ms()
    await job.report("clicks", token, {"c-0": {"watermark": 70, "oldest_work": now_ms - 60_000}})
    assert (await job.watermark("clicks"))["system_lag_ms"] >= 60_000
    await job.retire("clicks", "c-0", BECAUSE)
    assert (await job.watermark("clicks"))["system_lag_ms"] == 0


async def test_a_range_that_is_final_stays_final(job: Api, gauge: InProcess) -> None:
    token = await job.token("clicks")
    await job.report("clicks", token, {"c-0": {"watermark": 70, "final": True}})
    done = await job.retire("clicks", "c-0", BECAUSE)
    assert (done["retired"], done["promise"], done["moves"]) == (False, MAX, [])
    records = ok(await gauge.client.get("/v1/audit?job=job"))["records"]
    assert "retire-range" not in {each["action"] for each in records}


@pytest.mark.parametrize(
    ("stage", "key", "status", "slug"),
    [
        ("taps", "t-9", 404, "unknown-range"),
        ("counts", "00000000-40000000", 404, "unknown-range"),
        ("other", "t-0", 404, "unknown-stage"),
        ("all", LEFT, 422, "invalid-request"),
    ],
)
async def test_what_cannot_be_retired_is_refused(
    job: Api, stage: str, key: str, status: int, slug: str
) -> None:
    before = await standing(job)
    problem(await job.post_retire(stage, key), status, slug)
    problem(await job.post_retire(stage, key, dry_run=True), status, slug)
    assert await standing(job) == before


@pytest.mark.parametrize(
    "because", ["", " ", "\xa0 ", "closed\nfor good", "closed\n", "x" * 501, "a\0b", None, 7]
)
async def test_a_retirement_has_a_reason(job: Api, because: Any) -> None:
    problem(await job.post_retire("taps", "t-2", because), 422, "invalid-request")
    assert await job.output("taps") is None


async def test_invariant_7_a_retirement_and_its_end_outlast_the_live_store(
    job: Api, gauge: InProcess
) -> None:
    await job.retire("taps", "t-2", BECAUSE)
    await job.retire("taps", "t-1", BECAUSE)
    await gauge.crash()
    job = gauge.api()
    assert (await job.watermark("taps"))["ranges"]["retired"] == 2
    assert await job.output("taps") == 100
    await job.report("taps", await job.token("taps"), {"t-1": 110})
    await gauge.crash()
    job = gauge.api()
    assert (await job.watermark("taps"))["ranges"]["retired"] == 1
    await job.report("taps", await job.token("taps"), {"t-0": 500})
    assert await job.output("taps") == 110, "the range that reports again is waited for"


async def test_a_reset_ends_it(job: Api) -> None:
    await job.retire("taps", "t-2", BECAUSE)
    ok(await job.reset())
    await job.report("taps", await job.token("taps"), {"t-0": 500, "t-1": 500})
    assert await job.output("taps") is None


async def test_a_retired_shard_stays_in_a_dynamic_source(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the service does not try again and again to let it leave."""
    left: list[str] = []
    checked: list[str] = []
    leave, observe = Definitions.leave, RecoveringLiveStore.observe

    async def counted_leave(self: Definitions, job: str, stage: str) -> int:
        left.append(stage)
        return await leave(self, job, stage)

    async def counted_observe(self: RecoveringLiveStore, job: str, stages: Sequence[str]) -> Any:
        checked.extend(stages)
        return await observe(self, job, stages)

    monkeypatch.setattr(Definitions, "leave", counted_leave)
    monkeypatch.setattr(RecoveringLiveStore, "observe", counted_observe)
    await api.define({"files": {"shards": ["manifest"], "dynamic": True}})
    token = await api.token("files", ranges=["manifest", "part-1"])
    await api.report("files", token, {"manifest": 50, "part-1": 40})
    await api.retire("files", "part-1", BECAUSE)
    checked.clear()
    # The first of these checks may have begun before the retirement.
    await eventually(lambda: _length(checked), lambda found: found >= 3)
    assert left == []
    assert {each["range"] for each in await api.ranges("files")} == {"manifest", "part-1"}
    await api.report("files", token, {"part-1": 45})
    assert (await api.watermark("files"))["ranges"]["total"] == 2


async def _length(found: list[str]) -> int:
    return len(found)


async def test_a_shard_stays_retired_when_the_pipeline_changes(job: Api) -> None:
    await job.retire("taps", "t-2", BECAUSE)
    await job.change(FLOW | {"taps": {"shards": ["t-0", "t-1", "t-2", "a-0"]}})
    assert (await job.watermark("taps"))["ranges"]["retired"] == 1
    await job.report("taps", await job.token("taps"), {"a-0": 90})
    assert await job.output("taps") == 40


async def test_a_stage_that_loses_its_ranges_meanwhile_is_retried(
    job: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica changes the pipeline between the two reads of a retirement."""
    read = RecoveringLiveStore.snapshot

    async def read_and_change(self: RecoveringLiveStore, name: str) -> Any:
        found = await read(self, name)
        with monkeypatch.context() as before:
            before.setattr(RecoveringLiveStore, "snapshot", read)
            await job.change(FLOW | {"counts": {"inputs": ["taps"], "passthrough": True}})
        return found

    with monkeypatch.context() as racing:
        racing.setattr(RecoveringLiveStore, "snapshot", read_and_change)
        refused = problem(await job.post_retire("counts", LEFT), 503, "unavailable")
    assert refused["detail"] == "the ranges of stage 'counts' are changing: retry"
    problem(await job.post_retire("counts", LEFT), 422, "invalid-request")


async def test_the_end_of_a_retirement_is_answered_once_it_is_durable(
    tmp_path: Path, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the range would be retired again after a loss, behind the back of its worker."""
    async with InProcess(tmp_path, clock=SystemClock(), stores=stores) as gauge:
        job = gauge.api()
        await job.define({"taps": {"shards": ["t-0", "t-1"]}})
        token = await job.token("taps", ttl_ms=600_000)
        await job.report("taps", token, {"t-0": 100})
        await job.retire("taps", "t-1", BECAUSE)

        async def away(*_: Any, **__: Any) -> Any:
            raise UnavailableError("the ledger does not answer")

        with monkeypatch.context() as outage:
            outage.setattr(SqlLedger, "record", away)
            outage.setattr(SqlLedger, "checkpoint", away)
            refused = problem(await job.post_report("taps", token, {"t-1": 50}), 503, "unavailable")
            assert "a range is waited for again: retry" in refused["detail"]
            # The first one is applied. A retry is not answered before the ledger has recorded it either.
            problem(await job.post_report("taps", token, {"t-1": 50}), 503, "unavailable")
            problem(await job.post_retire("taps", "t-0"), 503, "unavailable")
        await eventually(
            lambda: job.post_report("taps", token, {"t-1": 50}),
            lambda answer: answer.status_code == 200,
        )
        await eventually(
            lambda: job.post_retire("taps", "t-0"), lambda answer: answer.status_code == 200
        )
        await gauge.crash()
        job = gauge.api()
        ranges = {each["range"]: each.get("retired", False) for each in await job.ranges("taps")}
        assert ranges == {"t-0": True, "t-1": False}


async def test_the_newest_record_is_of_what_is_in_effect(
    job: Api, gauge: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range returns, and the ledger is slow to record it, when it is retired again."""
    await job.retire("taps", "t-2", BECAUSE)
    token = await job.token("taps", ["t-2"])
    record, may_record = SqlLedger.record, asyncio.Event()

    async def slow(self: SqlLedger, *of: Any) -> Any:
        await may_record.wait()
        return await record(self, *of)

    with monkeypatch.context() as slowness:
        slowness.setattr(SqlLedger, "record", slow)
        returns = asyncio.create_task(job.report("taps", token, {"t-2": 10}))
        await eventually(lambda: _retired(job), lambda found: found == 0)
        retires = asyncio.create_task(job.retire("taps", "t-2", "again"))
        await asyncio.sleep(0.2)
        may_record.set()
        await asyncio.gather(returns, retires)
    assert await _retired(job) == 1
    records = ok(await gauge.client.get("/v1/audit?job=job"))["records"]
    assert [each["action"] for each in records[:3]] == [
        "retire-range",
        "return-range",
        "retire-range",
    ]


async def _retired(job: Api) -> int:
    return (await job.watermark("taps"))["ranges"].get("retired", 0)


async def test_a_waiting_report_that_ends_a_retirement_is_answered_with_the_newest_watermark(
    api: Api,
) -> None:
    """The stage is no longer idle, although the report itself waits for its epoch."""
    await api.define({"taps": {"shards": ["t-0", "t-1"]}})
    tokens = [await api.token("taps", [name], ttl_ms=600_000) for name in ("t-0", "t-1")]
    await api.report("taps", tokens[0], {"t-0": {"watermark": 100, "idle": True}})
    await api.retire("taps", "t-1", BECAUSE)
    assert (await api.watermark("taps"))["status"] == "idle"
    answer = await api.report("taps", tokens[1], {"t-1": 50}, epoch=1)
    now = await api.watermark("taps")
    assert (now["status"], now["version"]) == ("active", answer["watermark"]["version"])
