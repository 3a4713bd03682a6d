"""Section 2, one by one, each as a property over HTTP with its own brute-force expectation."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.api import KEYS, MAX, Api, events, ok, problem, tile_ids
from tests.support.inprocess import InProcess, with_schema
from tests.support.redis_server import RedisServer
from tests.support.stores import Stores

T = TypeVar("T")
SHARDS = ("0", "1", "2")
SOURCE = {"s": {"shards": list(SHARDS)}, "u": {"inputs": ["s"], "passthrough": True}}
TIMES = st.integers(-50, 50)
SAYINGS = st.lists(st.tuples(st.sampled_from(SHARDS), TIMES), min_size=1, max_size=12)

property_test = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@dataclass(frozen=True)
class World:
    """World of the stories."""

    runner: asyncio.Runner
    redis: RedisServer | None


@pytest.fixture(scope="module", params=["memory", "redis"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    redis = request.getfixturevalue("redis_server") if request.param == "redis" else None
    with asyncio.Runner() as runner:
        yield World(runner, redis)


@contextmanager
def folder() -> Generator[Path]:
    made = Path(tempfile.mkdtemp(prefix="tidegauge-"))
    try:
        yield with_schema(made)
    finally:
        shutil.rmtree(made)


def in_gauge(world: World, story: Callable[[InProcess], Awaitable[T]]) -> T:
    """Tell a story in a service of its own."""

    async def tell(path: Path) -> T:
        async with InProcess(path, stores=Stores(world.redis)) as gauge:
            return await story(gauge)

    with folder() as path:
        return world.runner.run(tell(path))


def below(time: int | None) -> float:
    return float("-inf") if time is None else time


@property_test
@given(sayings=SAYINGS, crash_after=st.integers(0, 12))
def test_invariant_1_monotone(world: World, sayings: Any, crash_after: int):
    """No reader, whatever way it reads, is shown less than any reader was shown before."""

    async def story(gauge: InProcess) -> None:
        await gauge.api().define(SOURCE)
        token = await gauge.api().token("s")
        highest = float("-inf")
        for index, (shard, time) in enumerate(sayings):
            if index == crash_after:
                await gauge.crash()
                token = await gauge.api().token("s")
            api = gauge.api()
            answer = await api.report("s", token, {shard: time})
            async with api.client.stream("GET", f"{api.root}/events") as response:
                stream = events(response)
                shown = [(await anext(stream))[1] for _ in SOURCE]
            for output in (
                answer["watermark"]["output_watermark"],
                next(state for state in shown if state["stage"] == "s")["output_watermark"],
                await api.output("s"),
                (await api.snapshot())["s"]["output_watermark"],
            ):
                assert below(output) >= highest
                highest = below(output)

    in_gauge(world, story)


@property_test
@given(sayings=SAYINGS)
def test_invariant_2_complete(world: World, sayings: Any):
    """The output is the minimum of the largest promises, once there is one of every shard."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define(SOURCE)
        promised: dict[str, int] = {}
        for shard, time in sayings:
            token = await api.token("s", [shard], ttl_ms=1_000)
            await api.report("s", token, {shard: time})
            promised[shard] = max(time, promised.get(shard, time))
            gauge.advance(1_001)  # a lease that ran out keeps its promise
            wanted = min(promised.values()) if len(promised) == len(SHARDS) else None
            assert await api.output("s") == await api.output("u") == wanted

    in_gauge(world, story)


