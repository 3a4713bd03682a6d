# pyright: basic
"""The four streaming queries of the demonstration, as a user of the agent would write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.demo.answer import Answer
from spark_agent.demo.flights import NEW_YORK, NEWARK
from spark_agent.pipeline import Pipeline
from spark_agent.strategies import Ascending, Strategy

JOB: Final = "nyc-flights"
SOURCES: Final = (NEWARK, NEW_YORK)
WEEKLY: Final = "weekly-average"
WEATHER: Final = "weather"
DEPARTURES: Final = "departures"
"""New York's logs again, as the join's source: each source stage belongs to one query."""
DEPARTURES_WEATHER: Final = "departures-weather"
STATIONS: Final = ("JFK", "LGA")
RANGES: Final = 2

LOGS_OF: Final[Mapping[str, str]] = {
    **{source: source for source in SOURCES},
    DEPARTURES: NEW_YORK,
    WEATHER: WEATHER,
}
"""The logs that each source stage reads."""
_SESSION_SCHEMA: Final = "tailnum string, started_at timestamp, ended_at timestamp, flights long"
_WEEK_SCHEMA: Final = "`from` timestamp, `to` timestamp, sessions long, minutes double"
_JOINED_SCHEMA: Final = "tailnum string, departed_at timestamp, visibility double"
_TRIGGER: Final = "100 milliseconds"


def rotations(source: str) -> str:
    """Return the name of the keyed stage fed by a source."""
    return f"{source}-rotations"


STAGES: Final = (
    *SOURCES,
    *(rotations(source) for source in SOURCES),
    WEEKLY,
    WEATHER,
    DEPARTURES,
    DEPARTURES_WEATHER,
)


class Medium(Protocol):
    """Storage of the logs, and of the output of each query: folders of files, or topics."""

    @property
    def repeats(self) -> bool:
        """True if the rows of a batch that Spark repeats are there twice."""
        ...

    def shards(self, stage: str) -> Mapping[str, Any]:
        """Return the specification of a source stage."""
        ...

    def source(
        self, pipeline: Pipeline, stage: str, event_time: str, strategy: Strategy
    ) -> DataFrame:
        """Return the rows of a source stage."""
        ...

    def output(self, stage: str, schema: str) -> DataFrame:
        """Return the rows that the query of a stage writes, as a stream."""
        ...

    def writer(self, frame: DataFrame, stage: str) -> DataStreamWriter:
        """Return a writer of a stage's output."""
        ...

    def result(self, stage: str, schema: str) -> DataFrame:
        """Return the rows that the query of a stage has written."""
        ...


def specification(medium: Medium) -> dict[str, Mapping[str, Any]]:
    """Two sources, sessions for each source, and the average over both.

    And a join: New York's departures with the weather of the hour.
    """
    return {
        **{source: medium.shards(source) for source in SOURCES},
        **{rotations(source): {"inputs": [source], "ranges": RANGES} for source in SOURCES},
        WEEKLY: {"inputs": [rotations(source) for source in SOURCES], "ranges": RANGES},
        WEATHER: medium.shards(WEATHER),
        DEPARTURES: medium.shards(DEPARTURES),
        DEPARTURES_WEATHER: {"inputs": [DEPARTURES, WEATHER], "ranges": RANGES},
    }


def start_queries(
    pipeline: Pipeline, medium: Medium, strategy: Strategy
) -> Generator[StreamingQuery]:
    """Start one query at each step, writers first: a file source must find its input and its format."""
    for source in SOURCES:
        lines = medium.source(pipeline, source, "departed_at", strategy)
        yield start(pipeline, medium, sessions(pipeline, lines, source), rotations(source))
    joined = _departures_with_weather(pipeline, medium, strategy)
    yield start(pipeline, medium, joined, DEPARTURES_WEATHER)
    weekly = pipeline.report(weekly_averages(pipeline, medium), stage=WEEKLY, event_time="to")
    yield start(pipeline, medium, weekly, WEEKLY)


