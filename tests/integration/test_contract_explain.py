"""Explaining a watermark: each reason, the way to it, and where the stage would be without it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.api import MAX, Api, eventually, ok, problem
from tests.support.inprocess import InProcess

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("stores", ["memory,sqlite", "redis,postgres"], indirect=True),
]

NOW = 1_767_225_600_000
KEYS = "00000000-100000000"
FLOW = {
    "s": {"shards": ["a", "b"]},
    "t": {"shards": ["0"]},
    "k": {"inputs": ["s"], "ranges": 1},
    "u": {"inputs": ["k", "t"], "passthrough": True},
}
LONG = 600_000


@pytest.fixture
async def job(api: Api) -> Api:
    await api.define(FLOW)
    return api


async def explain(job: Api, stage: str, query: str = "") -> Any:
    return ok(await job.client.get(f"{job.root}/stages/{stage}/explain{query}"))


def reasons(body: Any) -> list[tuple[str, str]]:
    return [(step["stage"], step["reason"]) for step in body["path"]]


async def test_never_reported(job: Api) -> None:
    token = await job.token("s")
    await job.report("s", token, {"a": 5})
    body = await explain(job, "s")
    [holder] = body["holders"]
    assert (holder["range"], holder["reason"], holder["would_be"]) == ("b", "never_reported", 5)
    assert body["holders_total"] == 1
    assert "never reported" in body["because"]


async def test_since_is_the_last_rise_of_the_output(job: Api, gauge: InProcess) -> None:
    """A keyed stage is changed by each move of its input, too."""
    sources, keys = await job.token("s", ttl_ms=LONG), await job.token("k", ttl_ms=LONG)
    await job.report("s", sources, {"a": 5, "b": 5})
    await job.report("t", await job.token("t"), {"0": {"final": True}})
    await job.report("k", keys, {KEYS: {}}, input_watermark=5)
    risen = (await explain(job, "k"))["since"]
    gauge.advance(60_000)
    await job.report("s", sources, {"a": 9, "b": 9})
    assert (await job.watermark("k"))["updated_at"] > risen
    assert (await explain(job, "k"))["since"] == risen
    listed = ok(await job.client.get("/v1/overview"))["jobs"]
    assert (listed[0]["slowest"], listed[0]["since"]) == ("k", risen)
    await job.report("k", keys, {KEYS: {}}, input_watermark=9)
    assert (await explain(job, "k"))["since"] > risen


async def test_a_backlog_and_the_position_of_its_reader(job: Api) -> None:
    token = await job.token("s")
    at = {"watermark": 5, "backlog": 1_234, "position": "offset 77"}
    await job.report("s", token, {"a": at, "b": 9})
    body = await explain(job, "s")
    [holder] = body["holders"]
    assert (holder["backlog"], holder["position"]) == (1_234, "offset 77")
    assert body["because"].endswith("; it is read up to offset 77, with 1,234 records to go")
    await job.report("s", token, {"a": {"watermark": 5, "position": "offset 1311"}})
    body = await explain(job, "s")
    assert "backlog" not in body["holders"][0]
    assert body["because"].endswith("; it is read up to offset 1311, and has nothing more")
    await job.report("s", token, {"a": 6})
    body = await explain(job, "s")
    assert "position" not in body["holders"][0]
    assert "read up to" not in body["because"]


async def test_a_position_that_is_too_long(job: Api) -> None:
    token = await job.token("s")
    answer = await job.client.post(
        f"{job.root}/stages/s/reports",
        json={"token": token, "ranges": {"a": {"watermark": 5, "position": "x" * 257}}},
    )
    assert "position" in problem(answer, 422)["detail"]


async def test_lease_expired(job: Api, gauge: InProcess) -> None:
    await job.report("s", await job.token("s", ttl_ms=1_000), {"a": 5, "b": 9})
    gauge.advance(5_000)
    [holder] = (await explain(job, "s"))["holders"]
    assert (holder["range"], holder["reason"], holder["holder"]) == ("a", "lease_expired", None)
    assert holder["would_be"] == 9


async def test_waiting_for_commit(job: Api) -> None:
    token = await job.token("s")
    await job.report("s", token, {"a": 5, "b": 9})
    await job.report("s", token, {"a": 50}, epoch=1)
    [holder] = (await explain(job, "s"))["holders"]
    assert (holder["range"], holder["reason"]) == ("a", "waiting_for_commit")
    await job.commit(1, {"s": {}})
    assert (await explain(job, "s"))["holders"][0]["range"] == "b"


async def test_the_first_report_waits_for_its_commit(job: Api) -> None:
    await job.report("s", await job.token("s"), {"a": 50, "b": 50}, epoch=1)
    assert {h["reason"] for h in (await explain(job, "s"))["holders"]} == {"waiting_for_commit"}


async def test_throttled(api: Api) -> None:
    flow = {"stages": {"s": {"shards": ["a"]}, "t": {"shards": ["0"]}}}
    throttle = {"groups": [{"stages": ["s", "t"], "max_drift_ms": 10}]}
    ok(await api.client.put(api.root, json=flow | {"throttle": throttle}), 201)
    await api.report("s", await api.token("s"), {"a": 500})
    await api.report("t", await api.token("t"), {"0": 5})
    body = await explain(api, "s")
    assert body["holders"][0]["reason"] == "throttled"
    assert "paused" in body["because"]


async def test_how_far_a_shard_may_run_that_its_reader_may_hold_back(api: Api) -> None:
    """A query that looks ahead waits before it is asked to."""
    flow = {"stages": {"s": {"shards": ["a"]}, "t": {"shards": ["0"]}}}
    throttle = {"groups": [{"stages": ["s", "t"], "max_drift_ms": 10}]}
    ok(await api.client.put(api.root, json=flow | {"throttle": throttle}), 201)
    await api.report("s", await api.token("s"), {"a": 14})
    await api.report("t", await api.token("t"), {"0": 5})
    body = await explain(api, "s")
    assert body["holders"][0]["reason"] == "behind"
    assert body["because"].endswith(
        "; its group may run to 1970-01-01T00:00:00.015Z, since shard 0 of t is at"
        " 1970-01-01T00:00:00.005Z"
    )
    assert "its group" not in (await explain(api, "t"))["because"], "the slowest has no limit"


async def test_a_stage_whose_next_epoch_waits_with_its_paused_source(api: Api) -> None:
    """Its window keeps nothing back of what it has observed, and the rest comes with that epoch."""
    flow = {
        "stages": {
            "s": {"shards": ["a"]},
            "k": {"inputs": ["s"], "ranges": 1},
            "t": {"shards": ["0"]},
        }
    }
    throttle = {"groups": [{"stages": ["s", "t"], "max_drift_ms": 10}]}
    ok(await api.client.put(api.root, json=flow | {"throttle": throttle}), 201)
    await api.report("t", await api.token("t"), {"0": 5})
    source = await api.token("s")
    await api.report("s", source, {"a": 500})
    await commit_with_holds(api, 500, window=499)
    assert reasons(await explain(api, "k")) == [("k", "input"), ("s", "ranges")], (
        "it is transparent"
    )
    await api.report("s", source, {"a": 900})
    body = await explain(api, "k")
    assert reasons(body) == [("k", "input"), ("s", "ranges")]
    assert body["holders"][0]["reason"] == "throttled"
    assert body["because"].startswith("k waits for s, where range a (holder worker) is paused at")
    await api.report("t", await api.token("t"), {"0": 1_000})
    assert reasons(await explain(api, "k")) == [("k", "ranges")], "now it has no reason to wait"


async def test_stalled(job: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=LONG)
    await job.report("s", token, {"b": 9})
    for _ in range(6):
        await job.report("s", token, {"a": {"watermark": 5, "oldest_work": NOW - 1_000}})
        gauge.advance(1_000)
    [holder] = (await explain(job, "s"))["holders"]
    assert (holder["range"], holder["reason"]) == ("a", "stalled")


async def test_buffering_through_the_chain(job: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    await job.report("s", await job.token("s"), {"a": 500, "b": 900})
    await job.report("t", await job.token("t"), {"0": 900})
    k = await job.token("k", holder="exec-3")
    held = {KEYS: {"holds": {"state": 40, "output": 60}}}
    await job.report("k", k, held, input_watermark=500)
    gauge.advance(12_000)
    k = await job.token("k", holder="exec-3")
    await job.report("k", k, held, input_watermark=500)
    body = await explain(job, "u")
    assert reasons(body) == [("u", "input"), ("k", "ranges")]
    [holder] = body["holders"]
    assert (holder["stage"], holder["range"], holder["reason"]) == ("k", KEYS, "buffering")
    assert (holder["component"], holder["promise"], holder["would_be"]) == ("state", 40, None)
    assert body["because"] == (
        f"u waits for k, where range {KEYS} (holder exec-3) keeps a hold 'state' at"
        " 1970-01-01T00:00:00.040Z, unchanged for 12 s"
    )
    assert body["output_watermark"] == 40


async def test_a_hold_that_a_range_reports_itself_is_named_however_small(job: Api) -> None:
    """Only what comes with a commit is known to be of a window that keeps nothing back."""
    await job.report("s", await job.token("s"), {"a": 500, "b": 500})
    await job.report(
        "k", await job.token("k"), {KEYS: {"holds": {"state": 499}}}, input_watermark=500
    )
    [holder] = (await explain(job, "k"))["holders"]
    assert (holder["reason"], holder["component"]) == ("buffering", "state")


async def commit_with_holds(job: Api, at: int, **holds: int) -> None:
    """An epoch of `k` that ran with this input, and kept this back."""
    token = await job.token("k")
    await job.report("k", token, {KEYS: {}}, epoch=at)
    await job.commit(at, {"k": {"input_watermark": at, "holds": holds}})


async def test_holds_that_the_commit_brings(job: Api) -> None:
    await job.report("s", await job.token("s"), {"a": 50, "b": 50})
    await commit_with_holds(job, 50, join=20, output=30)
    assert await job.output("k") == 20
    body = await explain(job, "k")
    assert reasons(body) == [("k", "ranges")]
    [holder] = body["holders"]
    assert (holder["reason"], holder["component"]) == ("buffering", "join")
    assert "a hold 'join'" in body["because"]
    listed = ok(await job.client.get(f"{job.root}/stages/k/ranges"))["ranges"]
    assert listed[0]["holds"] == {"join": 20, "output": 30}
    # The next commit says what is kept now.
    await job.report("s", await job.token("s"), {"a": 60, "b": 60})
    await commit_with_holds(job, 60)
    assert await job.output("k") == 60
    listed = ok(await job.client.get(f"{job.root}/stages/k/ranges"))["ranges"]
    assert listed[0]["holds"] == {}


async def test_holds_of_a_commit_are_over_with_the_next_promise_and_the_next_run(job: Api) -> None:
    await job.report("s", await job.token("s"), {"a": 50, "b": 50})
    await commit_with_holds(job, 50, join=20)

    async def holds() -> Any:
        return ok(await job.client.get(f"{job.root}/stages/k/ranges"))["ranges"][0]["holds"]

    assert await holds() == {"join": 20}
    await job.report("k", await job.token("k"), {KEYS: {}}, input_watermark=40)
    assert await holds() == {}, "this is not what the commit has left"
    await job.commit(60, {"k": {"input_watermark": 50, "holds": {"join": 40}}})
    assert await holds() == {"join": 40}
    await job.run("k")
    assert await holds() == {}


async def test_who_lags_more_by_its_input_than_by_what_it_keeps_waits_for_its_input(
    job: Api,
) -> None:
    token = await job.token("s")
    await job.report("s", token, {"a": 900, "b": 50})
    await commit_with_holds(job, 50, join=20)
    body = await explain(job, "k")
    assert reasons(body) == [("k", "input"), ("s", "ranges")]
    assert body["holders"][0]["range"] == "b"
    await job.report("s", token, {"b": 890})
    await commit_with_holds(job, 890, join=860)
    assert reasons(await explain(job, "k")) == [("k", "ranges")]
    # A source that is final is no measure of how far the others are behind.
    await job.report("s", token, {"a": {"final": True}})
    assert reasons(await explain(job, "k")) == [("k", "ranges")]
    # It is still what keeps the range there, now that the input has gone on.
    await job.report("s", token, {"b": 2_000})
    assert (await explain(job, "k"))["holders"][0]["reason"] == "buffering"


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"k": {"holds": {"join": 5}}}, "require an input_watermark"),
        ({"s": {"holds": {"join": 5}}}, "require an input_watermark"),
        ({"k": {"input_watermark": None, "holds": {"join": -(2**62)}}}, "must be milliseconds"),
        (
            {"u": {"input_watermark": None, "holds": {"join": 5}}},
            "a passthrough stage has no holds",
        ),
    ],
)
async def test_holds_that_no_commit_may_bring(job: Api, stages: dict[str, Any], words: str) -> None:
    response = await job.client.post(f"{job.root}/commits", json={"epoch": 1, "stages": stages})
    assert words in problem(response, 422, "invalid-request")["detail"]


async def test_no_input(job: Api) -> None:
    s = await job.token("s")
    await job.report("s", s, {"a": 500, "b": 500})
    await job.report("k", await job.token("k"), {KEYS: {}}, input_watermark=500)
    await job.report("s", s, {"a": 700, "b": 700})
    body = await explain(job, "k")
    assert reasons(body) == [("k", "ranges")]
    assert body["holders"][0]["reason"] == "no_input"


async def test_behind_and_the_way_through_stages_that_only_wait(job: Api) -> None:
    await job.report("s", await job.token("s"), {"a": 500, "b": 900})
    await job.report("t", await job.token("t"), {"0": 900})
    await job.report("k", await job.token("k"), {KEYS: {}}, input_watermark=500)
    body = await explain(job, "u")
    assert reasons(body) == [("u", "input"), ("k", "input"), ("s", "ranges")]
    [holder] = body["holders"]
    assert (holder["range"], holder["reason"], holder["would_be"]) == ("a", "behind", 900)


async def test_idle_and_final(job: Api) -> None:
    token = await job.token("s")
    await job.report("s", token, {"a": {"watermark": 5, "idle": True}, "b": {"final": True}})
    body = await explain(job, "s")
    assert body["status"] == "idle"
    assert [(h["range"], h["reason"]) for h in body["holders"]] == [("a", "idle")]
    await job.report("s", token, {"a": {"final": True}})
    body = await explain(job, "s")
    assert (reasons(body), body["holders"], body["holders_total"]) == ([("s", "final")], [], 0)


async def test_a_shard_that_is_idle_by_policy_before_its_first_report_is_idle(
    api: Api, gauge: InProcess
) -> None:
    gauge.skip_on_redis()
    await api.define({"s": {"shards": ["a", "b"], "idle": {"after_ms": 1_000, "then": "exclude"}}})
    await api.report(
        "s", await api.token("s", ttl_ms=LONG), {"a": {"watermark": NOW, "records": 1}}
    )
    gauge.advance(1_500)

    async def health() -> str:
        return (await explain(api, "s"))["health"]

    await eventually(health, lambda found: found == "idle", what="the policy is applied")
    body = await explain(api, "s")
    assert [(each["range"], each["reason"]) for each in body["holders"]] == [("b", "idle")]
    assert body["because"] == (
        "s is idle, and stages below wait for it only without an active input: range b (holder worker)"
        " is idle, and has"
        " never promised"
    )


async def test_without_the_only_active_shard_the_least_idle_one_counts(job: Api) -> None:
    """The value was missing, although a retirement of the shard would move the watermark to it."""
    await job.report("s", await job.token("s"), {"a": 5, "b": {"watermark": 9, "idle": True}})
    [holder] = (await explain(job, "s"))["holders"]
    assert (holder["range"], holder["would_be"]) == ("a", 9)
    path = f"{job.root}/stages/s/ranges/a/retire"
    body = {"because": "gone", "dry_run": True}
    planned = ok(await job.client.post(path, json=body))
    assert planned["moves"][0]["after"]["output_watermark"] == 9


async def test_a_besides_has_its_remedy(job: Api, gauge: InProcess) -> None:
    """A stage without a worker waits for a sound input: nothing was said of the next thing to do."""
    await job.report("s", await job.token("s"), {"a": 5, "b": 5})
    await job.report("t", await job.token("t", ttl_ms=600_000), {"0": 9})
    await job.report("k", await job.token("k", ttl_ms=1_000), {KEYS: {}}, input_watermark=5)
    gauge.advance(2_000)
    body = await explain(job, "k")
    assert "; besides, 1 of 1 ranges of k has no worker" in body["because"]
    assert "Start the program again" in body["remedy"]


async def test_a_stage_between_with_a_problem_is_named_with_its_remedy(
    api: Api, gauge: InProcess
) -> None:
    """Only the problems of the first and the last stage of the path were named."""
    spec = {"inputs": ["s"], "ranges": 1}, {"inputs": ["m"], "ranges": 1}
    await api.define({"s": {"shards": ["a"]}, "m": spec[0], "k": spec[1]})
    run = await api.run("s")
    await api.report("s", await api.token("s", run=run), {"a": 5})
    lost = await api.token("m", holder="exec-2", ttl_ms=1_000)
    await api.report("m", lost, {KEYS: {}}, input_watermark=5)
    await api.report("k", await api.token("k", ttl_ms=LONG), {KEYS: {}}, input_watermark=5)
    await api.end(run, "failed")
    gauge.advance(2_000)
    body = await explain(api, "k")
    assert body["because"].startswith("k waits for s: the last run of s failed at ")
    assert "; besides, 1 of 1 ranges of m has no worker" in body["because"]
    assert re.match(r"Mend .*\. For m: Start .* The last holder: exec-2\.$", body["remedy"])
    assert [each.get("health") for each in body["path"]] == [None, None, None]


async def test_a_single_range_is_named_behind_the_reason_of_its_problem(api: Api) -> None:
    """The explanation lacked the range, and elsewhere the range read as a part of the reason."""
    await api.define({"s": {"shards": ["a"]}})
    run = await api.run("s")
    await api.report("s", await api.token("s", run=run), {"a": 5})
    await api.end(run, "failed", because="out of memory")
    because = (await explain(api, "s"))["because"]
    assert re.fullmatch(
        r's stands at .*: the last run of s failed at .*: "out of memory" \(range a\)', because
    )
    [found] = (await api.problems())["problems"]
    assert because.endswith(f"{found['because']} (range a)")


async def test_another_input_that_is_as_low_is_named_with_its_remedy(
    api: Api, gauge: InProcess
) -> None:
    await api.define(
        {
            "s": {"shards": ["a"]},
            "t": {"shards": ["b"]},
            "k": {"inputs": ["s", "t"], "ranges": 1},
            "u": {"inputs": ["k"], "passthrough": True},
        }
    )
    body = await explain(api, "u")
    assert body["because"].startswith("u waits for s: 1 of 1 ranges of s has never reported")
    assert "; besides, 1 of 1 ranges of t has never reported" in body["because"]
    await api.report("s", await api.token("s", ttl_ms=LONG), {"a": 5})
    assert "ranges of s " not in (await explain(api, "u"))["because"]


async def test_late_rows_are_named_beside_a_problem(api: Api, gauge: InProcess) -> None:
    """They were named only while the stage was without one."""
    await api.define({"s": {"shards": ["a", "b"]}})
    run = await api.run("s")
    token = await api.token("s", run=run)
    await api.report("s", token, {"a": 50, "b": 20})
    await api.retire("s", "b", "sold")
    await api.report("s", token, {"b": 30})
    late = (
        "range b is at 1970-01-01T00:00:00.030Z, behind 1970-01-01T00:00:00.050Z, before which its rows"
        " are late"
    )
    await api.end(run, "failed")
    assert (await explain(api, "s"))["because"].endswith(f"; {late}")


async def test_a_shard_that_is_final_and_idle_is_final_without_the_others(job: Api) -> None:
    token = await job.token("s")
    await job.report("s", token, {"a": {"final": True}})
    await job.report("s", token, {"a": {"idle": True}})
    [holder] = (await explain(job, "s"))["holders"]
    assert (holder["range"], holder["would_be"]) == ("b", MAX)


async def test_the_longest_holding_comes_first(job: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    token = await job.token("s", ttl_ms=LONG)
    await job.report("s", token, {"b": 5})
    gauge.advance(1_000)
    await job.report("s", token, {"a": 5})
    body = await explain(job, "s", "?limit=1")
    assert [h["range"] for h in body["holders"]] == ["b"]
    assert body["holders_total"] == 2
    assert body["holders"][0]["would_be"] == 5, "the other one is there, too"


async def test_what_is_refused(job: Api) -> None:
    problem(await job.client.get(f"{job.root}/stages/x/explain"), 404, "unknown-stage")
    problem(await job.client.get("/v1/jobs/none/stages/x/explain"), 404, "unknown-job")
    response = await job.client.get(f"{job.root}/stages/s/explain?limit=0")
    problem(response, 422, "invalid-request")


async def test_a_dead_range_beside_sound_ones_is_the_root_cause(api: Api, gauge: InProcess) -> None:
    """Half of the workers had died, and the sentence was about the others: `limit` of them."""
    shards = [f"s{number:02}" for number in range(24)]
    await api.define({"s": {"shards": shards}})
    await api.report(
        "s", await api.token("s", shards[:12], ttl_ms=LONG), dict.fromkeys(shards[:12], 5)
    )
    dying = await api.token("s", shards[12:], holder="dying", ttl_ms=1_000)
    await api.report("s", dying, dict.fromkeys(shards[12:], 5))
    gauge.advance(5_000)
    [problem_of_s] = (await api.problems())["problems"]
    body = await explain(api, "s")
    assert {each["reason"] for each in body["holders"]} == {"behind"}
    assert problem_of_s["because"].startswith("12 of 24 ranges of s have no worker")
    assert body["because"].endswith(f": {problem_of_s['because']}")
    assert body["remedy"] == problem_of_s["remedy"]


async def test_a_dead_range_that_is_ahead_is_named_besides(api: Api, gauge: InProcess) -> None:
    await api.define({"s": {"shards": ["a", "b"]}})
    await api.report("s", await api.token("s", ["a"], ttl_ms=LONG), {"a": 5})
    await api.report("s", await api.token("s", ["b"], holder="dying", ttl_ms=1_000), {"b": 9})
    gauge.advance(5_000)
    body = await explain(api, "s")
    assert body["health"] == "no_worker"
    assert body["because"].startswith("s waits for range a")
    assert "; besides, 1 of 2 ranges of s has no worker since " in body["because"]
    assert body["remedy"] == (await api.problems())["problems"][0]["remedy"]
