"""Checks of the arguments of `Pipeline.read_logs`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from spark_agent.arrow import has_type

FORMATS: Final[Sequence[str]] = ("csv", "json", "parquet")


def check_logs(
    path: object,
    *,
    form: object,
    schema: object,
    shard: object,
    most: object,
    complete: object = None,
) -> StructType:
    """Check the arguments of `read_logs`; return its columns. Raises `ValueError`."""
    _check_path(path)
    if form not in FORMATS:
        raise ValueError(f"invalid format {form!r}: write 'csv', 'json' or 'parquet'")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"invalid max_files_per_shard {most!r}: write 1 or more, or leave it out")
    if complete is not None and not _is_file_name(complete):
        raise ValueError(
            f"invalid complete {complete!r}: write the name of a file, without a folder, like "
            f"'_SUCCESS', or leave it out"
        )
    fields = _fields(schema)
    if not isinstance(shard, str) or not shard:
        raise ValueError(f"invalid shard {shard!r}: write a column's name, such as 'shard'")
    taken = {name.lower(): name for name in fields.names}
    if shard.lower() in taken:
        raise ValueError(
            f"shard {shard!r}: the schema already has a column {taken[shard.lower()]!r}, and the column "
            f"with the folder's name needs another name: pass shard='folder', or leave the schema's "
            f"column out"
        )
    for field in fields:
        _check_type(field, str(form))
    columns = [StructField(each.name, each.dataType, nullable=True) for each in fields]
    return StructType([*columns, StructField(shard, StringType(), nullable=False)])


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or name in {"", ".", ".."}:
        return False
    return not any(each in name for each in ("/", "\\", "\0"))


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)) or not path:
        raise ValueError(f"invalid path {path!r}: write the path of a folder, like '/data/taps'")
    name = str(os.fspath(path))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if "://" in name or name.startswith("file:"):
        raise ValueError(
            f"path {name!r} is a URL, and read_logs() reads folders that are mounted: write the path "
            f"of the mount on the driver and every executor, like '/data/taps'"
        )
    if not Path(name).is_dir():
        raise ValueError(
            f"path {name!r} is not a folder. Create it before the query starts. The folders of its "
            f"shards may come later"
        )


def _fields(schema: object) -> StructType:
    given = schema
    if isinstance(schema, str):
        try:
            schema = DataType.fromDDL(schema)
        except (PySparkException, ValueError) as error:
            raise ValueError(
                f"schema {given!r} cannot be read: write columns and their types, like "
                f"'tap string, at timestamp, litres double'"
            ) from error
    if not isinstance(schema, StructType) or not schema.fields:
        raise ValueError(
            f"schema {given!r} has no columns: write columns and their types, like "
            f"'tap string, at timestamp, litres double'"
        )
    names = [name.lower() for name in schema.names]
    for name in schema.names:
        if names.count(name.lower()) > 1:
            raise ValueError(f"schema: duplicate column {name!r}")
    return schema


def _check_type(field: StructField, form: str) -> None:
    data_type: Any = field.dataType
    if not has_type(field):
        raise ValueError(
            f"schema: column {field.name!r} is of type {data_type.simpleString()}, which read_logs() "
            f"cannot read: leave it out, or read it as a string"
        )
    if form == "csv" and isinstance(data_type, (ArrayType, MapType, StructType)):
        raise ValueError(
            f"schema: column {field.name!r} is of type {data_type.simpleString()}, which a CSV file "
            f"cannot have: read it as a string, or write JSON or Parquet"
        )
