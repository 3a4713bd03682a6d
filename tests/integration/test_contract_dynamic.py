"""Shards that come, fall silent and go: dynamic sources, and idleness by policy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import Api, eventually, ok, problem
from tests.support.inprocess import InProcess
from tests.support.sketches import pending

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("stores", ["memory,sqlite", "redis,postgres"], indirect=True),
]

LONG = 600_000
DYNAMIC = {"d": {"shards": ["x"], "dynamic": True}}


async def counts(api: Api, stage: str) -> Any:
    return (await api.watermark(stage))["ranges"]


async def test_a_shard_joins_with_its_first_claim_and_holds_the_stage(api: Api) -> None:
    await api.define(DYNAMIC)
    x = await api.token("d", ["x"], holder="one")
    await api.report("d", x, {"x": 10})
    lease = await api.claim("d", ["y", "z"], holder="other")
    assert (sorted(lease["granted"]), lease["denied"]) == (["y", "z"], [])
    await api.report("d", x, {"x": 50})
    assert await api.output("d") == 10, "the answer to the claim is out: it waits for both"
    await api.report("d", lease["token"], {"y": 20, "z": 30})
    assert await api.output("d") == 20
    assert ok(await api.put(DYNAMIC))["stages"] == DYNAMIC, "the same PUT again is unchanged"
    assert (await counts(api, "d"))["total"] == 3


async def test_a_shard_leaves_once_it_is_final(api: Api) -> None:
    await api.define(DYNAMIC)
    lease = await api.claim("d", ["x", "y"])
    await api.report("d", lease["token"], {"x": 10, "y": {"final": True}})
    assert await api.output("d") == 10

    async def total() -> int:
        return (await counts(api, "d"))["total"]

    await eventually(total, lambda found: found == 1, what="y has left")
    await api.report("d", lease["token"], {"x": 15})
    assert await api.output("d") == 15
    await api.report("d", lease["token"], {"x": {"final": True}})
    assert (await api.watermark("d"))["status"] == "final", "who is declared stays"


async def test_a_shard_leaves_that_is_final_just_after_another_has_left(api: Api) -> None:
    """As many are final as at the last look, but not the same: it stayed for good."""
    await api.define(DYNAMIC)
    lease = await api.claim("d", ["x", "y", "z"])
    await api.report("d", lease["token"], {"x": 10, "y": 10, "z": {"final": True}})

    async def total() -> int:
        return (await counts(api, "d"))["total"]

    await eventually(total, lambda found: found == 2, what="z has left")
    await api.report("d", lease["token"], {"y": {"final": True}})
    await eventually(total, lambda found: found == 1, what="y has left")


async def test_a_shard_that_has_joined_may_be_declared(api: Api) -> None:
    """Then it stays when it is final; before, the declaration was answered 200 and forgotten."""
    await api.define(DYNAMIC)
    lease = await api.claim("d", ["x", "y"])
    await api.report("d", lease["token"], {"x": 10, "y": 12})
    declared = {"d": {"shards": ["x", "y"], "dynamic": True}}
    problem(await api.put(declared), 428, "precondition-required")
    await api.change(declared)
    assert ok(await api.put(declared))["stages"] == declared, "from now on it is unchanged"
    assert await api.output("d") == 10, "and nothing starts over"
    await api.report("d", lease["token"], {"x": 15, "y": {"final": True}})
    assert await api.output("d") == 15
    await api.change(DYNAMIC)
    assert (await counts(api, "d"))["total"] == 1


async def test_a_fenced_run_lets_no_shard_join(api: Api) -> None:
    await api.define(DYNAMIC)
    old = await api.run("d")
    new = await api.run("d")
    response = await api.post_claim("d", ["ghost"], run=old)
    problem(response, 409, "stale-run")
    assert (await counts(api, "d"))["total"] == 1
    await api.claim("d", ["real"], run=new)
    assert (await counts(api, "d"))["total"] == 2


async def test_a_source_that_is_not_dynamic_gets_no_shards(api: Api) -> None:
    await api.define({"s": {"shards": ["x"]}})
    lease = await api.claim("s", ["x", "y"])
    assert lease["denied"] == [{"range": "y", "reason": "unknown"}]
    problem(await api.post_claim("s", ["y"]), 409, "lease-conflict")


async def test_no_shard_joins_a_source_that_is_final(api: Api) -> None:
    """The watermark cannot go back, so it could not wait for that shard."""
    await api.define({"d": {"shards": ["x"], "dynamic": True}})
    token = await api.token("d")
    await api.report("d", token, {"x": {"final": True}})
    await api.release(token)
    response = await api.post_claim("d", ["y"])
    assert "is final" in problem(response, 422, "invalid-request")["detail"]
    problem(await api.post_claim("d", ["x", "y"]), 422, "invalid-request")
    assert (await counts(api, "d"))["leased"] == 0, "of what is refused, nothing stays granted"
    assert (await counts(api, "d"))["total"] == 1


async def test_a_source_that_is_no_longer_dynamic_loses_who_joined(api: Api) -> None:
    await api.define(DYNAMIC)
    await api.claim("d", ["y"])
    await api.change({"d": {"shards": ["x"]}})
    assert (await counts(api, "d"))["total"] == 1


@pytest.mark.parametrize(
    "stage",
    [
        {"shards": ["a"], "idle": {"after_ms": 0, "then": "exclude"}},
        {"shards": ["a"], "idle": {"after_ms": 10, "then": "follow_clock"}},
        {"shards": ["a"], "idle": {"after_ms": 10, "then": "exclude", "slack_ms": 5}},
        {"shards": ["a"], "percentiles": [33, 33]},
        {"shards": ["a"], "percentiles": [100]},
        {"inputs": ["s"], "ranges": 1, "dynamic": True},
        {"inputs": ["s"], "ranges": 1, "idle": {"after_ms": 10, "then": "exclude"}},
        {"inputs": ["s"], "passthrough": True, "percentiles": [50]},
    ],
)
async def test_what_is_no_policy(api: Api, stage: dict[str, Any]) -> None:
    response = await api.put({"s": {"shards": ["0"]}, "t": stage})
    assert problem(response, 422, "invalid-pipeline")


# ---- idleness by policy

QUIET = {"s": {"shards": ["a", "b"], "idle": {"after_ms": 1_000, "then": "exclude"}}}


async def outputs(api: Api, expected: int) -> None:
    async def output() -> int | None:
        return await api.output("s")

    await eventually(output, lambda found: found == expected, what=f"an output of {expected}")


@pytest.fixture
async def quiet(api: Api, gauge: InProcess) -> tuple[Api, str]:
    gauge.skip_on_redis()
    await api.define(QUIET)
    token = await api.token("s", ttl_ms=LONG)
    await api.report("s", token, said(a=100, b=50))
    return api, token


def said(records: int = 1, **watermarks: int) -> dict[str, Any]:
    return {name: {"watermark": at, "records": records} for name, at in watermarks.items()}


async def settled(api: Api, gauge: InProcess) -> None:
    """Wait until the policies have been applied twice: a job that has one, too, has become idle."""
    other = Api(api.client, "sentinel")
    flow = {"s": {"shards": ["a", "b"], "idle": {"after_ms": 1, "then": "exclude"}}}
    for _ in range(2):
        await other.delete()
        await other.define(flow)
        token = await other.token("s", ttl_ms=LONG)
        await other.report("s", token, {"a": {"watermark": 1, "records": 0}})
        gauge.advance(5)

        async def idle() -> int:
            return (await counts(other, "s"))["idle"]

        await eventually(idle, lambda found: found > 0, what="the policies are applied")


async def test_a_quiet_shard_that_is_watched_is_left_out(
    quiet: tuple[Api, str], gauge: InProcess
) -> None:
    api, token = quiet
    gauge.advance(1_000)
    await api.report("s", token, said(a=200))
    await outputs(api, 200)
    assert (await counts(api, "s"))["idle"] == 1
    await api.report("s", token, said(0, b=50))
    assert (await counts(api, "s"))["idle"] == 1, "a report without records changes nothing"
    await api.report("s", token, said(1, b=60))
    assert (await counts(api, "s"))["idle"] == 0
    await api.report("s", token, said(a=300))
    assert await api.output("s") == 200, "it holds the stage until it has caught up"


async def test_who_is_quiet_for_longer_leaves_first(
    quiet: tuple[Api, str], gauge: InProcess
) -> None:
    """Found idle in the same moment, they would stand at the promise of the one that lags."""
    api, token = quiet
    gauge.advance(500)
    await api.report("s", token, said(a=200))
    gauge.advance(1_500)
    await outputs(api, 200)
    await eventually(
        lambda: counts(api, "s"), lambda found: found["idle"] == 2, what="both are idle"
    )
    assert await api.output("s") == 200


@pytest.mark.parametrize(
    "kept",
    [
        {"holds": {"buffer": 50}},
        {"pending": pending([70])},
        {"oldest_work": 1},
        {"epoch": 1},
    ],
    ids=lambda kept: next(iter(kept)),
)
async def test_nobody_passes_what_a_quiet_shard_keeps_back(
    quiet: tuple[Api, str], gauge: InProcess, kept: dict[str, Any]
) -> None:
    """It brings nothing more, and has said that something of it is still to come out."""
    api, token = quiet
    members = dict(kept)
    epoch = members.pop("epoch", None)
    await api.report("s", token, {"b": {"watermark": 60, "records": 5} | members}, epoch=epoch)
    gauge.advance(3_000)
    await api.report("s", token, said(a=200))
    await settled(api, gauge)
    assert (await counts(api, "s"))["idle"] == 0
    assert (await api.output("s") or 0) <= 60
    if epoch is None:
        await api.report("s", token, {"b": {"watermark": 60, "records": 0, "pending": None}})
    else:
        await api.commit(epoch, {"s": {}})
    gauge.advance(1_000)
    await api.report("s", token, said(a=300))
    await outputs(api, 300)


@pytest.mark.parametrize("kept", [{"holds": {"buffer": 250}}, {"oldest_work": 1}])
async def test_who_is_idle_and_keeps_something_back_is_waited_for_at_once(
    quiet: tuple[Api, str], gauge: InProcess, kept: dict[str, Any]
) -> None:
    """It stayed idle until the policy looked again, and the watermark passed what it kept."""
    api, token = quiet
    gauge.advance(1_000)
    await api.report("s", token, said(a=200))
    await outputs(api, 200)
    await api.report("s", token, {"b": {"watermark": 250, "records": 0} | kept})
    assert (await counts(api, "s"))["idle"] == 0
    await api.report("s", token, said(a=300))
    assert await api.output("s") == 250


async def quiet_batches(api: Api, gauge: InProcess, run: int, first: int) -> None:
    """Commit epochs that have something for `a` alone, for longer than the policy's time."""
    token = await api.token("s", ["a"], run=run, ttl_ms=LONG)
    for epoch in range(first, first + 6):
        await api.report("s", token, said(a=1_000 * epoch), epoch=epoch)
        await api.commit(epoch, {"s": {}}, run=run)
        gauge.advance(400)
    await settled(api, gauge)


