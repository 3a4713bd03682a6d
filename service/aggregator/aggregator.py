"""The façade of the use cases: runs, leases, reports and commits, and the parts for the rest.

Reports are checked and joined in the live store, in one atomic step. The advances that follow go through
the `Publisher`: first into the ledger, then to the readers. A response that contains an advance is sent
only when the advance is visible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress

from service.aggregator.background import Background, Retention
from service.aggregator.changes import ChangesOfJobs
from service.aggregator.definitions import Definitions, Limits
from service.aggregator.dynamic_shards import DynamicShards
from service.aggregator.explain import Explainer
from service.aggregator.health import Examiner
from service.aggregator.history import History
from service.aggregator.idleness import IdlePolicies
from service.aggregator.keys import Keys
from service.aggregator.overview import Overviews
from service.aggregator.problems import Problems
from service.aggregator.range_summary import RangeSummaries
from service.aggregator.reader import Reader
from service.aggregator.retirements import Retirements
from service.aggregator.states import StageState
from service.aggregator.survey import survey
from service.aggregator.throttling import Throttling
from service.clock import Clock
from service.consistency.outage_reads import OutageReads
from service.consistency.publisher import Publisher
from service.consistency.reconciler import Reconciler
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.consistency.touched import Published
from service.errors import (
    InvalidRequestError,
    LeaseConflictError,
    ProblemError,
    StaleRunError,
    UnavailableError,
    UnknownStageError,
)
from service.frontier.graph import Stage
from service.frontier.health import Outcome
from service.ledger.port import Ledger
from service.live.port import LiveStore, UnknownShardsError
from service.model.audit import Action, Actor, Deed
from service.model.jobs import StageView
from service.model.keys import Key
from service.model.leases import Claim, Grant, LostLease, Renewal
from service.model.pipeline_spec import decode_spec
from service.model.reports import Commit, Report, Reported
from service.model.runs import NewRun, RunEnd, RunRecord
from service.tasks import Shutdown, run_to_completion
from service.telemetry.metrics import Metrics
from service.telemetry.stage_metrics import Survey

log = logging.getLogger(__name__)

_MAX_JOINS = 5
"""Attempts at a report while other requests change the shards of its source."""

_READY_FOR_MS = 250
"""Time for which a result of the readiness check is reused: each probe writes to the disk."""


class Aggregator:
    """The service without HTTP. Start it with `open`, end it with `close`."""

    def __init__(
        self,
        live: LiveStore,
        ledger: Ledger,
        *,
        clock: Clock,
        metrics: Metrics,
        checkpoint_interval_ms: int,
        retention: Retention,
        limits: Limits,
        metrics_stages: int = 2_000,
        operator_keys: Sequence[Key] = (),
        open_without_keys: bool = True,
    ) -> None:
        self._store = live
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self._metrics_stages = metrics_stages
        self._publisher = Publisher(live, ledger, clock, metrics)
        self._reconciler = Reconciler(live, ledger, self._publisher, clock, metrics)
        last_seen = OutageReads(ledger)
        self._live = RecoveringLiveStore(
            live, self._reconciler, self._publisher, last_seen, metrics
        )
        shutdown = Shutdown()
        self.keys = Keys(
            ledger,
            clock,
            operator=operator_keys,
            open_without=open_without_keys,
            shared=live.shared,
        )
        self.definitions = Definitions(live, self._live, ledger, self._publisher, clock, limits)
        self.throttling = Throttling(self._live, clock, shutdown)
        self.examiner = Examiner(self._live, self.throttling)
        self.retirements = Retirements(self._live, ledger, self._publisher, clock)
        self.explainer = Explainer(self._live, self.throttling, self.examiner, self.retirements)
        self.reader = Reader(
            live, self._live, last_seen, self.throttling, self.examiner, shutdown, clock
        )
        self.changes = ChangesOfJobs(ledger)
        self.history = History(self.reader, ledger, clock)
        self.problems = Problems(self.reader, self.examiner, clock)
        self.overviews = Overviews(self.reader, self.problems.jobs_if_available, clock)
        self.range_summaries = RangeSummaries(self._live, self.examiner)
        self._background = Background(
            live,
            self._live,
            ledger,
            self._publisher,
            self._reconciler,
            self.keys,
            IdlePolicies(live, self._live, self.throttling, self._publisher, clock),
            DynamicShards(live, self._live, self.definitions),
            clock,
            shutdown,
            checkpoint_interval_ms=checkpoint_interval_ms,
            retention=retention,
        )
        self._resources = AsyncExitStack()
        self._probing = asyncio.Lock()
        self._ready_until_ms = 0

    # ---- life cycle

    async def open(self) -> None:
        """Open the stores, and restore every job that the live store has lost.

        If the live store does not answer, the background work restores them later.
        """
        self._resources.push_async_callback(self._ledger.close)
        self._resources.push_async_callback(self._store.close)
        try:
            await self._ledger.open(exclusive=not self._store.shared)
            await self.keys.refresh()
            await self._store.open()
            try:
                await self._reconciler.reconcile()
                await self._publisher.publish_all()
            except UnavailableError as error:
                log.warning("starting without the live store: %s", error.detail)
        except BaseException:
            await self._resources.aclose()
            raise
        self._background.start()

    async def close(self) -> None:
        """End the background work, publish and checkpoint once more, close the stores."""
        self.reader.release()
        try:
            await self._background.stop()
        except UnavailableError as error:
            log.warning("ending without a last checkpoint: %s", error.detail)
        finally:
            await self._resources.aclose()

    async def ready(self) -> None:
        """Return if the stores take writes; raise `UnavailableError` otherwise.

        Within a short time, calls share one result.
        """
        async with self._probing:
            if self._clock.steady_ms() < self._ready_until_ms:
                return
            await self._store.ping()
            await self._ledger.ping()
            self._ready_until_ms = self._clock.steady_ms() + _READY_FOR_MS

    def now_ms(self) -> int:
        """Return the wall-clock time, for lag."""
        return self._clock.wall_ms()

    async def survey(self) -> Survey:
        """Return the stages with metrics. Raises `UnavailableError`."""
        return await survey(self.reader, self.throttling, self._metrics_stages)

    # ---- runs and leases

    @run_to_completion
    async def open_run(self, job: str, run: NewRun, by: Actor | None = None) -> int:
        """Open a run. Once this returns, older runs of its stages are fenced."""
        for stage in run.stages:
            await self.find_stage(job, stage)
        at_ms = self._clock.wall_ms()
        deed = None if by is None else Deed(Action.OPEN_RUN, by, at_ms)
        number = await self._ledger.open_run(job, run, at_ms, deed)
        await self._live.open_run(job, run.stages, number)
        self._publisher.touch(job, run.stages)
        return number

    @run_to_completion
    async def end_run(
        self, job: str, run: int, outcome: Outcome, because: str, by: Actor | None = None
    ) -> RunEnd:
        """End a run; return its end: the first one, if it has already ended.

        Its leases are released. Promises do not change. Only the idleness of its ranges ends with the
        leases, and has consequences to publish. Raises `UnknownRunError`, `StaleRunError`.
        """
        at_ms = self._clock.wall_ms()
        deed = None if by is None else Deed(Action.END_RUN, by, at_ms)
        ended = await self._ledger.end_run(job, RunEnd(run, outcome, at_ms, because), deed)
        # Also if it had ended before: the earlier request may have failed before this point.
        await self._live.end_run(job, ended.stages, ended.end)
        self._publisher.touch(job, ended.stages)
        return ended.end

    async def runs(
        self, job: str, limit: int, before: int | None = None, stage: str | None = None
    ) -> Sequence[RunRecord]:
        """Return the newest runs of a job, newest first; see `Ledger.runs`."""
        return await self._ledger.runs(job, limit, before, stage)

    async def check_filter(self, job: str, stage: str) -> None:
        """Check that a stage is, or was, one of the job: a run was opened for it, or it is specified.

        Raises `UnknownJobError`, `UnknownStageError`.
        """
        if await self._ledger.runs(job, 1, None, stage):
            return
        found = await self._ledger.specification(job)
        if stage not in decode_spec(found.spec).stages:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")

    async def claim(self, job: str, stage: str, claim: Claim) -> Grant:
        """Claim ranges; see `LiveStore.claim`. New shards join a dynamic source."""
        try:
            grant = await self._claim(job, stage, claim)
        except LeaseConflictError as error:
            self._metrics.denied_ranges.inc(error.total)
            raise
        except StaleRunError as error:
            raise await self._naming_holder(job, error) from None
        self._metrics.count_grant(grant)
        self._publisher.touch(job, (stage,))
        if grant.returned:
            await self._order_return(job)
        return grant

    async def _claim(self, job: str, stage: str, claim: Claim) -> Grant:
        refusal: LeaseConflictError | None = None
        grant: Grant | None = None
        try:
            grant = await self._live.claim(job, stage, claim)
            is_whole = not any(denied.reason == "unknown" for denied in grant.denied)
        except LeaseConflictError as error:
            refusal, is_whole = error, False
        # Shards join only by a claim of the stage's run: one of an older run was rejected.
        if not is_whole and claim.ranges is not None:
            found = await self.find_stage(job, stage)
            if found.policy.is_dynamic and found.layout is not None:
                index = found.layout.index
                joining = [name for name in claim.ranges if name not in index]
                if joining:
                    try:
                        await self.definitions.join(job, stage, joining)
                    except InvalidRequestError:
                        if grant is not None:
                            await self._live.release(job, [grant.token])
                        raise
                    return await self._live.claim(job, stage, claim)
        if grant is None:
            raise refusal or LeaseConflictError("nothing was granted", (), 0)
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

    async def _naming_holder(self, job: str, error: StaleRunError) -> StaleRunError:
        """Add the holder of the newer run to the error. Only the ledger has it."""
        holder: str | None = None
        if error.run is not None:
            # Without the ledger, the error has only the number of the run.
            with suppress(UnavailableError):
                holder = await self._ledger.run_holder(job, error.run)
        return error if holder is None else error.opened_by(holder)

    # ---- reports

    async def find_stage(self, job: str, stage: str) -> Stage:
        """Return a stage of the pipeline. Raises `UnknownJobError`, `UnknownStageError`."""
        found = (await self._live.pipeline(job, stage)).stages.get(stage)
        if found is None:
            raise UnknownStageError(f"job {job!r} has no stage {stage!r}")
        return found

    async def report(self, job: str, stage: str, report: Report) -> tuple[Reported, StageView]:
        """Apply a report; return its result, and the stage's view after it.

        Shards that the report claims join a dynamic source first.
        """
        try:
            reported = await self._report(job, stage, report)
        except ProblemError as error:
            self._metrics.count_refused_report(error.slug)
            if isinstance(error, LeaseConflictError):
                self._metrics.denied_ranges.inc(error.total)
            if isinstance(error, StaleRunError):
                raise await self._naming_holder(job, error) from None
            raise
        if reported.grant is not None:
            self._metrics.count_grant(reported.grant)
        self._metrics.count_report(job, stage, report, reported, waiting=report.epoch is not None)
        published: Published = None
        if reported.returned or reported.ends_retirement:
            # The end of a retirement is saved, too: else the range would be retired again after a loss
            # of the live store, and the watermark would pass rows of a report that was accepted.
            self._publisher.touch(job, (stage,), saves=reported.ends_retirement)
            published = await self._order_return(job)
        elif reported.advances:
            self._publisher.touch(job, (stage,))
            with suppress(UnavailableError):
                published = await self._live.flush(job)
        if published is None:
            return reported, reported.view
        # As published by that round: later reads return this view, or a newer one.
        return reported, published.stages.get(stage, reported.view)

    async def _order_return(self, job: str) -> Published:
        """Wait for the revision after a range has returned (see `awaits_revision`); return the job."""
        try:
            return await self._live.flush(job)
        except UnavailableError:
            raise UnavailableError(
                "the ledger has not recorded yet that a range is waited for again: retry"
            ) from None

    async def _report(self, job: str, stage: str, report: Report) -> Reported:
        for _ in range(_MAX_JOINS):
            try:
                return await self._live.report(job, stage, report)
            except UnknownShardsError as error:
                # The store has checked the report already: one that is refused lets nothing join.
                await self.definitions.join(job, stage, error.shards)
        raise UnavailableError(f"the shards of stage {stage!r} keep changing: retry")

    @run_to_completion
    async def commit(
        self, job: str, commit: Commit
    ) -> tuple[Mapping[str, int], Mapping[str, StageState]]:
        """Commit an epoch; return the number of applied ranges, and the stages' states after it.

        Once this returns, the commit is durable. Raises `UnavailableError` after a timeout: then
        the commit may be retried.
        """
        try:
            committed = await self._live.commit(job, commit)
        except StaleRunError as error:
            raise await self._naming_holder(job, error) from None
        if committed.unrecorded:
            self._publisher.touch_epochs(
                job,
                (committed.incarnation, committed.generation),
                dict.fromkeys(committed.unrecorded, commit.epoch),
            )
        try:
            await self._live.flush(job)
        except UnavailableError:
            error = UnavailableError("the ledger has not recorded the commit yet: retry")
            raise error from None
        return committed.applied, await self.reader.snapshot(job, commit.stages, soft=False)
