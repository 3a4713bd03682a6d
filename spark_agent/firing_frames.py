"""Data frames of windows that fire more than once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.types import LongType, StructType

from spark_agent.columns import column, micros_of, quoted

ON_TIME: Final = "on_time"
VERSION: Final = "version"
"""The columns that a firing adds to a window: True for the first one, and the number of its batch."""

_ROW: Final = "row"
_END: Final = "end"
_BATCH: Final = "batch"


def end_us(frame: DataFrame, window: str) -> Column:
    """Return the ends of windows, in microseconds."""
    return micros_of(frame, window)


def kept(rows: DataFrame, window: str, batch: int) -> DataFrame:
    """Return rows as they are kept until they fire, with the batch that has brought them."""
    return rows.select(
        F.struct("*").alias(_ROW), end_us(rows, window).alias(_END), _number(batch).alias(_BATCH)
    )


def kept_schema(rows: StructType) -> StructType:
    """Return the schema of rows that are kept."""
    return StructType().add(_ROW, rows).add(_END, LongType()).add(_BATCH, LongType())


def newest(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the newest row of each window and key, of rows that are kept."""
    # The keys have names of their own: a column of the rows may be named like one of these.
    groups = rows.groupBy(
        *[F.col(f"{_ROW}.{quoted(key)}").alias(f"key_{at}") for at, key in enumerate(keys)]
    )
    found = groups.agg(
        F.max_by(_ROW, _BATCH).alias(_ROW), F.max(_END).alias(_END), F.max(_BATCH).alias(_BATCH)
    )
    return found.select(_ROW, _END, _BATCH)


def ending(rows: DataFrame, after_us: int, to_us: int) -> DataFrame:
    """Return kept rows whose window ends after one time and not after another, as they came."""
    return rows.filter((F.col(_END) > after_us) & (F.col(_END) <= to_us)).select(f"{_ROW}.*")


def open_after(rows: DataFrame, now_us: int) -> DataFrame:
    """Return kept rows whose window ends after a time, to be kept on."""
    return rows.filter(F.col(_END) > now_us)


def fired(rows: DataFrame, batch: int, on_time: Column) -> DataFrame:
    """Return rows with the columns of their firing."""
    return rows.select(
        *map(column, rows.columns), on_time.alias(ON_TIME), _number(batch).alias(VERSION)
    )


def with_firing(rows: DataFrame) -> DataFrame:
    """Return a data frame with the columns of rows that have fired."""
    return fired(rows, 0, F.lit(True))


def _number(batch: int) -> Column:
    return F.lit(batch).cast("long")
