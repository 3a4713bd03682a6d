"""Load on machines without wrk: `python -m benchmarks.pyload SECONDS CONNECTIONS < target`."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from base64 import b64encode

import uvloop

from benchmarks.load import COLUMN, RANGE, TOKEN, VALUE, Target
from benchmarks.wire import NOT_MODIFIED, Connection, encode


def column(target: Target, value: int) -> str:
    head, rest = (1 if target.standing else value), value.to_bytes(8, "little")
    return b64encode(head.to_bytes(8, "little") + rest * (target.rows - 1)).decode()


async def load(target: Target, seconds: float, connections: int) -> tuple[int, float]:
    counter = itertools.count(target.first)
    ranges = itertools.cycle(target.ranges or ("",))

    def request(token: str) -> bytes:
        value = next(counter)
        body = target.body.replace(VALUE, str(value)).replace(TOKEN, token)
        body = body.replace(COLUMN, column(target, value), 1) if target.rows else body
        body = body.replace(RANGE, next(ranges), 1) if target.ranges else body
        return encode(target.method, target.url, body.encode(), target.key, target.etag)

    start = time.perf_counter()
    end = start + seconds

    async def client(place: int) -> int:
        token = target.tokens[place] if target.tokens else ""
        connection = await Connection.open(target.url)
        done = 0
        while time.perf_counter() < end:
            status, body = await connection.send(request(token))
            if not 200 <= status < 300 and status != NOT_MODIFIED:
                raise ValueError(f"{status}: {body[:500]!r}")
            done += 1
        connection.close()
        return done

    counts = await asyncio.gather(*(client(place) for place in range(connections)))
    return sum(counts), time.perf_counter() - start


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    made = Target(**wanted | {name: tuple(wanted[name]) for name in ("ranges", "tokens")})
    print(json.dumps(uvloop.run(load(made, float(sys.argv[1]), int(sys.argv[2])))))
