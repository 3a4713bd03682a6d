"""One table of vectors for every rule that a live store judges by (`tests/data/rules.json`).

It is run over the pure function, over its mirror in Lua, and over each live store, which has to come to
the same by whatever way it judges.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import pytest

from service.errors import (
    EpochsWaitingError,
    InputAheadError,
    InvalidRequestError,
    LeaseConflictError,
    StaleEpochError,
    StaleRunError,
)
from service.frontier import agreement, epochs, facts, graph, idleness, leases, reports
from service.frontier.agreement import Agreement
from service.frontier.epochs import Waiting
from service.frontier.facts import Facts, ReportedFacts
from service.frontier.graph import Pipeline, StageWatermark
from service.frontier.idleness import Commits
from service.frontier.leases import Rank, held_since
from service.frontier.policies import IdlePolicy, StagePolicy
from service.frontier.timestamps import MAX, MIN
from service.live.port import LiveStore
from service.live.redis.client import LUA
from service.live.redis.schema import as_time, epoch_text, lua_header, number_text
from service.model.observations import Settled
from tests.conformance.test_live import LEFT, Worker, installed, pipeline
from tests.support.redis_server import RedisServer

ROOT: Final = Path(__file__).parent.parent
TABLE: Final[Mapping[str, Any]] = json.loads((ROOT / "data" / "rules.json").read_text())
RULES_LUA: Final = lua_header() + (LUA / "rules.lua").read_text()
IN_PYTHON_ALONE: Final = {"range_status", "held_since", "watched_since"}
"""No step of a store judges by it."""

OTHERS: Final[Mapping[str, ModuleType]] = {
    "is_ahead": graph,
    "agree": agreement,
    "agree_keyed": agreement,
    "are_idle_together": agreement,
    "awaits_revision": agreement,
    "leaves_out": agreement,
    "merge_facts": facts,
    "next_commit": idleness,
    "repeat_commit": idleness,
    "is_void": idleness,
    "after_set_back": idleness,
    "stays_idle": idleness,
}
"""Rules of modules that also have functions for readers alone."""

PART_OF_A_RULE: Final = {"is_quiet", "is_unfinished"}
"""In Python, properties."""

Case = dict[str, Any]
Advance = Callable[[int], None]


@pytest.fixture
def worker(live: LiveStore, runner: asyncio.Runner) -> Worker:
    runner.run(live.begin(installed(pipeline())))
    return Worker(live, runner)


def instants(value: Any) -> Any:
    """Read the ends of time, wherever they stand."""
    if isinstance(value, list):
        return [instants(each) for each in value]
    return {"MIN": MIN, "MAX": MAX}.get(value, value) if isinstance(value, str) else value


def cases() -> Iterator[Any]:
    for name, some in TABLE.items():
        if name == "about":
            continue
        for number, case in enumerate(some):
            read = {key: instants(value) for key, value in case.items()}
            if isinstance(read.get("waiting"), str):
                count, _, first = read["waiting"].split()
                read["waiting"] = list(range(int(first), int(first) + int(count)))
            yield pytest.param(name, read, id=f"{name}-{number}")


every_case = pytest.mark.parametrize(("rule", "case"), list(cases()))


def compared(value: Waiting | Agreement | Commits) -> list[Any]:
    """Return the members that make two values different."""
    return [getattr(value, each.name) for each in fields(value) if each.compare]


def functions(module: ModuleType) -> set[str]:
    return {
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    }


def test_every_rule_has_its_mirror_and_its_vectors() -> None:
    rules = functions(leases) | functions(epochs) | functions(reports) | OTHERS.keys()
    rules -= IN_PYTHON_ALONE
    mirrors = set(
        re.findall(r"^local function (\w+)", (LUA / "rules.lua").read_text(), re.MULTILINE)
    )
    assert mirrors - PART_OF_A_RULE == rules
    assert TABLE.keys() - {"about"} == rules


# ---- the pure functions


def reported_facts(value: list[Any]) -> ReportedFacts:
    oldest, records, late, backlog, pending, keeps_back = value
    return ReportedFacts(
        None if oldest == MIN else oldest,
        None if pending is False else pending.encode(),
        None if records < 0 else records,
        late,
        backlog,
        keeps_back,
    )


def facts_of(value: list[Any]) -> Facts:
    at, interval, oldest, backlog, quiet_since, pending, keeps_back = value
    return Facts(
        at,
        None if interval < 0 else interval,
        None if oldest == MIN else oldest,
        None if pending is False else pending.encode(),
        backlog,
        quiet_since,
        keeps_back,
    )


def python_value(key: str, value: Any) -> Any:
    match key:
        case "rank" | "held_by":
            return Rank(*value)
        case "earlier" | "later" if value is not None:
            is_waiting = len(value) == len(fields(Waiting))
            return Waiting(*value) if is_waiting else facts_of(value)
        case "series":
            return None if value is None else Commits(*value)
        case "reported" if isinstance(value, list):
            return reported_facts(value)
        case "reached" if isinstance(value, list):
            return Agreement(*value) if value else None
        case _:
            return value


@every_case
def test_the_pure_function(rule: str, case: Case) -> None:
    expected = case["gives"]
    if rule == "is_ahead":
        published = StageWatermark(output=case["published"], idle=case["published_idle"])
        assert graph.is_ahead(Agreement(*case["reached"]), published) is expected
        return
    modules = (leases, epochs, reports)
    module = OTHERS.get(rule) or next(each for each in modules if hasattr(each, rule))
    arguments = {k: python_value(k, v) for k, v in case.items() if k not in {"gives", "exact"}}
    found = getattr(module, rule)(**arguments)
    match found:
        case Waiting() | Agreement() | Commits():
            assert compared(found) == expected
        case Facts():
            assert found == facts_of(expected)
        case tuple():
            assert list(found) == expected
        case Enum():
            assert found.value == expected
        case _:
            assert found == expected
            assert type(found) is type(expected)


# ---- their mirrors in Lua


def lua_value(key: str, value: Any) -> Any:
    """Write an argument as the steps have it."""
    match key:
        case "rank" | "held_by":
            return "".join(map(number_text, value))
        case "run" | "current":
            return str(value)
        case "epoch" | "committed":
            return epoch_text(value)
        case "waiting":
            return [epoch_text(each) for each in value]
        case _:
            return lua_number(value)


def lua_number(value: Any) -> Any:
    if isinstance(value, list):
        return [lua_number(each) for each in value]
    if value is None:
        return False
    return value if isinstance(value, bool | str) else float(value)


def read_number(value: Any) -> Any:
    if isinstance(value, list):
        return [read_number(each) for each in value]
    if isinstance(value, bool | str):
        return value
    return MIN if value <= MIN else as_time(value)


@every_case
def test_the_mirror_in_lua(redis_server: RedisServer, rule: str, case: Case) -> None:
    arguments = [lua_value(k, v) for k, v in case.items() if k not in {"gives", "exact"}]
    script = f"{RULES_LUA}\nreturn cmsgpack.pack({{{rule}(unpack(cmsgpack.unpack(ARGV[1])))}})"
    raw = redis_server.command("EVAL", script, 0, msgspec.msgpack.encode(arguments))
    found = read_number(msgspec.msgpack.decode(raw))
    expected = case["gives"]
    assert (found if rule == "join_report" else found[0]) == expected


# ---- the stores


def said(worker: Worker, stage: str = "k") -> list[Any]:
    """The promise and the idleness of a stage's first range."""
    first = worker.run(worker.live.ranges("j", stage, limit=1, order="range"))[0]
    return [first.promise, first.idle]


