"""The heads of all jobs on Redis, many in one step: the background work reads them each second."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.live.redis import schema
from service.live.redis.steps import Steps, reply
from service.model.positions import LivePosition

JOBS_AT_ONCE = 16
"""Jobs that are read at once: half of the connections, which reads of single jobs and reports share."""

_HEADS_AT_ONCE = 100
"""Jobs whose heads one step reads: all other clients of the server wait meanwhile."""


@dataclass(frozen=True, slots=True)
class Head:
    """Position of a job, and the number of its chunks that are not saved in the ledger."""

    position: LivePosition
    unsaved: int


async def all_heads(steps: Steps) -> Mapping[str, Head]:
    """Return the heads of all jobs with a trustworthy state. Raises `UnavailableError`."""
    names = await steps.names()
    steps.keep_only(names)
    found: dict[str, Head] = {}
    if steps.client.is_cluster:
        for some in parts_of(names, JOBS_AT_ONCE):
            for each in await asyncio.gather(*(heads_of(steps, [name]) for name in some)):
                found |= each
    else:
        for some in parts_of(names, _HEADS_AT_ONCE):
            found |= await heads_of(steps, some)
    return found


async def heads_of(steps: Steps, names: Sequence[str]) -> Mapping[str, Head]:
    """Read the heads of these jobs in one step, and drop damaged states.

    Notes when their next leases run out, for `Steps.with_expired_lease`. In a cluster, the names must be
    one: the keys of a script are on one node.
    """
    keys = [key for name in names for key in schema.job_keys(name)]
    heads = reply.decode(await steps.run_for(names, "heads", keys))
    found: dict[str, Head] = {}
    for name, head in zip(names, heads, strict=True):
        if head == "damaged":
            await steps.drop(name)
        elif head:
            *numbers, next_expiry_in, unsaved = head
            steps.note_next_expiry(name, next_expiry_in)
            found[name] = Head(LivePosition(*map(int, numbers)), int(unsaved))
    return found


def parts_of(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Return the names in parts of at most this size."""
    return (names[start : start + size] for start in range(0, len(names), size))
