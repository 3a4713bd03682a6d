"""redis-py alone, doing the least that can be done for a report of 1,000 ranges: one script, one set.

Members and scores are packed as MessagePack, and one EVALSHA gives them all to one `ZADD … GT`. Scores
are decimal strings: as numbers, the script would have to print each of them. They rise with every call,
over all clients. Nobody asks for a lease here, keeps a ledger or speaks HTTP.

`python -m benchmarks.redis_alone PORT DEPTH BEGIN SECONDS` is one client; `DEPTH` calls go out together.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from redis import Redis

from benchmarks.load import LoadFailedError, Outcome
from benchmarks.servers import ROOT

KEY = "alone"
MEMBERS = [f"shard-{i:04d}" for i in range(1_000)]
SCRIPT = "return redis.call('ZADD', KEYS[1], 'GT', unpack(cmsgpack.unpack(ARGV[1])))"
BEGIN_IN_S = 1.0
"""All clients are there by then."""


@dataclass(frozen=True)
class Clients:
    """Number of clients, each a process, and of calls that each sends together."""

    count: int
    depth: int

    def __str__(self) -> str:
        return f"best with {self.count} clients, each {self.depth} at a time"


CANDIDATES = (Clients(1, 1), Clients(1, 8), Clients(2, 1), Clients(2, 4), Clients(4, 1))


def client(port: int, depth: int, begin: float, seconds: float) -> tuple[int, float]:
    """Return the number of calls, and their time."""
    redis: Any = Redis(port=port)
    digest = redis.script_load(SCRIPT)
    encoder = msgspec.msgpack.Encoder()
    words = [""] * (2 * len(MEMBERS))
    words[1::2] = MEMBERS
    made = 0
    time.sleep(max(0.0, begin - time.time()))
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        pipeline = redis.pipeline(transaction=False)
        for _ in range(depth):
            # In microseconds, so that it rises over all clients: what does not is no work.
            words[::2] = [str(time.time_ns() // 1_000)] * len(MEMBERS)
            pipeline.evalsha(digest, 1, KEY, encoder.encode(words))
        pipeline.execute()
        made += depth
    took = time.perf_counter() - start
    redis.close()
    return made, took


def run_alone(port: int, clients: Clients, seconds: float) -> Outcome:
    """All clients at once."""
    words = [str(clients.depth), repr(time.time() + BEGIN_IN_S), str(seconds)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.redis_alone", str(port), *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(clients.count)
    ]
    answers = [process.communicate() for process in processes]
    for process, (_, said) in zip(processes, answers, strict=True):
        if process.returncode:
            raise LoadFailedError(f"redis-py alone: {said[-2000:]}")
    found = [json.loads(answer) for answer, _ in answers]
    rate = sum(made / took for made, took in found)
    return Outcome(sum(made for made, _ in found), sum(made for made, _ in found) / rate)


def fastest(port: int) -> Clients:
    """With how many clients it is fastest here."""
    rates = {one: run_alone(port, one, 1).rate for one in CANDIDATES}
    return max(rates, key=lambda one: rates[one])


if __name__ == "__main__":
    server, at_once, at, duration = sys.argv[1:]
    print(json.dumps(client(int(server), int(at_once), float(at), float(duration))))