def takes_over(worker: Worker, case: Case, _advance: Advance) -> bool:
    held_by, rank = Rank(*case["held_by"]), Rank(*case["rank"])
    worker.run(worker.live.open_run("j", ["s"], held_by.run))
    worker.claim(["a"], rank=held_by)
    worker.run(worker.live.open_run("j", ["s"], rank.run))
    try:
        worker.claim(["a"], holder="x" if case["same_holder"] else "y", rank=rank)
    except (LeaseConflictError, StaleRunError):
        return False
    return True


def continues_watch(worker: Worker, case: Case, advance: Advance) -> bool:
    """The earlier lease is current in each case."""
    worker.claim(["a"], watched=case["before"])
    begin_ms = worker.lease_ms()
    advance(5)
    while worker.lease_ms() == begin_ms:
        pass
    worker.claim(["a"], rank=Rank(attempt=1), watched=case["watched"])
    moment_ms = int(worker.observe().held_since_ms[0])
    return 0 <= moment_ms <= begin_ms


def held_moment(worker: Worker, case: Case, advance: Advance) -> int:
    """The clock of Redis is ahead of the case's."""
    advance(case["now_ms"])
    begin_ms = worker.lease_ms()
    worker.claim(["a"], watched=case["watched"])
    moment_ms = int(worker.observe().held_since_ms[0])
    assert begin_ms <= held_since(moment_ms) <= worker.lease_ms()
    return leases.held_moment(case["now_ms"], watched=moment_ms >= 0)


