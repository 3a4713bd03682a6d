"""The use cases: define, run, claim, report, commit, watch. It knows the two ports and no adapter.

What is said to the live store is checked and joined there, in one atomic step. What that moves goes
through the `Publisher`: first into the ledger, then to the readers. An answer that tells of an advance
is given once the advance is visible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import numpy as np

from service.clock import Clock
from service.errors import (
    LeaseConflictError,
    PreconditionFailedError,
    PreconditionRequiredError,
    ProblemError,
    UnavailableError,
    UnknownJobError,
    UnknownStageError,
)
from service.frontier.graph import Pipeline, Stage
from service.frontier.ranges import inherit
from service.last_seen import LastSeen
from service.ledger.port import Ledger, NewLayout
from service.live.port import LiveStore, Watch
from service.live_jobs import LiveJobs
from service.metrics import Metrics
from service.model.jobs import Census, InstalledJob, JobView, StageView, StoredJob
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.reports import Commit, RangeOrder, RangeView, Report, Reported
from service.publisher import Publisher
from service.reconciler import Reconciler
from service.spec import PipelineSpec, encode_spec
from service.tasks import to_its_end

log = logging.getLogger(__name__)

_TICK_S = 0.1
"""How soon the end of a lease is noticed if nobody asks: that ends idleness."""

_HISTORY_INTERVAL_MS = 600_000
"""How often the history is thinned."""

_RECONCILE_S = 1.0
"""How soon it is noticed, if nobody asks, that the live store is not up with the ledger."""

HEARTBEAT_S = 15.0
"""How long a stream of changes is silent at most."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of the history of watermarks is kept, by age in milliseconds."""

    fine_ms: int
    keep_ms: int


@dataclass(frozen=True, slots=True)
class Precondition:
    """What an author believes to be stored: entity tags, `*` (anything), or nothing said."""

    matches: frozenset[str] | None = None
    none_matches: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class StageState:
    """A stage as one reader sees it at one instant."""

    job: JobView
    name: str
    view: StageView
    census: Census

    @property
    def etag(self) -> str:
        """Changes with input, output or status, never comes back."""
        return f"{self.job.generation}-{self.view.version}"


@dataclass(frozen=True, slots=True)
class Change:
    """A stage that has changed, for a stream of changes."""

    state: StageState
    cursor: str | None
    """Where to go on after this one; None: amid several that belong together."""


def layout_etag(job: StoredJob) -> str:
    """Name the stored specification of a job: another one, another name."""
    return f"{job.installed.generation}-{job.installed.layout_version}"