@property_test
@given(
    loss=st.sampled_from(["expired", "superseded", "released", "same holder", "run", "restart"]),
    time=TIMES,
    epoch=st.sampled_from([None, 5]),
)
def test_invariant_3_fenced(world: World, loss: str, time: int, epoch: int | None):
    """From the instant that a lease is lost, nothing under it counts, ever."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define(SOURCE)
        old = await api.claim("s", holder="old", ttl_ms=5_000)
        await api.report("s", old["token"], dict.fromkeys(SHARDS, -60))
        fresh: dict[str, Any] = {}
        if loss == "expired":
            gauge.advance(5_001)
        elif loss == "released":
            await api.release(old["token"])
        elif loss == "restart":
            await gauge.restart()
        elif loss == "run":
            fresh["run"] = await api.run("s")
        if loss == "superseded":
            fresh["attempt"] = 1
        holder = "old" if loss == "same holder" else "new"
        api = gauge.api()
        more = {} if epoch is None else {"epoch": epoch}
        if loss not in {"superseded", "same holder"}:
            late = await api.post_report("s", old["token"], dict.fromkeys(SHARDS, time), **more)
            assert late.status_code in {409, 410}
        new = await api.claim("s", holder=holder, **fresh)
        assert new["fence"] > old["fence"]
        late = await api.post_report("s", old["token"], dict.fromkeys(SHARDS, time), **more)
        assert late.status_code == (409 if loss == "run" else 410)
        assert (await api.renew(old["token"]))["renewed"] == []
        if epoch is not None:
            run = {"run": fresh["run"]} if "run" in fresh else {}
            assert (await api.commit(epoch, {"s": {}}, **run))["applied"] == {"s": 0}
        assert await api.promises("s") == dict.fromkeys(SHARDS, -60)

    in_gauge(world, story)


@property_test
@given(
    published=st.lists(TIMES, min_size=1, max_size=4),
    words=st.lists(
        st.tuples(st.integers(0, 1), st.integers(-60, 60), st.none() | TIMES),
        min_size=1,
        max_size=8,
    ),
)
def test_invariant_4_never_early(world: World, published: list[int], words: Any):
    """A keyed promise is at most what its worker says it has observed, which was published."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define({"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": 2}})
        keys = tile_ids(2)
        source, keyed = await api.token("s"), await api.token("k")
        promised: dict[str, int] = {}
        for step, (which, observed, hold) in enumerate(words):
            if step < len(published):
                await api.report("s", source, {"0": published[step]})
            newest = max(published[: step + 1])
            holds = {} if hold is None else {"holds": {"h": hold}}
            response = await api.post_report(
                "k", keyed, {keys[which]: holds}, input_watermark=observed
            )
            if observed > newest:
                problem(response, 409, "input-ahead")
            else:
                promise = observed if hold is None else min(observed, hold)
                ok(response)
                promised[keys[which]] = max(promise, promised.get(keys[which], promise))
            wanted = min(promised.values()) if len(promised) == 2 else None
            assert await api.output("k") == wanted

    in_gauge(world, story)


@property_test
@given(sayings=SAYINGS, way=st.sampled_from(["answer", "get", "event", "poll"]))
def test_invariant_5_durable_before_visible(world: World, sayings: Any, way: str):
    """However a reader learned of a watermark, a crash at that instant does not take it back."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define(SOURCE)
        token = await api.token("s")
        await api.report("s", token, dict.fromkeys(SHARDS, -60))
        etag = (await api.get_watermark("u")).headers["etag"]
        poll = asyncio.create_task(api.get_watermark("u", If_None_Match=etag, Prefer="wait=60"))
        seen: int | None = None
        for shard, time in sayings:
            answer = await api.report("s", token, {shard: time})
            seen = answer["watermark"]["output_watermark"]
        if way == "get":
            seen = await api.output("u")
        elif way == "event":
            async with api.client.stream("GET", f"{api.root}/events") as response:
                stream = events(response)
                seen = max([(await anext(stream))[1]["output_watermark"] for _ in SOURCE])
        elif way == "poll" and seen != -60:
            seen = ok(await poll)["output_watermark"]
        poll.cancel()
        await asyncio.wait([poll])
        await gauge.crash()
        api = gauge.api()
        assert below(await api.output("s")) >= below(seen)
        assert below(await api.output("u")) >= below(seen)

    in_gauge(world, story)


@property_test
@given(
    attempts=st.lists(
        st.dictionaries(st.sampled_from(SHARDS), TIMES, min_size=1), min_size=1, max_size=5
    ),
    base=TIMES,
)
def test_invariant_6_epochs_are_atomic(world: World, attempts: Any, base: int):
    """Nothing of an epoch counts before its commit; then the smallest word on each range does."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define(SOURCE)
        token = await api.token("s")
        await api.report("s", token, dict.fromkeys(SHARDS, base))
        before = await api.snapshot()
        for attempt, words in enumerate(attempts):
            token = await api.token("s", attempt=attempt + 1, holder=f"attempt-{attempt}")
            await api.report("s", token, words, epoch=3)
            assert await api.promises("s") == dict.fromkeys(SHARDS, base)
            after = await api.snapshot()
            assert {k: v["version"] for k, v in after.items()} == {
                k: v["version"] for k, v in before.items()
            }
        await api.commit(3, {"s": {}})
        wanted = {
            shard: max([base, min([w[shard] for w in attempts if shard in w], default=base)])
            for shard in SHARDS
        }
        assert await api.promises("s") == wanted
        assert await api.output("u") == min(wanted.values())
        for epoch in (2, 3):
            late = await api.post_report("s", token, dict.fromkeys(SHARDS, 99), epoch=epoch)
            problem(late, 409, "stale-epoch")

    in_gauge(world, story)