def is_current(worker: Worker, case: Case, advance: Advance) -> bool:
    token = worker.claim(["a"], ttl_ms=case["deadline_ms"]).token
    advance(case["now_ms"])
    return worker.lost(token) is None


def opens_run(worker: Worker, case: Case, _advance: Advance) -> bool:
    worker.run(worker.live.open_run("j", ["s"], case["current"]))
    token = worker.claim(["a"], rank=Rank(case["current"])).token
    worker.run(worker.live.open_run("j", ["s"], case["run"]))
    return worker.lost(token) is not None


def is_of_run(worker: Worker, case: Case, _advance: Advance) -> bool:
    worker.run(worker.live.open_run("j", ["s"], case["current"]))

    def allowed(step: Callable[[], object]) -> bool:
        try:
            step()
        except StaleRunError:
            return False
        return True

    claims = allowed(lambda: worker.claim(["a"], rank=Rank(case["run"])))
    assert allowed(lambda: worker.commit(1, run=case["run"], s=None)) is claims
    return claims


def is_fenced(worker: Worker, case: Case, _advance: Advance) -> bool:
    worker.run(worker.live.open_run("j", ["s"], case["run"]))
    token = worker.claim(["a"], rank=Rank(case["run"])).token
    worker.run(worker.live.open_run("j", ["s"], case["current"]))
    try:
        worker.report(token, {"a": 1})
    except StaleRunError:
        return True
    return False


def arrival(worker: Worker, case: Case, _advance: Advance) -> str:
    if case["committed"] is not None:
        worker.commit(case["committed"], s=None)
    token = worker.claim(["a"]).token
    for epoch in case["waiting"]:
        worker.report(token, {"a": 1}, epoch=epoch)
    try:
        worker.report(token, {"a": 1}, epoch=case["epoch"])
    except StaleEpochError:
        return "stale"
    except EpochsWaitingError:
        return "too many"
    return "waits"


def admission(worker: Worker, case: Case, _advance: Advance) -> str:
    token = worker.claim(["a"]).token
    worker.report(token, {"a": 1}, epoch=case["epoch"])
    if case["committed"] is not None:
        # A report for a later epoch stays; one for this epoch, or an earlier one, goes.
        worker.commit(case["committed"], s=None)
    try:
        applied = worker.commit(case["epoch"], s=None)
    except StaleEpochError:
        return "stale"
    return "fresh" if applied["s"] else "repeated"


def join_attempts(worker: Worker, case: Case, _advance: Advance) -> list[Any]:
    worker.publish(k=StageWatermark(input=MAX))
    attempts = enumerate((case["earlier"], case["later"]))
    for attempt, (promise, capped, idle, _, text, unfinished) in attempts:
        pending = text.encode() if text else None
        token = worker.claim([LEFT], stage="k", rank=Rank(0, 1, attempt)).token
        worker.report(
            token,
            {LEFT: promise},
            stage="k",
            epoch=1,
            capped_at_commit=capped,
            idle=[LEFT] if idle else [],
            facts={LEFT: ReportedFacts(pending=pending, keeps_back=unfinished)}
            if text or unfinished
            else None,
        )
    try:
        worker.commit(1, k=None)
        capped = False
    except InvalidRequestError:
        worker.commit(1, k=MAX)
        capped = True
    promise, idle = said(worker)
    # Idleness could be the later lease's alone: the earlier one is over.
    kept = worker.observe("k").facts.get(0)
    text = kept.pending.decode() if kept and kept.pending else False
    unfinished = kept is not None and kept.keeps_back
    return [promise, capped, idle, case["gives"][3], text, unfinished]


def lacks_cap(worker: Worker, case: Case, _advance: Advance) -> bool:
    worker.publish(k=StageWatermark(input=MAX))
    token = worker.claim([LEFT], stage="k").token
    capped = case["capped_at_commit"]
    worker.report(token, {LEFT: 1}, stage="k", epoch=1, capped_at_commit=capped)
    try:
        worker.commit(1, k=case["observed_input"])
    except InvalidRequestError:
        return True
    return False


