"""Latency from a report to its server-sent event: `python -m benchmarks.latency URL JOB RATE SECONDS`.

Reports go out on a fixed schedule whatever becomes of the earlier ones, so a service that stalls is
charged for all that had to wait. Every report advances the watermark. The clock of a report stops
when an event shows its value or a later one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.wire import Connection, encode

FIRST = 1_767_225_600_000
CONNECTIONS = 32


@dataclass
class Stopwatch:
    """When each value was sent and when it was first seen."""

    sent: dict[int, float] = field(default_factory=dict[int, float])
    seen: dict[int, float] = field(default_factory=dict[int, float])
    latest: int = FIRST

    def show(self, value: int, now: float) -> None:
        """An event has come: it answers every report up to its value."""
        for one in range(self.latest + 1, value + 1):
            self.seen[one] = now
        self.latest = max(self.latest, value)

    def latencies_ms(self) -> list[float]:
        return sorted((self.seen[value] - start) * 1e3 for value, start in self.sent.items())


async def states(url: str, stage: str) -> AsyncGenerator[dict[str, Any]]:
    """Yield each state of a stage that the job's stream of events shows."""
    connection = await Connection.open(url)
    reader = await connection.stream(encode("GET", url, b""))
    try:
        while True:
            line = await reader.readuntil(b"\n")
            if line.startswith(b"data:"):
                state = json.loads(line[5:])
                if state.get("stage") == stage:
                    yield state
    finally:
        connection.close()


async def listen(url: str, stage: str, watch: Stopwatch, ready: asyncio.Event, last: int) -> None:
    async with aclosing(states(url, stage)) as shown:
        async for state in shown:
            ready.set()
            if state["output_watermark"] is not None:
                watch.show(state["output_watermark"], time.perf_counter())
            if watch.latest >= last:
                return


async def drive(root: str, token: str, rate: int, count: int) -> Stopwatch:
    watch, ready = Stopwatch(), asyncio.Event()
    reports = f"{root}/stages/s/reports"
    pool: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        pool.put_nowait(await Connection.open(root))
    listener = asyncio.create_task(listen(f"{root}/events", "s", watch, ready, FIRST + count))
    await ready.wait()

    async def report(value: int) -> None:
        watch.sent[value] = time.perf_counter()
        connection = await pool.get()
        body = json.dumps({"token": token, "ranges": {"0": value}}).encode()
        status, answer = await connection.send(encode("POST", reports, body))
        if status != 200:
            raise ValueError(f"{status}: {answer[:500]!r}")
        pool.put_nowait(connection)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i in range(1, count + 1):
            await asyncio.sleep(max(0.0, start + i / rate - time.perf_counter()))
            group.create_task(report(FIRST + i))
    async with asyncio.timeout(60):
        await listener
    while not pool.empty():
        pool.get_nowait().close()
    return watch


async def measure(url: str, job: str, rate: int, seconds: float) -> dict[str, float]:
    root = f"{url}/v1/jobs/{job}"
    connection = await Connection.open(url)
    spec = json.dumps({"stages": {"s": {"shards": ["0"]}}}).encode()
    status, answer = await connection.send(encode("PUT", root, spec))
    if status not in {200, 201}:
        raise ValueError(f"{status}: {answer[:500]!r}")
    claim = json.dumps({"ranges": "all", "holder": "bench", "ttl_ms": 600_000}).encode()
    _, answer = await connection.send(encode("POST", f"{root}/stages/s/leases", claim))
    connection.close()
    watch = await drive(root, json.loads(answer)["token"], rate, round(rate * seconds))
    found = watch.latencies_ms()
    return {
        "reports": len(found),
        "p50": found[len(found) // 2],
        "p99": found[len(found) * 99 // 100],
        "max": found[-1],
    }


if __name__ == "__main__":
    _, service, name, per_second, duration = sys.argv
    print(json.dumps(uvloop.run(measure(service, name, int(per_second), float(duration)))))