@property_test
@given(sayings=SAYINGS, after=SAYINGS, graceful=st.booleans())
def test_invariant_7_loss_costs_time_never_truth(
    world: World, sayings: Any, after: Any, graceful: bool
):
    """After a loss the watermark stands, and moves on only as promises are made again."""

    async def story(gauge: InProcess) -> None:
        await gauge.api().define(SOURCE)
        token = await gauge.api().token("s")
        for shard, time in sayings:
            await gauge.api().report("s", token, {shard: time})
        stood = await gauge.api().output("s")
        before = await gauge.api().promises("s")
        await (gauge.restart() if graceful else gauge.crash())
        api = gauge.api()
        assert await api.output("s") == stood
        promised = await api.promises("s")
        assert all(below(promised[shard]) <= below(before[shard]) for shard in SHARDS)
        if graceful:
            assert promised == before
        problem(await api.post_report("s", token, {"0": 99}), 410, "lease-lost")
        token = await api.token("s")
        for shard, time in after:
            await api.report("s", token, {shard: time})
            promised[shard] = int(max(below(promised[shard]), time))
            honest = min(below(promise) for promise in promised.values())
            assert below(await api.output("s")) == max(below(stood), honest)

    in_gauge(world, story)


TILINGS = st.lists(st.integers(1, 15), max_size=5, unique=True).map(
    lambda cuts: [0, *(KEYS // 16 * cut for cut in sorted(cuts)), KEYS]
)


def spec(edges: list[int]) -> dict[str, Any]:
    ranges = [{"start": a, "end": b} for a, b in pairwise(edges)]
    return {"s": {"shards": ["0"]}, "k": {"inputs": ["s"], "ranges": ranges}}


async def report_keyed(api: Api, edges: list[int], holds: dict[int, int]) -> None:
    """Report some of the ranges, each with its own hold."""
    token = await api.token("k")
    names = [f"{a:08x}-{b:08x}" for a, b in pairwise(edges)]
    words = {name: {"holds": {"h": holds[i]}} for i, name in enumerate(names) if i in holds}
    if words:
        await api.report("k", token, words, input_watermark=100)


@property_test
@given(
    old=TILINGS,
    new=TILINGS,
    holds=st.dictionaries(st.integers(0, 5), TIMES, max_size=6),
)
def test_invariant_8_layout_changes_are_ordered(
    world: World, old: list[int], new: list[int], holds: dict[int, int]
):
    """Each new range promises the minimum of what it is made of; the output stands till it may."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define(spec(old))
        await api.report("s", await api.token("s"), {"0": 100})
        await report_keyed(api, old, holds)
        stood = await api.output("k")
        await api.change(spec(new))
        wanted: dict[str, int | None] = {}
        for start, end in pairwise(new):
            parts = [
                holds.get(i) for i, (a, b) in enumerate(pairwise(old)) if a < end and start < b
            ]
            least = None if None in parts else min(part for part in parts if part is not None)
            wanted[f"{start:08x}-{end:08x}"] = least
        assert await api.promises("k") == wanted
        assert await api.output("k") == stood
        token = await api.token("k")
        unknown = [name for name, promise in wanted.items() if promise is None]
        for name in unknown:
            assert await api.output("k") == stood
            await api.report("k", token, {name: {}}, input_watermark=100)
        if unknown:
            known = [promise for promise in wanted.values() if promise is not None]
            assert await api.output("k") == min([*known, 100])

    in_gauge(world, story)


@property_test
@given(
    mine=SAYINGS,
    theirs=SAYINGS,
    deed=st.sampled_from(["nothing", "reset", "delete", "run", "layout", "final"]),
)
def test_invariant_9_jobs_are_apart(world: World, mine: Any, theirs: Any, deed: str):
    """Events in one of two jobs of one shape move nothing in the other."""

    async def story(gauge: InProcess) -> None:
        one, other = gauge.api("one"), gauge.api("other")
        for api in (one, other):
            await api.define(SOURCE)
        token = await one.token("s")
        for shard, time in mine:
            await one.report("s", token, {shard: time})
        before = await one.snapshot()
        promises = await one.promises("s")
        foreign = await other.token("s")
        for shard, time in theirs:
            await other.report("s", foreign, {shard: time})
            problem(await other.post_report("s", token, {shard: 99}), 410, "lease-lost")
        if deed == "reset":
            ok(await other.reset())
        elif deed == "delete":
            ok(await other.delete(), 204)
        elif deed == "run":
            await other.run("s")
        elif deed == "layout":
            await other.change({"s": {"shards": ["0"]}})
        elif deed == "final":
            await other.report("s", foreign, dict.fromkeys(SHARDS, MAX))
        assert await one.snapshot() == before
        assert await one.promises("s") == promises
        await one.report("s", token, dict.fromkeys(SHARDS, 60))
        assert await one.output("u") == 60

    in_gauge(world, story)


def test_flink_several_sources(world: World) -> None:
    """Flink's `StatusWatermarkValve` and its bounded sources, in this project's W (Flink's + 1 ms)."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define(
            {
                "a": {"shards": ["0"]},
                "b": {"shards": ["0"]},
                "u": {"inputs": ["a", "b"], "passthrough": True},
            }
        )
        tokens = {stage: await api.token(stage) for stage in ("a", "b")}
        shown: list[int | None] = []
        for stage, row in (("b", 1_000), ("b", 4_000), ("a", 1_000), ("b", 5_000)):
            await api.report(stage, tokens[stage], {"0": row})
            shown.append(await api.output("u"))
        assert shown == [None, None, 1_000, 1_000]
        for stage, expected in (("a", 5_000), ("b", MAX)):
            await api.report(stage, tokens[stage], {"0": {"final": True}})
            assert await api.output("u") == expected

    in_gauge(world, story)


def test_flink_idle_and_back(world: World) -> None:
    """An idle input is left out. Once it is back, the watermark waits for it, and does not go back."""

    async def story(gauge: InProcess) -> None:
        api = gauge.api()
        await api.define({"s": {"shards": ["0", "1"]}})
        token = await api.token("s")
        shown: list[int | None] = []
        for reports in (
            {"0": 1_000, "1": 5_000},
            {"0": {"idle": True}},
            {"1": 7_000},
            {"0": 2_000},
            {"1": 9_000},
            {"0": 8_000},
        ):
            await api.report("s", token, reports)
            shown.append(await api.output("s"))
        assert shown == [1_000, 5_000, 7_000, 7_000, 7_000, 8_000]

    in_gauge(world, story)
