# pyright: basic
"""The four streaming queries of the demonstration, as a user of the agent would write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent.demo.answer import Answer
from spark_agent.demo.flights import LOG_SCHEMA, NEW_YORK, NEWARK, WEATHER_SCHEMA, Flights
from spark_agent.pipeline import Pipeline
from spark_agent.strategies import Ascending, Strategy

JOB: Final = "nyc-flights"
SOURCES: Final = (NEWARK, NEW_YORK)
WEEKLY: Final = "weekly-average"
WEATHER: Final = "weather"
DEPARTURES: Final = "departures"
"""New York's logs again, as the source of the join: a source is one query's own."""
WEATHERED: Final = "departures-weather"
STATIONS: Final = ("JFK", "LGA")
RANGES: Final = 2

_SESSION_SCHEMA: Final = "tailnum string, started_at timestamp, ended_at timestamp, flights long"
_JOINED_SCHEMA: Final = "tailnum string, departed_at timestamp, visibility double"
_TRIGGER: Final = "100 milliseconds"


def rotations(source: str) -> str:
    """Name the keyed stage behind a source."""
    return f"{source}-rotations"


STAGES: Final = (
    *SOURCES,
    *(rotations(source) for source in SOURCES),
    WEEKLY,
    WEATHER,
    DEPARTURES,
    WEATHERED,
)


def specification(flights: Flights) -> dict[str, dict[str, object]]:
    """Two sources with a shard for each carrier, sessions behind each, the average over both.

    And a join: New York's departures with the weather of the hour.
    """
    return {
        **{source: {"shards": flights.carriers(source)} for source in SOURCES},
        **{rotations(source): {"inputs": [source], "ranges": RANGES} for source in SOURCES},
        WEEKLY: {"inputs": [rotations(source) for source in SOURCES], "ranges": RANGES},
        WEATHER: {"shards": list(STATIONS)},
        DEPARTURES: {"shards": flights.carriers(NEW_YORK)},
        WEATHERED: {"inputs": [DEPARTURES, WEATHER], "ranges": RANGES},
    }


@dataclass(frozen=True)
class Folders:
    """Where everything lies."""

    root: Path

    def logs(self, source: str) -> Path:
        """Say where the carriers write."""
        return self.root / "logs" / source

    def output(self, stage: str) -> Path:
        """Say where a stage writes."""
        return self.root / "output" / stage

    def checkpoint(self, stage: str) -> Path:
        """Say where Spark remembers how far a stage's query is."""
        return self.root / "checkpoints" / stage


def start_queries(
    spark: SparkSession,
    pipeline: Pipeline,
    folders: Folders,
    strategy: Strategy,
    flights: Flights,
    slices_per_batch: int = 1,
) -> list[StreamingQuery]:
    """Start them all. Those that write come first: who reads files must find how they are kept."""

    def logs(source: str, schema: str, logs_per_slice: int) -> DataFrame:
        limited = spark.readStream.option("maxFilesPerTrigger", slices_per_batch * logs_per_slice)
        return limited.schema(schema).json(str(folders.logs(source)))

    carriers = {source: len(flights.carriers(source)) for source in SOURCES}
    queries: list[StreamingQuery] = []
    for source in SOURCES:
        lines = logs(source, LOG_SCHEMA, carriers[source])
        sessions = _sessions(pipeline, lines, source, strategy)
        queries.append(_start(pipeline, sessions, rotations(source), folders))
    departures = logs(NEW_YORK, LOG_SCHEMA, carriers[NEW_YORK])
    weather = logs(WEATHER, WEATHER_SCHEMA, len(STATIONS))
    joined = _weathered(pipeline, departures, weather, strategy)
    queries.append(_start(pipeline, joined, WEATHERED, folders))
    queries.append(_start(pipeline, _weekly(spark, pipeline, folders), WEEKLY, folders))
    return queries