def promise_at_commit(worker: Worker, case: Case, _advance: Advance) -> int:
    worker.publish(k=StageWatermark(input=MAX))
    token = worker.claim([LEFT], stage="k").token
    worker.report(token, {LEFT: case["promise"]}, stage="k", epoch=1)
    worker.commit(1, k=case["observed_input"])
    return said(worker)[0]


def idle_at_commit(worker: Worker, case: Case, advance: Advance) -> bool:
    token = worker.claim([LEFT], stage="k").token
    idle = [LEFT] if case["idle"] else []
    worker.report(token, {LEFT: 1}, stage="k", epoch=1, idle=idle)
    if not case["same_lease"]:
        worker.claim([LEFT], stage="k", holder="y", rank=Rank(0, 1))
    if not case["is_current"]:
        advance(60_000)
    worker.commit(1, k=None)
    return said(worker)[1]


def join_report(worker: Worker, case: Case, _advance: Advance) -> list[Any]:
    token = worker.claim(["a"]).token
    worker.report(token, {"a": case["promise"]})
    worker.report(token, {"a": case["reported"]}, idle=["a"] if case["idle"] else [])
    return said(worker, "s")


def is_behind(worker: Worker, case: Case, _advance: Advance) -> bool:
    token = worker.claim(["a"]).token
    worker.report(token, {"a": case["promise"]})
    behind = [
        list(worker.report(token, {"a": case["reported"]}, epoch=epoch).behind)
        for epoch in (1, None)
    ]
    assert behind[0] == behind[1], "the same with an epoch and without"
    return behind[0] == ["a"]


def may_observe(worker: Worker, case: Case, _advance: Advance) -> bool:
    worker.publish(k=StageWatermark(input=case["published_input"]))
    token = worker.claim([LEFT], stage="k").token
    observed = case["observed_input"]

    def allowed(step: Callable[[], object]) -> bool:
        try:
            step()
        except InputAheadError:
            return False
        return True

    reports_ = allowed(lambda: worker.report(token, {LEFT: 1}, stage="k", observed=observed))
    assert allowed(lambda: worker.commit(1, k=observed)) is reports_
    return reports_


def is_ahead(worker: Worker, case: Case, _advance: Advance) -> bool:
    grant = worker.claim(None)
    published = StageWatermark(output=case["published"], idle=case["published_idle"])
    worker.publish(1, 1, s=published)
    watermark: int = case["reached"][0]
    idle: bool = case["reached"][1]
    promises: dict[str, int] = dict.fromkeys(grant.granted, watermark)
    return worker.report(grant.token, promises, idle=promises if idle else []).advances


def agree(worker: Worker, case: Case, _advance: Advance) -> list[Any]:
    token = worker.claim(None).token
    idle = {0: [], 1: ["b"], 2: ["a", "b"]}[case["idle"]]
    promises = {"a": case["lowest"], "b": case["lowest_idle"]}
    if case["idle"] == 2:
        promises["a"] = promises["b"]
    worker.report(token, promises, idle=idle)
    return compared(worker.agreement())


def agree_keyed(worker: Worker, case: Case, _advance: Advance) -> list[Any]:
    worker.publish(k=StageWatermark(input=MAX))
    grant = worker.claim(None, stage="k")
    first, second = grant.granted
    promises = {first: case["lowest"], second: MAX if case["final"] else case["lowest"]}
    idle = [first, second][: case["idle"]]
    worker.report(grant.token, promises, stage="k", observed=MAX, idle=idle)
    return compared(worker.agreement("k"))


def are_idle_together(worker: Worker, case: Case, _advance: Advance) -> bool:
    return agree_keyed(worker, {**case, "lowest": 7}, _advance)[1]


def leaves_out(worker: Worker, case: Case, _advance: Advance) -> bool:
    stage = "k" if case["keyed"] else "s"
    if case["keyed"]:
        worker.publish(k=StageWatermark(input=MAX))
    observed = MAX if case["keyed"] else None
    grant = worker.claim(None, stage=stage)
    first, second = grant.granted
    idle = [first] if case["idle"] else []
    worker.report(grant.token, {first: 5, second: 7}, stage=stage, observed=observed, idle=idle)
    if case["retired"]:
        worker.run(worker.live.retire("j", stage, second))
    return worker.agreement(stage).leaves_out


