"""`python -m tests.interleavings [--requests 100000] [--seed 1]`: random requests to two replicas."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from service.clock import SystemClock
from tests.interleavings.fuzzer import Fuzzer
from tests.support.inprocess import InProcess
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.stores import Stores

PART = 2_000


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.interleavings", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tidegauge-") as name:
        folders = [Path(name) / each for each in ("redis", "postgres", "one", "other")]
        for folder in folders:
            folder.mkdir()
        with RedisServer(folders[0]) as redis, PostgresServer(folders[1]) as postgres:
            stores = Stores(redis, postgres)
            clock = SystemClock()
            async with (
                InProcess(folders[2], clock=clock, stores=stores) as one,
                InProcess(folders[3], clock=clock, stores=stores) as other,
            ):
                fuzzer = Fuzzer([one.client, other.client], options.seed)
                for done in range(0, options.requests, PART):
                    await fuzzer.run(min(PART, options.requests - done))
                    print(f"{done + PART:,} requests", flush=True)
    for (act, status), count in sorted(fuzzer.statuses.items()):
        print(f"{act:12} {status} {count:7,}")
    print(
        f"{sum(fuzzer.statuses.values()):,} requests, {fuzzer.watermarks_seen:,} watermarks compared:"
        " no internal error, no entity tag with two values, nothing went back"
    )


if __name__ == "__main__":
    asyncio.run(main())
