"""Admission of the shards of a source of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from spark_agent.client.client import Client
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.writer import Trigger
from spark_agent.sources.admission import Admission, ShardLimit, Wanted
from spark_agent.throttle.source_throttle import WAIT_TIMEOUT_MS, SourceThrottle
from tests.unit.agent.answers import Answer, Answers, FakeClock
from tests.unit.agent.queries import CONTINUOUS, NIGHTLY, source, started

PAUSE = {"pause": True, "until": 50, "rate": 1.0, "because": "it is ahead"}


def asks(shards: Mapping[str, Any], *groups: Any, version: int = 1) -> Answer:
    return Answer(200, {"groups": groups, "shards": shards}, {"ETag": f'"{version}"'})


def held_by(stage: str, shard: str, limit: int | None = 50) -> dict[str, Any]:
    slowest = {"stage": stage, "range": shard}
    return {"stages": ["s", "other"], "limit": limit, "held_by": slowest}


def promises(**by_shard: int | None) -> Answer:
    found = [{"range": k, "status": "active", "promise": v} for k, v in by_shard.items()]
    return Answer(200, {"ranges": found})


def throttle(
    server: Answers,
    clock: FakeClock,
    *,
    sources: tuple[str, ...] = ("s",),
    trigger: Trigger = NIGHTLY,
) -> SourceThrottle:
    query = started([source(name) for name in sources], by_shard=("s",), trigger=trigger)
    client = Client(server.url, patience_ms=3_000, clock=clock, jitter=lambda: 1.0)
    return SourceThrottle(query, client=client, clock=clock)


def wanted(*shards: str, most: int | None = None, ends: bool = False) -> Wanted:
    return Wanted(dict.fromkeys(shards, 9), most, ends)


def after(epoch: int) -> CommittedBatch:
    return CommittedBatch(epoch, 0, duration_ms=1_000)


def files(admission: Admission) -> dict[str, int]:
    return {shard: limit.files for shard, limit in admission.limits.items()}


def test_a_shard_that_is_asked_to_pause_waits_and_the_other_does_not() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, held_by("s", "b"))) as server:
        admission = throttle(server, FakeClock()).admit("s", wanted("a", "b"), None)
    assert admission.limits == {"a": ShardLimit(0, "shard a of s is throttled: it is ahead")}


def test_a_shard_that_has_nothing_to_read_waits_for_nothing() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, held_by("s", "b"))) as server:
        assert files(throttle(server, FakeClock()).admit("s", wanted("b"), None)) == {}


@pytest.mark.parametrize(
    ("slowest", "waits"), [("b", {"a"}), ("a", set[str]()), ("else", {"a", "b"})]
)
def test_a_shard_waits_before_its_limit_unless_the_group_waits_for_it(
    slowest: str, waits: set[str]
) -> None:
    """Each would be taken past it by a batch like its last one."""
    group = held_by("s", slowest)
    if slowest == "else":
        group = held_by("other", "o")
    latest = promises(a=40, b=35) if slowest != "a" else promises(a=35)
    with Answers(asks({}, group), promises(a=10, b=10), latest) as server:
        throttled = throttle(server, FakeClock(), trigger=CONTINUOUS)
        assert files(throttled.admit("s", wanted("a", "b"), after(0))) == {}
        admission = throttled.admit("s", wanted("a", "b"), after(1))
    assert set(files(admission)) == waits


def test_without_looking_ahead_shards_wait_when_they_are_asked_to() -> None:
    with Answers(asks({}, held_by("other", "o"))) as server:
        throttled = throttle(server, FakeClock())
        assert files(throttled.admit("s", wanted("a"), after(0))) == {}
        assert files(throttled.admit("s", wanted("a"), after(1))) == {}


@pytest.mark.parametrize(
    ("rate", "most", "first", "rest_ms"),
    [(0.5, 4, 2, 0), (0.1, 4, 1, 1_500), (0.5, None, None, 1_000), (1.0, 4, None, 0)],
)
def test_a_rate_is_kept_by_fewer_files_and_then_by_rests(
    rate: float, most: int | None, first: int | None, rest_ms: int
) -> None:
    slow = {"pause": False, "until": None, "rate": rate, "because": "k lags"}
    clock = FakeClock()
    allowed = {} if first is None else {"a": first}
    with Answers(asks({"s": {"a": slow}})) as server:
        throttled = throttle(server, clock)
        assert files(throttled.admit("s", wanted("a", "b", most=most), None)) == allowed
        for passed_ms in range(0, rest_ms, 500):
            clock.now_ms = 1_000_000 + passed_ms
            assert files(throttled.admit("s", wanted("a", "b", most=most), after(0))) == {"a": 0}
            # Its own batch counts, not those of the other shard.
            assert throttled.reason_to_wait(after(0)) is None
        clock.now_ms = 1_000_000 + rest_ms
        assert files(throttled.admit("s", wanted("a", "b", most=most), after(0))) == allowed


def test_what_the_whole_query_rests_is_the_shard_s_rest_too() -> None:
    slow = {"pause": False, "until": None, "rate": 0.5, "because": "k lags"}
    with Answers(asks({"s": {"a": slow}, "t": {"c": slow}})) as server:
        throttled = throttle(server, FakeClock(), sources=("s", "t"))
        assert files(throttled.admit("s", wanted("a", most=4), None)) == {}
        assert throttled.reason_to_wait(after(0)) is not None


def test_a_run_with_an_end_does_not_wait_for_its_own_shard_that_has_no_more() -> None:
    with Answers(asks({"s": {"a": PAUSE}}, held_by("s", "b"))) as server:
        throttled = throttle(server, FakeClock())
        assert files(throttled.admit("s", wanted("a", "b", ends=True), None)) == {"a": 0}
        assert files(throttled.admit("s", wanted("a", ends=True), None)) == {}


def test_a_run_with_an_end_waits_as_long_as_the_limit_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    moved = asks({"s": {"a": PAUSE}}, held_by("other", "o", 60), version=2)
    first = asks({"s": {"a": PAUSE}}, held_by("other", "o"))
    with Answers(first, moved, Answer(304)) as server:
        throttled = throttle(server, clock)
        for tenths, waits in (0, True), (8, True), (12, True), (18, False):
            clock.now_ms = 1_000_000 + tenths * WAIT_TIMEOUT_MS // 10
            found = files(throttled.admit("s", wanted("a", ends=True), None))
            assert found == ({"a": 0} if waits else {}), tenths
    assert "made no progress" in caplog.text
