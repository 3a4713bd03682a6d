"""Runs the demonstration: logs, service, queries, and the comparison with the batch answer."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from spark_agent.client import Client
from spark_agent.clock import Clock, SystemClock
from spark_agent.demo.answer import Comparison, batch_answer, compare
from spark_agent.demo.flights import START, Flights, load_flights, write_logs, write_weather
from spark_agent.demo.outcome import CannotRunError, Outcome, Plan
from spark_agent.demo.queries import (
    DEPARTURES,
    JOB,
    RANGES,
    SOURCES,
    STAGES,
    WEATHER,
    Folders,
    rotations,
    specification,
    start_queries,
    streamed_answer,
)
from spark_agent.demo.server import CannotServeError, Server, start_server
from spark_agent.demo.session import java_problem, spark_session
from spark_agent.demo.view import Journey, LiveView, NoView, PlainView, View
from spark_agent.pipeline import Pipeline
from spark_agent.strategies import BoundedOutOfOrderness
from spark_agent.tally import Count

_LOOK_MS: Final = 250


@dataclass(frozen=True, slots=True)
class Late:
    """Rows that came late, and those that came too late."""

    rows: int
    dropped: int


def run(plan: Plan, place: Path) -> Outcome:
    """Run it in an empty folder. Raises `CannotRunError`."""
    problem = java_problem()
    if problem is not None:
        raise CannotRunError(problem)
    clock, console = SystemClock(), Console(highlight=False)
    began_ms = clock.steady_ms()
    try:
        server = start_server(place, plan.port, clock)
    except CannotServeError as error:
        raise CannotRunError(str(error)) from None
    stays = False
    try:
        if not plan.quiet:
            console.print(f"tidegauge runs at {server.url}; reading the flights")
        outcome = _stream(plan, place, server, clock, console)
        stays = plan.keep
    finally:
        if not stays:
            server.stop()
    outcome = replace(outcome, seconds=(clock.steady_ms() - began_ms) / 1_000)
    if not stays:
        return outcome
    pid = server.process.pid
    return replace(outcome, service_url=server.url, service_pid=pid, folder=str(place))


def _stream(plan: Plan, place: Path, server: Server, clock: Clock, console: Console) -> Outcome:
    folders, flights = Folders(place), load_flights(plan.days)
    for source in SOURCES:
        write_logs(flights, source, folders.logs(source), plan.slice_days)
        folders.output(rotations(source)).mkdir(parents=True)
    write_weather(flights, folders.logs(WEATHER), plan.slice_days)
    if not plan.quiet:
        console.print(
            f"{len(flights.table):,} flights, written up to {flights.longest_delay} after they "
            f"left; starting Spark"
        )
    journey = Journey(
        job=JOB,
        stages=STAGES,
        sources=(*SOURCES, WEATHER, DEPARTURES),
        start_ms=_ms(START),
        end_ms=_ms(flights.end),
        bound_ms=plan.bound_ms,
    )
    with _log_to(place / "agent.log"), spark_session(place, RANGES) as spark:
        view = _view(plan, console)
        late = _follow(plan, spark, folders, flights, journey, server, view, clock)
        comparison = compare(streamed_answer(spark, folders), batch_answer(flights))
    return _outcome(plan, flights, late, comparison)


def _follow(
    plan: Plan,
    spark: SparkSession,
    folders: Folders,
    flights: Flights,
    journey: Journey,
    server: Server,
    view: View,
    clock: Clock,
) -> Late:
    """Start the queries and watch until they have ended."""
    client = Client(server.url)
    with Pipeline(server.url, JOB, specification(flights), spark=spark) as pipeline, view:
        strategy = BoundedOutOfOrderness(plan.bound_ms)
        queries = start_queries(spark, pipeline, folders, strategy, flights)
        while any(query.isActive for query in queries):
            _raise_failure(queries)
            _look(journey, client, view)
            clock.pause(_LOOK_MS)
        _raise_failure(queries)
        _look(journey, client, view)
    # The counts are complete only now: the pipeline has stopped.
    return Late(pipeline.counts[Count.LATE_ROWS], sum(_dropped_rows(query) for query in queries))


@contextmanager
def _log_to(path: Path) -> Generator[None]:
    """Write the agent's warnings to a file: on the screen they would tear the view."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("spark_agent")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def _look(journey: Journey, client: Client, view: View) -> None:
    moment = journey.look(client)
    if moment is not None:
        view.show(moment)


def _raise_failure(queries: Sequence[StreamingQuery]) -> None:
    """Do not wait for the others to end: they wait for the one that failed."""
    for query in queries:
        failure = query.exception()
        if failure is not None:
            raise failure


def _dropped_rows(query: StreamingQuery) -> int:
    return sum(
        int(operator["numRowsDroppedByWatermark"])
        for progress in query.recentProgress
        for operator in progress["stateOperators"]
    )


def _view(plan: Plan, console: Console) -> View:
    if plan.quiet:
        return NoView()
    return LiveView(console) if console.is_terminal else PlainView(console)


def _outcome(plan: Plan, flights: Flights, late: Late, comparison: Comparison) -> Outcome:
    return Outcome(
        flights=len(flights.table),
        days=plan.days,
        seconds=0.0,
        late_rows=late.rows,
        dropped_rows=late.dropped,
        equal_sessions=comparison.equal_sessions,
        sessions=comparison.sessions,
        equal_weeks=comparison.equal_weeks,
        weeks=comparison.weeks,
        equal_departures=comparison.equal_departures,
        departures=comparison.departures,
    )


def _ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1_000)
