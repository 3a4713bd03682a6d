"""Columns of data frames: references to them, checks, and their distribution over tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.types import StructField, StructType, TimestampType

from spark_agent.arrow import has_type

_MAX_ASSIGNED_SHARDS: Final = 64
"""Up to this many shards are assigned to tasks one by one; more are hashed."""


def column(name: str) -> Column:
    """Refer to a column, whatever characters its name contains."""
    return F.col(quoted(name))


def quoted(name: str) -> str:
    """Quote a column's name for Spark.

    >>> quoted("a`b")
    '`a``b`'
    """
    return "`{}`".format(name.replace("`", "``"))


def by_shard(frame: DataFrame, shard: str, shards: Sequence[str] | None, tasks: int) -> DataFrame:
    """Bring all rows of a shard into one task, with the shards spread evenly over the tasks.

    Hashing spreads a few names unevenly: two tasks might get three and five of eight shards, and each
    batch would wait for the slower task. Hashing spreads many names well enough, and searching a long
    list for each row's name would cost more than even tasks save. `shards` is None if unknown.
    """
    if shards is None or len(shards) > _MAX_ASSIGNED_SHARDS:
        return frame.repartition(tasks, column(shard))
    names = F.array(*[F.lit(name) for name in shards])
    return frame.repartitionById(
        tasks, F.array_position(names, column(shard).cast("string")).cast("int")
    )


def time_of(frame: DataFrame, name: str) -> Column:
    """Return the event time of a column: its value, or the end of its window."""
    found = column(name)
    return found if isinstance(frame.schema[name].dataType, TimestampType) else found["end"]


def control_schema(frame: DataFrame) -> StructType:
    """Return the data's columns, all nullable, as control rows set only the event time.

    Raises `ValueError` for a type that Arrow does not support.
    """
    for field in frame.schema:
        if not has_type(field):
            raise ValueError(
                f"column {field.name!r} is of type {field.dataType.simpleString()}, which cannot pass "
                f"through watermarked() or split_late(): cast it, or leave it out"
            )
    return StructType([StructField(f.name, f.dataType, nullable=True) for f in frame.schema])


def _is_window(field: StructField) -> bool:
    data_type = field.dataType
    return (
        isinstance(data_type, StructType)
        and data_type.names == ["start", "end"]
        and isinstance(data_type["end"].dataType, TimestampType)
    )


def event_time_of(frame: DataFrame, stage: str, name: str | None) -> str | None:
    """Find the column with the event times of a stage's rows; None: there is none.

    Raises `ValueError`.
    """
    candidates = [
        field.name
        for field in frame.schema
        if isinstance(field.dataType, TimestampType) or _is_window(field)
    ]
    if name is None:
        if len(candidates) > 1:
            raise ValueError(
                f"stage {stage!r}: {', '.join(candidates)} could each be the event time of its "
                f"output: name one, event_time={candidates[-1]!r}"
            )
        return candidates[0] if candidates else None
    check_column(frame, name)
    if name not in candidates:
        data_type = frame.schema[name].dataType.simpleString()
        raise ValueError(
            f"event time {name!r} is of type {data_type}; it must be a timestamp (with local time zone) "
            f"or a window"
        )
    return name


def check_column(frame: DataFrame, name: object) -> None:
    """Check that the data frame has the column. Raises `ValueError`."""
    if not isinstance(name, str):
        raise ValueError(  # noqa: TRY004  (a wrong argument, like all that a pipeline rejects)
            f"give a column's name, a string, not {name!r}"
        )
    if name not in frame.columns:
        raise ValueError(f"unknown column {name!r}; the data frame has {', '.join(frame.columns)}")


def check_time(frame: DataFrame, name: str) -> None:
    """Check that the column is a timestamp. Raises `ValueError`."""
    check_column(frame, name)
    data_type = frame.schema[name].dataType
    if not isinstance(data_type, TimestampType):
        raise ValueError(  # noqa: TRY004  (the column's name has the right type, its value is wrong)
            f"event time {name!r} is of type {data_type.simpleString()}; it must be a timestamp (with "
            f"local time zone)"
        )


def with_ingress_time(frame: DataFrame, name: str) -> DataFrame:
    """Add the column with the time of the batch that has read a row. Raises `ValueError`.

    Spark's time of a batch is logged with the plan of the batch, so a repeated batch has it again.
    """
    if not isinstance(name, str) or name in frame.columns:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"IngressTime adds the column {name!r}, and the data frame has it already: give it another "
            f"name, event_time='read_at', or use another strategy"
        )
    return frame.withColumn(name, F.current_timestamp())


def with_output_time(frame: DataFrame, name: str, window: str, reach_us: int) -> DataFrame:
    """Date windows by a column, which is at most `reach_us` before their end.

    In overlapping windows an output time is then at or after the end of the window before (Beam's rule
    for sliding windows).
    """
    end_us = F.unix_micros(time_of(frame, window))
    earliest = F.timestamp_micros(end_us - F.lit(reach_us))
    return frame.withColumn(name, F.greatest(column(name), earliest))


def mark_of(frame: DataFrame, mark: Column) -> Column:
    """Return a strategy's mark, which must be a timestamp. Raises `ValueError`."""
    try:
        # A filter, since the mark will be in one: aggregates and window functions cannot be.
        rows = frame.filter(mark.isNull()).select(mark.alias("mark"))
        data_type = rows.schema["mark"].dataType
    except AnalysisException as error:
        raise ValueError(f"the strategy's SQL cannot be read: {error.getMessage()}") from error
    if not isinstance(data_type, TimestampType):
        raise ValueError(  # noqa: TRY004  (the column has a type, and it is the wrong one)
            f"the strategy's SQL gives {data_type.simpleString()}; it must give a timestamp (with local "
            f"time zone), like 'at - INTERVAL 5 SECONDS'"
        )
    return mark
