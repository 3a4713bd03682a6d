# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Rows of a shard's files, in Spark's form."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from spark_agent.arrow import Array, Batch
from spark_agent.exceptions import LogsError

ArrowType: TypeAlias = Any
"""A `pyarrow.DataType`, or a `pyarrow.Schema`."""

_BLOCK_BYTES: Final = 8 << 20
"""The longest line of JSON or CSV."""
_ROWS: Final = 10_000
_HEADER_BYTES: Final = 65_536
_ZONED: Final = r"(?:[zZ]|[+-]\d{2}:?(?:\d{2})?)$"
_DATED: Final = r"^\d{4}-\d{2}-\d{2}$"
_BEYOND_MICROSECONDS: Final = r"(\.\d{6})\d+"


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the rows that are read from a file."""

    schema: ArrowType
    """The `pyarrow.Schema` that Spark expects."""
    zone: str
    """The time zone of instants without one."""
    event_time: str
    """The column that every file must have: rows without an event time would be lost silently."""


def read_file(path: str, form: str, columns: Columns) -> Iterator[Batch]:
    """Read a file. A missing column is null. Raises `LogsError`."""
    try:
        for batch in FORMATS[form](path, columns):
            yield _converted(batch, columns)
    except FileNotFoundError as error:
        raise LogsError(
            f"tidegauge: {path} was deleted before it was read: a file may be deleted once the query "
            f"has read past it. Put it back, and start the query again"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise LogsError(
            f"tidegauge: {path} cannot be read as {form}: {error}. A file must be complete when it "
            f"gets its name: write it under a name that begins with a dot, and rename it. Repair the "
            f"file, or replace it by a file without rows, and start the query again"
        ) from error


def _read_parquet(path: str, columns: Columns) -> Iterator[Batch]:
    with pa.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        _check_event_time(file.schema_arrow.names, columns)
        wanted = [name for name in file.schema_arrow.names if name in columns.schema.names]
        # A legacy form of Spark's, in which instants are UTC, although the file does not record it.
        instants = {
            file.schema.column(i).name
            for i in range(len(file.schema))
            if file.schema.column(i).physical_type == "INT96"
        }
        for batch in file.iter_batches(batch_size=_ROWS, columns=wanted, use_threads=False):
            arrays = [
                pc.assume_timezone(array, "UTC")
                if name in instants and pa.types.is_timestamp(array.type) and array.type.tz is None
                else array
                for name, array in zip(batch.schema.names, batch.columns, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _read_json(path: str, columns: Columns) -> Iterator[Batch]:
    if _is_empty(path):
        return
    explicit = pa.schema([pa.field(each.name, _as_text(each.type)) for each in columns.schema])
    with pa.input_stream(path) as stream:
        table = pa.json.read_json(
            stream,
            read_options=pa.json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pa.json.ParseOptions(
                explicit_schema=explicit, unexpected_field_behavior="ignore"
            ),
        )
    yield from table.to_batches(max_chunksize=_ROWS)


def _read_csv(path: str, columns: Columns) -> Iterator[Batch]:
    if _is_empty(path):
        return
    types = {each.name: _as_text(each.type) for each in columns.schema}
    with pa.input_stream(path) as stream:
        _check_event_time(_csv_header(stream.read(_HEADER_BYTES)), columns)
    with pa.input_stream(path) as stream:
        reader = pa.csv.open_csv(
            stream,
            read_options=pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            convert_options=pa.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                include_missing_columns=True,
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        yield from reader


def _is_empty(path: str) -> bool:
    """Return whether a file is empty, or a compressed file of nothing."""
    if not Path(path).stat().st_size:
        return True
    with pa.input_stream(path) as stream:
        return not stream.read(1)


def _csv_header(beginning: bytes) -> list[str]:
    line = beginning.decode("utf-8-sig", errors="replace").partition("\n")[0]
    return next(csv.reader([line.rstrip("\r")]), [])


def _check_event_time(names: Sequence[str], columns: Columns) -> None:
    if columns.event_time not in names:
        raise pa.ArrowInvalid(
            f"the column {columns.event_time!r}, the event time, is missing among {', '.join(names)}"
        )


FORMATS: Final[Mapping[str, Callable[[str, Columns], Iterator[Batch]]]] = {
    "csv": _read_csv,
    "json": _read_json,
    "parquet": _read_parquet,
}
"""Readers of the formats. CSV has the columns' names in its first line, JSON an object in each line."""


def _as_text(of: ArrowType) -> ArrowType:
    """Return the type in which a column of a text file is read first: Arrow parses few forms of time."""
    return pa.string() if pa.types.is_timestamp(of) or pa.types.is_date(of) else of


def _converted(batch: Batch, columns: Columns) -> Batch:
    names = batch.schema.names
    arrays = [
        _cast(batch.column(names.index(each.name)), each.type, columns.zone)
        if each.name in names
        else pa.nulls(batch.num_rows, each.type)
        for each in columns.schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns.schema)


def _cast(array: Array, to: ArrowType, zone: str) -> Array:
    if array.type == to:
        return array
    if not pa.types.is_timestamp(to):
        return pc.cast(array, to)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return _parsed(array, to, zone)
    if to.tz is not None and pa.types.is_timestamp(array.type) and array.type.tz is None:
        array = _in_zone(pc.cast(array, pa.timestamp("us"), safe=False), zone)
    # Spark, too, truncates to microseconds.
    return pc.cast(array, to, safe=False)


def _parsed(texts: Array, to: ArrowType, zone: str) -> Array:
    """Parse instants. As in Spark, an instant without a time zone is in the session's."""
    texts = pc.replace_substring_regex(texts, _BEYOND_MICROSECONDS, r"\1")
    local = pa.timestamp("us")
    if to.tz is None:
        return pc.cast(texts, local)
    zoned = pc.and_(
        pc.match_substring_regex(texts, _ZONED),
        pc.invert(pc.match_substring_regex(texts, _DATED)),
    )
    nothing = pa.scalar(None, pa.string())
    instants = pc.cast(pc.if_else(zoned, texts, nothing), to)
    return pc.coalesce(instants, _in_zone(pc.cast(pc.if_else(zoned, nothing, texts), local), zone))


def _in_zone(local: Array, zone: str) -> Array:
    """Place local times in a time zone. As in Spark, a time that the clocks skip is read by the offset
    before the change: 02:15 is 03:15 then.
    """
    placed = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="earliest")
    skipped = pc.subtract(local, pc.local_timestamp(placed))
    return pc.cast(pc.add(placed, skipped), pa.timestamp("us", "UTC"))


def read_rows(
    path: str,
    shard: str,
    names: Sequence[str],
    *,
    form: str,
    schema: StructType,
    shard_column: str,
    zone: str,
    event_time: str,
) -> Iterator[Batch]:
    """Read a shard's files, one after the other, and add the shard as a column. Raises `LogsError`."""
    whole = to_arrow_schema(schema, timezone="UTC")
    at = whole.get_field_index(shard_column)
    columns = Columns(whole.remove(at), zone, event_time)
    for name in names:
        for batch in read_file(str(Path(path, shard, name)), form, columns):
            arrays = list(batch.columns)
            arrays.insert(at, pa.repeat(pa.scalar(shard, whole.field(at).type), batch.num_rows))
            yield pa.RecordBatch.from_arrays(arrays, schema=whole)
