"""The figures on Redis and Postgres: against redis-py alone, against etcd, and with a second replica.

Redis syncs its file every second, Postgres with every transaction. Each replica is a process, and so is
everything else: on few cores all of them share those, and the details say what each has used.
"""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import redis_alone
from benchmarks.etcd import Etcd, etcd, run_etcd
from benchmarks.figures import BATCH, FIRST, Figure, Job, Plan, fill, keyed_job, packed
from benchmarks.load import VALUE, Outcome, Target, run
from benchmarks.servers import processor_seconds, resident_bytes, service
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.server import Service

RANGES = 1_000
STEP = 100_000_000
"""Between the first values of two measurements: none may be behind what was reported before."""

CONNECTIONS = 64
"""To us and to what we are compared with: so many workers report at once."""

LOAD = "load"
CORES_FOR_TWO = 4
"""Two replicas, Redis, and the load."""

WORKLOADS = ("standing", "advancing")
"""Movement of the watermark with the reports: if it does, each is answered once that is durable."""


@dataclass
class Stores:
    """A Redis and a Postgres, and what runs on them."""

    folder: Path
    redis: RedisServer
    postgres: PostgresServer
    ledger_url: str = ""
    replicas: list[Service] = field(default_factory=list[Service])
    rival: Etcd | None = None

    @contextmanager
    def replica(self) -> Generator[Service]:
        name = self.folder / f"replica-{len(self.replicas)}"
        with service(name, live_url=self.redis.url, ledger_url=self.ledger_url) as running:
            self.replicas.append(running)
            yield running

    def used(self) -> Mapping[str, float]:
        """The processor time that each has had so far."""
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            **{
                "replica" if not i else f"replica {i + 1}": processor_seconds(one.pid)
                for i, one in enumerate(self.replicas)
            },
            "Redis": processor_seconds(self.redis.pid),
            "Postgres": processor_seconds(self.postgres.pid, family=True),
            **({"etcd": processor_seconds(self.rival.pid)} if self.rival else {}),
            # Those that have ended, which only the load does while something is measured.
            LOAD: ours.ru_utime + ours.ru_stime,
        }


@contextmanager
def stores(folder: Path) -> Generator[Stores]:
    """Both, durable, with an empty database."""
    folder.mkdir()
    with (
        RedisServer(folder / "redis", fsync="everysec") as redis,
        PostgresServer(folder / "postgres", durable=True) as postgres,
    ):
        yield Stores(folder, redis, postgres, postgres.database())


@dataclass
class Contestant:
    """Something that is measured once in each round."""

    go: Callable[[int], Outcome]
    """Given the first value to report."""
    rates: list[float] = field(default_factory=list[float])
    used: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    """Share of a core that each process had."""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def share(self, process: str) -> float:
        return statistics.median(one.get(process, 0) for one in self.used)

    def shares(self) -> str:
        shares = {name: self.share(name) for name in self.used[0]}
        return ", ".join(f"{name} {share:.2f}" for name, share in shares.items() if share >= 0.01)

    def over(self, other: Contestant) -> tuple[float, str]:
        """The median ratio of the rates, round by round."""
        ratios = [us / them for us, them in zip(self.rates, other.rates, strict=True)]
        spread = f"rounds {min(ratios):.2f}-{max(ratios):.2f}"
        detail = f"{self.rate:,.0f}/s to {other.rate:,.0f}/s, {spread}"
        return statistics.median(ratios), f"{detail}; cores: {self.shares()} to {other.shares()}"


def measure(plan: Plan, on: Stores, contestants: list[Contestant]) -> None:
    """In each round all of them, in another order each time; the first round only warms up."""
    firsts = itertools.count(FIRST + STEP, STEP)
    for index in range(plan.rounds + 1):
        turn = index % len(contestants)
        for one in contestants[turn:] + contestants[:turn]:
            before, start = on.used(), time.perf_counter()
            outcome = one.go(next(firsts))
            if not index:
                continue
            after, took = on.used(), time.perf_counter() - start
            one.rates.append(outcome.rate)
            # The servers' time is all of what was measured; the load's is also that of its start.
            one.used.append(
                {
                    name: (after[name] - before[name]) / (took if name == LOAD else outcome.seconds)
                    for name in before
                }
            )


