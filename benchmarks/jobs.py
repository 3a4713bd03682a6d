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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Costs:
    """Costs of one job's requests, in seconds of the service's processor, and of all jobs."""

    report: float
    poll: float
    metrics_s: float
    overview_s: float
    rest: float
    """Share of a core while nobody sends a request."""
    resident: int


class _Fleet:
    """Jobs on a service."""

    def __init__(self, server: Service) -> None:
        self._server = server
        self._declared = 0
        self._first = FIRST + 1
        self._token = ""

    def grow(self, number: int) -> None:
        """Declare jobs until there are so many; every second one is busy."""
        asyncio.run(_each(self._server.url, range(self._declared, number), _declare))
        asyncio.run(_each(self._server.url, range(0, number, 2), _work))
        self._declared = number

    @property
    def _stage(self) -> str:
        return f"{self._server.url}/v1/jobs/{_name(0)}/stages/in"

    def costs(self, seconds: float, rounds: int) -> _Costs:
        """Measure a job's requests, and requests for all jobs."""
        url = self._server.url
        lease = httpx.post(
            f"{self._stage}/leases",
            json={"ranges": ["a"], "holder": "bench", "ttl_ms": _TTL_MS, "attempt": 2**30},
        ).json()
        body = f'{{"token":"{lease["token"]}","ranges":{{"a":{VALUE}}}}}'
        etag = httpx.get(f"{self._stage}/watermark").headers["ETag"]
        poll = Target(f"{self._stage}/watermark", etag=etag)

        def report() -> Target:
            self._first += 10_000_000
            return Target(f"{self._stage}/reports", "POST", body, first=self._first)

        return _Costs(
            self._each(report, seconds, rounds),
            self._each(lambda: poll, seconds, rounds),
            statistics.median(_seconds(f"{url}/metrics") for _ in range(rounds)),
            statistics.median(_seconds(f"{url}/v1/overview") for _ in range(rounds)),
            self._rest(),
            resident_bytes(self._server.pid),
        )

    def _each(self, target: Callable[[], Target], seconds: float, rounds: int) -> float:
        """Return the processor time of one request."""
        found: list[float] = []
        rest = self._rest()
        for number in range(rounds + 1):
            before, began = processor_seconds(self._server.pid), time.perf_counter()
            outcome = run(target(), seconds)
            used = processor_seconds(self._server.pid) - before
            # The work for all jobs goes on meanwhile, and has a figure of its own.
            used -= rest * (time.perf_counter() - began)
            if number:
                found.append(used / outcome.requests)
        return statistics.median(found)

    def _rest(self) -> float:
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
    """Every figure by the number of jobs, on the embedded stores and on Redis and Postgres."""
    numbers = NUMBERS if plan is FULL else QUICK_NUMBERS
    with service(folder / "embedded") as server:
        yield from _by_number("embedded", _Fleet(server), numbers, plan)
    with ExitStack() as stack:
        on = stack.enter_context(stores(folder / "stores"))
        server = stack.enter_context(on.replica())
        fleet = _Fleet(server)
        yield from _by_number("Redis", fleet, numbers, plan)
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


def _by_number(stores: str, fleet: _Fleet, numbers: Sequence[int], plan: Plan) -> Iterator[Figure]:
    one: _Costs | None = None
    for number in numbers:
        began = time.perf_counter()
        fleet.grow(number)
        took = time.perf_counter() - began
        found = fleet.costs(plan.seconds, plan.rounds)
        one = one or found
        name = f"{stores}, {number:,} job{'s' if number > 1 else ''}"
        wanted = None if number == 1 else 1.1
        for kind, cost, alone in (
            ("report", found.report, one.report),
            ("poll that finds nothing new", found.poll, one.poll),
        ):
            detail = f"{cost * 1e6:.0f} µs to {alone * 1e6:.0f} µs of processor"
            yield Figure(f"{name}: a {kind}", cost / alone, "of one job", wanted, False, detail)
        yield Figure(f"{name}: /metrics", found.metrics_s, "s", 1, False, "")
        yield Figure(f"{name}: overview", found.overview_s, "s", None, False, "")
        yield Figure(f"{name}: without requests", 100 * found.rest, "% of a core", None, False, "")
        detail = f"declared within {took:.1f} s"
        yield Figure(f"{name}: resident", found.resident, "bytes", None, False, detail)
