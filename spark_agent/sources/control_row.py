# pyright: basic, reportAttributeAccessIssue=false, reportUnknownVariableType=false
"""The one row by which a control source brings a watermark into Spark.

It is apart from `spark_agent.arrow`, and made without `pa.array`, since those import Arrow's functions
and pandas: a quarter of a second, for which every start of a query would wait. It is apart from
`spark_agent.sources.control`, too, since pyarrow has no types and those of the source stay strict.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

Batch: TypeAlias = Any
"""A `pyarrow.RecordBatch`."""


def control_row(schema: StructType, event_time: str, time_ms: int) -> Batch:
    """Make one row in which only the event time is set."""
    fields = to_arrow_schema(schema, timezone="UTC")
    time_us = pa.py_buffer(struct.pack("=q", time_ms * 1_000))
    arrays = [
        pa.Array.from_buffers(field.type, 1, [None, time_us])
        if field.name == event_time
        else pa.nulls(1, field.type)
        for field in fields
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=fields)