def ranges(count: int) -> str:
    return f"reports of {count:,} range{'s' if count > 1 else ''}"


# ---- one replica


def reporting(server: Service, name: str, count: int, *, standing: bool) -> Target:
    """Reports of `count` shards; standing: another shard has spoken once and stays where it is."""
    shards = [f"shard-{i:04d}" for i in range(count)]
    job = Job(server, name, {"s": {"shards": [*shards, *(["slow"] if standing else [])]}})
    token = job.claim("s")
    if standing:
        job.report("s", token, {"slow": 1})
    words = ",".join(f'"{shard}":{VALUE}' for shard in shards)
    job.close()
    return Target(job.reports("s"), "POST", f'{{"token":"{token}","ranges":{{{words}}}}}')


def one_replica(plan: Plan, on: Stores, folder: Path) -> Iterator[Figure]:
    """Reports through HTTP, Redis and Postgres against redis-py alone, and against etcd."""
    with on.replica() as server, etcd(folder / "etcd") as rival:

        def ours(count: int, said: str) -> Contestant:
            name = f"of-{count}-{said}"
            return reports(reporting(server, name, count, standing=said == "standing"))

        def ours_packed(said: str) -> Contestant:
            standing = said == "standing"
            target = packed(server, f"packed-{said}", standing=standing, connections=CONNECTIONS)
            return reports(target)

        def reports(target: Target) -> Contestant:
            def go(first: int) -> Outcome:
                return run(replace(target, first=first), plan.seconds, connections=CONNECTIONS)

            return Contestant(go)

        def etcds(port: int, keys: int) -> Contestant:
            return Contestant(lambda _: run_etcd(port, keys, CONNECTIONS, plan.seconds))

        on.rival = rival
        clients = redis_alone.fastest(on.redis.port)
        port = on.redis.port
        alone = Contestant(lambda _: redis_alone.run_alone(port, clients, plan.seconds))
        many = {said: ours(RANGES, said) for said in WORKLOADS}
        arrays = {said: ours_packed(said) for said in WORKLOADS}
        single = {said: ours(1, said) for said in WORKLOADS}
        theirs = {} if rival is None else {count: etcds(rival.port, count) for count in (1, RANGES)}
        mine = [*many.values(), *arrays.values(), *single.values()]
        measure(plan, on, [alone, *mine, *theirs.values()])

    for said in WORKLOADS:
        value, detail = many[said].over(alone)
        detail = f"{detail}; {clients}"
        name = f"{ranges(RANGES)}, {said} / redis-py alone"
        yield Figure(name, value, "ratio", 0.4, True, detail)
    yield from _to_etcd(ranges(RANGES), many, theirs.get(RANGES), dict.fromkeys(WORKLOADS, 10.0))
    wanted = {"standing": 20.0, "advancing": 10.0}
    yield from _to_etcd(f"packed {ranges(RANGES)}", arrays, theirs.get(RANGES), wanted)
    yield from _to_etcd(ranges(1), single, theirs.get(1), dict.fromkeys(WORKLOADS, 1.0))


def _to_etcd(
    what: str,
    ours: Mapping[str, Contestant],
    theirs: Contestant | None,
    wanted: Mapping[str, float],
) -> Iterator[Figure]:
    for said in WORKLOADS:
        name = f"{what}, {said} / etcd"
        if theirs is None:
            detail = f"etcd is not installed; {ours[said].rate:,.0f}/s"
            yield Figure(name, None, "ratio", None, True, detail)
        else:
            value, detail = ours[said].over(theirs)
            detail = f"{detail}; {CONNECTIONS} connections each, etcd's of gRPC"
            yield Figure(name, value, "ratio", wanted[said], True, detail)


# ---- two replicas


def together(targets: list[Target], seconds: float, first: int) -> Outcome:
    """Several loads at once, which share the connections."""

    def go(target: Target) -> Outcome:
        share = CONNECTIONS // len(targets)
        return run(replace(target, first=first), seconds, connections=share)

    with ThreadPoolExecutor(len(targets)) as pool:
        outcomes = list(pool.map(go, targets))
    requests = sum(outcome.requests for outcome in outcomes)
    return Outcome(requests, statistics.mean(outcome.seconds for outcome in outcomes))