KEPT = [{"holds": {"buffer": 50}}, {"backlog": 5}, {"pending": pending([70])}, {"oldest_work": 1}]


@pytest.mark.parametrize(
    ("kept", "packed"),
    [*((kept, False) for kept in KEPT), (KEPT[0], True)],
    ids=["holds", "backlog", "pending", "oldest_work", "holds, packed"],
)
@pytest.mark.parametrize("what", ["uncommitted", "another attempt", "restart", "a join"])
async def test_what_was_committed_as_unfinished_stays_so(
    api: Api, gauge: InProcess, kept: dict[str, Any], packed: bool, what: str
) -> None:
    """The watermark passed it: after a report that was never committed, after an attempt that kept
    nothing, and after a loss of the live store.
    """
    gauge.skip_on_redis()
    await api.define({"s": QUIET["s"] | {"dynamic": True}})
    run = await api.run("s")
    token = await api.token("s", ["a", "b"], run=run, ttl_ms=LONG, epoch=1, attempt=0)
    b = {"watermark": 60, "records": 1}
    if packed:
        columns = {"watermark": [60, 60], "records": [1, 1], "holds": {"buffer": [None, 50]}}
        body = {"token": token, "columns": columns, "epoch": 1}
        ok(await api.client.post(f"{api.root}/stages/s/reports", json=body))
    else:
        await api.report("s", token, said(a=60) | {"b": b | kept}, epoch=1)
    if what == "another attempt":
        other = await api.token("s", run=run, ttl_ms=LONG, epoch=1, attempt=1)
        await api.report("s", other, said(a=60) | {"b": b | {"pending": None}}, epoch=1)
    await api.commit(1, {"s": {}}, run=run)
    if what == "uncommitted":
        nothing_more = {"b": {"watermark": 70, "records": 0, "pending": None}}
        await api.report("s", token, said(a=70) | nothing_more, epoch=2)
        run = await api.run("s")
    if what == "restart":
        await gauge.restart()
        api = gauge.api()
    if what == "a join":
        # With the new layout it is in the ledger at once, and not only from the next checkpoint on.
        await api.token("s", ["c"], run=run, ttl_ms=LONG)
        await gauge.crash()
        api = gauge.api()
        last = await api.token("s", ["c"], run=run, ttl_ms=LONG)
        await api.report("s", last, {"c": {"final": True}})
    await quiet_batches(api, gauge, run, 2)
    assert (await counts(api, "s"))["idle"] == 0
    assert (await api.output("s") or 0) <= 60
    token = await api.token("s", ["b"], run=run, ttl_ms=LONG)
    done = {"watermark": 60, "records": 0, "pending": None}
    await api.report("s", token, {"b": done}, epoch=8)
    await api.commit(8, {"s": {}}, run=run)
    await api.release(token)
    await quiet_batches(api, gauge, run, 9)
    await outputs(api, 14_000)


