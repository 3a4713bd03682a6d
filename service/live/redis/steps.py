"""Running steps on Redis: the job layout they are sent with, and how their replies are read.

A script refuses a step that was prepared for a layout that the job no longer has; it is then prepared
afresh and retried.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from cachetools import LRUCache
from redis.exceptions import ResponseError

from service.clock import Clock
from service.frontier.leases import is_current
from service.frontier.ranges import Layout
from service.live import refusals
from service.live.batching import Batcher
from service.live.port import StateLostError
from service.live.redis import schema
from service.live.redis.client import RedisClient
from service.live.redis.errors import WrongTypeError
from service.live.redis.job_layout import JobLayout, read_pipeline
from service.live.redis.packing import pack
from service.live.redis.rights import DeniedError
from service.live.redis.spans import RangeLookup, ResolvedReport
from service.model.jobs import Census, JobView
from service.model.reports import Reported

T = TypeVar("T")

log = logging.getLogger(__name__)

_FROZEN_TIMEOUT_S = 3.0
"""Wait of a step for a layout change; after it, the replica changing the layout is taken for dead."""

_FROZEN_POLL_S = 0.01

_FAILED_SCRIPT = re.compile(r"user_script|running script")

_LOOKUP_BYTES = 128 * 2**20
"""For all jobs together: a million ranges that are reported by their names take 100 MB."""

reply = msgspec.msgpack.Decoder()
"""Reads a script's reply."""


class FrozenError(Exception):
    """The job's layout is being changed."""


class LayoutChangedError(Exception):
    """The job has another layout by now."""