def _sessions(pipeline: Pipeline, logs: DataFrame, source: str, strategy: Strategy) -> DataFrame:
    stage = rotations(source)
    lines = pipeline.source(
        logs, stage=source, shard="log", event_time="departed_at", strategy=strategy
    )
    flights = lines.where(F.col("tailnum").isNotNull()).select("tailnum", "departed_at")
    windowed = pipeline.watermarked(flights, stage=stage, event_time="departed_at")
    sessions = (
        windowed.groupBy(F.session_window("departed_at", "48 hours").alias("session"), "tailnum")
        .agg(F.count("*").alias("flights"))
        .select(
            "tailnum",
            F.col("session.start").alias("started_at"),
            F.col("session.end").alias("ended_at"),
            "flights",
        )
    )
    return pipeline.report(sessions, stage=stage, event_time="ended_at")


def _weathered(
    pipeline: Pipeline, departures: DataFrame, weather: DataFrame, strategy: Strategy
) -> DataFrame:
    """Join each departure with what its airport's station observed at the full hour.

    The bounds on both event times tell Spark how long a row may find its partner; the equal hours
    are only there for speed.
    """
    left = pipeline.source(
        departures, stage=DEPARTURES, shard="log", event_time="departed_at", strategy=strategy
    )
    right = pipeline.source(
        weather, stage=WEATHER, shard="station", event_time="observed_at", strategy=Ascending()
    )
    flights = pipeline.watermarked(
        left.where(F.col("tailnum").isNotNull()).withColumn("hour", _hour("departed_at")),
        stage=WEATHERED,
        event_time="departed_at",
    )
    observations = pipeline.watermarked(
        right.withColumn("full_hour", _hour("observed_at")),
        stage=WEATHERED,
        event_time="observed_at",
    )
    joined = flights.join(
        observations,
        F.expr(
            "origin = station AND hour = full_hour AND observed_at <= departed_at "
            "AND observed_at > departed_at - INTERVAL 1 HOUR"
        ),
    ).select("tailnum", "departed_at", "visibility")
    return pipeline.report(joined, stage=WEATHERED, event_time="departed_at")


def _hour(event_time: str) -> Column:
    return F.date_trunc("hour", event_time)


def _weekly(spark: SparkSession, pipeline: Pipeline, folders: Folders) -> DataFrame:
    sessions: Sequence[DataFrame] = [
        spark.readStream.schema(_SESSION_SCHEMA).parquet(str(folders.output(rotations(source))))
        for source in SOURCES
    ]
    minutes = F.timestamp_diff("MINUTE", F.col("started_at"), F.col("ended_at"))
    both = sessions[0].union(sessions[1]).select("ended_at", minutes.alias("minutes"))
    windowed = pipeline.watermarked(both, stage=WEEKLY, event_time="ended_at")
    weekly = (
        windowed.groupBy(F.window("ended_at", "7 days", startTime="4 days").alias("week"))
        .agg(F.count("*").alias("sessions"), F.avg("minutes").alias("minutes"))
        .select(
            F.col("week.start").alias("from"), F.col("week.end").alias("to"), "sessions", "minutes"
        )
    )
    return pipeline.report(weekly, stage=WEEKLY, event_time="to")


def _start(pipeline: Pipeline, frame: DataFrame, stage: str, folders: Folders) -> StreamingQuery:
    writer = (
        frame.writeStream.queryName(stage)
        .format("parquet")
        .option("path", str(folders.output(stage)))
        .option("checkpointLocation", str(folders.checkpoint(stage)))
        .trigger(processingTime=_TRIGGER)
    )
    return pipeline.start(writer, bounded=True)


def streamed_answer(spark: SparkSession, folders: Folders) -> Answer:
    """Read what the queries wrote."""
    sessions = {
        (source, row["tailnum"], row["started"]): (row["ended"], row["flights"])
        for source in SOURCES
        for row in spark.read.schema(_SESSION_SCHEMA)
        .parquet(str(folders.output(rotations(source))))
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
        for row in spark.read.schema("`from` timestamp, sessions long, minutes double")
        .parquet(str(folders.output(WEEKLY)))
        .select(F.unix_millis("from").alias("from"), "sessions", "minutes")
        .collect()
    }
    departures = Counter(
        (row["tailnum"], row["departed"], row["visibility"])
        for row in spark.read.schema(_JOINED_SCHEMA)
        .parquet(str(folders.output(WEATHERED)))
        .select("tailnum", F.unix_millis("departed_at").alias("departed"), "visibility")
        .toLocalIterator()
    )
    return Answer(sessions, weeks, departures)
