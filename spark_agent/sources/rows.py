# pyright: basic
"""The rows of a shard's files, as Spark takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from spark_agent.arrow import Batch
from spark_agent.sources.formats import Columns, read_file


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