def awaits_revision(worker: Worker, case: Case, _advance: Advance) -> bool:
    token = worker.claim(None).token
    returned_at: int | None = case["returned_at"]
    worker.report(token, {"a": 5, "b": 5}, idle=[] if returned_at is None else ["a"])
    if returned_at is not None:
        worker.publish(returned_at, s=StageWatermark(output=5))
        worker.report(token, {"a": 5})
    worker.publish(case["revision"], s=StageWatermark(output=5))
    reported = worker.report(token, {"a": 5}).returned
    assert not worker.report(token, {"b": 5}).returned, "the other range was not away"
    assert not worker.claim(["b"]).returned
    assert worker.claim(["a"]).returned is reported, "the same of a claim"
    return reported


def merge_facts(worker: Worker, case: Case, advance: Advance) -> list[Any]:
    """Facts that do not depend on the position of the clock."""
    token = worker.claim(["a"]).token
    start = worker.run(worker.live.observe("j", ["s"]))[0].wall_ms
    shift = 0
    if case["earlier"]:
        at, _, oldest, backlog, quiet_since, pending, keeps_back = case["earlier"]
        shift = start - quiet_since
        first = ReportedFacts(
            None if oldest == MIN else oldest + shift,
            pending.encode() if pending is not False else None,
            1,
            0,
            backlog,
            keeps_back,
        )
        worker.report(token, {"a": 1}, facts={"a": first})
        if at > quiet_since:
            advance(at - quiet_since)
            worker.report(token, {"a": 1}, facts={"a": replace(first, records=0)})
        advance(case["wall_ms"] - at)
    else:
        shift = start - case["wall_ms"]
    said = reported_facts(case["reported"])
    oldest = said.oldest_work_ms
    said = replace(said, oldest_work_ms=None if oldest is None else oldest + shift)
    worker.report(token, {"a": 1}, facts={"a": said})
    kept = worker.observe("s").facts[0]
    oldest = kept.oldest_work_ms
    return [
        kept.reported_at_ms - shift,
        -1 if kept.interval_ms is None else kept.interval_ms,
        MIN if oldest is None else oldest - shift,
        kept.backlog,
        kept.quiet_since_ms - shift,
        False if kept.pending is None else kept.pending.decode(),
        kept.keeps_back,
    ]


def after_commits(worker: Worker, case: Case, advance: Advance) -> int:
    """Commit the series of a case, each commit without an age; return the shift of the store's clock."""
    with_policy(worker, case.get("after_ms", 1_000))
    series = case["series"]
    if series is None:
        return worker.lease_ms() - case["now_ms"]
    since, last, count, before, _ = series
    commits = [since, *([before, last] if count > 2 else [last])][:count]
    shift = worker.lease_ms() - since
    for epoch, at in enumerate(commits, 1):
        advance(at + shift - worker.lease_ms())
        worker.commit(epoch, s=None)
    assert series_of(worker, shift) == series
    advance(case["now_ms"] + shift - worker.lease_ms())
    return shift


def series_of(worker: Worker, shift: int) -> list[int] | None:
    found = worker.observe("s").commits
    if found is None:
        return None
    since, last, count, before, arrived = compared(found)
    return [since - shift, last - shift, count, before - shift, arrived - shift]


def next_commit(worker: Worker, case: Case, advance: Advance) -> list[int] | None:
    shift = after_commits(worker, case, advance)
    worker.commit(9, age_ms=case["age_ms"], s=None)
    return series_of(worker, shift)


def repeat_commit(worker: Worker, case: Case, advance: Advance) -> list[int] | None:
    shift = after_commits(worker, case, advance)
    worker.commit(case["series"][2], age_ms=case["age_ms"], s=None)
    return series_of(worker, shift)


def is_void(worker: Worker, case: Case, advance: Advance) -> bool:
    """Commits that are void stay so once the clock reaches them again."""
    after_commits(worker, case, advance)
    worker.run(worker.live.follow_set_back("j", "s", 1_000))
    observed = worker.observe("s").commits
    return case["series"] is not None and observed is None


