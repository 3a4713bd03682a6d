"""Contract section 3, health and problems: who is there to move a watermark, and what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from service.frontier.health import Health
from tests.support.api import Api, events, eventually, ok, problem, tile_ids
from tests.support.inprocess import InProcess

pytestmark = pytest.mark.anyio

CLICKS = [f"c-{k:02}" for k in range(24)]
LEFT, RIGHT = tile_ids(2)
SPEC = {
    "clicks": {"shards": CLICKS},
    "taps": {"shards": ["0"]},
    "sessions": {"inputs": ["clicks"], "ranges": 2},
    "both": {"inputs": ["sessions", "taps"], "passthrough": True},
}
MINUTES = 60_000


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(SPEC)
    return api


async def all_well(job: Api, ttl_ms: int = 600_000) -> dict[str, str]:
    """Every stage has workers that have reported, up to 10; taps is ahead."""
    tokens = {
        "clicks": await job.token("clicks", ttl_ms=10 * MINUTES),
        "taps": await job.token("taps", ttl_ms=ttl_ms),
        "sessions": await job.token("sessions", ttl_ms=ttl_ms),
    }
    await job.report("taps", tokens["taps"], {"0": 99})
    await job.report("clicks", tokens["clicks"], dict.fromkeys(CLICKS, 10))
    await job.report("sessions", tokens["sessions"], {LEFT: {}, RIGHT: {}}, input_watermark=10)
    return tokens


async def healths(job: Api) -> dict[str, str]:
    """Return the health of all stages, on which all responses must agree."""
    found = {name: state["health"] for name, state in (await job.snapshot()).items()}
    for name, health in found.items():
        assert await job.health(name) == health
    assert ok(await job.spec())["health"] == found
    return found


async def test_all_is_well(job: Api):
    await all_well(job)
    assert set((await healths(job)).values()) == {"ok"}
    assert await job.problems() == {"job": "job", "health": "ok", "problems": []}


async def test_the_dead_are_not_shown_as_alive(job: Api, gauge: InProcess):
    """All leases of a stage had run out for 25 minutes: it was active, and one range of 24 was named."""
    await all_well(job, ttl_ms=10 * MINUTES)
    before = await job.get_watermark("clicks")
    gauge.advance(25 * MINUTES)
    tokens = {stage: await job.token(stage) for stage in ("taps", "sessions")}
    await job.report("taps", tokens["taps"], {"0": 99})
    assert await healths(job) == {
        "clicks": "no_worker",
        "taps": "ok",
        "sessions": "waiting",
        "both": "waiting",
    }
    after = await job.get_watermark("clicks")
    assert ok(after)["status"] == "active", "that is about the watermark alone"
    assert after.headers["etag"] == before.headers["etag"]
    found = await job.problems()
    assert found["health"] == "no_worker"
    [only] = found["problems"]
    because = only.pop("because")
    assert re.fullmatch(
        r"24 of 24 ranges of clicks have no worker since (\d{4}-\d\d-\d\d )?\d\d:\d\dZ"
        r" \(their leases have run out\)",
        because,
    )
    assert only.pop("since") is not None
    remedy = only.pop("remedy")
    assert remedy.startswith("Start the program again")
    assert remedy.endswith(" The last holder: worker.")
    assert (await job.explain("both"))["remedy"] == remedy
    assert (await job.explain("taps"))["remedy"] is None
    assert only == {
        "job": "job",
        "stage": "clicks",
        "health": "no_worker",
        "severity": "critical",
        "ranges": 24,
        "examples": CLICKS[:5],
        "holds_back": ["sessions", "both"],
    }
    assert (await job.explain("clicks"))["because"].endswith(f": {because}")
    assert (await job.explain("both"))["because"] == f"both waits for clicks: {because}"
    whole = ok(await job.client.get("/v1/problems"))
    assert (whole["total"], whole["problems"][0]["because"]) == (1, because)
    # One worker is back, for most of them.
    token = await job.token("clicks", CLICKS[:23])
    assert (await job.problems())["problems"][0]["because"].startswith(
        "1 of 24 ranges of clicks has no worker since "
    )
    await job.report("clicks", token, dict.fromkeys(CLICKS[:23], 11))
    assert await job.health("clicks") == "no_worker"
    await job.token("clicks", CLICKS[23:])
    assert (await healths(job))["clicks"] == "ok"


async def test_since_is_when_the_leases_ran_out(job: Api, gauge: InProcess):
    gauge.skip_on_redis()
    await all_well(job, ttl_ms=10 * MINUTES)
    gauge.advance(10 * MINUTES)
    ran_out = ok(await job.client.get(f"{job.root}/problems"))["problems"]
    gauge.advance(5 * MINUTES)
    assert (await job.problems())["problems"][0]["since"] == ran_out[0]["since"]


async def test_after_a_clean_end_nobody_is_missed(job: Api, gauge: InProcess):
    """An `availableNow` run had finished: "has no worker", as after a crash."""
    run = await job.run("clicks", "sessions")
    clicks = await job.token("clicks", run=run)
    sessions = await job.token("sessions", run=run)
    await job.report("clicks", clicks, dict.fromkeys(CLICKS, 10))
    await job.report("sessions", sessions, {LEFT: {}, RIGHT: {}}, input_watermark=10)
    taps = await job.token("taps", ttl_ms=600_000)
    await job.report("taps", taps, {"0": 99})
    await job.end(run, "finished")
    gauge.advance(5 * MINUTES)
    assert await healths(job) == {
        "clicks": "ended",
        "taps": "ok",
        "sessions": "ended",
        "both": "ok",
    }
    assert (await job.problems())["problems"] == []
    found = await job.explain("sessions")
    assert re.search(
        r"^sessions has ended, and is below clicks: the last run of clicks finished at (\S+ )?\S+Z$",
        found["because"],
    )
    assert {each["reason"] for each in found["holders"]} == {"ended"}
    assert [each.get("health") for each in found["path"]] == [None, "ended"], "its own is beside"
    assert "no worker" not in found["because"]
    await gauge.restart()
    assert await gauge.api().health("clicks") == "ended", "as the ledger has it"
    # The next run begins.
    await gauge.api().run("clicks", "sessions")
    assert await gauge.api().health("clicks") == "no_worker"


async def test_ranges_that_never_had_a_lease_have_one_cause_for_it(job: Api, gauge: InProcess):
    await all_well(job)
    quarters = SPEC | {"sessions": {"inputs": ["clicks"], "ranges": 4}}
    await job.change(quarters)
    [found] = (await job.problems())["problems"]
    assert found["because"] == (
        "4 of 4 ranges of sessions have no worker (not held by a lease since they began)"
    )
    await gauge.restart()
    clicks = (await gauge.api().problems())["problems"]
    restored = "not held by a lease since the live state was restored from the ledger"
    assert f"24 of 24 ranges of clicks have no worker ({restored})" in [
        each["because"] for each in clicks
    ]


async def test_a_stage_below_an_input_that_has_ended_is_not_expected_to_move(job: Api):
    run = await job.run("clicks", "sessions")
    clicks = await job.token("clicks", run=run)
    sessions = await job.token("sessions", run=run)
    await job.report("clicks", clicks, dict.fromkeys(CLICKS, 10))
    await job.report("sessions", sessions, {LEFT: {}, RIGHT: {}}, input_watermark=10)
    taps = await job.token("taps", ttl_ms=600_000)
    await job.report("taps", taps, {"0": 5})
    await job.end(run, "finished")
    assert [name for name, each in (await job.snapshot()).items() if "input_ended" in each] == []
    await job.report("taps", taps, {"0": 99})
    both = ok(await job.get_watermark("both"))
    assert (both["status"], both["health"], both["input_ended"]) == ("active", "ok", True)
    [listed] = ok(await job.client.get("/v1/overview"))["jobs"]
    assert (listed["slowest"], listed["slowest_ended"]) == ("clicks", True)
    assert not listed.keys() & {"cause", "holds_back", "holds_back_next"}


async def test_a_stage_that_its_own_ranges_hold_back_is_expected_to_move(api: Api):
    await api.define({"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 1}})
    run = await api.run("s")
    await api.report("s", await api.token("s", run=run), {"0": 5})
    own = await api.token("k", ttl_ms=600_000)
    [whole] = [each["range"] for each in await api.ranges("k")]
    await api.report("k", own, {whole: {}}, input_watermark=5)
    await api.report("s", await api.token("s", run=run), {"0": 10})
    await api.end(run, "finished")
    held = ok(await api.get_watermark("k"))
    assert (held["health"], held.get("input_ended")) == ("ok", None), "it has observed up to 5"
    await api.report("k", own, {whole: {}}, input_watermark=10)
    assert ok(await api.get_watermark("k"))["input_ended"] is True


async def test_a_stage_that_will_wait_for_an_input_is_named(job: Api):
    tokens = await all_well(job)
    await job.client.post(f"{job.root}/leases/release", json={"tokens": [tokens["taps"]]})
    [found] = (await job.problems())["problems"]
    assert (found["stage"], found["holds_back"], found["holds_back_next"]) == ("taps", [], ["both"])
    [listed] = ok(await job.client.get("/v1/overview"))["jobs"]
    assert listed["cause"] == f"{found['because']} (range 0)"
    assert (listed["holds_back_next"], "holds_back" in listed) == (["both"], False)
    # Once the lower input has passed, the stage waits.
    await job.report("clicks", tokens["clicks"], dict.fromkeys(CLICKS, 100))
    await job.report("sessions", tokens["sessions"], {LEFT: {}, RIGHT: {}}, input_watermark=100)
    [found] = (await job.problems())["problems"]
    assert (found["holds_back"], "holds_back_next" in found) == (["both"], False)


@pytest.mark.parametrize(
    ("outcome", "health", "says"),
    [
        ("failed", "failed", "the last run of clicks failed at "),
        ("stopped", "no_worker", "24 of 24 ranges of clicks have no worker since "),
    ],
)
async def test_a_run_that_ends_otherwise_is_a_problem(
    job: Api, outcome: str, health: str, says: str
):
    run = await job.run("clicks")
    clicks = await job.token("clicks", run=run)
    await job.report("clicks", clicks, dict.fromkeys(CLICKS, 10))
    await job.end(run, outcome, because="by hand")
    assert await job.health("clicks") == health
    found = next(p for p in (await job.problems())["problems"] if p["stage"] == "clicks")
    assert (found["health"], found["severity"], found["ranges"]) == (health, "critical", 24)
    assert found["because"].startswith(says)
    assert "by hand" in found["because"]
    assert found["remedy"].endswith("The last run was held by driver.") is (outcome == "stopped")
    assert (await job.explain("clicks"))["because"].endswith(found["because"])
    await job.run("clicks")
    await job.token("clicks", run=run + 1)
    assert await job.health("clicks") == "ok"


async def test_every_root_cause_is_listed_the_worst_first(job: Api, gauge: InProcess):
    await all_well(job, ttl_ms=600_000)
    gauge.advance(11 * MINUTES)
    run = await job.run("taps")
    await job.end(run, "failed")
    sessions = await job.token("sessions", [LEFT])
    await job.report("sessions", sessions, {LEFT: {}}, input_watermark=10)
    found = await job.problems()
    assert found["health"] == "failed"
    listed = [(p["stage"], p["health"], p["ranges"]) for p in found["problems"]]
    assert listed[0] == ("taps", "failed", 1)
    # Their leases ran out at nearly the same moment.
    assert sorted(listed[1:]) == [("clicks", "no_worker", 24), ("sessions", "no_worker", 1)]


async def test_a_stage_and_its_input_in_trouble_at_one_watermark(job: Api, gauge: InProcess):
    """The problem of the stage had the stages below, and that of its input none."""
    await all_well(job)
    gauge.advance(25 * MINUTES)
    taps = await job.token("taps", ttl_ms=600_000)
    await job.report("taps", taps, {"0": 99})
    problems = (await job.problems())["problems"]
    assert [(each["stage"], each["holds_back"]) for each in problems] == [
        ("clicks", ["sessions", "both"]),
        ("sessions", ["both"]),
    ]
    explained = ok(await job.client.get(f"{job.root}/stages/both/explain"))
    assert [each["stage"] for each in explained["path"]] == ["both", "sessions", "clicks"]
    own = ok(await job.client.get(f"{job.root}/stages/sessions/explain"))
    assert own["remedy"] == problems[0]["remedy"]


async def test_a_silence_does_not_begin_with_the_last_input(job: Api):
    """`since` of the problem moved with each advance of the input."""
    sessions = await job.token("sessions")
    clicks = await job.token("clicks")
    [before] = [p for p in (await job.problems())["problems"] if p["stage"] == "sessions"]
    assert before["since"] is not None
    await job.report("clicks", clicks, dict.fromkeys(CLICKS, 10))
    await job.report("sessions", sessions, {LEFT: {}}, input_watermark=10)
    [after] = [p for p in (await job.problems())["problems"] if p["stage"] == "sessions"]
    assert (after["health"], after["since"]) == ("silent", before["since"])


async def test_an_idle_stage_is_not_held_back(job: Api):
    tokens = await all_well(job)
    await job.report("taps", tokens["taps"], {"0": {"idle": True}})
    assert (await job.explain("taps"))["because"].startswith(
        "taps is idle, and stages below wait for it only without an active input: range 0 (holder"
        " worker) is idle at "
    )


async def test_a_stage_that_never_reported_is_silent(job: Api):
    found = await job.problems()
    assert found["health"] == "silent"
    clicks = next(p for p in found["problems"] if p["stage"] == "clicks")
    assert (clicks["severity"], clicks["ranges"]) == ("warning", 24)
    assert clicks["because"] == (
        "24 of 24 ranges of clicks have never reported, and are not held by a lease"
    )
    token = await job.token("clicks")
    await job.report("clicks", token, dict.fromkeys(CLICKS[1:], 10))
    [clicks] = [p for p in (await job.problems())["problems"] if p["stage"] == "clicks"]
    assert clicks["because"] == "1 of 24 ranges of clicks has never reported"
    assert clicks["examples"] == ["c-00"]


async def test_idle_and_final_shards_need_no_worker(job: Api, gauge: InProcess):
    token = await job.token("clicks", ttl_ms=600_000)
    final = {"final": True}
    await job.report("clicks", token, dict.fromkeys(CLICKS[1:], final))
    await job.report("clicks", token, {CLICKS[0]: {"watermark": 5, "idle": True}})
    assert await job.health("clicks") == "idle"
    await job.report("clicks", token, {CLICKS[0]: final})
    assert await job.health("clicks") == "final"
    gauge.advance(11 * MINUTES)
    assert await job.health("clicks") == "final"
    assert [p["stage"] for p in (await job.problems())["problems"] if p["stage"] == "clicks"] == []


async def test_leases_that_were_given_back_have_not_run_out(job: Api, gauge: InProcess):
    run = await job.run("taps")
    await job.report("taps", await job.token("taps", run=run), {"0": 5})
    await job.end(run, "finished")
    gauge.advance(MINUTES)
    await job.run("taps")
    [found] = [p for p in (await job.problems())["problems"] if p["stage"] == "taps"]
    assert found["because"].endswith("(its lease has been given back)")
    assert "last holder" not in found["remedy"]


async def test_the_end_of_a_later_run_does_not_move_the_loss_of_a_worker(
    job: Api, gauge: InProcess
):
    gauge.skip_on_redis()
    await job.report("taps", await job.token("taps", ttl_ms=1_000), {"0": 5})
    gauge.advance(5 * MINUTES)
    [before] = [p for p in (await job.problems())["problems"] if p["stage"] == "taps"]
    run = await job.run("taps")
    await job.end(run, "stopped", because="deploy\nof 1.2")
    [after] = [p for p in (await job.problems())["problems"] if p["stage"] == "taps"]
    assert after["since"] == before["since"]
    assert after["because"].endswith("(its last run was stopped: deploy of 1.2)")
    assert after["remedy"].endswith(" The last holder: worker.")


async def test_a_shard_that_stalls(job: Api, gauge: InProcess):
    gauge.skip_on_redis()
    taps = await job.token("taps", ttl_ms=600_000)
    began = ok(await job.client.get(f"{job.root}/watermarks"))
    assert began
    for _ in range(6):
        await job.report("taps", taps, {"0": {"watermark": 5, "oldest_work": 1_000}})
        gauge.advance(1_000)
    assert await job.health("taps") == "stalled"
    [found] = [p for p in (await job.problems())["problems"] if p["stage"] == "taps"]
    assert (found["severity"], found["ranges"]) == ("warning", 1)
    assert found["because"].startswith(
        "1 of 1 ranges of taps keeps reporting, while its oldest work has been waiting since "
    )
    holder = (await job.explain("taps"))["holders"][0]
    assert holder["reason"] == "stalled"
    assert await are_stalled(job) == [True, True]
    await job.report("taps", taps, {"0": {"watermark": 5}})
    assert await are_stalled(job) == [None, None], "it has no old work any more"


async def are_stalled(job: Api) -> list[bool | None]:
    """The mark of the only shard of taps, where its ranges are listed."""
    root = f"{job.root}/stages/taps"
    [listed] = ok(await job.client.get(f"{root}/range-summary"))["listed"]
    [shown] = ok(await job.client.get(f"{root}/ranges"))["ranges"]
    return [listed.get("stalled"), shown.get("stalled")]


async def test_a_shard_that_waits_for_a_commit_stalls_if_its_work_ages(
    job: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    run = await job.run("taps")
    taps = await job.token("taps", ttl_ms=600_000, run=run)
    await job.report("taps", taps, {"0": {"watermark": 5}})
    await job.report("taps", taps, {"0": {"watermark": 9}}, epoch=1)
    for _ in range(6):
        gauge.advance(1_000)
        assert await job.health("taps") == "ok", "a batch runs, and not a report tells of old work"
        await job.report("taps", taps, {"0": {"watermark": 5}})
    for _ in range(3):
        await job.report("taps", taps, {"0": {"watermark": 5, "oldest_work": 1_000}})
        gauge.advance(1_000)
    assert await job.health("taps") == "stalled"
    [found] = [p for p in (await job.problems())["problems"] if p["stage"] == "taps"]
    assert (found["health"], found["ranges"]) == ("stalled", 1)
    explained = await job.explain("taps")
    assert explained["holders"][0]["reason"] == "waiting_for_commit"
    assert "its oldest work has been waiting since 1970-01-01T00:00:01" in explained["because"]
    await job.commit(1, {"taps": {}}, run=run)
    assert await job.health("taps") == "ok"


async def test_a_stream_has_what_changes_in_health_alone(remote: Api):
    await remote.define({"s": {"shards": ["0"]}})
    run = await remote.run("s")
    token = await remote.token("s", run=run)
    await remote.report("s", token, {"0": 5})
    async with remote.client.stream("GET", f"{remote.root}/events") as response:
        stream = events(response)
        name, state = await anext(stream)
        assert (name is not None, state["health"]) == (True, "ok")
        await remote.end(run, "failed")
        name, changed = await anext(stream)
        assert (name, changed["health"]) == (None, "failed")
        assert changed["version"] == state["version"]
        await remote.run("s")
        assert (await anext(stream))[1]["health"] == "no_worker"


async def test_a_stream_has_the_stages_whose_input_has_ended(remote: Api):
    await remote.define({"s": {"shards": ["0"]}, "u": {"inputs": ["s"], "passthrough": True}})
    run = await remote.run("s")
    await remote.report("s", await remote.token("s", run=run), {"0": 5})
    async with remote.client.stream("GET", f"{remote.root}/events") as response:
        stream = events(response)
        before = {state["stage"]: state for _, state in [await anext(stream), await anext(stream)]}
        await remote.end(run, "finished")
        after = {state["stage"]: state for _, state in [await anext(stream), await anext(stream)]}
    assert (after["u"]["health"], after["u"]["input_ended"]) == ("ok", True)
    assert "input_ended" not in {*before["u"], *after["s"]}
    assert after["u"]["version"] == before["u"]["version"]


async def test_the_overview_has_the_worst_first(gauge: InProcess):
    spec = {"s": {"shards": ["0"]}}
    for name in ("a", "b", "c", "d"):
        await gauge.api(name).define(spec)
    for name in ("a", "b", "c"):
        api = gauge.api(name)
        run = await api.run("s")
        token = await api.token("s", run=run, ttl_ms=600_000)
        await api.report("s", token, {"0": 5})
        if name != "b":
            await api.end(run, {"a": "finished", "c": "failed"}[name])
    found: list[dict[str, Any]] = await eventually(
        lambda: overview(gauge), lambda jobs: jobs[0]["health"] == "failed"
    )
    assert [(each["job"], each["health"], each["problems"]) for each in found] == [
        ("c", "failed", 1),
        ("d", "silent", 1),
        ("b", "ok", 0),
        ("a", "ended", 0),
    ]
    assert found[0]["because"].startswith("the last run of s failed at ")
    whole = ok(await gauge.client.get("/v1/problems?limit=1"))
    assert (whole["total"], [p["job"] for p in whole["problems"]]) == (2, ["c"])
    problem(await gauge.client.get("/v1/problems?limit=0"), 422, "invalid-request")
    problem(await gauge.api("nope").client.get("/v1/jobs/nope/problems"), 404, "unknown-job")


async def overview(gauge: InProcess) -> list[dict[str, Any]]:
    return ok(await gauge.client.get("/v1/overview"))["jobs"]


async def test_health_and_throttled_shards_are_metrics(gauge: InProcess):
    api = gauge.api()
    throttle = {"groups": [{"stages": ["s"], "max_drift_ms": 10}]}
    spec = {"stages": {"s": {"shards": ["0", "1"]}}, "throttle": throttle}
    ok(await api.client.put(api.root, json=spec), 201)
    run = await api.run("s")
    token = await api.token("s", run=run)
    await api.report("s", token, {"0": 5, "1": 500})

    async def metrics() -> list[str]:
        text = (await gauge.client.get("/metrics")).text
        return [line for line in text.splitlines() if 'stage="s"' in line]

    found = await metrics()
    assert 'tidegauge_stage_health{health="ok",job="job",stage="s"} 1.0' in found
    assert 'tidegauge_stage_health{health="failed",job="job",stage="s"} 0.0' in found
    assert 'tidegauge_throttled_shards{job="job",stage="s"} 1.0' in found
    await api.end(run, "failed")
    found = await metrics()
    assert 'tidegauge_stage_health{health="failed",job="job",stage="s"} 1.0' in found
    assert sum(line.startswith("tidegauge_stage_health") for line in found) == len(Health)
