"""Steps on Redis: by which layout they are made, and what their answers come to.

A step about a layout that is not the job's any more is refused by the script and made again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from redis.exceptions import ResponseError

from service.clock import Clock
from service.frontier.leases import is_current
from service.frontier.ranges import Layout
from service.live import refusals
from service.live.batching import Batcher
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.client import RedisClient
from service.live.redis.packing import pack
from service.live.redis.schema import Plan
from service.live.redis.spans import Asked
from service.model.jobs import Census, JobView
from service.model.reports import Reported

T = TypeVar("T")

_FROZEN_PATIENCE_S = 3.0
"""How long a step waits for a layout change; then whoever was at it is taken for dead."""

_FROZEN_POLL_S = 0.01

reply = msgspec.msgpack.Decoder()
"""Reads what a script answers."""


class FrozenError(Exception):
    """The job's layout is being changed."""


class MovedError(Exception):
    """The job's layout is another by now."""


@dataclass(slots=True)
class Due:
    """When the next lease of a job runs out, as heard last, on this process's clock."""

    at_ms: int | None
    """None: there was no lease."""
    heard_at_ms: int

    def is_over(self, now_ms: int) -> bool:
        """Whether it has run out by now."""
        return self.at_ms is not None and not is_current(self.at_ms, now_ms)


@dataclass(frozen=True, slots=True)
class Read:
    """What one call has read of a job, for all who asked."""

    view: JobView
    censuses: Mapping[str, Census]


@dataclass(slots=True)
class Known:
    """What this process has at hand for a job."""

    plan: Plan | None = None
    due: Due | None = None
    ended: Counter[str] = field(default_factory=Counter[str])
    """Leases, by stage, that were found to be over and that `expire` has not told of yet."""
    reports: Batcher[tuple[Plan, Asked], Reported] | None = None
    """Those that arrive together share a call."""
    reads: Batcher[str | None, Read] | None = None


class Steps:
    """Makes steps, and remembers of each job what the next one needs."""

    def __init__(self, client: RedisClient, clock: Clock) -> None:
        self.client = client
        self.clock = clock
        self.jobs: dict[str, Known] = {}

    def known(self, job: str) -> Known:
        """Say what is at hand for a job."""
        return self.jobs.setdefault(job, Known())

    async def names(self) -> list[str]:
        """Name every job that may be there."""
        return sorted(name.decode() for name in await self.client.command("SMEMBERS", schema.JOBS))

    async def step(
        self,
        plan: Plan,
        name: str,
        stages: Iterable[str],
        args: object,
        *,
        at: str | None = None,
    ) -> list[Any]:
        """Run a step; return what it answers after its `ok`, or with the word that it has instead.

        Raises `StateLostError`, `FrozenError`, and `MovedError` if the layout is another by now.
        """
        raw = await self.run(plan.job, name, plan.keys(stages), at or plan.at, pack(args))
        return self.read_reply(plan, raw)

    async def run(
        self, job: str, name: str, keys: Sequence[str], *args: bytes | str, repeatable: bool = True
    ) -> Any:  # noqa: ANN401 - what a script answers
        """Run a script with these keys. Raises `StateLostError`, `UnavailableError`."""
        try:
            return await self.client.step(name, keys, *args, repeatable=repeatable)
        except ResponseError as error:
            if "LOST" in str(error):
                raise StateLostError(job) from error
            raise

    def read_reply(self, plan: Plan, raw: bytes) -> list[Any]:
        """Read what a step answered. Raises as `step` does."""
        due_in, word, *rest = reply.decode(raw)
        if word == "lost":
            raise StateLostError(plan.job)
        if word == "at":
            self.known(plan.job).plan = None
            if str(rest[0]).startswith("!"):
                raise FrozenError
            raise MovedError
        now_ms = self.clock.steady_ms()
        self.known(plan.job).due = Due(None if due_in < 0 else now_ms + int(due_in), now_ms)
        return [word, *rest]

    async def by_plan(self, job: str, use: Callable[[Plan], Awaitable[T]]) -> T:
        """Do something by the job's plan; if the layout is another by now, by the next one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _FROZEN_PATIENCE_S
        while True:
            try:
                return await use(await self.plan(job))
            except MovedError:
                continue
            except FrozenError:
                if loop.time() > until:
                    # Who froze it is gone. The ledger has the layout that it was about to install.
                    raise StateLostError(job) from None
                await asyncio.sleep(_FROZEN_POLL_S)

    async def plan(self, job: str) -> Plan:
        """Say by which layout a job is known to be. Raises `StateLostError`, `FrozenError`."""
        found = self.known(job)
        if found.plan is None:
            found.plan = await self._load_plan(job)
        return found.plan

    async def _load_plan(self, job: str) -> Plan:
        at, generation, version, packed = await self.client.command(
            "HMGET", schema.job_keys(job)[0], "at", "generation", "layout_version", "pipeline"
        )
        if at is None or packed is None:
            self.forget(job)
            raise StateLostError(job)
        if at.startswith(b"!"):
            raise FrozenError
        return Plan(job, at.decode(), int(generation), int(version), schema.read_pipeline(packed))

    def forget(self, job: str) -> None:
        """Let go of what is at hand for a job that may not exist: anybody may ask for any name."""
        self.jobs.pop(job, None)


def layout_of(plan: Plan, stage: str) -> Layout:
    """Find the ranges of a stage. Raises `UnknownStageError`, `InvalidRequestError`."""
    found = plan.pipeline.stages.get(stage)
    if found is None:
        raise refusals.unknown_stage(plan.job, stage)
    if found.layout is None:
        raise refusals.no_ranges(stage)
    return found.layout
