"""A run that ends by itself waits, at its end, for a service that is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent.jvm.progress import CommittedBatch
from spark_agent.sources.control import END_MS
from spark_agent.supervision.supervisor import Signal, Supervisor
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    DEADLINE_S,
    SOURCE,
    Flow,
    ended,
    steady,
    until,
    windows,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark

AWAY_S = 4.0
"""Longer than a supervisor waits for the service once somebody has stopped its query."""


class Outage:
    """Kills the service once, and starts it again a while later."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._back: threading.Timer | None = None

    def begin(self) -> None:
        if self._back is None:
            self._service.kill()
            self._back = threading.Timer(AWAY_S, self._service.start)
            self._back.start()

    @property
    def has_been(self) -> bool:
        return self._back is not None

    def end(self) -> None:
        if self._back is not None:
            self._back.join(DEADLINE_S)


@pytest.fixture
def outage(service: Service) -> Iterator[Outage]:
    outage = Outage(service)
    yield outage
    outage.end()


Moment = Callable[[pytest.MonkeyPatch, Outage], None]


def once_final(patch: pytest.MonkeyPatch, outage: Outage) -> None:
    """The service has taken that the sources are final, and dies before the query has read so."""
    finalise = Supervisor.finalise_sources

    def and_die(self: Supervisor, timeout_ms: int) -> bool:
        done = finalise(self, timeout_ms)
        if done:
            outage.begin()
        return done

    patch.setattr(Supervisor, "finalise_sources", and_die)


def once_drained(patch: pytest.MonkeyPatch, outage: Outage) -> None:
    """The query has read everything, and the service dies before it hears so."""
    finalise = Supervisor.finalise_sources

    def die(self: Supervisor, timeout_ms: int) -> bool:
        outage.begin()
        return finalise(self, timeout_ms)

    patch.setattr(Supervisor, "finalise_sources", die)


def before_commit(is_the_one: Callable[[CommittedBatch], bool]) -> Moment:
    """Spark has committed a batch, and the service dies before it does."""

    def at(patch: pytest.MonkeyPatch, outage: Outage) -> None:
        commit = Supervisor.commit_epoch

        def die(self: Supervisor, batch: CommittedBatch, timeout_ms: int) -> bool:
            if is_the_one(batch):
                outage.begin()
            return commit(self, batch, timeout_ms)

        patch.setattr(Supervisor, "commit_epoch", die)

    return at


MOMENTS: dict[str, Moment] = {
    "first commit": before_commit(lambda batch: batch.epoch == 0),
    "drained": once_drained,
    "final": once_final,
    "last commit": before_commit(lambda batch: batch.watermark_ms == END_MS),
}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("first commit", marks=pytest.mark.matrix),
        pytest.param("drained", marks=pytest.mark.slow),
        "final",
        "last commit",
    ],
)
def test_the_last_windows_come_out_though_the_service_was_away_when(
    flow: Flow, outage: Outage, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    MOMENTS[moment](monkeypatch, outage)
    readings = steady(range(30))
    flow.files_per_batch = None
    flow.write(readings)
    with flow.pipeline(patience="300 ms") as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    assert outage.has_been
    assert flow.counted() == windows(readings)
    outage.end()
    assert flow.watermark(COUNTS).final


@pytest.mark.slow
def test_a_night_closes_what_it_has_read_though_the_service_was_away(
    flow: Flow, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    MOMENTS["first commit"](monkeypatch, outage)
    readings = steady(range(30))
    flow.files_per_batch = None
    flow.write(readings)
    with flow.pipeline(patience="300 ms") as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    assert outage.has_been
    expected = windows(readings)
    assert flow.counted() == {each: expected[each] for each in expected if each[1] < 20}


def test_a_night_reads_on_while_the_service_is_away(
    flow: Flow, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its middle, a run has nothing to wait for."""
    MOMENTS["first commit"](monkeypatch, Gone(service))
    readings = steady(range(30))
    files = 3
    for each in range(files):
        flow.write(readings[each::files])
    with flow.pipeline(patience="300 ms") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW)
        until(lambda: rows_read(query) == len(readings), "all files are read")
        service.start()
        ended(query)
    assert sum(flow.counted().values()) > 0


def rows_read(query: StreamingQuery) -> int:
    """Rows of files that this start of a query has read."""
    return sum(
        source["numInputRows"]
        for batch in query.recentProgress
        for source in batch["sources"]
        if source["description"].startswith("FileStreamSource")
    )


def test_a_source_alone_becomes_final_though_the_service_was_away_at_the_end(
    flow: Flow, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a query has nothing that could wait, and has ended by then."""
    notify = Supervisor.notify

    def die(self: Supervisor, event: CommittedBatch | Signal) -> None:
        if event is Signal.ENDED:
            outage.begin()
        notify(self, event)

    monkeypatch.setattr(Supervisor, "notify", die)
    monkeypatch.setattr(Supervisor, "_step", _slow(Supervisor._step, outage))
    flow.files_per_batch = None
    flow.write(steady(range(30)))
    with flow.pipeline(patience="300 ms") as pipeline:
        ended(flow.start(pipeline, flow.source(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    assert outage.has_been
    assert flow.watermark(SOURCE).final


def _slow(step: Callable[[Supervisor], None], outage: Outage) -> Callable[[Supervisor], None]:
    """Keep the supervisor from finishing before the service is away."""

    def delayed(self: Supervisor) -> None:
        if self._finalisation.is_drained and not outage.has_been:
            return
        step(self)

    return delayed


def run_without(flow: Flow, *, bounded: bool) -> StreamingQuery:
    """Run what is there, with a service that does not come back."""
    flow.files_per_batch = None
    flow.write(steady(range(30)))
    with flow.pipeline(patience="300 ms", finish_timeout="3 s") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=bounded)
        query.awaitTermination(DEADLINE_S)
        return query


@pytest.mark.slow
def test_a_bounded_run_fails_without_its_last_windows(
    flow: Flow, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    MOMENTS["final"](monkeypatch, Gone(service))
    with pytest.raises(StreamingQueryException, match=r"within finish_timeout \(3 s\) the service"):
        run_without(flow, bounded=True)
    service.start()
    monkeypatch.undo()
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(steady(range(30)))


@pytest.mark.slow
def test_a_night_ends_without_them_and_says_so(
    flow: Flow,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    MOMENTS["first commit"](monkeypatch, Gone(service))
    ended(run_without(flow, bounded=False))
    assert "Its last windows come out in the next run" in caplog.text


class Gone(Outage):
    """Kills the service for good."""

    def begin(self) -> None:
        if self._service._process is not None:
            self._service.kill()