@dataclass(slots=True)
class NextExpiry:
    """When the next lease of a job runs out, as of the last reply, on this process's clock."""

    at_ms: int | None
    """None: there was no lease."""
    updated_at_ms: int

    def is_over(self, now_ms: int) -> bool:
        """Return whether it has expired."""
        return self.at_ms is not None and not is_current(self.at_ms, now_ms)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot of a job from one call, for every request that shared the call."""

    view: JobView
    censuses: Mapping[str, Census]


@dataclass(slots=True)
class JobCache:
    """Cache of a job in this process, between steps."""

    layout: JobLayout | None = None
    next_expiry: NextExpiry | None = None
    expired: Counter[str] = field(default_factory=Counter[str])
    """Leases that were ended, by stage, and that `expire` has not returned yet."""
    reports: Batcher[tuple[JobLayout, ResolvedReport], Reported] | None = None
    """Reports that arrive together share a call."""
    reads: Batcher[str | None, Snapshot] | None = None


class Steps:
    """Runs steps, and remembers what the next one of each job needs."""

    def __init__(self, client: RedisClient, clock: Clock) -> None:
        self.client = client
        self.clock = clock
        self.caches: dict[str, JobCache] = {}
        self.lookups = LRUCache[tuple[str, ...], RangeLookup](
            _LOOKUP_BYTES, lambda lookup: lookup.size_bytes
        )
        self._torn: set[str] = set()
        """Jobs of which a script was refused a command in its middle. They are kept while the right is
        missing. Once it is back they are dropped, and restored from the ledger: a part of that step may
        have been written."""

    def cache(self, job: str) -> JobCache:
        """Return what is remembered of a job."""
        found = self.caches.get(job)
        if found is None:
            found = self.caches[job] = JobCache()
        return found

    async def names(self) -> list[str]:
        """Return the names of all jobs that may have a state here."""
        found = await self._of_names("SMEMBERS")
        return sorted(name.decode() for name in found)

    async def list_job(self, job: str) -> None:
        """Add a job to the names."""
        await self._of_names("SADD", job)

    async def unlist_job(self, job: str) -> None:
        """Remove a job from the names."""
        await self._of_names("SREM", job)

    async def _of_names(self, command: str, *args: str) -> Any:  # noqa: ANN401 - a server's reply
        """Run a command on the set of names. If that is no set, begin with an empty one.

        The ledger has all jobs; each comparison with it lists those that are missing here.
        """
        try:
            return await self.client.command(command, schema.JOBS, *args)
        except WrongTypeError:
            await self.client.command("DEL", schema.JOBS)
            return await self.client.command(command, schema.JOBS, *args)

    async def step(
        self,
        job_layout: JobLayout,
        name: str,
        stages: Iterable[str],
        args: object,
        *,
        layout_id: str | None = None,
    ) -> list[Any]:
        """Run a step; return its reply: a code (`ok`, or the reason for a refusal) and its values.

        Raises `StateLostError`, `FrozenError`, `LayoutChangedError`.
        """
        raw = await self.run(
            job_layout.job, name, job_layout.keys(stages), layout_id or job_layout.id, pack(args)
        )
        return self.read_reply(job_layout, raw)

    async def step_with_columns(
        self, job_layout: JobLayout, name: str, stages: Iterable[str], args: object
    ) -> list[Any]:
        """Run a step whose reply is followed by columns, which are not packed; return all of them.

        Raises as `step` does.
        """
        raw = await self.run(
            job_layout.job, name, job_layout.keys(stages), job_layout.id, pack(args)
        )
        if isinstance(raw, bytes):
            # The step is refused: there are no columns.
            raw = [raw]
        first, *columns = raw
        return [self.read_reply(job_layout, first), *columns]

    async def run(
        self, job: str, name: str, keys: Sequence[str], *args: bytes | str, repeatable: bool = True
    ) -> Any:  # noqa: ANN401 - a script's reply
        """Run a script with these keys. Raises `StateLostError`, `UnavailableError`."""
        if job in self._torn:
            await self.drop(job)
            self._torn.discard(job)
            raise StateLostError(job)
        try:
            return await self.client.step(name, keys, *args, repeatable=repeatable)
        except DeniedError as error:
            if error.may_have_written:
                self._torn.add(job)
            raise
        except WrongTypeError as error:
            await self.drop(job)
            raise StateLostError(job) from error
        except ResponseError as error:
            if "LOST" in str(error):
                raise StateLostError(job) from error
            if _FAILED_SCRIPT.search(str(error)):
                # It found something that no script writes: a field is missing, or is no number.
                log.error("a step of job %s failed: %s", job, error)  # noqa: TRY400 - it is raised
                await self.drop(job)
                raise StateLostError(job) from error
            raise

    async def command(self, job: str, *parts: bytes | str | int) -> Any:  # noqa: ANN401 - a server's reply
        """Run a plain command on a job's keys. Raises `StateLostError`, `UnavailableError`."""
        try:
            return await self.client.command(*parts)
        except WrongTypeError as error:
            await self.drop(job)
            raise StateLostError(job) from error

    async def drop(self, job: str) -> None:
        """Drop a state of which parts are missing or damaged, as `lost` does in the scripts.

        Another replica may have begun the next incarnation since; then that is begun once more.
        """
        log.warning("the live state of job %s is damaged: dropping it", job)
        await self.client.command("DEL", schema.job_keys(job)[0])

    def read_reply(self, job_layout: JobLayout, raw: bytes) -> list[Any]:
        """Read a step's reply. Raises as `step` does."""
        next_expiry_in, code, *values = reply.decode(raw)
        if code == "lost":
            raise StateLostError(job_layout.job)
        if code == "at":
            self.cache(job_layout.job).layout = None
            if str(values[0]).startswith("!"):
                raise FrozenError
            raise LayoutChangedError
        now_ms = self.clock.steady_ms()
        at_ms = None if next_expiry_in < 0 else now_ms + int(next_expiry_in)
        self.cache(job_layout.job).next_expiry = NextExpiry(at_ms, now_ms)
        return [code, *values]

    async def with_layout(self, job: str, step: Callable[[JobLayout], Awaitable[T]]) -> T:
        """Run a step with the job's layout; retry with the new one if that has changed."""
        deadline: float | None = None
        while True:
            try:
                return await step(await self.layout(job))
            except LayoutChangedError:
                continue
            except FrozenError:
                now = asyncio.get_running_loop().time()
                if deadline is None:
                    deadline = now + _FROZEN_TIMEOUT_S
                if now > deadline:
                    # The replica that froze it is gone. The ledger has the layout it was installing.
                    raise StateLostError(job) from None
                await asyncio.sleep(_FROZEN_POLL_S)

    async def layout(self, job: str) -> JobLayout:
        """Return a job's layout as last known. Raises `StateLostError`, `FrozenError`."""
        cached = self.cache(job)
        if cached.layout is None:
            cached.layout = await self._load_layout(job)
        return cached.layout

    async def _load_layout(self, job: str) -> JobLayout:
        layout_id, generation, version, packed = await self.command(
            job, "HMGET", schema.job_keys(job)[0], "at", "generation", "layout_version", "pipeline"
        )
        if layout_id is None or packed is None:
            self.forget(job)
            raise StateLostError(job)
        if layout_id.startswith(b"!"):
            raise FrozenError
        return JobLayout(
            job,
            layout_id.decode(),
            int(generation),
            int(version),
            read_pipeline(packed),
            self.lookups,
        )

    def forget(self, job: str) -> None:
        """Drop the cache of a job that may not exist: clients may request any name."""
        self.caches.pop(job, None)


def stage_layout(job_layout: JobLayout, stage: str) -> Layout:
    """Return the ranges of a stage. Raises `UnknownStageError`, `InvalidRequestError`."""
    found = job_layout.pipeline.stages.get(stage)
    if found is None:
        raise refusals.unknown_stage(job_layout.job, stage)
    if found.layout is None:
        raise refusals.no_ranges(stage)
    return found.layout
