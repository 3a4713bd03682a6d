"""Data frames of late rows: set apart from the others, and written beside the results in one query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from spark_agent.columns import column, micros_of

FLAG: Final = "tidegauge_is_late"
"""The column with the flag of a late row, between the shuffle and the two data frames."""

_PART: Final = "tidegauge_part_"


def is_late(frame: DataFrame, event_time: str, first_on_time_us: Column) -> Column:
    """Return the condition of a late row. A row without an event time is not late."""
    return F.coalesce(micros_of(frame, event_time) < first_on_time_us, F.lit(False))


def split(
    frame: DataFrame, event_time: str, first_on_time_us: Column, *, tasks: int
) -> tuple[DataFrame, DataFrame]:
    """Return the rows that are on time, and the late rows.

    Both read one shuffle, so that the source is read once, and each row is in one of the two. That
    holds only as long as Spark recognises the two shuffles as equal. So the optimiser must neither push
    a filter of one branch below the shuffle, nor remove a column that only one branch needs: each
    branch's filter is non-deterministic, and refers to every column in a case that never occurs.
    """
    # The flag is the first column: Spark's text of a plan leaves out those after the first few.
    flagged = frame.select(is_late(frame, event_time, first_on_time_us).alias(FLAG), "*")
    # By time, since a repeated task must have the same rows: one without a key would have to sort.
    shuffled = flagged.repartition(tasks, column(event_time))
    every_column = F.xxhash64(*[_hashable(shuffled, name) for name in shuffled.columns]) == 0
    never = F.spark_partition_id() < 0
    branches = (
        shuffled.filter(F.when(never, every_column).otherwise(flag))
        for flag in (~column(FLAG), column(FLAG))
    )
    on_time, late = (branch.select(*map(column, frame.columns)) for branch in branches)
    return on_time, late


def _hashable(frame: DataFrame, name: str) -> Column:
    """Return a value that depends on a column. Spark does not hash a map, nor a variant."""
    found = column(name)
    return found if _has_hash(frame.schema[name].dataType) else F.to_json(F.struct(found))


def _has_hash(data_type: DataType) -> bool:
    match data_type:
        case MapType() | VariantType():
            return False
        case ArrayType():
            return _has_hash(data_type.elementType)
        case StructType():
            return all(_has_hash(field.dataType) for field in data_type)
        case _:
            return True


def together(frames: Sequence[DataFrame]) -> DataFrame:
    """Return the rows of several data frames, each in a column of its own.

    The first data frame's tasks keep their partitions' numbers.
    """
    schemas = [frame.schema for frame in frames]
    parts = [
        frame.select(
            *[
                (F.struct("*") if of == at else F.lit(None).cast(schema)).alias(f"{_PART}{of}")
                for of, schema in enumerate(schemas)
            ]
        )
        for at, frame in enumerate(frames)
    ]
    found = parts[0]
    for part in parts[1:]:
        found = found.union(part)
    return found


def rows_of(batch: DataFrame, part: int) -> DataFrame:
    """Return the rows of one of the data frames that `together` was given."""
    name = f"{_PART}{part}"
    return batch.filter(column(name).isNotNull()).select(f"{name}.*")
