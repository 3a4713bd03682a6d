"""A chain of keyed stages on the service: `python -m benchmarks.flink.chain URL JOB STAGES RATE TICKS`.

The source's worker reports on a fixed schedule, whatever becomes of the earlier reports. Each later
stage has a worker with a stream of the job's events, which reports each input watermark of the stage at
once. The clock of a report stops when a reader's stream shows its value as the output of the last stage.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import aclosing
from typing import Any, Final

import uvloop

from benchmarks.latency import FIRST, Stopwatch, listen, states
from benchmarks.wire import Connection, encode

RANGES: Final = 2
"""Ranges of each stage, as many as Flink has tasks."""
_TTL_MS: Final = 600_000
_FINISH_S: Final = 60

Json = dict[str, Any]


def specification(stages: int) -> Json:
    """Return a source and this number of keyed stages below it, in a chain."""
    spec: Json = {"source": {"shards": [f"shard-{i}" for i in range(RANGES)]}}
    above = "source"
    for number in range(1, stages + 1):
        spec[f"stage-{number}"] = {"inputs": [above], "ranges": RANGES}
        above = f"stage-{number}"
    return {"stages": spec}


async def _sent(connection: Connection, method: str, url: str, body: Json) -> Json:
    status, answer = await connection.send(encode(method, url, json.dumps(body).encode()))
    if status not in {200, 201}:
        raise ValueError(f"{method} {url}: {status} {answer[:500]!r}")
    return json.loads(answer)


async def _claim(connection: Connection, stage: str) -> Json:
    body = {"ranges": "all", "holder": "bench", "ttl_ms": _TTL_MS}
    return await _sent(connection, "POST", f"{stage}/leases", body)


async def _pass_on(events: str, stage: str, last: int, ready: asyncio.Event) -> None:
    """Report each input watermark of a stage as soon as an event shows it, up to the last one."""
    connection = await Connection.open(stage)
    lease = await _claim(connection, stage)
    ranges: Json = {key: {} for key in lease["granted"]}
    observed = 0
    async with aclosing(states(events, stage.rpartition("/")[2])) as shown:
        async for state in shown:
            ready.set()
            newest = state["input_watermark"] or 0
            while newest > observed:
                observed = newest
                report = {"token": lease["token"], "input_watermark": observed, "ranges": ranges}
                answer = await _sent(connection, "POST", f"{stage}/reports", report)
                newest = answer["watermark"]["input_watermark"]
            if observed >= last:
                break
    connection.close()


async def _emit(source: str, token: str, rate: int, ticks: int, watch: Stopwatch) -> None:
    """Report both shards of the source on a fixed schedule."""
    pool: asyncio.Queue[Connection] = asyncio.Queue()

    async def report(value: int) -> None:
        watch.sent[value] = time.perf_counter()
        connection = pool.get_nowait() if not pool.empty() else await Connection.open(source)
        shards = {f"shard-{i}": value for i in range(RANGES)}
        await _sent(connection, "POST", f"{source}/reports", {"token": token, "ranges": shards})
        pool.put_nowait(connection)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for tick in range(1, ticks + 1):
            await asyncio.sleep(max(0.0, start + tick / rate - time.perf_counter()))
            group.create_task(report(FIRST + tick))
    while not pool.empty():
        pool.get_nowait().close()


async def measure(url: str, job: str, stages: int, rate: int, ticks: int) -> list[float]:
    """Return the latency of each report in ms, in their order."""
    root = f"{url}/v1/jobs/{job}"
    setup = await Connection.open(url)
    await _sent(setup, "PUT", root, specification(stages))
    source = f"{root}/stages/source"
    token = (await _claim(setup, source))["token"]
    setup.close()
    watch, events, last = Stopwatch(), f"{root}/events", FIRST + ticks
    waiting = [asyncio.Event() for _ in range(stages + 1)]
    async with asyncio.timeout(_FINISH_S + ticks / rate), asyncio.TaskGroup() as group:
        group.create_task(listen(events, f"stage-{stages}", watch, waiting[0], last))
        for number in range(1, stages + 1):
            stage = f"{root}/stages/stage-{number}"
            group.create_task(_pass_on(events, stage, last, waiting[number]))
        for each in waiting:
            await each.wait()
        await _emit(source, token, rate, ticks, watch)
    return [(watch.seen[value] - sent) * 1e3 for value, sent in sorted(watch.sent.items())]


if __name__ == "__main__":
    _, service, name, *numbers = sys.argv
    print(json.dumps(uvloop.run(measure(service, name, *map(int, numbers)))))
