"""Each figure on the embedded stores: what is measured, against what, and what the target is."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import COLUMN, CONNECTIONS, RANGE, TOKEN, VALUE, Target, run
from benchmarks.servers import ROOT, baseline, processor_seconds, resident_bytes, service
from tests.support.server import Service

KEYS = 1 << 32
Json = dict[str, Any]
MANY = 1_000_000
BATCH = 10_000


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: float | None
    """None: what it is measured against is not here."""
    unit: str
    target: float | None
    """None: for information only."""
    at_least: bool
    detail: str

    @property
    def ok(self) -> bool | None:
        if self.target is None or self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


@dataclass(frozen=True)
class Plan:
    """Durations of the measurements."""

    rounds: int
    seconds: float
    latency_seconds: float
    ranges: int


FULL = Plan(rounds=5, seconds=3, latency_seconds=20, ranges=MANY)
QUICK = Plan(rounds=3, seconds=1, latency_seconds=5, ranges=100_000)


class Job:
    """A job on the service that is measured."""

    def __init__(self, server: Service, name: str, stages: dict[str, Any]) -> None:
        self.root = f"{server.url}/v1/jobs/{name}"
        self._client = httpx.Client(timeout=600)
        self._post("PUT", "", {"stages": stages}, 201)

    def _post(self, method: str, path: str, body: Json | None, status: int = 200) -> Json:
        response = self._client.request(method, self.root + path, json=body)
        if response.status_code != status:
            raise RuntimeError(f"{method} {path}: {response.status_code} {response.text[:500]}")
        return response.json()

    def claim(
        self,
        stage: str,
        ranges: Sequence[str] | str = "all",
        *,
        holder: str = "bench",
        attempt: int = 0,
    ) -> str:
        body = {"ranges": ranges, "holder": holder, "ttl_ms": 600_000, "attempt": attempt}
        grant = self._post("POST", f"/stages/{stage}/leases", body, 201)
        if grant["denied"]:
            raise RuntimeError(f"denied: {grant['denied'][:3]}")
        return grant["token"]

    def report(self, stage: str, token: str, ranges: dict[str, Any], **members: int) -> Json:
        answer = self._post(
            "POST", f"/stages/{stage}/reports", {"token": token, "ranges": ranges} | members
        )
        if answer["rejected"]:
            raise RuntimeError(f"rejected: {answer['rejected'][:3]}")
        return answer

    def output(self, stage: str) -> int | None:
        return self._post("GET", f"/stages/{stage}/watermark", None)["output_watermark"]

    def etag(self, stage: str) -> str:
        return self._client.get(f"{self.root}/stages/{stage}/watermark").headers["ETag"]

    def reports(self, stage: str) -> str:
        return f"{self.root}/stages/{stage}/reports"

    def close(self) -> None:
        self._client.close()


def tile(count: int) -> list[str]:
    """The ids of `count` even key ranges."""
    edges = [KEYS * i // count for i in range(count + 1)]
    return [f"{edges[i]:08x}-{edges[i + 1]:08x}" for i in range(count)]


FIRST = 1_767_225_600_000
OBSERVED = 10**14
"""Observed input of key ranges below a final stage: later than any of their holds."""


def packed(
    server: Service,
    name: str,
    *,
    standing: bool,
    connections: int = CONNECTIONS,
    as_bytes: bool = True,
) -> Target:
    """Packed reports of 1,000 key ranges with a hold each, from as many workers as connections.

    Each worker has a lease and a connection of its own. Standing: the first range of each keeps its
    hold where it is.
    """
    job = keyed_job(server, name, 1_000 * connections)
    names = tile(1_000 * connections)
    tokens = [
        job.claim("k", names[k * 1_000 : (k + 1) * 1_000], holder=f"worker-{k}")
        for k in range(connections)
    ]
    job.close()
    holds = ",".join("1" if standing and not k else VALUE for k in range(1_000))
    column = f'"{COLUMN}"' if as_bytes else f"[{holds}]"
    columns = f'{{"holds":{{"state":{column}}}}}'
    return Target(
        job.reports("k"),
        "POST",
        f'{{"token":"{TOKEN}","input_watermark":{OBSERVED},"columns":{columns}}}',
        tokens=tuple(tokens),
        first=FIRST,
        rows=1_000 if as_bytes else 0,
        standing=standing,
    )


def compared(plan: Plan, ours: Target, theirs: Target) -> tuple[float, str]:
    """The median ratio of our rate to theirs, over interleaved rounds."""
    ratios: list[float] = []
    rates: list[tuple[float, float]] = []
    for index in range(plan.rounds + 1):
        # Values go on rising over the rounds, so that no report is behind.
        moved = replace(ours, first=ours.first + index * 10_000_000)
        first, second = (moved, theirs) if index % 2 else (theirs, moved)
        one, two = run(first, plan.seconds).rate, run(second, plan.seconds).rate
        us, them = (one, two) if index % 2 else (two, one)
        if index:  # the first round warms up
            ratios.append(us / them)
            rates.append((us, them))
    us, them = (statistics.median(rate) for rate in zip(*rates, strict=True))
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return statistics.median(ratios), f"{us:,.0f}/s to {them:,.0f}/s, rounds {spread}"


def rates(plan: Plan, server: Service, bare: str) -> Iterator[Figure]:
    """Reports and reads against handlers that do nothing."""
    shards = [f"shard-{i:04d}" for i in range(1_000)]
    job = Job(
        server,
        "rates",
        {
            "one": {"shards": shards[:64]},
            "many": {"shards": [*shards, "slow"]},
            "keyed": {"inputs": ["end"], "ranges": 1_000},
            "end": {"shards": ["0"]},
        },
    )
    # One shard stays behind in each: reports are taken, and the stage does not advance.
    one, many, end = job.claim("one"), job.claim("many"), job.claim("end")
    job.report("one", one, dict.fromkeys(shards[:64], 1))
    job.report("many", many, {"slow": 1})
    job.report("end", end, {"0": {"final": True}})
    keyed, keys = job.claim("keyed"), tile(1_000)
    held_all = {key: {"holds": {"state": 1}} for key in keys}
    job.report("keyed", keyed, held_all, input_watermark=FIRST)

    single = f'{{"token":"{one}","ranges":{{"{shards[0]}":{VALUE}}}}}'
    plain = ",".join(f'"{shard}":{VALUE}' for shard in shards)
    # The first key range keeps its hold where it is, so that the stage does not advance.
    held = ",".join(
        f'"{key}":{{"holds":{{"state":{VALUE if i else 1}}}}}' for i, key in enumerate(keys)
    )
    source = f'{{"token":"{many}","ranges":{{{plain}}}}}'
    keys_held = f'{{"token":"{keyed}","input_watermark":{OBSERVED},"ranges":{{{held}}}}}'

    ours = Target(job.reports("one"), "POST", single, first=FIRST)
    value, detail = compared(plan, ours, Target(f"{bare}/bare", "POST", single))
    yield Figure("reports of 1 range / bare POST", value, "ratio", 0.8, True, detail)
    for kind, ours, target in (
        ("source", Target(job.reports("many"), "POST", source, first=FIRST), 0.3),
        ("keyed", Target(job.reports("keyed"), "POST", keys_held, first=FIRST), 0.3),
        ("packed", packed(server, "packed", standing=True), 0.6),
        ("packed, as arrays", packed(server, "arrays", standing=True, as_bytes=False), None),
    ):
        value, detail = compared(plan, ours, replace(ours, url=f"{bare}/body"))
        name = f"reports of 1,000 ranges ({kind}) / POST that reads the body"
        yield Figure(name, value, "ratio", target, True, detail)
    ours = Target(f"{job.root}/stages/one/watermark")
    value, detail = compared(plan, ours, Target(f"{bare}/bare"))
    yield Figure("plain GET of a watermark / bare GET", value, "ratio", 0.85, True, detail)
    value, detail = compared(plan, replace(ours, etag=job.etag("one")), Target(f"{bare}/bare"))
    yield Figure("poll that finds nothing new / bare GET", value, "ratio", 0.9, True, detail)
    job.close()


def latency(plan: Plan, server: Service) -> Iterator[Figure]:
    """From a report to its server-sent event, with every report advancing the watermark."""
    rate = 500
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.latency", server.url, "latency"),
            *(str(rate), str(plan.latency_seconds)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout)
    detail = f"{found['reports']:,} reports at {rate}/s, max {found['max']:.1f} ms"
    yield Figure("report to event, p50", found["p50"], "ms", 10, False, detail)
    yield Figure("report to event, p99", found["p99"], "ms", 50, False, detail)


def fill(
    job: Job,
    stage: str,
    count: int,
    word: Callable[[int], Any],
    *,
    observed: Callable[[int], int] = lambda _: FIRST,
    last: int | None = None,
) -> str:
    """Claim and report every range, or those before `last`, in batches by different workers.

    Gives the last worker's token.
    """
    names = tile(count)
    token = ""
    for start in range(0, count if last is None else last, BATCH):
        batch = names[start : start + BATCH]
        token = job.claim(stage, batch, holder=f"bench-{start}")
        words = {name: word(start + i) for i, name in enumerate(batch)}
        job.report(stage, token, words, input_watermark=observed(start))
    return token


def keyed_job(server: Service, name: str, count: int) -> Job:
    job = Job(server, name, {"src": {"shards": ["0"]}, "k": {"inputs": ["src"], "ranges": count}})
    job.report("src", job.claim("src"), {"0": {"final": True}})
    return job


def memory(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Resident bytes per range, in processes of their own."""
    cases: list[tuple[str, Callable[[int], Any], float | None]] = [
        ("memory per range", lambda _: {}, 400),
        ("  same, a hold on each", lambda i: {"holds": {"state": FIRST - i}}, None),
    ]
    for index, (name, word, target) in enumerate(cases):
        with service(folder / f"memory-{index}") as server:
            warm = keyed_job(server, "warm", 1_000)
            fill(warm, "k", 1_000, word)
            before = resident_bytes(server.pid)
            job = keyed_job(server, "large", plan.ranges)
            fill(job, "k", plan.ranges, word)
            used = resident_bytes(server.pid) - before
            warm.close()
            job.close()
        detail = f"{plan.ranges:,} ranges registered, claimed, reported: {used / 2**20:,.0f} MiB"
        yield Figure(name, used / plan.ranges, "bytes", target, False, detail)