def halves(
    first: Service, second: Service, count: int, said: str, seconds: float
) -> tuple[Contestant, Contestant]:
    """The same two loads, each of half of a stage's ranges: on one replica each, and both on one."""
    each = [[f"{half}-{i:04d}" for i in range(count)] for half in "ab"]
    still = ["slow"] if said == "standing" else []
    job = Job(first, f"halves-{count}-{said}", {"s": {"shards": [*each[0], *each[1], *still]}})
    bodies: list[str] = []
    for half in each:
        token = job.claim("s", half, holder=half[0])
        words = ",".join(f'"{shard}":{VALUE}' for shard in half)
        bodies.append(f'{{"token":"{token}","ranges":{{{words}}}}}')
    if still:
        job.report("s", job.claim("s", still, holder="slow"), dict.fromkeys(still, 1))
    job.close()

    def on_these(*servers: Service) -> Contestant:
        path = job.reports("s").removeprefix(first.url)
        targets = [
            Target(server.url + path, "POST", body)
            for server, body in zip(servers, bodies, strict=True)
        ]
        return Contestant(lambda value: together(targets, seconds, value))

    return on_these(first, second), on_these(first, first)


def two_replicas(plan: Plan, on: Stores) -> Iterator[Figure]:
    """Yield the gain by a second replica."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(on.replica()) for _ in range(2))
        pairs = {
            (count, said): halves(first, second, count, said, plan.seconds)
            for count in (RANGES, 1)
            for said in WORKLOADS
        }
        measure(plan, on, [one for pair in pairs.values() for one in pair])
    cores = os.cpu_count() or 1
    enough = cores >= CORES_FOR_TWO
    for (count, said), (two, one) in pairs.items():
        value, detail = two.over(one)
        if not enough:
            detail = f"{detail}; no target, since all of this shares {cores} cores"
        name = f"{ranges(count)}, {said}: two replicas / one"
        yield Figure(name, value, "ratio", 1.5 if enough else None, True, detail)


# ---- memory


def memory(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Bytes for each range, in Redis and in the replica, and that the minimum is right."""
    cases: list[tuple[str, Callable[[int], Any], float | None]] = [
        ("Redis memory per range", lambda _: {}, None),
        ("  same, a hold on each", lambda i: {"holds": {"state": FIRST - i}}, None),
    ]
    for index, (name, word, target) in enumerate(cases):
        with stores(folder / f"memory-{index}") as on, on.replica() as server:
            warm = keyed_job(server, "warm", RANGES)
            fill(warm, "k", RANGES, word)
            before, resident = used_memory(on.redis), resident_bytes(server.pid)
            job = keyed_job(server, "large", plan.ranges)
            # Each batch has observed a little more, so without holds the first one is the minimum.
            fill(job, "k", plan.ranges, word, observed=lambda start: FIRST + start)
            redis = (used_memory(on.redis) - before) / plan.ranges
            replica = (resident_bytes(server.pid) - resident) / plan.ranges
            least = FIRST if not index else FIRST - (plan.ranges - 1)
            expect(job, least)
            if not index:
                # Once the first batch has come on, the second one holds the stage.
                fill(
                    job, "k", plan.ranges, word, observed=lambda _: FIRST + plan.ranges, last=BATCH
                )
                expect(job, FIRST + BATCH)
            warm.close()
            job.close()
        detail = (
            f"{plan.ranges:,} ranges registered, claimed, reported, at the right minimum;"
            f" and {replica:,.0f} bytes in the replica"
        )
        yield Figure(name, redis, "bytes", target, False, detail)


def expect(job: Job, output: int) -> None:
    found = job.output("k")
    if found != output:
        raise RuntimeError(f"the watermark is {found}, and the least promise is {output}")


def used_memory(redis: RedisServer) -> int:
    return int(redis.info("memory")["used_memory"])


def figures(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Every figure on Redis and Postgres."""
    with stores(folder / "one") as on:
        yield from one_replica(plan, on, folder)
    with stores(folder / "two") as on:
        yield from two_replicas(plan, on)
    yield from memory(plan, folder)
