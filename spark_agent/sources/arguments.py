"""Checks of what the user passes to `Pipeline.read_logs`."""

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
    path: object, *, form: object, schema: object, shard: object, most: object
) -> StructType:
    """Check the arguments of `read_logs`; return the columns that it gives. Raises `ValueError`."""
    _check_path(path)
    if form not in FORMATS:
        raise ValueError(f"format {form!r} is not known: write 'csv', 'json' or 'parquet'")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(
            f"max_files_per_shard {most!r} is not a number of files: write 1 or more, or leave it out"
        )
    fields = _fields(schema)
    if not isinstance(shard, str) or not shard:
        raise ValueError(f"shard {shard!r} is not a column's name: write one, such as 'shard'")
    taken = {name.lower(): name for name in fields.names}
    if shard.lower() in taken:
        raise ValueError(
            f"shard {shard!r}: the schema has a column {taken[shard.lower()]!r}, and this is to be the "
            f"column with the folder's name: give that another name, shard='folder', or leave the "
            f"schema's column out"
        )
    for field in fields:
        _check_type(field, str(form))
    columns = [StructField(each.name, each.dataType, nullable=True) for each in fields]
    return StructType([*columns, StructField(shard, StringType(), nullable=False)])


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)) or not path:
        raise ValueError(f"path {path!r} is not the path of a folder: write it like '/data/taps'")
    name = str(os.fspath(path))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if "://" in name or name.startswith("file:"):
        raise ValueError(
            f"path {name!r} is a URL, and read_logs() reads folders that are mounted: write the path "
            f"where the driver and every executor have it, like '/data/taps'"
        )
    if not Path(name).is_dir():
        raise ValueError(
            f"path {name!r} is not a folder. It must be there before the query starts; in it is a "
            f"folder for each shard, which may come later"
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
            f"schema {given!r} has no columns: write them with their types, like "
            f"'tap string, at timestamp, litres double'"
        )
    names = [name.lower() for name in schema.names]
    for name in schema.names:
        if names.count(name.lower()) > 1:
            raise ValueError(f"schema: the column {name!r} is there more than once")
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