def after_set_back(worker: Worker, case: Case, advance: Advance) -> int:
    with_policy(worker, 1_000)
    shift = worker.lease_ms() - case["given_ms"]
    token = worker.claim(["a"], watched=False).token
    worker.report(token, {"a": 5}, facts={"a": ReportedFacts(records=1)})
    if case["quiet_ms"]:
        seen = worker.observe("s")
        idle = Settled(0, int(seen.owners[0]), seen.facts[0].quiet_since_ms, True, MIN)
        worker.run(worker.live.settle("j", "s", worker.observe().layout, [idle]))
    advance(case["now_ms"] - case["given_ms"])
    assert worker.observe("s").is_ahead_of(worker.lease_ms()) is (case["given_ms"] > case["now_ms"])
    worker.run(worker.live.follow_set_back("j", "s", case["quiet_ms"]))
    seen = worker.observe("s")
    assert not seen.is_ahead_of(worker.lease_ms())
    assert held_since(int(seen.held_since_ms[0])) == seen.facts[0].quiet_since_ms
    assert seen.held_since_ms[0] < 0, "it is not watched"
    return seen.facts[0].quiet_since_ms - shift


def stays_idle(worker: Worker, case: Case, _advance: Advance) -> bool:
    with_policy(worker, 1_000)
    token = worker.claim(["a"]).token
    worker.report(token, {"a": 5}, facts={"a": ReportedFacts(records=1)})
    seen = worker.observe("s")
    if case["was_idle_by_policy"]:
        settled = Settled(0, int(seen.owners[0]), seen.facts[0].quiet_since_ms, True, MIN)
        worker.run(worker.live.settle("j", "s", worker.observe().layout, [settled]))
    for epoch in (None, 1):
        records = 0 if case["reported_nothing"] else 1
        worker.report(token, {"a": 6}, epoch=epoch, facts={"a": ReportedFacts(records=records)})
    worker.commit(1, s=None)
    assert (0 in worker.observe("s").idle_by_policy) is case["gives"]
    return said(worker, "s")[1]


@pytest.mark.parametrize("epoch", [None, 1])
@pytest.mark.parametrize("attempts", [1, 2])
def test_who_keeps_something_back_does_not_stay_idle(
    worker: Worker, epoch: int | None, attempts: int
) -> None:
    """Though it says that no record came. Of two attempts, it is enough that one has said so."""
    with_policy(worker, 1_000)
    token = worker.claim(["a"]).token
    nothing = ReportedFacts(records=0)
    worker.report(token, {"a": 5}, facts={"a": nothing})
    seen = worker.observe("s")
    settled = Settled(0, int(seen.owners[0]), seen.facts[0].quiet_since_ms, True, MIN)
    worker.run(worker.live.settle("j", "s", worker.observe().layout, [settled]))
    assert worker.observe("s").idle_by_policy == {0}
    if epoch is None:
        attempts = 1
    for said_now in (replace(nothing, keeps_back=True), nothing)[:attempts]:
        worker.report(token, {"a": 6}, epoch=epoch, facts={"a": said_now})
    if epoch is not None:
        worker.commit(epoch, s=None)
    seen = worker.observe("s")
    assert (seen.idle_by_policy, bool(seen.idle[0])) == (set(), False)
    assert seen.facts[0].keeps_back


def with_policy(worker: Worker, after_ms: int) -> None:
    policy = StagePolicy(idle=IdlePolicy(after_ms))
    old = pipeline()
    flow = Pipeline({**old.stages, "s": replace(old.stages["s"], policy=policy)})
    worker.run(worker.live.install(installed(flow, layout_version=2)))


STORES_JUDGE: Final[Sequence[Callable[[Worker, Case, Advance], Any]]] = [
    takes_over,
    continues_watch,
    held_moment,
    is_current,
    opens_run,
    is_of_run,
    is_fenced,
    arrival,
    admission,
    join_attempts,
    lacks_cap,
    promise_at_commit,
    idle_at_commit,
    join_report,
    is_behind,
    may_observe,
    is_ahead,
    agree,
    agree_keyed,
    are_idle_together,
    leaves_out,
    awaits_revision,
    merge_facts,
    next_commit,
    repeat_commit,
    is_void,
    after_set_back,
    stays_idle,
]


@every_case
def test_the_store(
    worker: Worker,
    advance: Advance,
    redis_servers: Sequence[RedisServer],
    rule: str,
    case: Case,
) -> None:
    if case.get("exact") and redis_servers:
        pytest.skip("the clock of Redis goes on")
    [judge] = [each for each in STORES_JUDGE if each.__name__ == rule]
    assert judge(worker, case, advance) == case["gives"]
