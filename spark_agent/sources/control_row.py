# pyright: basic, reportAttributeAccessIssue=false, reportUnknownVariableType=false
"""The one row by which a control source brings a watermark into Spark.

The module is separate from `spark_agent.arrow`, and avoids `pa.array`, because both import Arrow's
functions and pandas. The imports take a quarter of a second at every start of a query. The module
is separate from `spark_agent.sources.control` because pyarrow has no types.
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
    """Make a row in which only the event time is set."""
    fields = to_arrow_schema(schema, timezone="UTC")
    time_us = pa.py_buffer(struct.pack("=q", time_ms * 1_000))
    arrays = [
        pa.Array.from_buffers(field.type, 1, [None, time_us])
        if field.name == event_time
        else pa.nulls(1, field.type)
        for field in fields
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=fields)
