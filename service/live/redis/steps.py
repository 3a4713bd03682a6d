"""Running steps on Redis: the job layout they are sent with, and how their replies are read.

A script refuses a step that was prepared for a layout that the job no longer has; it is then prepared
afresh and retried.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from cachetools import LRUCache
from redis.exceptions import ResponseError

from service.clock import Clock
from service.errors import UnavailableError
from service.frontier.graph import Pipeline
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot of a job from one call, for every request that shared the call."""

    view: JobView
    censuses: Mapping[str, Census]


@dataclass(slots=True)
class JobCache:
    """Cache of a job in this process, between steps."""

    layout: JobLayout | None = None
    view: JobView | None = None
    """The last view that was read."""
    reports: Batcher[tuple[JobLayout, ResolvedReport], Reported] | None = None
    """Reports that arrive together share a call."""
    reads: Batcher[str | None, Snapshot] | None = None


class Steps:
    """Runs steps, and remembers what the next one of each job needs."""

    def __init__(self, client: RedisClient, clock: Clock) -> None:
        self.client = client
        self.clock = clock
        self.caches: dict[str, JobCache] = {}
        self.pipelines: dict[str, Pipeline] = {}
        """Pipelines of the layouts that are remembered."""
        self.lookups = LRUCache[tuple[str, ...], RangeLookup](
            _LOOKUP_BYTES, lambda lookup: lookup.size_bytes
        )
        self._expiries: dict[str, int] = {}
        """When the next lease of a job runs out, as of the last reply, on this process's clock."""
        self._expired: dict[str, Counter[str]] = {}
        """Leases that were ended, by job and stage, and that `take_expired` has not returned yet."""
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
        if await self._drop_torn(job):
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

    async def run_for(self, jobs: Sequence[str], name: str, keys: Sequence[str]) -> bytes:
        """Run a script that reads several jobs. Raises `UnavailableError`."""
        for job in self._torn & set(jobs):
            await self._drop_torn(job)
        return await self.client.step(name, keys)

    async def _drop_torn(self, job: str) -> bool:
        if job not in self._torn:
            return False
        await self.drop(job)
        self._torn.discard(job)
        return True

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
            self.forget_layout(job_layout.job)
            if str(values[0]).startswith("!"):
                raise FrozenError
            raise LayoutChangedError
        self.note_next_expiry(job_layout.job, next_expiry_in)
        return [code, *values]

    def note_next_expiry(self, job: str, in_ms: float) -> None:
        """Note in how many milliseconds the next lease of a job runs out; below 0: there is none."""
        if in_ms < 0:
            self._expiries.pop(job, None)
        else:
            self._expiries[job] = self.clock.steady_ms() + int(in_ms)

    def with_expired_lease(self, job: str | None) -> Sequence[str]:
        """Return the jobs (of this one, or of all) with a lease that has run out, by the last replies.

        A lease that another replica has granted is found by the next `heads`.
        """
        now_ms = self.clock.steady_ms()
        if job is None:
            return [name for name, at_ms in self._expiries.items() if not is_current(at_ms, now_ms)]
        at_ms = self._expiries.get(job)
        return [job] if at_ms is not None and not is_current(at_ms, now_ms) else []

    def note_expired(self, job: str, counts: Mapping[str, int]) -> None:
        """Count leases that were ended, by stage."""
        if counts:
            self._expired.setdefault(job, Counter()).update(counts)

    def take_expired(self, job: str | None) -> Mapping[str, Mapping[str, int]]:
        """Return the leases that were ended since the last call, in this job or in all of them."""
        if job is None:
            expired, self._expired = self._expired, {}
            return expired
        counts = self._expired.pop(job, None)
        return {job: counts} if counts else {}

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
            try:
                found = cached.layout = await self._load_layout(job)
            except UnavailableError:
                # Clients may request any name during an outage, when nothing is found out about it.
                if cached.view is None and self.caches.get(job) is cached:
                    self.forget(job)
                raise
            # The job may have been forgotten meanwhile.
            if self.caches.get(job) is cached:
                self.pipelines[job] = found.pipeline
        return cached.layout

    def forget_layout(self, job: str) -> None:
        """Read the layout of a job again before its next step."""
        self.cache(job).layout = None
        self.pipelines.pop(job, None)

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

    def keep_only(self, jobs: Collection[str]) -> None:
        """Drop the caches of all other jobs. Another replica may have deleted them.

        A job that was created since is read again at its next step.
        """
        for job in {*self.caches, *self.pipelines, *self._expiries}.difference(jobs):
            self.forget(job)

    def forget(self, job: str) -> None:
        """Drop the cache of a job that may not exist: clients may request any name."""
        self.caches.pop(job, None)
        self.pipelines.pop(job, None)
        self._expiries.pop(job, None)


def stage_layout(job_layout: JobLayout, stage: str) -> Layout:
    """Return the ranges of a stage. Raises `UnknownStageError`, `InvalidRequestError`."""
    found = job_layout.pipeline.stages.get(stage)
    if found is None:
        raise refusals.unknown_stage(job_layout.job, stage)
    if found.layout is None:
        raise refusals.no_ranges(stage)
    return found.layout
