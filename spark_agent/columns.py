"""Columns of data frames: references to them, checks, and their distribution over tasks.

An event time is a `timestamp`, or a `timestamp_ntz`: a wall clock without a time zone. Spark compares
both with its watermark by their microseconds, so a wall clock counts as UTC, and the agent does the same
everywhere. Neither is ever cast to the other: Spark casts by the session's time zone, and an event time
that is moved by some hours would be late for a watermark that is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.types import (
    DataType,
    DayTimeIntervalType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from spark_agent.arrow import has_type

_MAX_ASSIGNED_SHARDS: Final = 64
"""Up to this many shards are assigned to tasks one by one; more are hashed."""
_US_PER_S: Final = 1_000_000
_SECOND: Final = DayTimeIntervalType.SECOND
_INSTANT_OF: Final[Mapping[str, str]] = {
    "long": "timestamp_millis({})",
    "string": "to_timestamp({})",
}
"""By type: an expression that is likely to make a timestamp of a column."""
_PART: Final = re.compile(r"`((?:[^`]|``)+)`|([^.`]+)")
"""A part of a column's name, with or without backquotes."""


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
    return found if is_time(frame.schema[name].dataType) else found["end"]


def micros_of(frame: DataFrame, name: str) -> Column:
    """Return the event time of a column, or the end of its window, in microseconds, by UTC."""
    return micros(time_of(frame, name), is_wall_clock=is_wall_clock(frame, name))


def micros(time: Column, *, is_wall_clock: bool) -> Column:
    """Return times in microseconds, by UTC."""
    if not is_wall_clock:
        return F.unix_micros(time)
    # `unix_micros` of a wall clock is an error before Spark 4.3.
    since = time - F.lit("1970-01-01").cast("timestamp_ntz")
    in_seconds = since.cast(DayTimeIntervalType(_SECOND, _SECOND)).cast("decimal(20,6)")
    return (in_seconds * _US_PER_S).cast("long")


def is_time(data_type: DataType) -> bool:
    """Return whether a type is one of event times."""
    return isinstance(data_type, (TimestampType, TimestampNTZType))


def is_wall_clock(frame: DataFrame, name: str) -> bool:
    """Return whether the event times in a column, or in its windows, have not a time zone."""
    data_type = frame.schema[name].dataType
    if isinstance(data_type, StructType):
        data_type = data_type["end"].dataType
    return isinstance(data_type, TimestampNTZType)


def control_schema(frame: DataFrame, event_time: str) -> StructType:
    """Return the data's columns, all nullable, as control rows set only the event time.

    The event time is a `timestamp`, which Spark's `withWatermark` requires. Raises `ValueError` for a
    type that Arrow does not support.
    """
    for field in frame.schema:
        if not has_type(field):
            raise ValueError(
                f"column {field.name!r} is of type {field.dataType.simpleString()}, which cannot pass "
                f"through watermarked() or split_late(): cast it, or leave it out"
            )
    return StructType(
        [
            StructField(
                f.name, TimestampType() if f.name == event_time else f.dataType, nullable=True
            )
            for f in frame.schema
        ]
    )


def as_wall_clock(frame: DataFrame, name: str, metadata: Mapping[str, int]) -> DataFrame:
    """Return rows of a control source, none of which comes out, with a wall clock as event time.

    Spark's operators find the event time by its metadata, and compare microseconds.
    """
    time = column(name).cast("timestamp_ntz").alias(name, metadata=dict(metadata))
    return frame.select(*[time if each == name else column(each) for each in frame.columns])


def _is_window(field: StructField) -> bool:
    data_type = field.dataType
    return (
        isinstance(data_type, StructType)
        and data_type.names == ["start", "end"]
        and is_time(data_type["end"].dataType)
    )


