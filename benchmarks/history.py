"""`python -m benchmarks.history [--hours 1] [--only sqlite]`: what history costs to thin and to read.

A history of 500 advances a second is made up, of 50 stages, and thinned as the service does it, while
other advances are recorded at 20 a second. Printed are the share of one core that thinning would take,
if it had to keep up with such a history all day, the time that an advance takes with thinning and
without, and the time in which 500 points of one stage's history are read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psycopg

from service.frontier.graph import StageWatermark
from service.frontier.timestamps import MIN
from service.ledger.port import JobRecord, Ledger, NewLayout
from service.ledger.sql import SqlLedger
from tests.support.postgres_server import PostgresServer

PER_S, STAGES, HOUR_MS = 500, 50, 3_600_000
REST = 9
"""As in `service.aggregator.background`."""

FILL = (
    "INSERT INTO watermark_history (job, stage, generation, version, input, output, idle, at_ms)"
    " SELECT 'old', 's' || (n % {stages}), 1, n, 0, n, {false}, n * 1000 / {rate} FROM {numbers}"
)


def fill_sqlite(path: Path, rows: int) -> None:
    numbers = (
        f"(WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c WHERE n < {rows - 1})"
        " SELECT n FROM c)"
    )
    with sqlite3.connect(path) as db:
        db.execute(FILL.format(stages=STAGES, rate=PER_S, numbers=numbers, false=0))
    db.close()


def fill_postgres(server: PostgresServer, url: str, rows: int) -> None:
    numbers = f"generate_series(0::bigint, {rows - 1}) AS numbers(n)"
    name = url.rpartition("/")[2]
    server.execute(FILL.format(stages=STAGES, rate=PER_S, numbers=numbers, false="false"), name)
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as db:
        db.execute("VACUUM ANALYZE watermark_history")


async def record(ledger: Ledger, stop: asyncio.Event) -> list[float]:
    """Record advances until told to stop; return how long each took."""
    job = await ledger.create(
        NewLayout(f"j{time.time_ns()}", b'{"stages":{"s":{"shards":["0"]}}}', ["s"]), 1
    )
    assert job is not None
    at, value = job.installed, 0
    took: list[float] = []
    while not stop.is_set():
        value += 1
        began = time.perf_counter()
        advance = {"s": StageWatermark(MIN, value)}
        await ledger.record(
            [JobRecord(at.name, at.incarnation, 1, 1, 0, advance, {})], int(time.time() * 1_000)
        )
        took.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)
    return took


async def thin(ledger: Ledger, until_ms: int) -> int:
    rows, more = 0, True
    while more:
        began = time.perf_counter()
        thinned = await ledger.thin_history(fine_until_ms=until_ms, keep_until_ms=0)
        rows, more = rows + thinned.rows, thinned.more
        await asyncio.sleep(REST * (time.perf_counter() - began))
    return rows


def p99_ms(times: Sequence[float]) -> float:
    return 1_000 * sorted(times)[int(0.99 * (len(times) - 1))]


async def read_ms(ledger: Ledger, until_ms: int) -> float:
    """Return the time to read the history of one stage: 500 points of all of it."""
    took: list[float] = []
    for _ in range(10):
        began = time.perf_counter()
        await ledger.history(
            *("old", "s0"),
            generation=1,
            newest=2**53,
            from_ms=0,
            until_ms=until_ms,
            intervals=499,
        )
        took.append(time.perf_counter() - began)
    return 1_000 * statistics.median(took)


async def measure(name: str, ledger: Ledger, cpu_s: Callable[[], float], hours: float) -> None:
    async def while_recording(work: asyncio.Task[int]) -> tuple[list[float], float]:
        stop = asyncio.Event()
        recording = asyncio.create_task(record(ledger, stop))
        before = cpu_s()
        await work
        stop.set()
        took = await recording
        return took, cpu_s() - before

    reading_ms = await read_ms(ledger, int(hours * HOUR_MS))
    alone, alone_s = await while_recording(asyncio.create_task(asyncio.sleep(20, 0)))
    thinning = asyncio.create_task(thin(ledger, int(hours * HOUR_MS)))
    beside, beside_s = await while_recording(thinning)
    own_s = beside_s - alone_s * len(beside) / len(alone)
    print(
        f"{name}: {thinning.result():,} rows of {hours:g} h thinned with {own_s:.1f} s of processor"
        f" time, {own_s / (hours * 36):.2f} % of one core; an advance's p99 is {p99_ms(beside):.1f} ms,"
        f" without thinning {p99_ms(alone):.1f} ms; 500 points of one stage's were read in"
        f" {reading_ms:.1f} ms"
    )


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_of_tree_s(root: int) -> float:
    """The processor time of this process and of a server's processes that still run."""
    ticks, total = os.sysconf("SC_CLK_TCK"), own_cpu_s()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(path.parent.name) == root or int(fields[1]) == root:
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="how much history is made up")
    parser.add_argument("--only", choices=("sqlite", "postgres"))
    options = parser.parse_args()
    rows = int(options.hours * 3_600 * PER_S)
    with tempfile.TemporaryDirectory(prefix="tidegauge-history-") as folder:
        if options.only != "postgres":
            path = Path(folder) / "ledger.db"
            ledger = SqlLedger(f"sqlite+aiosqlite:///{path}")
            await ledger.open(exclusive=True)
            await ledger.close()
            fill_sqlite(path, rows)
            await ledger.open(exclusive=True)
            await measure("SQLite", ledger, own_cpu_s, options.hours)
            await ledger.close()
        if options.only != "sqlite":
            (Path(folder) / "postgres").mkdir()
            with PostgresServer(Path(folder) / "postgres", durable=True) as server:
                url = server.database()
                ledger = SqlLedger(url)
                await ledger.open(exclusive=False)
                fill_postgres(server, url, rows)
                cpu = lambda: cpu_of_tree_s(server.pid)  # noqa: E731
                await measure("Postgres", ledger, cpu, options.hours)
                await ledger.close()


if __name__ == "__main__":
    asyncio.run(main())
