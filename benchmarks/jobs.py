"""Many jobs on one service: what one of them costs, and what all of them cost together.

Each job has ten stages in a chain. Every second one is busy: its workers have leases, and have reported.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.figures import FIRST, FULL, Figure, Plan
from benchmarks.load import VALUE, Target, run
from benchmarks.production import stores
from benchmarks.servers import processor_seconds, resident_bytes, service
from service.live.redis.schema import JOBS
from tests.support.redis_server import RedisServer
from tests.support.server import Service

NUMBERS: Final = (1, 100, 1_000, 5_000)
QUICK_NUMBERS: Final = (1, 100)
_STAGES: Final = 10
_AT_ONCE: Final = 16
"""Requests of the declaration at once."""
_TTL_MS: Final = 600_000
"""Duration of the leases; workers claim their ranges again before each measurement."""
_REST_S: Final = 5.0
"""Duration of the measurement of a service that serves nobody."""
_LIMIT_S: Final = 600.0
_POLL_S: Final = 0.05

Json = dict[str, Any]


def _spec() -> Json:
    stages: Json = {"in": {"shards": ["a", "b"]}}
    above = "in"
    for number in range(1, _STAGES):
        name = f"k{number}"
        stages[name] = {"inputs": [above], "ranges": 2}
        above = name
    return {"stages": stages}


def _name(number: int) -> str:
    return f"job-{number:05d}"


async def _declare(client: httpx.AsyncClient, number: int) -> None:
    await _sent(client, "PUT", f"/v1/jobs/{_name(number)}", _spec())


async def _work(client: httpx.AsyncClient, number: int) -> None:
    """Claim the ranges of a job's first stages, and report all of them."""
    root = f"/v1/jobs/{_name(number)}"
    for stage in ("in", "k1"):
        path = f"{root}/stages/{stage}"
        claim: Json = {"ranges": "all", "holder": "bench", "ttl_ms": _TTL_MS}
        lease = await _sent(client, "POST", f"{path}/leases", claim)
        # One shard stays behind the other: the stage does not advance with the reports of a measurement.
        shards: Json = (
            {"a": FIRST, "b": FIRST} if stage == "in" else {key: {} for key in lease["granted"]}
        )
        report: Json = {"token": lease["token"], "ranges": shards}
        if stage != "in":
            report["input_watermark"] = FIRST
        await _sent(client, "POST", f"{path}/reports", report)


async def _sent(client: httpx.AsyncClient, method: str, path: str, body: Json) -> Json:
    response = await client.request(method, path, json=body)
    if not response.is_success:
        raise RuntimeError(f"{method} {path}: {response.status_code} {response.text[:500]}")
    return response.json()


