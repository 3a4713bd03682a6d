"""Clicks of many people, in the order in which they come, and parquet files of them."""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from spark_agent import BoundedOutOfOrderness, Pipeline

Table: TypeAlias = Any
"""A `pyarrow.Table`."""
Array: TypeAlias = Any
"""A numpy array of numbers."""

SHARDS: Final = 8
GAP_S: Final = 600
BOUND_S: Final = 120
"""Rows come no later than this behind newer ones."""

_START_S: Final = 1_700_000_000
_CLICKS: Final = 5
"""Rows of a session, all within a minute."""
_MINUTE_US: Final = 60_000_000
_SESSIONS_PER_S: Final = 5
_PEOPLE_S: Final = 6 * 3_600
"""After so long the same person comes again."""


@dataclass(frozen=True)
class Clicks:
    """Clicks in slices of time. One late row of each shard comes last, by which all sessions close: so
    every query over them writes the same in the end.
    """

    rows: int
    slices: int

    @property
    def span_s(self) -> int:
        """The event time that one slice covers, rounded up."""
        return self.rows // _CLICKS // _SESSIONS_PER_S // self.slices + 1

    @property
    def sessions(self) -> int:
        """Return the number of sessions that come out. The sessions of the last rows stay open."""
        return self.rows // _CLICKS

    def tables(self) -> Iterator[Table]:
        """Each slice, then the late rows."""
        clicks = _clicks(self.rows)
        for number in range(self.slices):
            first, last = (self.rows * edge // self.slices for edge in (number, number + 1))
            yield clicks.slice(first, last - first)
        yield self._last()

    def _last(self) -> Table:
        # Later than all others by more than any of the watermarks compared is delayed.
        after_s = _START_S + (self.slices + 4) * self.span_s + _PEOPLE_S
        return _table(
            np.arange(SHARDS) - SHARDS, np.full(SHARDS, after_s * 1_000_000), np.arange(SHARDS)
        )


class Input(Protocol):
    """Clicks where a query reads them, a slice of time in each batch."""

    @property
    def clicks(self) -> Clicks:
        """The clicks that it has."""
        ...

    @property
    def source(self) -> Mapping[str, Any]:
        """Its stage in a pipeline's specification."""
        ...

    def write(self) -> None:
        """Make it."""
        ...

    def read(self, spark: SparkSession) -> DataFrame:
        """Read the clicks with plain Spark."""
        ...

    def read_by(self, pipeline: Pipeline, spark: SparkSession, stage: str) -> DataFrame:
        """Read the clicks as the source of a stage."""
        ...


@dataclass(frozen=True)
class Files:
    """A folder of parquet files, a slice of time in each, as a log is written."""

    folder: Path
    clicks: Clicks
    by_shard: bool = False
    """True if each file has the rows of one shard alone."""

    @property
    def per_batch(self) -> int:
        """Return the number of files of one batch: one slice of time."""
        return SHARDS if self.by_shard else 1

    @property
    def source(self) -> Mapping[str, Any]:
        return {"shards": [str(shard) for shard in range(SHARDS)]}

    def write(self) -> None:
        self.folder.mkdir()
        for number, table in enumerate(self.clicks.tables()):
            self._put(number, table)

    def read(self, spark: SparkSession) -> DataFrame:
        return (
            spark.readStream.schema("person long, shard string, at timestamp, amount double")
            .option("maxFilesPerTrigger", self.per_batch)
            .parquet(str(self.folder))
        )

    def read_by(self, pipeline: Pipeline, spark: SparkSession, stage: str) -> DataFrame:
        return pipeline.source(
            self.read(spark),
            stage=stage,
            shard="shard",
            event_time="at",
            strategy=BoundedOutOfOrderness(f"{BOUND_S} s"),
            partitioned_by_shard=self.by_shard,
        )

    def _put(self, number: int, table: Table) -> None:
        if not self.by_shard:
            self._write(f"{number:04d}.parquet", table, number)
            return
        for shard in range(SHARDS):
            mask = pa.compute.equal(table["shard"], str(shard))
            self._write(f"{number:04d}-{shard}.parquet", table.filter(mask), number)

    def _write(self, name: str, table: Table, number: int) -> None:
        path = self.folder / name
        pq.write_table(table, path)
        os.utime(path, (_START_S + number, _START_S + number))


def _clicks(rows: int) -> Table:
    """All rows in the order in which they come: up to a minute out of that of their event times."""
    random = np.random.default_rng(7)
    sessions = rows // _CLICKS
    starts = _START_S * 1_000_000 + np.arange(sessions) * (1_000_000 // _SESSIONS_PER_S)
    times = (starts[:, None] + random.integers(0, _MINUTE_US, (sessions, _CLICKS))).ravel()
    people = np.arange(sessions) % (_PEOPLE_S * _SESSIONS_PER_S)
    order = np.argsort(times + random.integers(0, _MINUTE_US, rows), kind="stable")
    return _table(np.repeat(people, _CLICKS)[order], times[order], np.arange(rows))


def _table(people: Array, times_us: Array, amounts: Array) -> Table:
    return pa.table(
        {
            "person": pa.array(people, pa.int64()),
            "shard": pa.array((people % SHARDS).astype(str)),
            "at": pa.array(times_us, pa.timestamp("us", tz="UTC")),
            "amount": pa.array(amounts, pa.float64()),
        }
    )
