"""Pipelines: definition, replacement, reset and deletion."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from service.clock import Clock
from service.consistency.publisher import Publisher
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import (
    LimitReachedError,
    PreconditionFailedError,
    PreconditionRequiredError,
    UnavailableError,
    UnknownJobError,
)
from service.frontier.differences import differences
from service.frontier.graph import Pipeline
from service.frontier.ranges import Layout
from service.frontier.timestamps import MAX
from service.ledger.port import Ledger, NewLayout
from service.live.port import LiveStore
from service.model.audit import Action, Actor, Deed
from service.model.checkpoints import Columns, inherited_columns
from service.model.jobs import InstalledJob, JobView, Specification, StoredJob
from service.model.pipeline_spec import PipelineSpec, decode_spec, encode_spec
from service.tasks import run_to_completion

_MAX_RACES = 20
"""Number of attempts to let shards join while other replicas change the job, too."""


@dataclass(frozen=True, slots=True)
class Precondition:
    """The condition of a request on the stored specification: entity tags, `*` (any), or None."""

    matches: frozenset[str] | None = None
    none_matches: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the stored jobs. Stored jobs stay, also above a lowered limit."""

    jobs: int
    ranges_per_job: int
    ranges: int


class Definitions:
    """The jobs and their pipelines."""

    def __init__(
        self,
        store: LiveStore,
        live: RecoveringLiveStore,
        ledger: Ledger,
        publisher: Publisher,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._store = store
        self._live = live
        self._ledger = ledger
        self._publisher = publisher
        self._clock = clock
        self._limits = limits
        self._layout_changes = asyncio.Lock()

    @run_to_completion
    async def define(
        self,
        job: str,
        spec: PipelineSpec,
        precondition: Precondition,
        by: Actor | None = None,
    ) -> tuple[StoredJob, bool]:
        """Store a pipeline for `by`; return it, and True if the job is new.

        Raises `InvalidPipelineSpecError`, `LimitReachedError`, and, where the stored one differs,
        `PreconditionRequiredError` or `PreconditionFailedError`.
        """
        self._check_job(job, spec.range_count)
        # One at a time, which also bounds the memory of layouts that are not stored yet.
        async with self._layout_changes:
            pipeline = spec.pipeline()
            stored = await self._stored(job)
            if stored is None:
                self._check_room(spec.range_count, new_jobs=1)
                return await self._create(job, spec, pipeline, precondition, by), True
            etag = stored.specification.etag
            _check_absent(precondition, etag)
            # Shards that have joined stay, as long as their source is dynamic.
            joined = _joined(stored, spec)
            pipeline = spec.pipeline(joined) if joined else pipeline
            if stored.installed.pipeline == pipeline and _declares_the_same(stored, spec):
                # This may be a retry after a failure of the live store.
                await self._install(stored)
                return stored, False
            _check_current(precondition, etag)
            self._check_room(spec.range_count - stored.installed.pipeline.range_count, new_jobs=0)
            try:
                deed = self._deed(Action.CHANGE_JOB, by)
                return await self._replace(stored, encode_spec(spec, joined), pipeline, deed), False
            except UnknownJobError:
                raise PreconditionFailedError(
                    f"job {job!r} was deleted by another request: omit If-Match to create it"
                ) from None

    async def check(self, job: str, spec: PipelineSpec) -> None:
        """Check a pipeline like `define`, without storing it.

        Raises `InvalidPipelineSpecError`, `LimitReachedError`.
        """
        self._check_job(job, spec.range_count)
        async with self._layout_changes:
            stored = await self._stored(job)
            if stored is None:
                spec.pipeline()
                self._check_room(spec.range_count, new_jobs=1)
            else:
                spec.pipeline(_joined(stored, spec))
                before = stored.installed.pipeline.range_count
                self._check_room(spec.range_count - before, new_jobs=0)

    def _check_room(self, new_ranges: int, *, new_jobs: int) -> None:
        """Raise `LimitReachedError` without room for the new ranges and jobs.

        Replicas do not count each other's jobs of the same instant: the limits keep a service alive, and
        need not be exact.
        """
        size = self._store.size()
        if new_jobs and size.jobs + new_jobs > self._limits.jobs:
            raise LimitReachedError(
                f"the service already has {size.jobs:,} jobs",
                self._limits.jobs,
                "TIDEGAUGE_MAX_JOBS",
            )
        if new_ranges > 0 and size.ranges + new_ranges > self._limits.ranges:
            raise LimitReachedError(
                f"all jobs together would have {size.ranges + new_ranges:,} ranges",
                self._limits.ranges,
                "TIDEGAUGE_MAX_RANGES",
            )

    async def _stored(self, job: str) -> StoredJob | None:
        try:
            return await self._ledger.get(job)
        except UnknownJobError:
            return None

    def _deed(self, action: Action, by: Actor | None) -> Deed | None:
        return None if by is None else Deed(action, by, self._clock.wall_ms())

    async def _create(
        self,
        job: str,
        spec: PipelineSpec,
        pipeline: Pipeline,
        precondition: Precondition,
        by: Actor | None,
    ) -> StoredJob:
        if precondition.matches is not None:
            raise PreconditionFailedError(f"job {job!r} does not exist yet: omit If-Match")
        new = NewLayout(job, encode_spec(spec), tuple(pipeline.stages))
        deed = self._deed(Action.CREATE_JOB, by)
        stored = await self._ledger.create(new, self._clock.wall_ms(), deed)
        if stored is None:
            raise PreconditionFailedError(f"job {job!r} was created by another request")
        await self._live.begin(stored.installed)
        # So that it counts in `LiveStore.size` from now on.
        await self._live.pipeline(job)
        return stored

    @run_to_completion
    async def join(self, job: str, stage: str, shards: Collection[str]) -> None:
        """Let shards join a dynamic source. Once this returns, the source waits for them.

        Raises `InvalidRequestError` if the source is final, `LimitReachedError`, `UnknownJobError`.
        """

        async def joining(_stored: StoredJob, joined: set[str]) -> set[str]:
            return joined | set(shards)

        await self._change_shards(job, stage, joining)

    @run_to_completion
    async def leave(self, job: str, stage: str) -> int:
        """Let final shards leave a dynamic source; return the number of final shards that stay, because
        they are declared. Raises `UnknownJobError`.
        """
        staying_final = 0

        async def staying(stored: StoredJob, joined: set[str]) -> set[str]:
            # The final shards are read for the layout and the generation of the change: with an index of
            # another layout, a shard that is not final would leave, and the watermark would run ahead of
            # it.
            nonlocal staying_final
            await self._live.install(stored.installed)
            promises = (await self._live.columns(job, stage))["promises"]
            layout = stored.installed.pipeline.stages[stage].layout
            if layout is None or len(layout) != len(promises):
                raise PreconditionFailedError(f"job {job!r} was changed by another request")
            final = {layout.name(k) for k in np.flatnonzero(promises == MAX).tolist()}
            staying_final = len(final - joined)
            return joined - final

        await self._change_shards(job, stage, staying)
        return staying_final

    async def _change_shards(
        self,
        job: str,
        stage: str,
        change: Callable[[StoredJob, set[str]], Awaitable[set[str]]],
    ) -> None:
        for _ in range(_MAX_RACES):
            async with self._layout_changes:
                stored = await self._ledger.get(job)
                spec = decode_spec(stored.spec)
                source = spec.stages.get(stage)
                if source is None or not source.dynamic:
                    return
                before = set((spec.joined or {}).get(stage, ()))
                # Another replica may change the job meanwhile: then retry.
                with suppress(PreconditionFailedError):
                    after = await change(stored, before) - set(source.shards or ())
                    if after == before:
                        # Another replica may have done it, and be about to install it.
                        await self._install(stored)
                        return
                    self._check_room(len(after) - len(before), new_jobs=0)
                    joined = {**(spec.joined or {}), stage: tuple(after)}
                    pipeline = spec.pipeline(joined)
                    self._check_job(job, pipeline.range_count)
                    encoded = encode_spec(spec, joined)
                    grows = stage if after - before else None
                    await self._replace(stored, encoded, pipeline, None, joined=grows)
                    return
        raise UnavailableError(f"the layout of job {job!r} keeps changing: retry")

    def _check_job(self, job: str, ranges: int) -> None:
        if ranges > self._limits.ranges_per_job:
            raise LimitReachedError(
                f"job {job!r} has {ranges:,} ranges in all its stages",
                self._limits.ranges_per_job,
                "TIDEGAUGE_MAX_RANGES_PER_JOB",
            )

    async def _replace(
        self,
        old: StoredJob,
        spec: bytes,
        pipeline: Pipeline,
        deed: Deed | None,
        *,
        joined: str | None = None,
    ) -> StoredJob:
        job, before = old.installed.name, old.installed.pipeline
        # The replica that stored the old layout may have died before installing it. Promises are read,
        # and ranges carried over, from one layout to the next, so none may be skipped.
        await self._live.install(old.installed)
        changed = [
            name
            for name, stage in pipeline.stages.items()
            if name not in before.stages or before.stages[name].layout != stage.layout
        ]
        inherited: dict[str, Columns] = {}
        layouts: dict[str, tuple[Layout, Layout]] = {}
        for name in changed:
            old_ranges = before.stages[name].layout if name in before.stages else None
            new_ranges = pipeline.stages[name].layout
            if old_ranges is not None and new_ranges is not None:
                current = await self._live.columns(job, name)
                if len(current["promises"]) != len(old_ranges):
                    raise PreconditionFailedError(f"job {job!r} was changed by another request")
                layouts[name] = old_ranges, new_ranges
                # In a thread: a million ranges take a while.
                inherited[name] = await asyncio.to_thread(
                    inherited_columns, old_ranges, current, new_ranges
                )
        words = await asyncio.to_thread(differences, before, pipeline) if deed else dict[str, str]()
        stored = await self._ledger.replace(
            NewLayout(job, spec, changed, inherited, layouts, joined, words),
            old.installed.generation,
            old.installed.layout_version,
            self._clock.wall_ms(),
            deed,
        )
        if stored is None:
            raise PreconditionFailedError(
                f"job {job!r} was changed by another request: get it again"
            )
        await self._install(stored)
        return stored

    async def _install(self, stored: StoredJob) -> None:
        """Install in the live store a layout that is already in the ledger, before the response.

        From the commit on, the ledger rejects advances that were computed for the older layout. An
        advance from just before the commit is in `stored`, so it is visible before the response and not
        after it.
        """
        job = stored.installed.name
        await self._live.install(stored.installed)
        self._publisher.touch(job, stored.installed.stages)
        with suppress(UnavailableError):
            await self._live.flush(job)

    async def get(self, job: str) -> Specification:
        """Return a stored specification. Raises `UnknownJobError`.

        Watermarks are at least at the same generation. A reset that was answered 503, because the live
        store rejected it, is in the ledger. A client that read its generation here, and then waited for
        a watermark, would get a watermark of the generation before. Raises `UnavailableError` as long
        as this is possible.
        """
        found = await self._ledger.specification(job)
        shown = await self._live.shown(job)
        # Without a view, the live store may still have the generation before: its removal or its next
        # installation may have failed there.
        if shown is None or (shown.generation, shown.layout_version) < (
            found.generation,
            found.layout_version,
        ):
            await self._install(await self._ledger.get(job))
        return found

    async def jobs(self) -> Sequence[JobView | InstalledJob]:
        """Return every job. The watermarks may be out of date: `Reader.jobs` has current ones."""
        try:
            return await self._live.jobs()
        except UnavailableError:
            stored: list[InstalledJob] = []
            for head in await self._ledger.heads():
                # The job may have been deleted since.
                with suppress(UnknownJobError):
                    stored.append((await self._ledger.get(head.job)).installed)
            return stored

    @run_to_completion
    async def delete(self, job: str, by: Actor | None = None) -> None:
        """Delete a job, and wake its readers. Raises `UnknownJobError`."""
        async with self._layout_changes:
            deed = self._deed(Action.DELETE_JOB, by)
            generation = await self._ledger.delete(job, self._clock.wall_ms(), deed)
            await self._store.remove(job, generation)

    @run_to_completion
    async def reset(self, job: str, by: Actor | None = None) -> StoredJob:
        """Begin a job's next generation. Raises `UnknownJobError`."""
        async with self._layout_changes:
            deed = self._deed(Action.RESET_JOB, by)
            stored = await self._ledger.reset(job, self._clock.wall_ms(), deed)
            await self._install(stored)
            return stored


def _joined(stored: StoredJob, spec: PipelineSpec) -> dict[str, Sequence[str]]:
    """Return the joined shards that are not declared now."""
    return {
        name: [shard for shard in shards if shard not in set(spec.stages[name].shards or ())]
        for name, shards in (decode_spec(stored.spec).joined or {}).items()
        if name in spec.stages and spec.stages[name].dynamic
    }


def _declares_the_same(stored: StoredJob, spec: PipelineSpec) -> bool:
    """Return whether two equal pipelines are also specified alike.

    Layouts of dynamic sources contain joined shards besides the declared ones, and no pipeline has the
    expressions of its sources' watermarks, which only their executors need.
    """
    before = decode_spec(stored.spec).stages
    return all(
        before[name].watermark == stage.watermark
        and (not stage.dynamic or set(before[name].shards or ()) == set(stage.shards or ()))
        for name, stage in spec.stages.items()
    )


def _check_absent(precondition: Precondition, etag: str) -> None:
    if precondition.none_matches is not None and (
        "*" in precondition.none_matches or etag in precondition.none_matches
    ):
        raise PreconditionFailedError("the job already exists", etag=etag)


def _check_current(precondition: Precondition, etag: str) -> None:
    if precondition.matches is None:
        raise PreconditionRequiredError(
            f'the stored pipeline differs: send If-Match with its ETag "{etag}" to replace it'
        )
    if "*" not in precondition.matches and etag not in precondition.matches:
        raise PreconditionFailedError(f'the stored pipeline is at ETag "{etag}" now', etag=etag)