class Aggregator:
    """The service without HTTP. Start it with `open`, let it go with `close`."""

    def __init__(
        self,
        live: LiveStore,
        ledger: Ledger,
        *,
        clock: Clock,
        metrics: Metrics,
        checkpoint_interval_ms: int,
        retention: Retention,
    ) -> None:
        self._store = live
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self._checkpoint_interval_ms = checkpoint_interval_ms
        self._retention = retention
        self._publisher = Publisher(live, ledger, clock, metrics)
        self._reconciler = Reconciler(live, ledger, self._publisher, clock, metrics)
        self._last_seen = LastSeen(ledger)
        self._live = LiveJobs(live, self._reconciler, self._publisher, self._last_seen, metrics)
        self._layout_changes = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._resources = AsyncExitStack()
        self.closing = False
        """Readers that wait are let go."""

    # ---- life

    async def open(self) -> None:
        """Open the stores, and bring every job that the live store does not know back from the ledger.

        A live store that is away delays that, and nothing else.
        """
        self._resources.push_async_callback(self._ledger.close)
        self._resources.push_async_callback(self._store.close)
        try:
            await self._ledger.open(exclusive=not self._store.shared)
            await self._store.open()
            try:
                await self._reconciler.reconcile()
                await self._publisher.round()
            except UnavailableError as error:
                log.warning("starting without the live store: %s", error.detail)
        except BaseException:
            await self._resources.aclose()
            raise
        work = (
            self._publisher.run,
            self._sweep,
            self._reconcile,
            self._checkpoint,
            self._thin_history,
        )
        for each in work:
            self._tasks.append(asyncio.create_task(_unfailing(each), name=each.__name__))

    def let_readers_go(self) -> None:
        """Answer every waiting reader now: the service is about to end."""
        self.closing = True
        self._store.let_go()

    async def close(self) -> None:
        """End the work in the background, publish and checkpoint once more, close the stores."""
        self.let_readers_go()
        # Told, not cancelled: a transaction that is cut off may or may not have been taken.
        self._ended.set()
        self._publisher.stop()
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        try:
            await self._publisher.round()
            await self._save_promises()
        except UnavailableError as error:
            log.warning("ending without a last checkpoint: %s", error.detail)
        finally:
            await self._resources.aclose()

    async def ready(self) -> None:
        """Return if the stores answer; raise `UnavailableError` otherwise."""
        await self._store.ping()
        await self._ledger.ping()

    def now_ms(self) -> int:
        """Return the time on the wall, for lag."""
        return self._clock.wall_ms()

    # ---- pipelines

    @to_its_end
    async def define(
        self, job: str, spec: PipelineSpec, precondition: Precondition
    ) -> tuple[StoredJob, bool]:
        """Store a pipeline; return it, and whether it is new.

        Raises `InvalidPipelineSpecError`, and, where the stored one differs, `PreconditionRequiredError`
        or `PreconditionFailedError`.
        """
        pipeline = spec.pipeline()
        async with self._layout_changes:
            stored = await self._stored(job)
            if stored is None:
                return await self._create(job, spec, pipeline, precondition), True
            etag = layout_etag(stored)
            _check_absent(precondition, etag)
            if stored.installed.pipeline == pipeline:
                return stored, False
            _check_current(precondition, etag)
            return await self._replace(stored, spec, pipeline), False

    async def _stored(self, job: str) -> StoredJob | None:
        try:
            return await self._ledger.get(job)
        except UnknownJobError:
            return None

    async def _create(
        self, job: str, spec: PipelineSpec, pipeline: Pipeline, precondition: Precondition
    ) -> StoredJob:
        if precondition.matches is not None:
            raise PreconditionFailedError(f"there is no job {job!r} yet: leave If-Match out")
        new = NewLayout(job, encode_spec(spec), tuple(pipeline.stages))
        stored = await self._ledger.create(new, self._clock.wall_ms())
        if stored is None:
            raise PreconditionFailedError(f"job {job!r} was created at the same time")
        await self._store.begin(stored.installed)
        return stored

    async def _replace(self, old: StoredJob, spec: PipelineSpec, pipeline: Pipeline) -> StoredJob:
        job, before = old.installed.name, old.installed.pipeline
        # Whoever stored that layout may not have come to install it: promises are read, and ranges
        # carried over, from one layout to the next, never past one.
        await self._live.install(old.installed)
        changed = [
            name
            for name, stage in pipeline.stages.items()
            if name not in before.stages or before.stages[name].layout != stage.layout
        ]
        promises: dict[str, bytes] = {}
        for name in changed:
            was = before.stages[name].layout if name in before.stages else None
            now = pipeline.stages[name].layout
            if was is not None and now is not None:
                said = await self._live.promises(job, name)
                if len(said) != len(was):
                    raise PreconditionFailedError(f"job {job!r} was changed at the same time")
                promises[name] = np.array(inherit(was, said, now), dtype="<i8").tobytes()
        stored = await self._ledger.replace(
            NewLayout(job, encode_spec(spec), changed, promises),
            old.installed.generation,
            old.installed.layout_version,
            self._clock.wall_ms(),
        )
        if stored is None:
            raise PreconditionFailedError(f"job {job!r} was changed at the same time: get it again")
        await self._install(stored)
        return stored

    async def _install(self, stored: StoredJob) -> None:
        """Bring the live store up to a layout that is already in the ledger, before it is answered.

        From the ledger's commit on it takes no advance that was computed for the older layout. One
        that it took just before is in `stored`, so readers see it before the answer, not after it.
        """
        job = stored.installed.name
        await self._live.install(stored.installed)
        self._publisher.touch(job, stored.installed.stages)
        with suppress(UnavailableError):
            await self._live.flush(job)

    async def definition(self, job: str) -> StoredJob:
        """Return a stored pipeline. Raises `UnknownJobError`."""
        return await self._ledger.get(job)

    async def jobs(self) -> Sequence[JobView | InstalledJob]:
        """Return every job; their watermarks may be old, see `shown` for those."""
        try:
            return await self._store.jobs()
        except UnavailableError:
            stored: list[InstalledJob] = []
            for head in await self._ledger.heads():
                # Or it is deleted at this moment.
                with suppress(UnknownJobError):
                    stored.append((await self._ledger.get(head.job)).installed)
            return stored

    async def shown(self) -> Sequence[JobView]:
        """Return every job as readers see it; while the live store is away, as many as can be shown."""
        try:
            jobs = await self._store.jobs()
        except UnavailableError:
            return await self._last_seen.jobs()
        for job in jobs:
            self._last_seen.note(job, {})
        return jobs

    @to_its_end
    async def delete(self, job: str) -> None:
        """Delete a job; its readers are let go. Raises `UnknownJobError`."""
        async with self._layout_changes:
            generation = await self._ledger.delete(job, self._clock.wall_ms())
            await self._store.remove(job, generation)

    @to_its_end
    async def reset(self, job: str) -> StoredJob:
        """Begin a job's next generation. Raises `UnknownJobError`."""
        async with self._layout_changes:
            stored = await self._ledger.reset(job, self._clock.wall_ms())
            await self._install(stored)
            return stored

    # ---- runs and leases

    @to_its_end
    async def open_run(self, job: str, stages: Sequence[str]) -> int:
        """Open a run for stages; older runs of them are fenced from the answer on."""
        for stage in stages:
            await self.stage_of(job, stage)
        run = await self._ledger.open_run(job, stages)
        await self._live.open_run(job, stages, run)
        self._publisher.touch(job, stages)
        return run

    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        """Claim ranges; see `LiveStore.claim`."""
        try:
            grant = await self._live.claim(job, stage, claim)
        except LeaseConflictError as error:
            self._metrics.ranges_denied.inc(len(error.denied))
            raise
        self._metrics.leases_granted.inc()
        if grant.denied:
            self._metrics.ranges_denied.inc(len(grant.denied))
        self._publisher.touch(job, (stage,))
        return grant

    async def renew(
        self, job: str, tokens: Sequence[str]
    ) -> tuple[Sequence[Renewal], Sequence[LostLease]]:
        """Renew leases; see `LiveStore.renew`."""
        return await self._live.renew(job, tokens)

    async def release(self, job: str, tokens: Sequence[str]) -> int:
        """Release leases; see `LiveStore.release`."""
        released = await self._live.release(job, tokens)
        self._publisher.touch(job, (await self._live.pipeline(job)).stages)
        return released

    # ---- reports

    async def stage_of(self, job: str, stage: str) -> Stage:
        """Say what kind of stage it is. Raises `UnknownJobError`, `UnknownStageError`."""
        found = (await self._live.pipeline(job, stage)).stages.get(stage)
        if found is None:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        return found

    async def report(self, job: str, stage: str, report: Report) -> tuple[Reported, StageView]:
        """Take a report; return what became of it and where the stage is then."""
        try:
            reported = await self._live.report(job, stage, report)
        except ProblemError as error:
            self._metrics.count_refused_report(error.slug)
            raise
        self._metrics.count_report(reported, waiting=report.epoch is not None)
        if not reported.advances:
            return reported, reported.view
        self._publisher.touch(job, (stage,))
        shown = None
        with suppress(UnavailableError):
            shown = await self._live.flush(job)
        # As the round has left it: whoever reads afresh finds that, or more.
        return reported, reported.view if shown is None else shown.stages.get(stage, reported.view)

    @to_its_end
    async def commit(
        self, job: str, commit: Commit
    ) -> tuple[Mapping[str, int], Mapping[str, StageState]]:
        """Commit an epoch; return how many ranges were applied, and where the stages are then.

        The answer means that it is durable. Raises `UnavailableError` if that takes too long: then
        it may be said again.
        """
        committed = await self._live.commit(job, commit)
        if committed.unrecorded:
            self._publisher.touch_epochs(
                job,
                (committed.incarnation, committed.generation),
                dict.fromkeys(committed.unrecorded, commit.epoch),
            )
        try:
            await self._live.flush(job)
        except UnavailableError:
            error = UnavailableError("the ledger has not taken the commit yet: say it again")
            raise error from None
        return committed.applied, await self._states(job, commit.stages)

    # ---- reading

    async def stage(self, job: str, stage: str) -> StageState:
        """Show where a stage is."""
        return await self._state(job, stage)

    async def snapshot(self, job: str) -> Mapping[str, StageState]:
        """Show where all stages of a job are, at one instant."""
        return await self._states(job)

    async def wait(
        self, job: str, stage: str, until: Callable[[StageState], bool], timeout_s: float
    ) -> StageState:
        """Return a stage once it is as asked for, or as it is when the time is over."""
        with self._store.watch(job, stage) as watch:
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        watch.rearm()
                        state = await self._state(job, stage)
                        if self.closing or until(state):
                            return state
                        await watch.wait()
            except TimeoutError:
                return await self._state(job, stage)

    async def changes(self, job: str, cursor: str | None) -> AsyncIterator[Sequence[Change]]:
        """Yield what has changed: at first every stage (or all since `cursor`), then each change.

        What happens while the reader is busy is folded: it gets the latest, and holds nobody up. An
        empty sequence comes after `HEARTBEAT_S` of silence. Ends with the job or the service.
        """
        seen: dict[str, int] = {}
        generation, revision = _read_cursor(cursor)
        with self._store.watch(job) as watch:
            while not self.closing:
                watch.rearm()
                try:
                    states = await self._states(job)
                except UnknownJobError:
                    return
                except UnavailableError:
                    if revision < 0 and not seen:
                        raise
                    await self._still_open(_RECONCILE_S)
                    yield ()
                    continue
                current = next(iter(states.values())).job.generation
                if current != generation:
                    generation, revision, seen = current, -1, {}
                fresh = [
                    state
                    for name, state in states.items()
                    if seen.get(name, -1) < state.view.version and state.view.revision > revision
                ]
                seen = {name: state.view.version for name, state in states.items()}
                revision = -1
                if fresh:
                    yield _changes(fresh, current)
                if not await _woken(watch):
                    yield ()

    async def ranges(
        self, job: str, stage: str, *, limit: int, order: RangeOrder
    ) -> Sequence[RangeView]:
        """Show ranges of a stage."""
        return await self._live.ranges(job, stage, limit=limit, order=order)

    async def _state(self, job: str, stage: str) -> StageState:
        try:
            found = await self._live.stage(job, stage)
            self._last_seen.note(found[0], {stage: found[2]})
        except UnavailableError as away:
            found = await self._last_seen.stage(job, stage, away)
        view, stage_view, census = found
        return StageState(view, stage, stage_view, census)

    async def _states(
        self, job: str, stages: Iterable[str] | None = None
    ) -> Mapping[str, StageState]:
        try:
            view, censuses = await self._live.snapshot(job)
            self._last_seen.note(view, censuses)
        except UnavailableError as away:
            view, censuses = await self._last_seen.snapshot(job, away)
            if censuses.keys() != view.stages.keys():
                raise
        chosen = view.stages if stages is None else stages
        return {
            name: StageState(view, name, view.stages[name], censuses[name])
            for name in chosen
            if name in view.stages
        }

    # ---- in the background

    async def _still_open(self, after_s: float) -> bool:
        """Wait; False at once if the service ends."""
        try:
            async with asyncio.timeout(after_s):
                await self._ended.wait()
        except TimeoutError:
            return True
        return False

    async def _sweep(self) -> None:
        while await self._still_open(_TICK_S):
            try:
                self._live.note_expired(await self._store.expire())
            except UnavailableError as error:
                log.debug("leases are looked at later: %s", error.detail)

    async def _reconcile(self) -> None:
        while await self._still_open(_RECONCILE_S):
            try:
                await self._reconciler.reconcile()
            except UnavailableError as error:
                log.warning("the stores are compared later: %s", error.detail)

    async def _checkpoint(self) -> None:
        while await self._still_open(self._checkpoint_interval_ms / 1_000):
            try:
                await self._save_promises()
            except UnavailableError as error:
                log.warning("the checkpoint waits: %s", error.detail)

    async def _save_promises(self) -> None:
        chunks = await self._store.unsaved()
        if chunks:
            await self._ledger.checkpoint(chunks)
            await self._store.mark_saved(chunks)

    async def _thin_history(self) -> None:
        while await self._still_open(_HISTORY_INTERVAL_MS / 1_000):
            now_ms = self._clock.wall_ms()
            try:
                await self._ledger.thin_history(
                    fine_until_ms=now_ms - self._retention.fine_ms,
                    keep_until_ms=now_ms - self._retention.keep_ms,
                )
            except UnavailableError as error:
                log.warning("the history is thinned later: %s", error.detail)


