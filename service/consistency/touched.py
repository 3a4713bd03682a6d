"""Jobs that changed since the last round, and the requests that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from service.errors import UnavailableError
from service.frontier.graph import Pipeline
from service.ledger.port import JobRecord, Recorded
from service.model.jobs import JobView

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

MOST_LINKS: Final = 128
"""Number of links that OpenTelemetry's SDK keeps of one span."""

Published = JobView | None
"""A job after a round; None: its state was lost, and is being restored."""

LiveState = tuple[int, int]
"""Incarnation and generation."""


def _new_future() -> asyncio.Future[Published]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class TouchedJob:
    """Changes of a job since its last round, and the future of the requests that wait for the next."""

    since_ms: int
    stages: set[str] = field(default_factory=set[str])
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    state: LiveState = (0, 0)
    """The one that the epochs were committed in: a reset or a loss discards them."""
    discarded: bool = False
    """True if epochs were discarded for which a request may wait."""
    last_error: str | None = None
    """The error for which the last round did not publish the job."""
    done: asyncio.Future[Published] = field(default_factory=_new_future)
    is_awaited: bool = False
    """True if a request waits for the next round."""
    touches: int = 0
    """Number of changes so far."""
    saves: bool = False
    """True if the round also saves the changed promises, as it does with epochs."""
    requests: list[SpanContext] = field(default_factory=list["SpanContext"])
    """Spans of these reports and commits, while requests are traced; at most `MOST_LINKS`."""

    def add_epochs(self, state: LiveState, epochs: Mapping[str, int]) -> None:
        """Add epochs that were committed in this state. The newer state discards the other's epochs."""
        if state != self.state:
            self.discarded |= bool(self.epochs if state > self.state else epochs)
        if state < self.state:
            return
        if state > self.state:
            self.epochs = {}
        self.state = state
        self.epochs.update(epochs)

    def are_lost(self, view: JobView) -> bool:
        """Return whether epochs cannot be recorded, since the state of their commit is over."""
        current = (view.incarnation, view.generation)
        return self.discarded or bool(self.epochs and self.state != current)

    def resolve(self, published: Published) -> None:
        """Answer the waiting requests."""
        _resolve(self.done, published)

    def reject(self, error: BaseException) -> None:
        """Fail the waiting requests. The job is not retried for them."""
        _reject(self.done, error)

    def fail(self, error: UnavailableError) -> None:
        """Fail the waiting requests. The job stays touched, with a new future for the next round."""
        self.reject(error)
        self.done = _new_future()
        self.last_error = error.detail

    def join(self, newer: TouchedJob) -> None:
        """Take over the changes that came during the round, with the requests that wait for them."""
        self.stages |= newer.stages
        self.add_epochs(newer.state, newer.epochs)
        self.discarded |= newer.discarded
        self.is_awaited |= newer.is_awaited
        self.touches += newer.touches
        self.saves |= newer.saves
        self.requests = [*self.requests, *newer.requests][:MOST_LINKS]
        self.done.add_done_callback(lambda done: _forward(done, newer.done))


def requeue(jobs: dict[str, TouchedJob], job: str, touched: TouchedJob) -> None:
    """Put a job that was not published into the next round, with all who wait for it."""
    newer = jobs.get(job)
    if newer is not None:
        touched.join(newer)
    jobs[job] = touched


def drop_unchanged(jobs: dict[str, TouchedJob], touches: Mapping[str, int]) -> None:
    """Drop these deleted jobs, unless they were touched since they had this number of changes.

    While the live store is unavailable, a round cannot find that a job is deleted.
    """
    for job, number in touches.items():
        touched = jobs.get(job)
        if touched is not None and touched.touches == number:
            del jobs[job]
            touched.reject(UnavailableError("the job was deleted"))


def _resolve(done: asyncio.Future[Published], published: Published) -> None:
    if not done.done():
        done.set_result(published)


def _reject(done: asyncio.Future[Published], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
        # There may be no waiting request. Retrieving the error keeps asyncio from warning.
        done.exception()


def _forward(done: asyncio.Future[Published], to: asyncio.Future[Published]) -> None:
    error = done.exception()
    if error is None:
        _resolve(to, done.result())
    else:
        _reject(to, error)


def overtaken(pipeline: Pipeline, record: JobRecord, recorded: Recorded) -> set[str]:
    """Return the stages that were computed from an input that another replica has advanced meanwhile.

    If two replicas advance the two inputs of a stage at once, each computes the stage with the old value
    of the other input. The ledger orders the two records, and the second replica finds the first one's
    advance in what it gets back. So at least one of the two computes the stage again.
    """
    return {
        downstream
        for stage, view in recorded.views.items()
        if view.watermark != record.advances.get(stage)
        for downstream in pipeline.downstreams.get(stage, ())
    }