def sessions(pipeline: Pipeline, lines: DataFrame, source: str) -> DataFrame:
    """Return each aircraft's rotations: flights less than 48 hours apart."""
    stage = rotations(source)
    flights = lines.where(F.col("tailnum").isNotNull()).select("tailnum", "departed_at")
    windowed = pipeline.watermarked(flights, stage=stage, event_time="departed_at")
    found = (
        windowed.groupBy(F.session_window("departed_at", "48 hours").alias("session"), "tailnum")
        .agg(F.count("*").alias("flights"))
        .select(
            "tailnum",
            F.col("session.start").alias("started_at"),
            F.col("session.end").alias("ended_at"),
            "flights",
        )
    )
    return pipeline.report(found, stage=stage, event_time="ended_at")


def _departures_with_weather(pipeline: Pipeline, medium: Medium, strategy: Strategy) -> DataFrame:
    """Join each departure with the observation of its airport's station at the full hour.

    The bounds on both event times limit the time for which Spark keeps a row for its partner. The
    equality of the hours is only for speed.
    """
    left = medium.source(pipeline, DEPARTURES, "departed_at", strategy)
    right = medium.source(pipeline, WEATHER, "observed_at", Ascending())
    flights = pipeline.watermarked(
        left.where(F.col("tailnum").isNotNull()).withColumn("hour", _hour("departed_at")),
        stage=DEPARTURES_WEATHER,
        event_time="departed_at",
    )
    observations = pipeline.watermarked(
        right.withColumn("full_hour", _hour("observed_at")),
        stage=DEPARTURES_WEATHER,
        event_time="observed_at",
    )
    joined = flights.join(
        observations,
        F.expr(
            "origin = station AND hour = full_hour AND observed_at <= departed_at "
            "AND observed_at > departed_at - INTERVAL 1 HOUR"
        ),
    ).select("tailnum", "departed_at", "visibility")
    return pipeline.report(joined, stage=DEPARTURES_WEATHER, event_time="departed_at")


def _hour(event_time: str) -> Column:
    return F.date_trunc("hour", event_time)


def weekly_averages(pipeline: Pipeline, medium: Medium) -> DataFrame:
    """Return each week's average of the sessions that ended in it, over both sources."""
    minutes = F.timestamp_diff("MINUTE", F.col("started_at"), F.col("ended_at")).alias("minutes")
    read: Sequence[DataFrame] = [
        medium.output(rotations(source), _SESSION_SCHEMA).select(
            F.lit(source).alias("source"), "tailnum", "ended_at", minutes
        )
        for source in SOURCES
    ]
    windowed = pipeline.watermarked(read[0].union(read[1]), stage=WEEKLY, event_time="ended_at")
    if medium.repeats:
        windowed = windowed.dropDuplicates(["source", "tailnum", "ended_at"])
    return (
        windowed.groupBy(F.window("ended_at", "7 days", startTime="4 days").alias("week"))
        .agg(F.count("*").alias("sessions"), F.avg("minutes").alias("minutes"))
        .select(
            F.col("week.start").alias("from"), F.col("week.end").alias("to"), "sessions", "minutes"
        )
    )


def start(
    pipeline: Pipeline, medium: Medium, frame: DataFrame, stage: str, *, bounded: bool = True
) -> StreamingQuery:
    """Start the query of a stage."""
    writer = medium.writer(frame, stage).queryName(stage).trigger(processingTime=_TRIGGER)
    return pipeline.start(writer, bounded=bounded)


def streamed_answer(medium: Medium) -> Answer:
    """Read the output of the queries."""
    sessions = {
        (source, row["tailnum"], row["started"]): (row["ended"], row["flights"])
        for source in SOURCES
        for row in medium.result(rotations(source), _SESSION_SCHEMA)
        .select(
            "tailnum",
            F.unix_millis("started_at").alias("started"),
            F.unix_millis("ended_at").alias("ended"),
            "flights",
        )
        .toLocalIterator()
    }
    weeks = {
        row["from"]: (row["sessions"], row["minutes"])
        for row in medium.result(WEEKLY, _WEEK_SCHEMA)
        .select(F.unix_millis("from").alias("from"), "sessions", "minutes")
        .collect()
    }
    departures = Counter(
        (row["tailnum"], row["departed"], row["visibility"])
        for row in medium.result(DEPARTURES_WEATHER, _JOINED_SCHEMA)
        .select("tailnum", F.unix_millis("departed_at").alias("departed"), "visibility")
        .toLocalIterator()
    )
    return Answer(sessions, weeks, departures)