async def _each(
    url: str, numbers: Sequence[int], step: Callable[[httpx.AsyncClient, int], Awaitable[None]]
) -> None:
    """Run a step for each of these jobs, some at once."""
    limits = httpx.Limits(max_connections=_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        waiting = iter(numbers)

        async def take_turns() -> None:
            for number in waiting:
                await step(client, number)

        await asyncio.gather(*(take_turns() for _ in range(_AT_ONCE)))


def _seconds(get: str) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(get, timeout=_LIMIT_S) as answer:
        answer.read()
    return time.perf_counter() - began


class _Fleet:
    """Jobs on a service."""

    def __init__(self, server: Service) -> None:
        self._server = server
        self._declared = 0
        self._first = FIRST + 1
        self._body = self._etag = ""
        self.rest = 0.0
        """Share of a core while nobody sends a request."""

    def grow(self, number: int) -> None:
        """Declare jobs until there are so many; every second one is busy."""
        asyncio.run(_each(self._server.url, range(self._declared, number), _declare))
        asyncio.run(_each(self._server.url, range(0, number, 2), _work))
        self._declared = number

    @property
    def _stage(self) -> str:
        return f"{self._server.url}/v1/jobs/{_name(0)}/stages/in"

    def work(self) -> None:
        """Let a worker report for the first job, and a reader poll it."""
        lease = httpx.post(
            f"{self._stage}/leases",
            json={"ranges": ["a"], "holder": "bench", "ttl_ms": _TTL_MS, "attempt": 2**30},
        ).json()
        self._body = f'{{"token":"{lease["token"]}","ranges":{{"a":{VALUE}}}}}'
        self._etag = httpx.get(f"{self._stage}/watermark").headers["ETag"]
        self.rest = self._measure_rest()

    def report(self) -> Target:
        self._first += 10_000_000
        return Target(f"{self._stage}/reports", "POST", self._body, first=self._first)

    def poll(self) -> Target:
        return Target(f"{self._stage}/watermark", etag=self._etag)

    def cost(self, target: Target, seconds: float) -> float:
        """Return the processor time of one request (s)."""
        before, began = processor_seconds(self._server.pid), time.perf_counter()
        outcome = run(target, seconds)
        used = processor_seconds(self._server.pid) - before
        # The work for all jobs goes on meanwhile, and has a figure of its own.
        used -= self.rest * (time.perf_counter() - began)
        return used / outcome.requests

    def seconds(self, path: str, rounds: int) -> float:
        """Return the time of a GET (s)."""
        return statistics.median(_seconds(self._server.url + path) for _ in range(rounds))

    @property
    def resident(self) -> int:
        """Resident memory of the service (bytes)."""
        return resident_bytes(self._server.pid)

    def _measure_rest(self) -> float:
        before, began = processor_seconds(self._server.pid), time.perf_counter()
        time.sleep(_REST_S)
        used = processor_seconds(self._server.pid) - before
        return used / (time.perf_counter() - began)

    def seen(self) -> Mapping[str, int | None]:
        """Return the output watermark of each job's first stage."""
        found: dict[str, int | None] = {}
        with httpx.Client(base_url=self._server.url, timeout=_LIMIT_S) as client:
            for number in range(self._declared):
                answer = client.get(f"/v1/jobs/{_name(number)}/stages/in/watermark")
                found[_name(number)] = answer.raise_for_status().json()["output_watermark"]
        return found

    def until_in(self, redis: RedisServer) -> float:
        """Return the seconds until Redis has the state of every job."""
        began = time.perf_counter()
        while time.perf_counter() - began < _LIMIT_S:
            if redis.command("SCARD", JOBS) == self._declared:
                return time.perf_counter() - began
            time.sleep(_POLL_S)
        raise RuntimeError(f"not all of {self._declared} jobs are restored within {_LIMIT_S} s")


def figures(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Every figure by the number of jobs, on the embedded stores and on Redis and Postgres.

    A service with a single job runs beside it, and each round measures both.
    """
    numbers = NUMBERS if plan is FULL else QUICK_NUMBERS
    with service(folder / "embedded") as server, service(folder / "alone") as other:
        yield from _by_number("embedded", _Fleet(server), _alone(other), numbers, plan)
    with ExitStack() as stack:
        on, beside = (stack.enter_context(stores(folder / name)) for name in ("stores", "beside"))
        server = stack.enter_context(on.replica())
        fleet = _Fleet(server)
        with beside.replica() as other:
            yield from _by_number("Redis", fleet, _alone(other), numbers, plan)
        most = numbers[-1]
        before = fleet.seen()
        server.stop()
        began = time.perf_counter()
        server.start()
        yield Figure(f"{most:,} jobs: start", time.perf_counter() - began, "s", None, False, "")
        seconds = _seconds(f"{server.url}/v1/overview")
        yield Figure(f"{most:,} jobs: first overview", seconds, "s", None, False, "")
        on.redis.command("FLUSHALL")
        seconds = fleet.until_in(on.redis)
        after = fleet.seen()
        if any(after[job] != output for job, output in before.items()):
            raise RuntimeError("a watermark differs after the recovery")
        yield Figure(f"{most:,} jobs: recovery of a lost Redis", seconds, "s", 30, False, "")


def _alone(server: Service) -> _Fleet:
    fleet = _Fleet(server)
    fleet.grow(1)
    return fleet


def _by_number(
    stores: str, fleet: _Fleet, alone: _Fleet, numbers: Sequence[int], plan: Plan
) -> Iterator[Figure]:
    for number in numbers:
        began = time.perf_counter()
        fleet.grow(number)
        took = time.perf_counter() - began
        for each in (fleet, alone):
            each.work()
        name = f"{stores}, {number:,} job{'s' if number > 1 else ''}"
        for kind, target in (
            ("report", _Fleet.report),
            ("poll that finds nothing new", _Fleet.poll),
        ):
            yield _to_one(f"{name}: a {kind}", target, fleet, alone, plan)
        metrics_s, overview_s = (
            fleet.seconds(path, plan.rounds) for path in ("/metrics", "/v1/overview")
        )
        yield Figure(f"{name}: /metrics", metrics_s, "s", 1, False, "")
        yield Figure(f"{name}: overview", overview_s, "s", None, False, "")
        yield Figure(f"{name}: without requests", 100 * fleet.rest, "% of a core", None, False, "")
        detail = f"declared within {took:.1f} s"
        yield Figure(f"{name}: resident", fleet.resident, "bytes", None, False, detail)


def _to_one(
    name: str, target: Callable[[_Fleet], Target], fleet: _Fleet, alone: _Fleet, plan: Plan
) -> Figure:
    """Compare a request's cost with its cost on the service with a single job, in turns."""
    rounds = [
        [each.cost(target(each), plan.seconds) for each in (fleet, alone)]
        for _ in range(plan.rounds + 1)
    ]
    del rounds[0]
    ratios = sorted(ours / single for ours, single in rounds)
    ours, single = (statistics.median(each) * 1e6 for each in zip(*rounds, strict=True))
    detail = (
        f"{ours:.0f} µs to {single:.0f} µs of processor; rounds {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )
    return Figure(name, statistics.median(ratios), "of one job", 1.1, False, detail)
