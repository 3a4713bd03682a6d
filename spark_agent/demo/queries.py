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
"""New York's logs again, as the join's source: each source stage belongs to one query."""
DEPARTURES_WEATHER: Final = "departures-weather"
STATIONS: Final = ("JFK", "LGA")
RANGES: Final = 2

_SESSION_SCHEMA: Final = "tailnum string, started_at timestamp, ended_at timestamp, flights long"
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


def specification(flights: Flights) -> dict[str, dict[str, object]]:
    """Two sources with a shard per carrier, sessions for each source, and the average over both.

    And a join: New York's departures with the weather of the hour.
    """
    return {
        **{source: {"shards": flights.carriers(source)} for source in SOURCES},
        **{rotations(source): {"inputs": [source], "ranges": RANGES} for source in SOURCES},
        WEEKLY: {"inputs": [rotations(source) for source in SOURCES], "ranges": RANGES},
        WEATHER: {"shards": list(STATIONS)},
        DEPARTURES: {"shards": flights.carriers(NEW_YORK)},
        DEPARTURES_WEATHER: {"inputs": [DEPARTURES, WEATHER], "ranges": RANGES},
    }


@dataclass(frozen=True)
class Folders:
    """The folders of the demonstration."""

    root: Path

    def logs(self, source: str) -> Path:
        """Return the folder of a source's logs."""
        return self.root / "logs" / source

    def output(self, stage: str) -> Path:
        """Return the output folder of a stage's query."""
        return self.root / "output" / stage

    def checkpoint(self, stage: str) -> Path:
        """Return the checkpoint folder of a stage's query."""
        return self.root / "checkpoints" / stage


def start_queries(
    spark: SparkSession,
    pipeline: Pipeline,
    folders: Folders,
    strategy: Strategy,
    flights: Flights,
    slices_per_batch: int = 1,
) -> list[StreamingQuery]:
    """Start all queries, writers first: a file source must find its input folder and its format."""

    def logs(source: str, schema: str, logs_per_slice: int) -> DataFrame:
        limited = spark.readStream.option("maxFilesPerTrigger", slices_per_batch * logs_per_slice)
        return limited.schema(schema).json(str(folders.logs(source)))

    carriers = {source: len(flights.carriers(source)) for source in SOURCES}
    queries: list[StreamingQuery] = []
    for source in SOURCES:
        lines = logs(source, LOG_SCHEMA, carriers[source])
        frame = sessions(pipeline, lines, source, strategy)
        queries.append(start(pipeline, frame, rotations(source), folders))
    departures = logs(NEW_YORK, LOG_SCHEMA, carriers[NEW_YORK])
    weather = logs(WEATHER, WEATHER_SCHEMA, len(STATIONS))
    joined = _departures_with_weather(pipeline, departures, weather, strategy)
    queries.append(start(pipeline, joined, DEPARTURES_WEATHER, folders))
    averages = weekly_averages(spark, pipeline, folders)
    weekly = pipeline.report(averages, stage=WEEKLY, event_time="to")
    queries.append(start(pipeline, weekly, WEEKLY, folders))
    return queries


def sessions(pipeline: Pipeline, logs: DataFrame, source: str, strategy: Strategy) -> DataFrame:
    """Return each aircraft's rotations: flights less than 48 hours apart."""
    stage = rotations(source)
    lines = pipeline.source(
        logs, stage=source, shard="log", event_time="departed_at", strategy=strategy
    )
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


def _departures_with_weather(
    pipeline: Pipeline, departures: DataFrame, weather: DataFrame, strategy: Strategy
) -> DataFrame:
    """Join each departure with the observation of its airport's station at the full hour.

    The bounds on both event times limit the time for which Spark keeps a row for its partner. The
    equality of the hours is only for speed.
    """
    left = pipeline.source(
        departures, stage=DEPARTURES, shard="log", event_time="departed_at", strategy=strategy
    )
    right = pipeline.source(
        weather, stage=WEATHER, shard="station", event_time="observed_at", strategy=Ascending()
    )
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


def weekly_averages(spark: SparkSession, pipeline: Pipeline, folders: Folders) -> DataFrame:
    """Return each week's average of the sessions that ended in it, over both sources."""
    read: Sequence[DataFrame] = [
        spark.readStream.schema(_SESSION_SCHEMA).parquet(str(folders.output(rotations(source))))
        for source in SOURCES
    ]
    minutes = F.timestamp_diff("MINUTE", F.col("started_at"), F.col("ended_at"))
    both = read[0].union(read[1]).select("ended_at", minutes.alias("minutes"))
    windowed = pipeline.watermarked(both, stage=WEEKLY, event_time="ended_at")
    return (
        windowed.groupBy(F.window("ended_at", "7 days", startTime="4 days").alias("week"))
        .agg(F.count("*").alias("sessions"), F.avg("minutes").alias("minutes"))
        .select(
            F.col("week.start").alias("from"), F.col("week.end").alias("to"), "sessions", "minutes"
        )
    )


def start(
    pipeline: Pipeline, frame: DataFrame, stage: str, folders: Folders, *, bounded: bool = True
) -> StreamingQuery:
    """Start the query of a stage."""
    writer = (
        frame.writeStream.queryName(stage)
        .format("parquet")
        .option("path", str(folders.output(stage)))
        .option("checkpointLocation", str(folders.checkpoint(stage)))
        .trigger(processingTime=_TRIGGER)
    )
    return pipeline.start(writer, bounded=bounded)


def streamed_answer(spark: SparkSession, folders: Folders) -> Answer:
    """Read the output of the queries."""
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
        .parquet(str(folders.output(DEPARTURES_WEATHER)))
        .select("tailnum", F.unix_millis("departed_at").alias("departed"), "visibility")
        .toLocalIterator()
    )
    return Answer(sessions, weeks, departures)