def event_time_of(frame: DataFrame, stage: str, name: str | None) -> str | None:
    """Find the column with the event times of a stage's rows; None: there is none.

    Raises `ValueError`.
    """
    times = [each for each in frame.schema if is_time(each.dataType) or _is_window(each)]
    if name is None:
        # A wall clock beside an instant is seldom the event time.
        zoned = [each.name for each in times if not is_wall_clock(frame, each.name)]
        candidates = zoned or [each.name for each in times]
        if len(candidates) > 1:
            raise ValueError(
                f"stage {stage!r}: {', '.join(candidates)} could each be the event time of its "
                f"output: name one, event_time={candidates[-1]!r}"
            )
        return candidates[0] if candidates else None
    found = name_of(frame, name)
    if found not in [each.name for each in times]:
        data_type = frame.schema[found].dataType.simpleString()
        raise ValueError(
            f"event time {name!r} is of type {data_type}; it must be a timestamp, a timestamp_ntz or a "
            f"window"
        )
    return found


def name_of(frame: DataFrame, name: object) -> str:
    """Return the data frame's own name of a column that is named as Spark's resolver reads names.

    Raises `ValueError`.
    """
    return name_in(frame.schema, name, is_case_sensitive=is_case_sensitive(frame.sparkSession))


def is_case_sensitive(spark: SparkSession) -> bool:
    """Return whether Spark distinguishes upper and lower case in names."""
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def name_in(schema: StructType, name: object, *, is_case_sensitive: bool) -> str:
    """Return a schema's own name of a column. Raises `ValueError`.

    Backquotes are those of Spark. A name with a dot is of a column, not of a field of a structure: like
    Spark's `withWatermark`, the agent takes columns alone.

    >>> meta = StructType().add("at", "timestamp")
    >>> schema = StructType().add("At", "timestamp").add("a.b", "string").add("meta", meta)
    >>> [name_in(schema, name, is_case_sensitive=False) for name in ("at", "`AT`", "a.b", "`A.b`")]
    ['At', 'At', 'a.b', 'a.b']
    >>> name_in(schema, "at", is_case_sensitive=True)
    Traceback (most recent call last):
    ValueError: unknown column 'at'; the data frame has At, a.b, meta. Names are case-sensitive here \
(spark.sql.caseSensitive)
    >>> name_in(schema, "meta.at", is_case_sensitive=False)
    Traceback (most recent call last):
    ValueError: 'meta.at' is a field of the structure 'meta', and must be a column, as for Spark's \
withWatermark: compute it before, .withColumn('meta_at', F.expr('meta.at')), or in read_kafka(), \
columns={'meta_at': 'meta.at'}, and name that
    """
    if not isinstance(name, str):
        raise ValueError(  # noqa: TRY004  (a wrong argument, like all that a pipeline rejects)
            f"give a column's name, a string, not {name!r}"
        )

    def alike(names: Sequence[str], wanted: str) -> list[str]:
        if is_case_sensitive:
            return [each for each in names if each == wanted]
        return [each for each in names if each.lower() == wanted.lower()]

    parts = _parts(name)
    found = alike(schema.names, name) or (alike(schema.names, parts[0]) if len(parts) == 1 else [])
    if len(found) > 1:
        raise ValueError(
            f"{name!r} may be each of the columns {', '.join(found)}, since Spark does not distinguish "
            f"upper and lower case: rename or drop the others"
        )
    field = _field(schema, parts, alike)
    if field and found:
        raise ValueError(
            f"{name!r} may be the column of this name, or a field of the structure {field[0]!r}: write "
            f"{quoted(found[0])!r}, in backquotes, for the column"
        )
    if field:
        new = _free_name(field, schema.names)
        raise ValueError(
            f"{name!r} is a field of the structure {field[0]!r}, and must be a column, as for Spark's "
            f"withWatermark: {_before(new, '{}', name)}, and name that"
        )
    if not found:
        case = (
            " Names are case-sensitive here (spark.sql.caseSensitive)" if is_case_sensitive else ""
        )
        has = ", ".join(schema.names)
        raise ValueError(f"unknown column {name!r}; the data frame has {has}{case and f'.{case}'}")
    return found[0]


def _parts(name: str) -> list[str]:
    """Return the parts of a name, without their backquotes; empty: it is not such a name.

    >>> _parts("meta.at"), _parts("`meta.at`"), _parts("meta.`a``t`"), _parts("a..b"), _parts("`")
    (['meta', 'at'], ['meta.at'], ['meta', 'a`t'], [], [])
    """
    if re.fullmatch(rf"(?:{_PART.pattern})(?:\.(?:{_PART.pattern}))*", name) is None:
        return []
    return [
        quoted_part.replace("``", "`") if quoted_part else plain
        for quoted_part, plain in _PART.findall(name)
    ]