@pytest.mark.parametrize("is_left", [True, False])
async def test_unfinished_work_of_a_later_epoch_outlasts_a_commit(
    api: Api, gauge: InProcess, is_left: bool
) -> None:
    """The commit of epoch 2 ends nothing that epoch 3 has left, also once a newer run drops epoch 3."""
    gauge.skip_on_redis()
    await api.define(QUIET)
    run = await api.run("s")
    token = await api.token("s", run=run, ttl_ms=LONG)
    await api.report("s", token, said(0, a=60, b=60), epoch=2)
    if is_left:
        left = {"watermark": 60, "records": 0, "backlog": 5}
        await api.report("s", token, {"b": left}, epoch=3)
    await api.commit(2, {"s": {}}, run=run)
    run = await api.run("s")
    await quiet_batches(api, gauge, run, 4)
    assert (await counts(api, "s"))["idle"] == (0 if is_left else 1)
    assert await api.output("s") == (60 if is_left else 9_000)


async def test_a_pause_does_not_count_towards_idleness(api: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    throttle = {"groups": [{"stages": ["s"], "max_drift_ms": 1_000}]}
    spec = {"stages": QUIET, "throttle": throttle}
    ok(await api.client.put(api.root, json=spec), 201)
    token = await api.token("s", ttl_ms=LONG)
    await api.report("s", token, said(a=5_000, b=42))
    gauge.advance(2_000)
    answer = await api.report("s", token, said(0, a=5_000) | said(b=43))
    assert answer["throttle"]["a"]["pause"]
    await settled(api, gauge)
    # It may go on. Nobody has read it for two seconds, and its worker has said so.
    await api.report("s", token, said(0, a=5_000) | said(b=5_000))
    await settled(api, gauge)
    assert (await counts(api, "s"))["idle"] == 0
    for _ in range(3):
        gauge.advance(500)
        await api.report("s", token, said(b=5_000))
        await settled(api, gauge)
    assert (await counts(api, "s"))["idle"] == 1


async def test_who_is_quiet_since_the_same_moment_leaves_together(
    quiet: tuple[Api, str], gauge: InProcess
) -> None:
    api, _ = quiet
    gauge.advance(1_500)
    await eventually(
        lambda: counts(api, "s"), lambda found: found["idle"] == 2, what="both are idle"
    )
    assert await api.output("s") == 50


async def test_its_clock_is_followed(api: Api, gauge: InProcess) -> None:
    gauge.skip_on_redis()
    policy = {"after_ms": 1_000, "then": "follow_clock", "slack_ms": 5_000}
    await api.define({"s": {"shards": ["a"], "idle": policy}})
    token = await api.token("s", ttl_ms=LONG)
    await api.report("s", token, said(a=100))
    gauge.advance(2_000)
    await outputs(api, gauge.clock.wall_ms() - 5_000)
    assert (await api.watermark("s"))["status"] == "active"


@pytest.mark.parametrize("why", ["backlog", "silent", "unwatched", "recent", "unsaid"])
async def test_who_is_waited_for(quiet: tuple[Api, str], gauge: InProcess, why: str) -> None:
    api, token = quiet
    if why == "backlog":
        await api.report("s", token, {"b": {"watermark": 50, "records": 0, "backlog": 7}})
    if why == "silent":
        await api.release(token)
        token = await api.token("s", ["a"], ttl_ms=LONG)
    if why == "unwatched":
        await api.token("s", ["b"], ttl_ms=LONG, watched=False)
    gauge.advance(1_000)
    if why == "recent":
        await api.report("s", token, said(b=50))
    if why == "unsaid":
        await api.report("s", token, {"b": 50})
    await api.report("s", token, said(a=200))
    await settled(api, gauge)
    assert await api.output("s") == 50


async def test_a_lease_that_is_not_watched_has_a_worker_and_proves_nothing(
    quiet: tuple[Api, str], gauge: InProcess
) -> None:
    api, token = quiet
    claim = {"holder": "worker", "ttl_ms": LONG, "watched": False}
    ranges = {"b": {"watermark": 50, "records": 0}}
    body = {"claim": claim, "ranges": ranges}
    unwatched = ok(await api.client.post(f"{api.root}/stages/s/reports", json=body))["token"]

    async def idle_after(ms: int) -> int:
        gauge.advance(ms)
        await api.report("s", token, said(a=200))
        await settled(api, gauge)
        return (await counts(api, "s"))["idle"]

    assert await idle_after(1_000) == 0
    await api.renew(unwatched)
    assert await idle_after(1_000) == 0
    assert (await counts(api, "s"))["leased"] == 2
    assert await api.health("s") == "ok"
    # A watched lease begins its proof anew, though there is not a gap between the two.
    await api.token("s", ["b"], ttl_ms=LONG)
    assert await idle_after(800) == 0
    assert await idle_after(200) == 1


async def test_whether_a_lease_is_watched_is_true_or_false(api: Api) -> None:
    await api.define(QUIET)
    refused = await api.post_claim("s", watched="no")
    assert problem(refused, 422)["type"] == "/problems/invalid-request"
    assert "watched" in refused.text


@pytest.mark.parametrize(
    ("ages_ms", "then"),
    [
        ([0] * 4, 203),
        ([0, 0, 0, 200], 203),
        ([0, 0, 0, 900], 50),
        # Each is later than the policy's time, which costs so much time, and no more.
        ([1_500] * 7, 50),
        ([1_500] * 8, 207),
    ],
)
async def test_commits_without_a_report_show_that_a_shard_is_quiet(
    api: Api, gauge: InProcess, ages_ms: list[int], then: int
) -> None:
    """They show it until their batches were planned."""
    gauge.skip_on_redis()
    await api.define(QUIET)
    first = await api.token("s")
    await api.report("s", first, said(a=100, b=50))
    run = await api.run("s")
    token = await api.token("s", ["a"], run=run, ttl_ms=LONG)
    for epoch, age_ms in enumerate(ages_ms):
        await api.report("s", token, said(a=200 + epoch), epoch=epoch)
        age = {"evidence_age_ms": age_ms} if age_ms else {}
        await api.commit(epoch, {"s": {}}, run=run, **age)
        gauge.advance(400)
    await settled(api, gauge)
    assert await api.output("s") == then
