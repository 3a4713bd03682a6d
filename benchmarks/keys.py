"""Cost of a key: reports to a service that has keys, against the same to one that has none."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks.figures import FIRST, Figure, Plan
from benchmarks.load import VALUE, Target, run
from benchmarks.servers import processor_seconds, service
from tests.support.api import ok
from tests.support.server import Service

ROUNDS = 5
"""Times as many as for other figures: a round is a second, and the difference is small."""

ADMIN = "operator-0123456789abcdef0123456789abcdef"
OTHERS = 100
"""Keys that are there besides the one that is used."""


def figures(plan: Plan, folder: Path) -> Iterator[Figure]:
    """Reports of one range, with a key for some jobs and without."""
    with (
        service(folder / "open") as open_to_all,
        service(folder / "guarded", environment={"TIDEGAUGE_ADMIN_KEY": ADMIN}) as guarded,
    ):
        measured = (guarded, reports(guarded.url, ADMIN)), (open_to_all, reports(open_to_all.url))
        ratios: list[float] = []
        for index in range(ROUNDS * plan.rounds):
            # Each is the first as often as the other.
            costs = {
                server.url: _cost(server, replace(target, first=FIRST + index * 10_000_000))
                for server, target in measured[:: 1 if index % 2 else -1]
            }
            ratios.append(costs[open_to_all.url] / costs[guarded.url])
    ratios = sorted(ratios)
    detail = (
        f"by processor time, {len(ratios)} rounds, the middle half of them"
        f" {ratios[len(ratios) // 4]:.2f}-{ratios[3 * len(ratios) // 4]:.2f}"
    )
    value = statistics.median(ratios)
    yield Figure("reports of 1 range, with a key / without", value, "ratio", 0.97, True, detail)


def _cost(server: Service, target: Target) -> float:
    """Processor time per report: the rate would mostly show what else the machine does."""
    before = processor_seconds(server.pid)
    outcome = run(target, 1)
    return (processor_seconds(server.pid) - before) / outcome.requests


def reports(url: str, admin: str = "") -> Target:
    """Reports to a job that is made for them, by a worker that has a key if there are keys."""
    headers = {"Authorization": f"Bearer {admin}"} if admin else {}
    with httpx.Client(base_url=url, headers=headers) as client:
        stages = {"s": {"shards": ["0", "1"]}}
        ok(client.put("/v1/jobs/rates", json={"stages": stages}), 201)
        claim = {"ranges": "all", "holder": "bench", "ttl_ms": 600_000}
        token = ok(client.post("/v1/jobs/rates/stages/s/leases", json=claim), 201)["token"]
        key = ""
        for number in range(OTHERS + 1 if admin else 0):
            body = {"name": f"k{number}", "role": "report", "jobs": "rate*"}
            key = ok(client.post("/v1/keys", json=body), 201)["secret"]
    # One of two shards, so that the watermark does not advance.
    body = json.dumps({"token": token, "ranges": {"0": VALUE}}).replace(f'"{VALUE}"', VALUE)
    return Target(f"{url}/v1/jobs/rates/stages/s/reports", "POST", body, first=FIRST, key=key)