def _check_absent(precondition: Precondition, etag: str) -> None:
    if precondition.none_matches is not None and (
        "*" in precondition.none_matches or etag in precondition.none_matches
    ):
        raise PreconditionFailedError("the job exists already", etag=etag)


def _check_current(precondition: Precondition, etag: str) -> None:
    if precondition.matches is None:
        raise PreconditionRequiredError(
            f'the stored pipeline differs: send If-Match with its ETag "{etag}" to replace it'
        )
    if "*" not in precondition.matches and etag not in precondition.matches:
        raise PreconditionFailedError(f'the stored pipeline is at ETag "{etag}" now', etag=etag)


async def _unfailing(work: Callable[[], Awaitable[None]]) -> None:
    """Do work that must not end before the service does: what it did not expect is logged."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s failed, and goes on", getattr(work, "__name__", work))
            await asyncio.sleep(1)


async def _woken(watch: Watch) -> bool:
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            await watch.wait()
    except TimeoutError:
        return False
    return True


def _read_cursor(cursor: str | None) -> tuple[int, int]:
    """Read where a stream left off; one that says nothing to us begins at the beginning."""
    match (cursor or "").split("-"):
        case [generation, revision] if generation.isdecimal() and revision.isdecimal():
            return int(generation), int(revision)
        case _:
            return -1, -1


def _changes(fresh: Sequence[StageState], generation: int) -> Sequence[Change]:
    """Put changes in order. Stages that changed in one step share a revision, and only the last of
    them may be resumed after: a reader that got but the first would miss the others.
    """
    ordered = sorted(fresh, key=lambda state: state.view.revision)
    following = [state.view.revision for state in ordered[1:]] + [-1]
    return [
        Change(
            state, f"{generation}-{state.view.revision}" if state.view.revision != after else None
        )
        for state, after in zip(ordered, following, strict=True)
    ]
