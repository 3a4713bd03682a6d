"""Relay the watermark of a regional service to a shard of a parent's source, until it is final.

    python examples/relay.py http://west:8000 scores sessions http://world:8000 world regions west

The parent's stage has a shard for each region, named after the region and the generation of its job:
`{"regions": {"shards": ["west.1", "east.1"]}}`. A region that was reset ends the program with the way
out. Start the program twice, and the second one takes over when the first one has died.
"""

from __future__ import annotations

import sys

from spark_agent import Client, Relay, Wrong

TTL_MS = 10_000


def main(place: list[str], parent: list[str], name: str, *, ttl_ms: int) -> None:
    """Relay until the region is final."""
    (url, job, stage), (parent_url, parent_job, parent_stage) = place, parent
    relay = Relay(
        (Client(url), job, stage),
        (Client(parent_url), parent_job, parent_stage),
        name=name,
        ttl_ms=ttl_ms,
    )
    try:
        relay.run()
    except Wrong as error:
        raise SystemExit(str(error)) from error
    print(f"{name} is final")


if __name__ == "__main__":
    ttl_ms = int(sys.argv[8]) if len(sys.argv) > 8 else TTL_MS
    main(sys.argv[1:4], sys.argv[4:7], sys.argv[7], ttl_ms=ttl_ms)
