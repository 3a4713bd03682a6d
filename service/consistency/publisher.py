"""Publishing: agreements go into the ledger, then into the live store, and only then are they visible.

Advances that arrive during a round wait for the next one and share its transaction, so the disk is
written once a round, not once a report. Under load, a round first waits a moment for more of them (group
commit: DeWitt et al., Implementation Techniques for Main Memory Database Systems, 1984).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from service.clock import Clock
from service.consistency.failures import PublishFailures
from service.consistency.records import record_jobs, record_of
from service.consistency.touched import (
    MOST_LINKS,
    LiveState,
    Published,
    TouchedJob,
    drop_unchanged,
    overtaken,
    requeue,
)
from service.errors import UnavailableError
from service.ledger.port import JobRecord, Ledger, Recorded
from service.live.port import LiveStore, StateLostError
from service.model.jobs import JobView
from service.tasks import side_by_side
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import SWITCH

log = logging.getLogger(__name__)

_GATHER_S = 0.005
"""Wait of a round for the requests that the last round answered."""

_JOBS_A_ROUND = 100
"""Number of jobs in a round that nobody waits for. After a loss, all jobs wait to be looked at."""

_AT_ONCE = 16
"""Number of jobs that a round reads and makes visible at once: a shared live store is a trip away."""

_RETRY_FIRST_S, _RETRY_LAST_S = 0.05, 1.0

_Prepared = tuple[JobView, JobRecord]
"""A record, with the view that it is based on."""

_Moved = Literal["moved"]
"""A job that is to be read again, in the same round."""


class Publisher:
    """Moves advances from the live store into the ledger, and then makes them visible to readers."""

    def __init__(self, live: LiveStore, ledger: Ledger, clock: Clock, metrics: Metrics) -> None:
        self._live = live
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self.failures = PublishFailures()
        self._touched: dict[str, TouchedJob] = {}
        self._under_way: dict[str, TouchedJob] = {}
        self._wake = asyncio.Event()
        self._all_arrived = asyncio.Event()
        self._touches = 0
        """Number of calls of `touch` since the last round began."""
        self._expected = 0
        """Number of calls for which the next round waits."""
        self._is_away = False  # A store, in the last round.
        self._stopped = False

    def touches(self) -> Mapping[str, int]:
        """Return the number of changes of each job that waits for a round."""
        return {job: touched.touches for job, touched in self._touched.items()}

    def drop_deleted(self, jobs: Mapping[str, int]) -> None:
        """Drop deleted jobs, unless they were touched since they had this number of changes."""
        drop_unchanged(self._touched, jobs)

    def touch(self, job: str, stages: Iterable[str], *, saves: bool = False) -> None:
        """Let the next round publish what these stages agree on.

        With `saves`, in one transaction with the checkpoint of the job's changed ranges.
        """
        touched = self._touch(job)
        touched.stages.update(stages)
        touched.saves |= saves

    def touch_epochs(self, job: str, state: LiveState, epochs: Mapping[str, int]) -> None:
        """Let the next round record these epochs, and publish what they have advanced."""
        touched = self._touch(job)
        touched.stages.update(epochs)
        touched.add_epochs(state, epochs)

    def _touch(self, job: str) -> TouchedJob:
        touched = self._touched.get(job)
        if touched is None:
            touched = self._touched[job] = TouchedJob(self._clock.steady_ms())
        tracing = SWITCH.tracing
        if tracing is not None and len(touched.requests) < MOST_LINKS:
            requester = tracing.requester()
            if requester is not None:
                touched.requests.append(requester)
        touched.touches += 1
        self._touches += 1
        if self._touches >= self._expected:
            self._all_arrived.set()
        self._wake.set()
        return touched

    async def flush(self, job: str) -> Published:
        """Wait until everything that was touched in the job before this call is visible.

        Returns the job as published, or None if nothing was touched or its state was lost. Raises
        `UnavailableError` at once while a store does not answer: else waiting requests would pile up.
        """
        published: Published = None
        for pending in (self._under_way.get(job), self._touched.get(job)):
            if pending is None:
                continue
            if pending.last_error is not None:
                raise UnavailableError(pending.last_error)
            pending.is_awaited = True
            # Shielded: one request that gives up must not cancel what others wait for.
            published = await asyncio.shield(pending.done)
        return published

    async def run(self) -> None:
        """Run rounds until `stop`."""
        retry_s, loop = _RETRY_FIRST_S, asyncio.get_running_loop()
        waking: asyncio.TimerHandle | None = None
        while not self._stopped:
            await self._wake.wait()
            await self._gather()
            self._wake.clear()
            touches, self._touches = self._touches, 0
            if await self.round():
                retry_s = _RETRY_FIRST_S
            elif self._is_away:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_LAST_S)
                self._wake.set()
            elif waking is None or waking.when() <= loop.time():
                # Another replica changes the jobs that are left. All others go on meanwhile.
                waking = loop.call_later(retry_s, self._wake.set)
                retry_s = min(2 * retry_s, _RETRY_LAST_S)
            # Those who were answered may report again, and those who came meanwhile already wait.
            self._expected = touches + self._touches

    async def _gather(self) -> None:
        """After a round with several callers, wait a moment for them to report again.

        Else two rounds would alternate, each with half of the reports and at the cost of a full one. A
        single caller never waits, and nobody waits for long.
        """
        if self._expected > 1 and self._touches < self._expected and not self._stopped:
            self._all_arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._all_arrived.wait()

    def stop(self) -> None:
        """Let `run` end after the current round."""
        self._stopped = True
        self._all_arrived.set()
        self._wake.set()

    async def publish_all(self) -> None:
        """Publish what is touched now, without `run`; return at the first failure."""
        while self._touched and await self.round():
            pass

    async def round(self) -> bool:
        """Publish jobs that are touched now: all of them, or if they are many, first those for which
        requests wait.

        Returns False if a job could not be published. Such a job stays touched, as do those left over.
        """
        self._under_way, self._is_away = self._take(), False
        tracing = SWITCH.tracing
        requests = [each for touched in self._under_way.values() for each in touched.requests]
        if tracing is None or not requests:
            return await self._round()
        with tracing.publication(requests[:MOST_LINKS]) as span:
            is_done = await self._round()
            span.set_attribute("tidegauge.complete", is_done)
            return is_done

    def _take(self) -> dict[str, TouchedJob]:
        taken, self._touched = self._touched, {}
        if len(taken) > _JOBS_A_ROUND:
            unawaited = [job for job, touched in taken.items() if not touched.is_awaited]
            self._touched = {job: taken.pop(job) for job in unawaited[_JOBS_A_ROUND:]}
            if self._touched:
                self._wake.set()
        return taken

    async def _round(self) -> bool:
        left: dict[str, TouchedJob] = dict(self._under_way)
        try:
            for job, published in (await self._publish(self._under_way)).items():
                left.pop(job).resolve(published)
        except Exception as error:
            # Unexpected, so it is logged and raised to those who wait; the next round goes on.
            log.exception("publishing failed")
            self._metrics.publish_failures.inc()
            for job, touched in left.items():
                self._drop(job, touched, error)
            left.clear()
        finally:
            self.failures.end_round(self._under_way)
            self._under_way = {}
            for job, touched in left.items():
                requeue(self._touched, job, touched)
        return not left

    def _fail_waiting(
        self, touched: Mapping[str, TouchedJob], waiting: Mapping[str, UnavailableError]
    ) -> None:
        """Fail the requests that wait for these jobs, each by its error. All stay touched."""
        for job, error in waiting.items():
            touched[job].fail(error)
            self.failures.note(job, self._clock.wall_ms(), error)
        if waiting:
            self._is_away = True
            first = next(iter(waiting.values()))
            log.warning("cannot publish %d jobs now, retrying: %s", len(waiting), first.detail)
            self._metrics.publish_failures.inc()

    async def _publish(self, touched: Mapping[str, TouchedJob]) -> Mapping[str, Published]:
        """Publish; return the jobs that are done."""
        done, moved = await self._attempt(touched, first=True)
        if moved:
            # The replica that changed them may have published our reports, too: then nothing is left.
            left = {job: touched[job] for job in moved}
            done |= (await self._attempt(left, first=False))[0]
        return done

    async def _attempt(
        self, touched: Mapping[str, TouchedJob], *, first: bool
    ) -> tuple[dict[str, Published], list[str]]:
        """Read, record and publish; return the jobs that are done, and those that changed meanwhile.

        The latter have to be read again: another replica has recorded something, or has changed the
        incarnation, generation or layout, which it installs in the live store next.
        """
        done, prepared = await self._prepare_all(touched, first=first)
        if not prepared:
            return done, []
        try:
            taken, rejected = await record_jobs(
                self._ledger, [record for _, record in prepared], self._clock.wall_ms()
            )
        except UnavailableError as error:
            self._fail_waiting(touched, {record.job: error for _, record in prepared})
            return done, []
        for job, error in rejected.items():
            log.error("cannot record job %s, passing over it: %s", job, error.detail)
            self._metrics.publish_failures.inc()
            self._drop(job, touched[job], error)
        done |= dict.fromkeys(rejected)
        prepared = [each for each in prepared if each[1].job not in rejected]
        shown = await side_by_side(
            prepared,
            lambda each: self._show(*each, taken.get(each[1].job), touched[each[1].job]),
            _AT_ONCE,
        )
        moved: list[str] = []
        waiting: dict[str, UnavailableError] = {}
        for (_, record), outcome in zip(prepared, shown, strict=True):
            if outcome == "moved":
                moved.append(record.job)
            elif isinstance(outcome, UnavailableError):
                waiting[record.job] = outcome
            else:
                done[record.job] = outcome
        self._fail_waiting(touched, waiting)
        return done, moved

    def _drop(self, job: str, pending: TouchedJob, error: Exception) -> None:
        """Fail the requests that wait for a job. The reconciler touches the job again."""
        self.failures.note_dropped(job, self._clock.wall_ms(), error)
        pending.reject(error)

    async def _show(
        self, view: JobView, record: JobRecord, recorded: Recorded | None, pending: TouchedJob
    ) -> Published | _Moved | UnavailableError:
        """Make visible what was recorded; None: the ledger has not taken the record."""
        if recorded is None:
            pending.last_error = None
            return "moved"
        try:
            await self._make_visible(record, recorded, pending.since_ms)
        except UnavailableError as error:
            return error
        except StateLostError:
            # The ledger has it, but readers have not, and whoever waits is shown what they see. So
            # it is read again: that fails those who wait, or finds that the state is back.
            return "moved"
        except Exception as error:
            # One job's trouble is no other job's. The ledger has it; the reconciler shows it.
            log.exception("cannot show what was recorded for job %s", record.job)
            self._drop(record.job, pending, error)
            return None
        again = overtaken(view.pipeline, record, recorded)
        if again:
            pending.stages |= again
            pending.epochs = {}
            return "moved"
        stages = {**view.stages, **recorded.views}
        return replace(view, revision=recorded.revision, stages=stages)

    async def _prepare_all(
        self, touched: Mapping[str, TouchedJob], *, first: bool
    ) -> tuple[dict[str, Published], list[_Prepared]]:
        """Prepare the records; return the jobs that have nothing to record, and the records of the
        others, each with the view that it is based on.
        """
        done: dict[str, Published] = {}
        prepared: list[_Prepared] = []
        outcomes = await side_by_side(
            list(touched), lambda job: self._try_prepare(job, touched[job], first=first), _AT_ONCE
        )
        waiting: dict[str, UnavailableError] = {}
        for job, outcome in zip(touched, outcomes, strict=True):
            if isinstance(outcome, tuple):
                prepared.append(outcome)
            elif isinstance(outcome, UnavailableError):
                waiting[job] = outcome
            else:
                done[job] = outcome
        self._fail_waiting(touched, waiting)
        return done, prepared

    async def _try_prepare(
        self, job: str, pending: TouchedJob, *, first: bool
    ) -> _Prepared | Published | UnavailableError:
        try:
            view, record = await self._prepare(job, pending, first=first)
        except StateLostError:
            # The job was deleted, or its state was lost: restoring that touches all its stages.
            pending.reject(UnavailableError("the job's state was lost: retry"))
            return None
        except UnavailableError as error:
            return error
        except Exception as error:
            log.exception("cannot read job %s to publish it", job)
            self._drop(job, pending, error)
            return None
        if pending.are_lost(view):
            # Whoever commits an epoch is answered only when it is durable. These are gone with the
            # state that they were committed in: it was restored, or reset, since.
            pending.reject(UnavailableError("the job's state was lost: retry"))
        return view if record is None else (view, record)

    async def _make_visible(self, record: JobRecord, recorded: Recorded, since_ms: int) -> None:
        await self._live.publish(
            record.job, record.generation, recorded.revision, recorded.views, record.epochs
        )
        await self._live.note_saved(record.chunks)
        self._metrics.advances.inc(len(recorded.views))
        self._metrics.publish_seconds.observe((self._clock.steady_ms() - since_ms) / 1_000)

    async def _prepare(
        self, job: str, touched: TouchedJob, *, first: bool
    ) -> tuple[JobView, JobRecord | None]:
        """Read a job and prepare its record; None: there is nothing to record."""
        stages = set(touched.stages)
        while True:
            view, agreements = await self._live.agreements(job, frozenset(stages))
            published = {name: stage.watermark for name, stage in view.stages.items()}
            idle = {name for name, watermark in published.items() if watermark.idle}
            if idle <= stages:
                break
            # A stage that is published as idle may no longer be: its lease may have run out since.
            # Before others advance without it, its own agreement is read, too.
            stages |= idle
        advances = view.pipeline.propagate(
            published, agreements, stages & view.pipeline.stages.keys()
        )
        epochs = touched.epochs if touched.state == (view.incarnation, view.generation) else {}
        # The promises of a committed epoch are saved with it: after a crash nobody would report them
        # again.
        chunks = await self._live.unsaved(job) if epochs or touched.saves else ()
        # Answers to ranges that have returned wait for a revision, also if nothing advances.
        has_returned = any(each.has_returned for each in agreements.values())
        if not (advances or epochs or chunks or has_returned):
            return view, None
        return view, record_of(view, agreements, advances, epochs, chunks, first=first)
