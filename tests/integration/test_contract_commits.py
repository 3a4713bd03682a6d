"""Contract section 3, epochs: what was reported in one counts when it is committed, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import LOWER, MAX, UPPER, Api, ok, problem
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

SPEC = {
    "s": {"shards": ["0", "1"]},
    "k": {"inputs": ["s"], "ranges": 2},
}


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


@pytest.fixture
async def token(job: Api) -> str:
    return await job.token("s", ttl_ms=600_000)


async def keyed_at(job: Api, token: str, time: int) -> str:
    await job.report("s", token, {"0": time, "1": time})
    return await job.token("k", ttl_ms=600_000)


async def test_a_report_with_an_epoch_waits_for_its_commit(job: Api, token: str):
    answer = await job.report("s", token, {"0": 10, "1": 20}, epoch=1)
    assert (answer["accepted"], answer["rejected"]) == (2, [])
    assert answer["watermark"]["output_watermark"] is None
    assert await job.promises("s") == {"0": None, "1": None}
    answer = await job.commit(1, {"s": {}})
    assert answer["applied"] == {"s": 2}
    assert answer["watermarks"]["s"]["output_watermark"] == 10
    assert await job.output("s") == 10


async def test_a_run_commits_its_stages_together(job: Api):
    run = await job.run("s", "k")
    source, keyed = await job.token("s", run=run), await job.token("k", run=run)
    await job.report("s", source, {"0": 10, "1": 10})
    await job.report("s", source, {"0": 20, "1": 30}, epoch=12)
    await job.report("k", keyed, {LOWER: {}, UPPER: {"holds": {"state": 4}}}, epoch=12)
    answer = await job.commit(12, {"s": {}, "k": {"input_watermark": 10}}, run=run)
    assert answer["applied"] == {"s": 2, "k": 2}
    assert answer["watermarks"]["k"]["output_watermark"] == 4
    assert await job.output("s") == 20
    assert await job.promises("k") == {LOWER: 10, UPPER: 4}


async def test_the_smallest_promise_of_an_epoch_counts(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10}, epoch=1)
    await job.report("s", token, {"0": 30, "1": 5}, epoch=1)
    assert (await job.commit(1, {"s": {}}))["applied"] == {"s": 2}
    assert await job.promises("s") == {"0": 10, "1": 5}


async def test_a_speculative_attempt_lowers_but_never_lifts(job: Api, token: str):
    await keyed_at(job, token, 100)
    first = await job.token("k", [LOWER], holder="a", epoch=1, attempt=0)
    await job.report("k", first, {LOWER: {"holds": {"state": 40}}}, epoch=1, input_watermark=100)
    second = await job.token("k", [LOWER], holder="b", epoch=1, attempt=1)
    await job.report("k", second, {LOWER: {"holds": {"state": 60}}}, epoch=1, input_watermark=100)
    problem(
        await job.post_report("k", first, {LOWER: {}}, epoch=1, input_watermark=100),
        410,
        "lease-lost",
    )
    await job.commit(1, {"k": {}})
    assert (await job.promises("k"))[LOWER] == 40


async def test_the_commits_input_caps_and_stands_in(job: Api, token: str):
    keyed = await keyed_at(job, token, 100)
    await job.report("k", keyed, {LOWER: {}}, epoch=1, input_watermark=100)
    await job.report("k", keyed, {UPPER: {"holds": {"state": 70}}}, epoch=1)
    await job.commit(1, {"k": {"input_watermark": 80}})
    assert await job.promises("k") == {LOWER: 80, UPPER: 70}


async def test_a_commits_input_does_not_lift_what_was_reported(job: Api, token: str):
    keyed = await keyed_at(job, token, 50)
    await job.report("k", keyed, {LOWER: {}}, epoch=1, input_watermark=50)
    await job.report("s", token, {"0": 100, "1": 100})
    await job.commit(1, {"k": {"input_watermark": 100}})
    assert (await job.promises("k"))[LOWER] == 50


async def test_an_input_must_come_from_the_report_or_the_commit(job: Api, token: str):
    keyed = await keyed_at(job, token, 50)
    await job.report("k", keyed, {LOWER: {}}, epoch=1)
    problem(await job.post_commit(1, {"k": {}}), 422)
    assert await job.promises("k") == {LOWER: None, UPPER: None}
    # The refused commit changed nothing: the epoch still waits.
    assert (await job.commit(1, {"k": {"input_watermark": 50}}))["applied"] == {"k": 1}
    assert (await job.promises("k"))[LOWER] == 50


async def test_a_commits_input_that_was_never_published(job: Api, token: str):
    keyed = await keyed_at(job, token, 50)
    await job.report("s", token, {"0": 60, "1": 60}, epoch=1)
    await job.report("k", keyed, {LOWER: {}, UPPER: {}}, epoch=1)
    stages = {"s": {}, "k": {"input_watermark": 51}}
    problem(await job.post_commit(1, stages), 409, "input-ahead")
    # Nothing half applied: not the source either.
    assert await job.output("s") == 50
    answer = await job.commit(1, {"s": {}, "k": {"input_watermark": 50}})
    assert answer["applied"] == {"s": 2, "k": 2}


async def test_the_same_epoch_again_changes_nothing(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10}, epoch=4)
    await job.commit(4, {"s": {}})
    before = await job.watermark("s")
    await job.report("s", token, {"0": 10, "1": 10}, epoch=5)
    answer = await job.commit(4, {"s": {}})
    assert answer["watermarks"]["s"]["output_watermark"] == 10
    assert await job.watermark("s") == before
    assert (await job.commit(5, {"s": {}}))["applied"] == {"s": 2}


async def test_late_rows_of_a_commit_count_once(job: Api, token: str, gauge: InProcess):
    async def late() -> list[int]:
        states = await job.snapshot()
        return [states[stage]["late"] for stage in ("s", "k")]

    await job.report("s", token, {"0": {"watermark": 10, "late": 2}, "1": 10}, epoch=4)
    stages = {"s": {"late": 0}, "k": {"input_watermark": None, "late": 3}}
    for _ in range(2):
        await job.commit(4, stages)
        assert await late() == [2, 3]
    problem(await job.post_commit(3, stages), 409, "stale-epoch")
    ahead = {"s": {"late": 5}, "k": {"input_watermark": 11, "late": 5}}
    problem(await job.post_commit(5, ahead), 409, "input-ahead")
    assert await late() == [2, 3]
    await job.commit(5, {"s": {"late": 1}, "k": {"late": 4}})
    assert await late() == [3, 7]
    await gauge.crash()
    job = gauge.api()
    await job.commit(5, {"s": {"late": 1}, "k": {"late": 4}})
    await job.commit(6, {"s": {"late": 8}, "k": {}})
    assert await late() == [8, 0], "counts begin anew with the live store"


async def test_a_passthrough_counts_no_late_rows(api: Api):
    await api.define({"s": SPEC["s"], "u": {"inputs": ["s"], "passthrough": True}})
    response = await api.post_commit(1, {"s": {"late": 1}, "u": {"late": 1}})
    assert "passthrough" in problem(response, 422, "invalid-request")["detail"]
    await api.commit(1, {"s": {"late": 1}, "u": {"late": 0}})
    assert (await api.snapshot())["s"]["late"] == 1


async def test_corrections_of_a_commit_count_once(job: Api, token: str, gauge: InProcess):
    async def counted() -> list[tuple[int, int]]:
        states = await job.snapshot()
        return [(states[stage]["corrections"], states[stage]["late"]) for stage in ("s", "k")]

    await job.report("s", token, {"0": 10, "1": 10}, epoch=4)
    stages = {"s": {}, "k": {"input_watermark": None, "corrections": 3, "late": 1}}
    for _ in range(2):
        await job.commit(4, stages)
        assert await counted() == [(0, 0), (3, 1)]
    problem(await job.post_commit(3, stages), 409, "stale-epoch")
    problem(
        await job.post_commit(5, {"k": {"input_watermark": 11, "corrections": 5}}),
        409,
        "input-ahead",
    )
    assert await counted() == [(0, 0), (3, 1)]
    await job.commit(5, {"s": {"corrections": 2}, "k": {"corrections": 4}})
    assert await counted() == [(2, 0), (7, 1)]
    assert (await job.watermark("k"))["corrections"] == 7
    await gauge.crash()
    job = gauge.api()
    await job.commit(5, {"s": {"corrections": 2}, "k": {"corrections": 4}})
    await job.commit(6, {"s": {}, "k": {"corrections": 8}})
    assert await counted() == [(0, 0), (8, 0)], "counts begin anew with the live store"


async def test_a_passthrough_counts_no_corrections(api: Api):
    await api.define({"s": SPEC["s"], "u": {"inputs": ["s"], "passthrough": True}})
    response = await api.post_commit(1, {"s": {"corrections": 1}, "u": {"corrections": 1}})
    assert "passthrough" in problem(response, 422, "invalid-request")["detail"]
    await api.commit(1, {"s": {"corrections": 1}, "u": {"corrections": 0}})
    assert (await api.snapshot())["s"]["corrections"] == 1


async def test_an_older_epoch_is_stale(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10}, epoch=4)
    await job.commit(4, {"s": {}})
    problem(await job.post_commit(3, {"s": {}}), 409, "stale-epoch")
    for epoch in (3, 4):
        response = await job.post_report("s", token, {"0": 20}, epoch=epoch)
        problem(response, 409, "stale-epoch")
    assert await job.promises("s") == {"0": 10, "1": 10}
    await job.report("s", token, {"0": 20}, epoch=5)


async def test_one_stale_stage_refuses_the_whole_commit(job: Api, token: str):
    keyed = await keyed_at(job, token, 10)
    await job.commit(7, {"s": {}})
    await job.report("k", keyed, {LOWER: {}, UPPER: {}}, epoch=5, input_watermark=10)
    problem(await job.post_commit(5, {"k": {}, "s": {}}), 409, "stale-epoch")
    assert await job.output("k") is None
    await job.commit(5, {"k": {}})
    assert await job.output("k") == 10


async def test_a_commit_skips_epochs_and_drops_what_waited_in_them(job: Api, token: str):
    await job.report("s", token, {"0": 90, "1": 90}, epoch=1)
    await job.report("s", token, {"0": 10}, epoch=2)
    assert (await job.commit(2, {"s": {}}))["applied"] == {"s": 1}
    assert await job.promises("s") == {"0": 10, "1": None}


async def test_later_epochs_go_on_waiting(job: Api, token: str):
    await job.report("s", token, {"0": 90, "1": 90}, epoch=2)
    await job.report("s", token, {"0": 10, "1": 10}, epoch=1)
    await job.commit(1, {"s": {}})
    assert await job.output("s") == 10
    await job.commit(2, {"s": {}})
    assert await job.output("s") == 90


async def test_an_empty_epoch_may_be_committed(job: Api, token: str):
    assert (await job.commit(1, {"s": {}}))["applied"] == {"s": 0}
    problem(await job.post_report("s", token, {"0": 1}, epoch=1), 409, "stale-epoch")


async def test_epoch_zero(job: Api, token: str):
    await job.report("s", token, {"0": 10, "1": 10}, epoch=0)
    await job.commit(0, {"s": {}})
    assert await job.output("s") == 10


async def test_below_the_promise_in_an_epoch_changes_nothing(job: Api, token: str):
    await job.report("s", token, {"0": 50, "1": 50})
    await job.report("s", token, {"0": 10, "1": 60}, epoch=1)
    await job.commit(1, {"s": {}})
    assert await job.promises("s") == {"0": 50, "1": 60}


async def test_a_commit_needs_no_living_lease(job: Api, gauge: InProcess):
    token = await job.token("s", ttl_ms=1_000)
    await job.report("s", token, {"0": 10, "1": 10}, epoch=1)
    gauge.advance(60_000)
    assert (await job.commit(1, {"s": {}}))["applied"] == {"s": 2}
    assert await job.output("s") == 10


async def test_final_waits_too(job: Api, token: str):
    await job.report("s", token, {"0": {"final": True}, "1": {"final": True}}, epoch=1)
    assert (await job.watermark("s"))["status"] == "unknown"
    await job.commit(1, {"s": {}})
    assert await job.output("s") == MAX


async def test_idle_waits_too(job: Api, token: str):
    await job.report("s", token, {"0": 5, "1": 10})
    await job.report("s", token, {"0": {"idle": True}}, epoch=1)
    assert await job.output("s") == 5
    await job.commit(1, {"s": {}})
    assert (await job.watermark("s"))["ranges"]["idle"] == 1
    assert await job.output("s") == 10


@pytest.mark.parametrize("how", ["expired", "released", "superseded"])
async def test_an_idle_word_of_a_lost_lease_is_not_applied(job: Api, gauge: InProcess, how: str):
    busy = await job.token("s", ["1"], holder="b", ttl_ms=600_000)
    quiet = await job.token("s", ["0"], holder="a", ttl_ms=1_000)
    await job.report("s", quiet, {"0": 5})
    await job.report("s", busy, {"1": 10})
    await job.report("s", quiet, {"0": {"idle": True}}, epoch=1)
    if how == "expired":
        gauge.advance(1_001)
    elif how == "released":
        await job.release(quiet)
    else:
        await job.claim("s", ["0"], holder="c", attempt=1)
    await job.commit(1, {"s": {}})
    state = await job.watermark("s")
    assert (state["output_watermark"], state["ranges"]["idle"]) == (5, 0)


async def test_commits_of_another_run(job: Api):
    run = await job.run("s")
    problem(await job.post_commit(1, {"s": {}}, run=run + 1), 409, "stale-run")
    problem(await job.post_commit(1, {"k": {}}, run=run), 409, "stale-run")
    newer = await job.run("s")
    problem(await job.post_commit(1, {"s": {}}, run=run), 409, "stale-run")
    await job.commit(1, {"s": {}}, run=newer)


async def test_epochs_go_on_over_runs(job: Api):
    first = await job.run("s")
    await job.commit(9, {"s": {}}, run=first)
    second = await job.run("s")
    problem(await job.post_commit(8, {"s": {}}, run=second), 409, "stale-epoch")
    await job.commit(10, {"s": {}}, run=second)


async def test_epochs_are_remembered_over_restart_and_crash(job: Api, gauge: InProcess):
    await job.commit(9, {"s": {}})
    for again, epoch in ((gauge.restart, 9), (gauge.crash, 10)):
        await again()
        job = gauge.api()
        problem(await job.post_commit(epoch - 1, {"s": {}}), 409, "stale-epoch")
        await job.commit(epoch, {"s": {}})
        token = await job.token("s")
        response = await job.post_report("s", token, {"0": 1}, epoch=epoch)
        problem(response, 409, "stale-epoch")
        await job.commit(epoch + 1, {"s": {}})


async def test_who_asks_is_told_the_run_and_the_last_committed_epoch(job: Api, token: str):
    body = {"job": "job", "stage": "s", "generation": 1, "run": None, "epoch": None}
    assert ok(await job.get_commits("s")) == body
    await job.report("s", token, {"0": 1, "1": 1}, epoch=0)
    assert await job.committed("s") == (None, None)
    await job.commit(0, {"s": {}})
    assert await job.committed("s") == (None, 0)
    run = await job.run("s", "k")
    await job.commit(2**53, {"s": {}}, run=run)
    assert ok(await job.get_commits("s")) == body | {"run": run, "epoch": 2**53}
    assert await job.committed("k") == (run, None)
    newer = await job.run("k")
    problem(await job.post_commit(7, {"k": {}}, run=run), 409, "stale-run")
    assert await job.committed("k") == (newer, None)
    problem(await job.get_commits("none"), 404, "unknown-stage")
    problem(await Api(job.client, "none").get_commits("s"), 404, "unknown-job")


async def test_what_is_told_of_commits_outlasts_a_restart_and_a_crash(job: Api, gauge: InProcess):
    run = await job.run("s")
    await job.commit(41, {"s": {}}, run=run)
    for again in (gauge.restart, gauge.crash):
        await again()
        assert await gauge.api().committed("s") == (run, 41)
        assert await gauge.api().committed("k") == (None, None)


async def test_a_reset_and_a_deletion_begin_with_no_commits(job: Api, gauge: InProcess):
    run = await job.run("s")
    await job.commit(41, {"s": {}}, run=run)
    ok(await job.reset())
    body = {"job": "job", "stage": "s", "generation": 2, "run": None, "epoch": None}
    assert ok(await job.get_commits("s")) == body
    await gauge.crash()
    job = gauge.api()
    assert ok(await job.get_commits("s")) == body
    ok(await job.delete(), 204)
    problem(await job.get_commits("s"), 404, "unknown-job")
    await job.define(SPEC)
    assert await job.committed("s") == (None, None)


async def test_what_a_commit_applied_survives_a_crash(job: Api, token: str, gauge: InProcess):
    await job.report("s", token, {"0": 10, "1": 20}, epoch=1)
    await job.commit(1, {"s": {}})
    await gauge.crash()
    assert await gauge.api().output("s") == 10


async def test_at_most_sixty_four_epochs_wait(job: Api, token: str):
    for epoch in range(64):
        await job.report("s", token, {"0": epoch}, epoch=epoch)
    problem(await job.post_report("s", token, {"0": 1}, epoch=64), 409, "epochs-waiting")
    # One that waits already takes more.
    await job.report("s", token, {"1": 7}, epoch=63)
    await job.commit(0, {"s": {}})
    await job.report("s", token, {"0": 1}, epoch=64)


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"epoch": 1},
        {"stages": {"s": {}}},
        {"epoch": 1, "stages": []},
        {"epoch": 1, "stages": {}},
        {"epoch": -1, "stages": {"s": {}}},
        {"epoch": "1", "stages": {"s": {}}},
        {"epoch": 1.5, "stages": {"s": {}}},
        {"epoch": 1 << 63, "stages": {"s": {}}},
        {"epoch": 1, "run": "1", "stages": {"s": {}}},
        {"epoch": 1, "stages": {"s": None}},
        {"epoch": 1, "stages": {"s": {"colour": 1}}},
        {"epoch": 1, "stages": {"s": {"late": -1}}},
        {"epoch": 1, "stages": {"s": {"late": None}}},
        {"epoch": 1, "stages": {"s": {"late": 1.5}}},
        {"epoch": 1, "stages": {"s": {"late": 1 << 54}}},
        {"epoch": 1, "stages": {"s": {"corrections": -1}}},
        {"epoch": 1, "stages": {"s": {"corrections": None}}},
        {"epoch": 1, "stages": {"s": {"corrections": 1.5}}},
        {"epoch": 1, "stages": {"s": {"corrections": 1 << 54}}},
        {"epoch": 1, "stages": {"k": {"input_watermark": "1"}}},
        {"epoch": 1, "stages": {"k": {"input_watermark": 1 << 62}}},
        {"epoch": 1, "stages": {"s": {}}, "evidence_age_ms": -1},
        {"epoch": 1, "stages": {"s": {}}, "evidence_age_ms": None},
        {"epoch": 1, "stages": {"s": {}}, "evidence_age_ms": 1.5},
        {"epoch": 1, "stages": {"s": {}}, "evidence_age_ms": 1 << 54},
        {"epoch": 1, "stages": {"s": {}}, "colour": 1},
    ],
    ids=repr,
)
async def test_an_invalid_commit(job: Api, token: str, body: Any):
    await job.report("s", token, {"0": 10, "1": 10}, epoch=1)
    response = await job.client.post(f"{job.root}/commits", json=body)
    problem(response, 422, "invalid-request", "invalid-report")
    assert await job.output("s") is None
    assert (await job.commit(1, {"s": {}}))["applied"] == {"s": 2}


async def test_a_commit_that_is_no_json(job: Api):
    problem(await job.client.post(f"{job.root}/commits", content=b"{"), 400)


async def test_waiting_reports_of_a_changed_range_do_not_count(job: Api, token: str):
    keyed = await keyed_at(job, token, 50)
    await job.report("k", keyed, {LOWER: {}, UPPER: {}}, epoch=1, input_watermark=50)
    await job.change({"s": SPEC["s"], "k": {"inputs": ["s"], "ranges": 1}})
    await job.commit(1, {"k": {}})
    assert await job.output("k") is None
