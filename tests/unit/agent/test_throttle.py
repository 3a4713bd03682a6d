"""When a query waits because its sources are throttled, and when it must not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from spark_agent.client.client import Client
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.writer import Trigger
from spark_agent.throttle.source_throttle import WAIT_TIMEOUT_MS, SourceThrottle
from tests.support.binaries import wait_until
from tests.unit.agent.answers import Answer, Answers, FakeClock
from tests.unit.agent.queries import CONTINUOUS, NIGHTLY, TIMING, source, started

POLL_MS, KEEP_MS = TIMING.poll_ms, TIMING.ttl_ms
PAUSE = {"pause": True, "until": 50, "rate": 1.0, "because": "it is ahead"}
GROUP = {"stages": ["s", "other"], "limit": 50, "held_by": {"stage": "other", "range": "o"}}
BATCH = CommittedBatch(1, 0, duration_ms=1_000)


def asks(shards: Mapping[str, Mapping[str, Any]], *groups: Any, version: int = 1) -> Answer:
    return Answer(200, {"groups": groups, "shards": shards}, {"ETag": f'"{version}"'})


def statuses(**by_shard: str) -> Answer:
    found = [{"range": k, "status": v, "promise": 60} for k, v in by_shard.items()]
    return Answer(200, {"ranges": found})


def promises(**by_shard: int | None) -> Answer:
    found = [{"range": k, "status": "active", "promise": v} for k, v in by_shard.items()]
    return Answer(200, {"ranges": found})


def throttle(
    server: Answers,
    clock: FakeClock,
    *,
    sources: tuple[str, ...] = ("s",),
    looks_ahead: bool = False,
    trigger: Trigger = CONTINUOUS,
) -> SourceThrottle:
    """A query one of whose sources has an idle policy does not look ahead."""
    specs = [source(name, has_idle_policy=not looks_ahead) for name in sources]
    client = Client(server.url, patience_ms=3_000, clock=clock, jitter=lambda: 1.0)
    return SourceThrottle(started(specs, trigger=trigger), client=client, clock=clock)


def test_a_query_waits_while_all_its_shards_have_to_pause() -> None:
    answers = asks({"s": {"a": PAUSE, "b": PAUSE}}, GROUP), statuses(a="active", b="active")
    with Answers(*answers, asks({}, GROUP, version=2)) as server:
        clock = FakeClock()
        throttled = throttle(server, clock)
        because = throttled.reason_to_wait(None)
        assert because == "shard a of s is throttled: it is ahead"
        clock.now_ms += POLL_MS
        wait_until(lambda: throttled.reason_to_wait(None) is None, "a long poll's end")
        waited = throttled.end_wait()
        assert waited is not None
        assert (waited.ms, waited.because) == (POLL_MS, because)
        assert throttled.end_wait() is None


@pytest.mark.parametrize(
    ("b", "waits"), [("active", False), ("unknown", False), ("idle", True), ("final", True)]
)
def test_a_shard_that_may_be_waited_for_keeps_its_query_going(b: str, waits: bool) -> None:
    with Answers(asks({"s": {"a": PAUSE}}, GROUP), statuses(a="active", b=b)) as server:
        assert (throttle(server, FakeClock()).reason_to_wait(None) is not None) is waits


def test_a_stage_in_no_group_does_not_keep_its_query_going() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, GROUP), statuses(a="active")) as server:
        assert throttle(server, FakeClock(), sources=("s", "alone")).reason_to_wait(None)


def test_statuses_that_nobody_tells_keep_a_query_going() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, GROUP), Answer(404)) as server:
        assert throttle(server, FakeClock()).reason_to_wait(None) is None


def test_a_service_that_is_gone_holds_nobody_back_for_long() -> None:
    clock = FakeClock()
    with Answers(asks({"s": {"a": PAUSE}}, GROUP), statuses(a="active")) as server:
        throttled = throttle(server, clock)
        assert throttled.reason_to_wait(None)
    clock.now_ms += KEEP_MS
    assert throttled.reason_to_wait(None) is None


def test_a_query_with_an_end_waits_as_long_as_the_limit_moves() -> None:
    clock = FakeClock()
    moved = dict(GROUP, limit=60)
    shards = {"s": {"a": PAUSE}}
    advice = asks(shards, GROUP), asks(shards, moved, version=2), Answer(304), Answer(304)
    answers = [answer for each in advice for answer in (each, statuses(a="active"))]
    with Answers(*answers) as server:
        throttled = throttle(server, clock, trigger=NIGHTLY)
        for tenths, waits in (0, True), (8, True), (12, True), (18, False):
            clock.now_ms = 1_000_000 + tenths * WAIT_TIMEOUT_MS // 10
            assert (throttled.reason_to_wait(None) is not None) is waits, tenths


@pytest.mark.parametrize(("rate", "rest_ms"), [(1.0, 0), (0.5, 1_000), (0.1, 9_000)])
def test_a_rate_is_kept_by_rests_between_batches(rate: float, rest_ms: int) -> None:
    slow = {"pause": False, "until": None, "rate": rate, "because": "k lags"}
    clock = FakeClock()
    with Answers(asks({"s": {"a": slow}})) as server:
        throttled = throttle(server, clock)
        assert throttled.reason_to_wait(None) is None
        because = throttled.reason_to_wait(BATCH)
        assert because == (f"s is to read at a rate of {rate}: k lags" if rest_ms else None)
        clock.now_ms += max(rest_ms - 1, 0)
        assert (throttled.reason_to_wait(BATCH) is not None) is (rest_ms > 0)
        clock.now_ms += 1
        assert throttled.reason_to_wait(BATCH) is None


def test_a_query_reads_on_while_one_of_its_sources_may() -> None:
    slow = {"pause": False, "until": None, "rate": 0.1, "because": "k lags"}
    with Answers(asks({"s": {"a": slow}})) as server:
        throttled = throttle(server, FakeClock(), sources=("s", "t"))
        assert throttled.reason_to_wait(BATCH) is None


def after(epoch: int) -> CommittedBatch:
    return CommittedBatch(epoch, 0, duration_ms=1_000)


@pytest.mark.parametrize(
    ("latest", "waits"), [({"a": 30}, False), ({"a": 31}, True), ({"a": 31, "b": 5}, False)]
)
def test_a_query_waits_before_a_batch_that_would_take_all_its_shards_past_the_limit(
    latest: dict[str, int], waits: bool
) -> None:
    """Batches of 20 each. A second shard that has not moved yet has an unknown step."""
    before = {shard: promise - 20 if shard == "a" else promise for shard, promise in latest.items()}
    with Answers(asks({}, GROUP), promises(**before), promises(**latest)) as server:
        throttled = throttle(server, FakeClock(), looks_ahead=True)
        assert throttled.reason_to_wait(after(0)) is None
        because = throttled.reason_to_wait(after(1))
        assert (because is not None) is waits
        if because is not None:
            assert because == (
                "shard a of s is at 1970-01-01T00:00:00.031Z, and its last batch brought 0.02 s: another"
                " one would take it past 1970-01-01T00:00:00.050Z, too far ahead of shard o of other"
            )


def test_a_query_that_reads_the_slowest_shard_never_waits_for_itself() -> None:
    """Whatever its batches bring: else two queries would wait for each other."""
    group = GROUP | {"held_by": {"stage": "s", "range": "a"}}
    with Answers(asks({}, group), promises(a=0), promises(a=40)) as server:
        throttled = throttle(server, FakeClock(), looks_ahead=True)
        assert throttled.reason_to_wait(after(0)) is None
        assert throttled.reason_to_wait(after(1)) is None


def test_shards_that_are_asked_to_pause_wait_with_those_that_would_be() -> None:
    answers = promises(a=0, b=0), asks({"s": {"b": PAUSE}}, GROUP, version=2), promises(a=40, b=60)
    with Answers(asks({}, GROUP), *answers) as server:
        clock = FakeClock()
        throttled = throttle(server, clock, looks_ahead=True)
        assert throttled.reason_to_wait(after(0)) is None
        throttled.refresh_soon()
        assert throttled.reason_to_wait(after(1)) is not None


def test_without_looking_ahead_a_query_waits_when_it_is_asked_to() -> None:
    with Answers(asks({}, GROUP)) as server:
        throttled = throttle(server, FakeClock())
        assert throttled.reason_to_wait(after(0)) is None
        assert throttled.reason_to_wait(after(1)) is None


@pytest.mark.parametrize("promise", [None, 2**63 - 1])
def test_a_shard_that_has_not_promised_or_is_at_its_end_is_not_held_back(
    promise: int | None,
) -> None:
    with Answers(asks({}, GROUP), promises(a=0), promises(a=promise)) as server:
        throttled = throttle(server, FakeClock(), looks_ahead=True)
        assert throttled.reason_to_wait(after(0)) is None
        assert throttled.reason_to_wait(after(1)) is None
