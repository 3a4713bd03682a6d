"""Files of logs, and the arguments that say what is in them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_agent.exceptions import LogsError
from spark_agent.sources.arguments import check_logs
from spark_agent.sources.formats import Columns, read_file

INSTANT = datetime(2026, 1, 1, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01T05:00:00Z",
        "2026-01-01T00:00:00-05:00",
        "2026-01-01 00:00:00-05",
        "2026-01-01T05:00:00.000000999Z",
        "2026-01-01T00:00:00",
        "2026-01-01 00:00:00.000",
        "2026-01-01",
    ],
)
@pytest.mark.parametrize("form", ["json", "json.gz", "csv"])
def test_instants_are_exact(tmp_path: Path, text: str, form: str) -> None:
    """Those without a time zone are in the session's."""
    path = tmp_path / f"1.{form}"
    content = f"other,at\n1,{text}\n" if form == "csv" else json.dumps({"at": text})
    path.write_bytes(gzip.compress(content.encode()) if form == "json.gz" else content.encode())
    columns = Columns(
        pa.schema([("at", pa.timestamp("us", "UTC")), ("x", pa.int64())]), "America/New_York", "at"
    )
    [found] = read_file(str(path), form.partition(".")[0], columns)
    assert found.to_pylist() == [{"at": INSTANT, "x": None}]


@pytest.mark.parametrize(
    ("local", "utc_hour", "minute"),
    [
        ("2026-03-08T02:15:00", 7, 15),
        ("2026-03-08T01:59:59", 6, 59),
        ("2026-11-01T01:30:00", 5, 30),
    ],
)
def test_local_times_are_placed_as_spark_places_them(
    tmp_path: Path, local: str, utc_hour: int, minute: int
) -> None:
    """Those that the clocks skip, and those that come twice."""
    path = tmp_path / "1.json"
    path.write_text(json.dumps({"at": local}))
    columns = Columns(pa.schema([("at", pa.timestamp("us", "UTC"))]), "America/New_York", "at")
    [found] = read_file(str(path), "json", columns)
    [at] = found.column("at").to_pylist()
    assert (at.hour, at.minute) == (utc_hour, minute)


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("kind", ["zoned", "local", "legacy"])
def test_instants_of_parquet_are_exact(tmp_path: Path, unit: str, kind: str) -> None:
    path = tmp_path / "1.parquet"
    at = INSTANT if kind == "zoned" else INSTANT.replace(tzinfo=None)
    at = at.replace(hour=0) if kind == "local" else at
    times = pa.array([at], pa.timestamp(unit, "UTC" if kind == "zoned" else None))
    pq.write_table(pa.table({"at": times}), path, use_deprecated_int96_timestamps=kind == "legacy")
    columns = Columns(pa.schema([("at", pa.timestamp("us", "UTC"))]), "America/New_York", "at")
    [found] = read_file(str(path), "parquet", columns)
    assert found.column("at").to_pylist() == [INSTANT]


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_an_empty_file_has_no_rows_and_a_truncated_one_is_an_error(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / "1"
    columns = Columns(
        pa.schema([("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]), "UTC", "at"
    )
    table = pa.table({"at": pa.array([INSTANT], pa.timestamp("us", "UTC")), "n": [1]})
    pq.write_table(table, tmp_path / "whole")
    path.write_bytes(
        {"json": b'{"n": 1}\n{"n":', "csv": b"n,at\n1,\n1"}.get(form)
        or (tmp_path / "whole").read_bytes()[:-20]
    )
    with pytest.raises(LogsError, match=f"{path} cannot be read as {form}"):
        list(read_file(str(path), form, columns))
    if form == "parquet":
        pq.write_table(table.slice(0, 0), path)
    else:
        path.write_bytes(b"")
    assert sum(each.num_rows for each in read_file(str(path), form, columns)) == 0


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_compressed_file_of_nothing_has_no_rows(tmp_path: Path, form: str) -> None:
    """As logrotate leaves it after a quiet hour."""
    path = tmp_path / f"1.{form}.gz"
    path.write_bytes(gzip.compress(b""))
    columns = Columns(pa.schema([("at", pa.timestamp("us", "UTC"))]), "UTC", "at")
    assert list(read_file(str(path), form, columns)) == []


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_file_without_the_event_time_is_refused(tmp_path: Path, form: str) -> None:
    """Its rows would have no time, so no window would have them, and nothing would be counted."""
    path = tmp_path / "1"
    if form == "csv":
        path.write_text("\ufeffAt,n\r\n2026-01-01T05:00:00Z,1\r\n")
    else:
        pq.write_table(pa.table({"At": [INSTANT], "n": [1]}), path)
    columns = Columns(
        pa.schema([("at", pa.timestamp("us", "UTC")), ("n", pa.int64())]), "UTC", "at"
    )
    with pytest.raises(LogsError, match="the column 'at', the event time, is missing among At, n"):
        list(read_file(str(path), form, columns))


def of(*columns: tuple[str, DataType]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns])


GOOD: Mapping[str, Any] = {
    "form": "json",
    "schema": of(("at", TimestampType())),
    "shard": "shard",
    "most": 4,
}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"path": "/nowhere"}, "path '/nowhere' is not a folder"),
        ({"path": "s3://bucket/taps"}, "path 's3://bucket/taps' is a URL"),
        ({"path": 5}, "invalid path 5: write the path of a folder"),
        ({"form": "orc"}, "invalid format 'orc': write 'csv', 'json' or 'parquet'"),
        ({"most": 0}, "invalid max_files_per_shard 0: write 1 or more"),
        ({"most": True}, "invalid max_files_per_shard True: write 1 or more"),
        ({"complete": ""}, "invalid complete '': write the name of a file, without a folder, like"),
        ({"complete": ".."}, "invalid complete '..': write the name of a file"),
        (
            {"complete": "done/_SUCCESS"},
            "invalid complete 'done/_SUCCESS': write the name of a file",
        ),
        ({"complete": True}, "invalid complete True: write the name of a file"),
        ({"schema": "at timestump"}, "schema 'at timestump' cannot be read"),
        ({"schema": ""}, "schema ''"),
        ({"schema": 5}, "schema 5 has no columns"),
        (
            {"schema": of(("Shard", StringType()))},
            "shard 'shard': the schema already has a column 'Shard'",
        ),
        (
            {"schema": of(("a", StringType()), ("A", StringType()))},
            "duplicate column 'a'",
        ),
        (
            {"schema": of(("a", ArrayType(LongType()))), "form": "csv"},
            "'a' is of type array<bigint>, which a CSV file",
        ),
        ({"shard": ""}, "invalid shard '': write a column's name"),
    ],
)
def test_arguments_that_are_wrong(tmp_path: Path, wrong: dict[str, Any], error: str) -> None:
    arguments = {"path": str(tmp_path), **GOOD, **wrong}
    with pytest.raises(ValueError, match=re.escape(error)):
        check_logs(arguments.pop("path"), **arguments)
