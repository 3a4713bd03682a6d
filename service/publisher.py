"""Publishing: what the ranges agree on goes into the ledger, then into the live store, and only then is
it seen.

Advances that arrive while a round is under way wait for the next one and share its transaction, so the
disk is asked once a round, not once a report. Under load the next one waits a moment for more of them
(group commit: DeWitt et al., Implementation Techniques for Main Memory Database Systems, 1984).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from service.clock import Clock
from service.errors import UnavailableError
from service.frontier.graph import Pipeline
from service.ledger.port import JobRecord, Ledger, Recorded
from service.live.port import LiveStore, StateLostError
from service.metrics import Metrics
from service.model.jobs import JobView

log = logging.getLogger(__name__)

_GATHER_S = 0.005
"""How long a round waits for those whom the last one answered."""

_RETRY_FIRST_S = 0.05
_RETRY_LAST_S = 1.0


Shown = JobView | None
"""The job as a round has left it; None: its state was lost, and is being restored."""


def _new_future() -> asyncio.Future[Shown]:
    return asyncio.get_running_loop().create_future()


LiveState = tuple[int, int]
"""Incarnation and generation."""


@dataclass(slots=True)
class _Touched:
    """What has happened to a job since its last round, and who waits for it to be visible."""

    since_ms: int
    stages: set[str] = field(default_factory=set[str])
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    state: LiveState = (0, 0)
    """That the epochs were committed in: a reset, or a loss, forgets them."""
    trouble: str | None = None
    """Why it did not get through to the stores when it was tried last."""
    done: asyncio.Future[Shown] = field(default_factory=_new_future)

    def add_epochs(self, state: LiveState, epochs: Mapping[str, int]) -> None:
        if state < self.state:
            return
        if state > self.state:
            self.epochs = {}
        self.state = state
        self.epochs.update(epochs)

    def fail(self, error: UnavailableError) -> None:
        """Tell those who wait; it stays touched, for the next round, and whoever waits for that."""
        _fail(self.done, error)
        self.done = _new_future()
        self.trouble = error.detail


class Publisher:
    """Carries advances from the live store through the ledger to the readers."""

    def __init__(self, live: LiveStore, ledger: Ledger, clock: Clock, metrics: Metrics) -> None:
        self._live = live
        self._ledger = ledger
        self._clock = clock
        self._metrics = metrics
        self._touched: dict[str, _Touched] = {}
        self._under_way: dict[str, _Touched] = {}
        self._wake = asyncio.Event()
        self._all_said = asyncio.Event()
        self._said = 0
        """How often something was touched since the last round began."""
        self._expected = 0
        """How often it is to be, for the next one to begin at once."""
        self._stopped = False

    def touch(self, job: str, stages: Iterable[str]) -> None:
        """Ask for the next round to look at these stages."""
        self._touch(job).stages.update(stages)

    def touch_epochs(self, job: str, state: LiveState, epochs: Mapping[str, int]) -> None:
        """Ask for the next round to record these epochs, and what they have moved."""
        touched = self._touch(job)
        touched.stages.update(epochs)
        touched.add_epochs(state, epochs)

    def _touch(self, job: str) -> _Touched:
        touched = self._touched.get(job)
        if touched is None:
            touched = self._touched[job] = _Touched(self._clock.steady_ms())
        self._said += 1
        if self._said >= self._expected:
            self._all_said.set()
        self._wake.set()
        return touched

    async def flush(self, job: str) -> Shown:
        """Return once everything that was touched in the job before this call is visible: the job as it
        was shown then, or None if nothing had been touched or its state was lost.

        Raises `UnavailableError` at once while a store is away: to wait for it would only pile up.
        """
        shown: Shown = None
        for pending in (self._under_way.get(job), self._touched.get(job)):
            if pending is None:
                continue
            if pending.trouble is not None:
                raise UnavailableError(pending.trouble)
            # Shielded: one reader that gives up must not cancel what others wait for.
            shown = await asyncio.shield(pending.done)
        return shown

    async def run(self) -> None:
        """Do round after round, until `stop`."""
        retry_s = _RETRY_FIRST_S
        while not self._stopped:
            await self._wake.wait()
            await self._gather()
            self._wake.clear()
            answered, self._said = self._said, 0
            if await self.round():
                retry_s = _RETRY_FIRST_S
            else:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_LAST_S)
            # Who was answered may come back, and who came meanwhile waits already.
            self._expected = answered + self._said

    async def _gather(self) -> None:
        """After a round of several, wait a moment for those whom it answered.

        Else two rounds would take turns, each with half of the reports and at the cost of a whole one.
        Who is alone waits for nobody, and nobody waits for long.
        """
        if self._expected > 1 and self._said < self._expected and not self._stopped:
            self._all_said.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._all_said.wait()

    def stop(self) -> None:
        """Let `run` end after the round that is under way."""
        self._stopped = True
        self._all_said.set()
        self._wake.set()

    async def round(self) -> bool:
        """Publish what is touched now. False: it was not all taken, and the rest is still touched."""
        self._under_way, self._touched = self._touched, {}
        left: dict[str, _Touched] = dict(self._under_way)
        try:
            for job, shown in (await self._publish(self._under_way)).items():
                _resolve(left.pop(job).done, shown)
        except Exception as error:
            # Not to be survived in silence: those who wait are told, and the loop goes on for others.
            log.exception("publishing failed")
            for touched in left.values():
                _fail(touched.done, error)
            left.clear()
        finally:
            self._under_way = {}
            for job, touched in left.items():
                self._put_back(job, touched)
        return not left

    def _wait_with(self, touched: Iterable[_Touched], error: UnavailableError) -> None:
        log.warning("publishing waits: %s", error.detail)
        self._metrics.publish_failures.inc()
        for each in touched:
            each.fail(error)

    def _put_back(self, job: str, touched: _Touched) -> None:
        """Let a job that was not taken go into the next round, with all who wait for it."""
        newer = self._touched.get(job)
        if newer is not None:
            touched.stages |= newer.stages
            touched.add_epochs(newer.state, newer.epochs)
            touched.done.add_done_callback(lambda done: _hand_on(done, newer.done))
        self._touched[job] = touched
        self._wake.set()

    async def _publish(self, touched: Mapping[str, _Touched]) -> Mapping[str, Shown]:
        """Publish; return the jobs that are done with."""
        done, moved = await self._attempt(touched, first=True)
        if moved:
            # What moved them may have taken our reports along, and then there is nothing left to do.
            left = {job: touched[job] for job in moved}
            done |= (await self._attempt(left, first=False))[0]
        return done

    async def _attempt(
        self, touched: Mapping[str, _Touched], *, first: bool
    ) -> tuple[dict[str, Shown], list[str]]:
        """Look, record and show; return the jobs that are done with, and those that had moved meanwhile.

        Those have another incarnation, generation or layout by now, and whoever changed it installs that
        in the live store next; or another replica recorded something. Either way they are to be looked
        at afresh.
        """
        done, plans = await self._plans(touched, first=first)
        if not plans:
            return done, []
        try:
            taken = await self._ledger.record([r for _, r in plans], self._clock.wall_ms())
        except UnavailableError as error:
            self._wait_with([touched[view.name] for view, _ in plans], error)
            return done, []
        moved: list[str] = []
        for view, record in plans:
            recorded = taken.get(record.job)
            if recorded is None:
                touched[record.job].trouble = None
                moved.append(record.job)
                continue
            try:
                await self._show(record, recorded, touched[record.job].since_ms)
            except UnavailableError as error:
                self._wait_with([touched[record.job]], error)
            except StateLostError:
                # It is in the ledger, and whoever restores the job's state begins with that.
                done[record.job] = None
            else:
                overtaken = _overtaken(view.pipeline, record, recorded)
                if overtaken:
                    touched[record.job].stages |= overtaken
                    touched[record.job].epochs = {}
                    moved.append(record.job)
                    continue
                stages = {**view.stages, **recorded.views}
                done[record.job] = replace(view, revision=recorded.revision, stages=stages)
        return done, moved

    async def _plans(
        self, touched: Mapping[str, _Touched], *, first: bool
    ) -> tuple[dict[str, Shown], list[tuple[JobView, JobRecord]]]:
        """Work out what there is to record; return the jobs that have nothing, and the records, each
        with what it rests on.
        """
        done: dict[str, Shown] = {}
        plans: list[tuple[JobView, JobRecord]] = []
        for job, what in touched.items():
            try:
                view, record = await self._plan(job, what, first=first)
            except StateLostError:
                # Deleted, or lost: then whoever restores it touches all of it afresh.
                _fail(what.done, UnavailableError("the job's state was lost: say it again"))
                done[job] = None
            except UnavailableError as error:
                self._wait_with([what], error)
            else:
                if record is None:
                    done[job] = view
                else:
                    plans.append((view, record))
        return done, plans

    async def _show(self, record: JobRecord, recorded: Recorded, since_ms: int) -> None:
        await self._live.publish(
            record.job, record.generation, recorded.revision, recorded.views, record.epochs
        )
        await self._live.mark_saved(record.chunks)
        self._metrics.advances.inc(len(recorded.views))
        self._metrics.publish_seconds.observe((self._clock.steady_ms() - since_ms) / 1_000)

    async def _plan(
        self, job: str, touched: _Touched, *, first: bool
    ) -> tuple[JobView, JobRecord | None]:
        """Look at a job, and work out what it has to record; None: nothing."""
        stages = set(touched.stages)
        while True:
            view, agreements = await self._live.agreements(job, frozenset(stages))
            published = {name: stage.watermark for name, stage in view.stages.items()}
            idle = {name for name, watermark in published.items() if watermark.idle}
            if idle <= stages:
                break
            # That a stage is published as idle may be out of date: its lease may have run out, and
            # nobody may have said so yet. Whoever goes on without it looks at it first.
            stages |= idle
        advances = view.pipeline.propagate(
            published, agreements, stages & view.pipeline.stages.keys()
        )
        epochs = touched.epochs if touched.state == (view.incarnation, view.generation) else {}
        if not advances and not epochs:
            return view, None
        # A committed epoch's promises are durable with it: after a crash nobody would repeat them.
        chunks = await self._live.unsaved(job) if epochs else ()
        return view, JobRecord(
            job=job,
            incarnation=view.incarnation,
            generation=view.generation,
            layout_version=view.layout_version,
            seen=view.revision,
            advances=advances,
            epochs=epochs,
            chunks=chunks,
            # Who leaves an idle member out must not have overlooked that it came back meanwhile. And
            # at first it is tried in the cheap way, which goes as long as nobody else records.
            unless_newer=(first and not epochs)
            or any(w.idle for w in (*published.values(), *advances.values())),
        )


def _overtaken(pipeline: Pipeline, record: JobRecord, recorded: Recorded) -> set[str]:
    """Name the stages that were worked out from an input that another replica has moved meanwhile.

    A stage behind two inputs that two replicas move at once is worked out twice, each time with the old
    value of the other input. The ledger puts the two records in an order, and whoever comes second finds
    among what was recorded what the first one did: so at least one of the two looks again.
    """
    return {
        downstream
        for stage, view in recorded.views.items()
        if view.watermark != record.advances.get(stage)
        for downstream in pipeline.downstreams.get(stage, ())
    }


def _resolve(done: asyncio.Future[Shown], shown: Shown) -> None:
    if not done.done():
        done.set_result(shown)


def _fail(done: asyncio.Future[Shown], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
        # Perhaps nobody waits; asking for it keeps asyncio from complaining.
        done.exception()


def _hand_on(done: asyncio.Future[Shown], to: asyncio.Future[Shown]) -> None:
    error = done.exception()
    if error is None:
        _resolve(to, done.result())
    else:
        _fail(to, error)