def growth(plan: Plan, server: Service) -> Iterator[Figure]:
    """Yield the cost of one report in a large stage, relative to a small one."""
    sizes = (1_000, plan.ranges)
    targets: list[Target] = []
    for count in sizes:
        job = keyed_job(server, f"of-{count}", count)
        fill(job, "k", count, lambda _: {"holds": {"state": 1}})
        # Ranges spread over the whole stage, in no order that a cache would like.
        names = tile(count)
        mine = list(dict.fromkeys(names[i * 7_919 % count] for i in range(1, min(count, BATCH))))
        token = job.claim("k", mine, attempt=1)
        holds = f'{{"holds":{{"state":{VALUE}}}}}'
        body = f'{{"token":"{token}","input_watermark":{FIRST},"ranges":{{"{RANGE}":{holds}}}}}'
        targets.append(Target(job.reports("k"), "POST", body, tuple(mine), first=2))
        job.close()
    small, large = targets
    costs: list[float] = []
    for index in range(plan.rounds + 1):
        each: list[float] = []
        for target in (small, large):
            moved = replace(target, first=2 + index * 10_000_000)
            before = processor_seconds(server.pid)
            outcome = run(moved, plan.seconds)
            each.append((processor_seconds(server.pid) - before) / outcome.requests)
        if index:
            costs.append(each[1] / each[0])
    detail = f"processor time per report, rounds {min(costs):.2f}-{max(costs):.2f}"
    name = f"cost per report, {plan.ranges:,} ranges / 1,000 ranges"
    yield Figure(name, statistics.median(costs), "ratio", 1.3, False, detail)


def embedded(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Every figure on the embedded stores, in the order of the table."""
    with baseline() as bare, service(folder / "rates") as server:
        yield from rates(plan, server, bare)
    with service(folder / "latency") as server:
        yield from latency(plan, server)
    with service(folder / "growth") as server:
        yield from growth(plan, server)
    yield from memory(plan, folder)
