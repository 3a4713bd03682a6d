# pyright: basic
"""The demonstration's logs and output in folders of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.demo.flights import LOG_SCHEMA, WEATHER_SCHEMA, Flights, write_logs, write_weather
from spark_agent.demo.queries import LOGS_OF, SOURCES, STATIONS, WEATHER, rotations
from spark_agent.pipeline import Pipeline
from spark_agent.strategies import Strategy

LOG_OF_ROW: Final[Mapping[str, str]] = {WEATHER: "station"}
"""The column with the log of a row, where it is not `log`."""


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


def write_all(flights: Flights, folders: Folders, slice_days: int) -> None:
    """Write all logs, in slices of days."""
    for source in SOURCES:
        write_logs(flights, source, folders.logs(source), slice_days)
    write_weather(flights, folders.logs(WEATHER), slice_days)


def schema_of(source: str) -> str:
    """Return the schema of a source's logs."""
    return WEATHER_SCHEMA if source == WEATHER else LOG_SCHEMA


@dataclass(frozen=True)
class Files:
    """Logs in JSON files, of which a batch reads one slice; output in Parquet files. See `Medium`."""

    spark: SparkSession
    folders: Folders
    flights: Flights

    @property
    def repeats(self) -> bool:
        """See `Medium`."""
        return False

    def logs(self, stage: str) -> list[str]:
        """Return the names of the logs that a source stage reads."""
        return list(STATIONS) if stage == WEATHER else self.flights.carriers(LOGS_OF[stage])

    def shards(self, stage: str) -> Mapping[str, Any]:
        """See `Medium`."""
        return {"shards": self.logs(stage)}

    def source(
        self, pipeline: Pipeline, stage: str, event_time: str, strategy: Strategy
    ) -> DataFrame:
        """See `Medium`."""
        logs = LOGS_OF[stage]
        limited = self.spark.readStream.option("maxFilesPerTrigger", len(self.logs(stage)))
        return pipeline.source(
            limited.schema(schema_of(logs)).json(str(self.folders.logs(logs))),
            stage=stage,
            shard=LOG_OF_ROW.get(logs, "log"),
            event_time=event_time,
            strategy=strategy,
        )

    def output(self, stage: str, schema: str) -> DataFrame:
        """See `Medium`."""
        return self.spark.readStream.schema(schema).parquet(str(self.folders.output(stage)))

    def writer(self, frame: DataFrame, stage: str) -> DataStreamWriter:
        """See `Medium`."""
        return (
            frame.writeStream.format("parquet")
            .option("path", str(self.folders.output(stage)))
            .option("checkpointLocation", str(self.folders.checkpoint(stage)))
        )

    def result(self, stage: str, schema: str) -> DataFrame:
        """See `Medium`."""
        return self.spark.read.schema(schema).parquet(str(self.folders.output(stage)))


def make_output_folders(folders: Folders) -> None:
    """Make the folders that one query writes and another reads: a reader needs its folder."""
    for source in SOURCES:
        folders.output(rotations(source)).mkdir(parents=True)
