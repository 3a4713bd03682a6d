"""Publishing: what the ranges agree on goes into the ledger, then into the live store, and only then is
it seen.

Advances that arrive while a round is under way wait for the next one and share its transaction, so the
disk is asked once a round, not once a report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from service.clock import Clock
from service.errors import UnavailableError, UnknownJobError
from service.ledger.port import JobRecord, Ledger
from service.live.port import LiveStore
from service.metrics import Metrics
from service.state import PromiseChunk

log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.05
_RETRY_LAST_S = 1.0


def _new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _Touched:
    """What has happened to a job since its last round, and who waits for it to be visible."""

    since_ms: int
    stages: set[str] = field(default_factory=set[str])
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    generation: int = 0
    """Of the epochs: a reset forgets them."""
    done: asyncio.Future[None] = field(default_factory=_new_future)

    def add_epochs(self, generation: int, epochs: Mapping[str, int]) -> None:
        if generation < self.generation:
            return
        if generation > self.generation:
            self.epochs = {}
        self.generation = generation
        self.epochs.update(epochs)


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
        self._stopped = False

    def touch(self, job: str, stages: Iterable[str]) -> None:
        """Ask for the next round to look at these stages."""
        self._touch(job).stages.update(stages)

    def touch_epochs(self, job: str, generation: int, epochs: Mapping[str, int]) -> None:
        """Ask for the next round to record these epochs, and what they have moved."""
        touched = self._touch(job)
        touched.stages.update(epochs)
        touched.add_epochs(generation, epochs)

    def _touch(self, job: str) -> _Touched:
        touched = self._touched.get(job)
        if touched is None:
            touched = self._touched[job] = _Touched(self._clock.steady_ms())
        self._wake.set()
        return touched

    async def flush(self, job: str) -> None:
        """Return once everything that was touched in the job before this call is visible."""
        for pending in (self._under_way.get(job), self._touched.get(job)):
            if pending is not None:
                # Shielded: one reader that gives up must not cancel what others wait for.
                await asyncio.shield(pending.done)

    async def run(self) -> None:
        """Do round after round, until `stop`."""
        retry_s = _RETRY_FIRST_S
        while not self._stopped:
            await self._wake.wait()
            self._wake.clear()
            if await self.round():
                retry_s = _RETRY_FIRST_S
            else:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_LAST_S)

    def stop(self) -> None:
        """Let `run` end after the round that is under way."""
        self._stopped = True
        self._wake.set()

    async def round(self) -> bool:
        """Publish what is touched now. False: the ledger did not take it, and it is still touched."""
        self._under_way, self._touched = self._touched, {}
        left: dict[str, _Touched] = dict(self._under_way)
        try:
            published = await self._publish(self._under_way)
        except UnavailableError as error:
            log.warning("publishing waits: %s", error.detail)
            self._metrics.publish_failures.inc()
            return False
        except Exception as error:
            # Not to be survived in silence: those who wait are told, and the loop goes on for others.
            log.exception("publishing failed")
            for touched in left.values():
                touched.done.set_exception(error)
                touched.done.exception()
            left.clear()
            return True
        else:
            for job in published:
                left.pop(job).done.set_result(None)
            return not left
        finally:
            self._under_way = {}
            for job, touched in left.items():
                self._put_back(job, touched)

    def _put_back(self, job: str, touched: _Touched) -> None:
        """Let a job that was not taken go into the next round, with all who wait for it."""
        newer = self._touched.get(job)
        if newer is not None:
            touched.stages |= newer.stages
            touched.add_epochs(newer.generation, newer.epochs)
            touched.done.add_done_callback(lambda done: _hand_on(done, newer.done))
        self._touched[job] = touched
        self._wake.set()

    async def _publish(self, touched: Mapping[str, _Touched]) -> list[str]:
        """Publish; return the jobs that are done with."""
        done: list[str] = []
        records: list[JobRecord] = []
        chunks: list[PromiseChunk] = []
        for job, what in touched.items():
            record = await self._record(job, what)
            if record is None:
                done.append(job)
                continue
            records.append(record)
            chunks.extend(record.chunks)
        if not records:
            return done
        try:
            taken = await self._ledger.record(records, self._clock.wall_ms())
        except BaseException:
            await self._live.mark_unsaved(chunks)
            raise
        for record in records:
            views = taken.get(record.job)
            if views is None:
                # The job has another layout or generation by now, and whoever changed it will
                # install that in the live store next: then this is looked at afresh.
                await self._live.mark_unsaved(record.chunks)
                continue
            await self._live.publish(record.job, record.generation, views)
            self._metrics.advances.inc(len(views))
            waited_ms = self._clock.steady_ms() - touched[record.job].since_ms
            self._metrics.publish_seconds.observe(waited_ms / 1_000)
            done.append(record.job)
        return done

    async def _record(self, job: str, touched: _Touched) -> JobRecord | None:
        """Work out what a job has to record; None: nothing, or the job is gone."""
        try:
            view = await self._live.job(job)
            pipeline = view.pipeline
            stages = touched.stages & pipeline.stages.keys()
            agreements = await self._live.agreements(job, pipeline.reach(stages))
        except UnknownJobError:
            return None
        published = {name: stage.watermark for name, stage in view.stages.items()}
        advances = pipeline.propagate(published, agreements, stages)
        epochs = touched.epochs if touched.generation == view.generation else {}
        if not advances and not epochs:
            return None
        # A committed epoch's promises are durable with it: after a crash nobody would repeat them.
        chunks = await self._live.unsaved(job) if epochs else ()
        return JobRecord(
            job=job,
            generation=view.generation,
            layout_version=view.layout_version,
            advances=advances,
            epochs=epochs,
            chunks=chunks,
        )


def _hand_on(done: asyncio.Future[None], to: asyncio.Future[None]) -> None:
    if not to.done():
        error = done.exception()
        if error is None:
            to.set_result(None)
        else:
            to.set_exception(error)
            to.exception()
