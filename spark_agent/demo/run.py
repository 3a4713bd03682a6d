"""Runs the demonstration: logs, service, queries, and the comparison with the batch answer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from spark_agent.client.client import Client
from spark_agent.clock import Clock, SystemClock
from spark_agent.demo.answer import Comparison, batch_answer, compare
from spark_agent.demo.broker import CannotStartBrokerError, start_broker
from spark_agent.demo.files import Files, Folders, make_output_folders, write_all
from spark_agent.demo.flights import START, Flights, load_flights
from spark_agent.demo.outcome import CannotRunError, DemoOptions, Outcome
from spark_agent.demo.queries import (
    DEPARTURES,
    JOB,
    RANGES,
    SOURCES,
    STAGES,
    WEATHER,
    Medium,
    specification,
    start_queries,
    streamed_answer,
)
from spark_agent.demo.server import CannotServeError, Server, start_server
from spark_agent.demo.session import java_problem, starting_spark
from spark_agent.demo.topics import Topics
from spark_agent.demo.view import LiveView, NoView, PlainView, Timeline, View
from spark_agent.executor.tally import Count
from spark_agent.kafka_jars import JarsUnavailableError, KafkaJars, fetch
from spark_agent.pipeline import Pipeline
from spark_agent.strategies import BoundedOutOfOrderness

_UPDATE_MS: Final = 250


@dataclass(frozen=True, slots=True)
class LateRows:
    """Number of rows that came late, and of those that Spark dropped."""

    rows: int
    dropped: int


def run(options: DemoOptions, folder: Path) -> Outcome:
    """Run the demonstration in an empty folder. Raises `CannotRunError`."""
    problem = java_problem()
    if problem is not None:
        raise CannotRunError(problem)
    clock, console = SystemClock(), Console(highlight=False)
    say = _ignore if options.quiet else console.print
    began_ms = clock.steady_ms()
    jars = _kafka_jars(say) if options.kafka else None
    keep_running = False
    with starting_spark(folder, RANGES, jars.connector_files if jars else "") as session:
        try:
            server = start_server(folder, options.port, clock)
        except CannotServeError as error:
            raise CannotRunError(str(error)) from None
        try:
            say(f"tidegauge runs: watch it at {_page(server)}")
            say("reading the flights, while Spark starts")
            outcome = _stream(options, folder, server, session, jars, clock, console)
            keep_running = options.keep
        finally:
            if not keep_running:
                server.stop()
    outcome = replace(outcome, seconds=(clock.steady_ms() - began_ms) / 1_000)
    if not keep_running:
        return outcome
    pid = server.process.pid
    return replace(
        outcome,
        service_url=server.url,
        service_pid=pid,
        page_url=_page(server),
        folder=str(folder),
    )


def _page(server: Server) -> str:
    """Return the URL of the job's page."""
    return f"{server.url}/#/jobs/{JOB}"


def _ignore(line: str) -> None:
    """Print nothing."""


def _kafka_jars(say: Callable[[str], None]) -> KafkaJars:
    try:
        return fetch(say, environment=os.environ)
    except JarsUnavailableError as error:
        raise CannotRunError(str(error)) from None


def _stream(
    options: DemoOptions,
    folder: Path,
    server: Server,
    session: Callable[[], SparkSession],
    jars: KafkaJars | None,
    clock: Clock,
    console: Console,
) -> Outcome:
    say = _ignore if options.quiet else console.print
    folders, flights = Folders(folder), load_flights(options.days)
    write_all(flights, folders, options.slice_days)
    make_output_folders(folders)
    say(f"{len(flights.table):,} flights, written up to {flights.longest_delay} after they left")
    timeline = Timeline(
        job=JOB,
        stages=STAGES,
        sources=(*SOURCES, WEATHER, DEPARTURES),
        start_ms=_ms(START),
        end_ms=_ms(flights.end),
        bound_ms=options.bound_ms,
    )
    with _log_to(folder / "agent.log"), ExitStack() as stack:
        files = Files(session(), folders, flights)
        medium = files if jars is None else _topics(stack, options, files, jars, clock, say)
        view = _view(options, console)
        say("starting four queries: the first watermark comes in about ten seconds")
        late_rows = _follow(options, medium, timeline, server, view, clock)
        say("comparing every window with a batch job's answer")
        comparison = compare(streamed_answer(medium), batch_answer(flights))
    return _outcome(options, flights, late_rows, comparison)


def _topics(
    stack: ExitStack,
    options: DemoOptions,
    files: Files,
    jars: KafkaJars,
    clock: Clock,
    say: Callable[[str], None],
) -> Medium:
    """Start a broker, and fill its topics; the stack stops the broker."""
    try:
        broker = start_broker(jars, files.folders.root / "kafka", clock)
    except CannotStartBrokerError as error:
        raise CannotRunError(str(error)) from None
    stack.callback(broker.stop)
    batches = -(-options.days // options.slice_days)
    topics = Topics(files, broker.servers, batches)
    say(f"a broker runs at {broker.servers}; writing the logs to its topics")
    topics.create()
    topics.fill()
    return topics


def _follow(
    options: DemoOptions,
    medium: Medium,
    timeline: Timeline,
    server: Server,
    view: View,
    clock: Clock,
) -> LateRows:
    """Start the queries and watch until they have ended."""
    client = Client(server.url)
    with Pipeline(server.url, JOB, specification(medium)) as pipeline, view:
        starting = start_queries(pipeline, medium, BoundedOutOfOrderness(options.bound_ms))
        queries = [next(starting)]
        # On two cores, four queries that start at once show a first watermark five seconds later.
        while queries[0].isActive and not queries[0].recentProgress:
            _update_view(timeline, client, view)
            clock.pause(_UPDATE_MS)
        _raise_failure(queries)
        queries += starting
        while any(query.isActive for query in queries):
            _raise_failure(queries)
            _update_view(timeline, client, view)
            clock.pause(_UPDATE_MS)
        _raise_failure(queries)
        _update_view(timeline, client, view)
    # The counts are complete only after the pipeline has stopped.
    return LateRows(
        pipeline.counts[Count.LATE_ROWS], sum(_dropped_rows(query) for query in queries)
    )


@contextmanager
def _log_to(path: Path) -> Generator[None]:
    """Write the agent's warnings to a file: on the terminal they would break up the view."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("spark_agent")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def _update_view(timeline: Timeline, client: Client, view: View) -> None:
    snapshot = timeline.snapshot(client)
    if snapshot is not None:
        view.show(snapshot)


def _raise_failure(queries: Sequence[StreamingQuery]) -> None:
    """Raise the error of a failed query: the others wait for it and would never end."""
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


def _view(options: DemoOptions, console: Console) -> View:
    if options.quiet:
        return NoView()
    return LiveView(console) if console.is_terminal else PlainView(console)


def _outcome(
    options: DemoOptions, flights: Flights, late_rows: LateRows, comparison: Comparison
) -> Outcome:
    return Outcome(
        flights=len(flights.table),
        days=options.days,
        seconds=0.0,
        late_rows=late_rows.rows,
        dropped_rows=late_rows.dropped,
        equal_sessions=comparison.equal_sessions,
        sessions=comparison.sessions,
        equal_weeks=comparison.equal_weeks,
        weeks=comparison.weeks,
        equal_departures=comparison.equal_departures,
        departures=comparison.departures,
    )


def _ms(instant: datetime) -> int:
    return int(instant.timestamp() * 1_000)