def _field(
    schema: StructType, parts: Sequence[str], alike: Callable[[Sequence[str], str], list[str]]
) -> list[str]:
    """Return the names from a column to a field of its structure; empty: there is not such a field."""
    path: list[str] = []
    data_type: DataType = schema
    for part in parts if len(parts) > 1 else ():
        names = alike(data_type.names, part) if isinstance(data_type, StructType) else []
        if not names or not isinstance(data_type, StructType):
            return []
        path.append(names[0])
        data_type = data_type[names[0]].dataType
    return path


def _free_name(field: Sequence[str], taken: Sequence[str]) -> str:
    """Return a name for a column with a field's values.

    >>> _free_name(["meta", "at"], ["tap"]), _free_name(["meta", "at"], ["tap", "AT"])
    ('at', 'meta_at')
    """
    return "_".join(field) if field[-1].lower() in map(str.lower, taken) else field[-1]


def _before(name: str, expression: str, of: str) -> str:
    """Return the advice to compute a column before it is named.

    >>> _before("at", "timestamp_millis({})", "ms")
    "compute it before, .withColumn('at', F.expr('timestamp_millis(ms)')), or in read_kafka(), \
columns={'at': 'timestamp_millis(ms)'}"
    """
    sql = expression.format(of)
    return (
        f"compute it before, .withColumn({name!r}, F.expr({sql!r})), or in read_kafka(), "
        f"columns={{{name!r}: {sql!r}}}"
    )


def time_name_of(frame: DataFrame, name: object) -> str:
    """Return the data frame's own name of a column, which must be an event time. Raises `ValueError`."""
    found = name_of(frame, name)
    data_type = frame.schema[found].dataType
    if not is_time(data_type):
        instant = _INSTANT_OF.get(data_type.typeName(), "CAST({} AS timestamp)")
        raise ValueError(
            f"event time {name!r} is of type {data_type.simpleString()}; it must be a timestamp or a "
            f"timestamp_ntz: {_before('at', instant, found)}"
        )
    return found


def with_ingress_time(frame: DataFrame, name: str) -> DataFrame:
    """Add the column with the time of the batch that has read a row. Raises `ValueError`.

    Spark's time of a batch is logged with the plan of the batch, so a repeated batch has it again.
    """
    taken = frame.columns
    if not is_case_sensitive(frame.sparkSession):
        # Spark would replace a column whose name is another in upper and lower case alone.
        taken = [each for each in taken if each.lower() == str(name).lower()] and [name]
    if not isinstance(name, str) or name in taken:  # pyright: ignore[reportUnnecessaryIsInstance]
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
    end = time_of(frame, window)
    if is_wall_clock(frame, window):
        seconds = F.lit(Decimal(reach_us) / _US_PER_S)
        earliest = end - F.make_dt_interval(secs=seconds)
    else:
        # An interval of days would depend on the session's time zone.
        earliest = F.timestamp_micros(F.unix_micros(end) - F.lit(reach_us))
    return frame.withColumn(name, F.greatest(column(name), earliest))


def mark_of(frame: DataFrame, event_time: str, mark: Column) -> Column:
    """Return a strategy's mark, which must be of the event time's type. Raises `ValueError`."""
    try:
        # A filter, since the mark will be in one: aggregates and window functions cannot be.
        rows = frame.filter(mark.isNull()).select(mark.alias("mark"))
        data_type = rows.schema["mark"].dataType
    except AnalysisException as error:
        raise ValueError(f"the strategy's SQL cannot be read: {error.getMessage()}") from error
    wanted = frame.schema[event_time].dataType
    if data_type != wanted:
        raise ValueError(
            f"the strategy's SQL gives {data_type.simpleString()}; it must give a "
            f"{wanted.simpleString()}, as the event time {event_time!r} is, like "
            f"'{event_time} - INTERVAL 5 SECONDS'"
        )
    return mark
