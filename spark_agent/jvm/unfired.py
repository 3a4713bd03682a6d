# pyright: basic
"""Windows that have not fired yet, in a folder of a query's checkpoint.

Each batch adds a folder of Parquet files, named by its number, with the newest values of the windows
that it has changed. A folder `NUMBER.whole` replaces all before it: it has every window that had not
fired after its batch. A batch reads only what older batches have added. A batch that is repeated has the
same rows, and overwrites its folder.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from spark_agent.jvm import JavaObject
from spark_agent.jvm.checkpoint import configuration, listing, names_in

_WHOLE: Final = ".whole"
_WRITE: Final = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
}
"""Settings of the session that would change values. Those of the user are for the user's own files."""
_READ: Final = {
    "datetimeRebaseMode": "CORRECTED",
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    "mergeSchema": "false",
    "__globPaths__": "false",
}
"""The last one is Spark's own, by which its file source reads names as they are."""


class Unfired:
    """The windows of one query that have not fired."""

    def __init__(self, spark: SparkSession, folder: str, schema: StructType) -> None:
        self._spark = spark
        self._folder = folder
        self._schema = schema

    def read(self, batch: int) -> DataFrame | None:
        """Return the values that older batches have added; None: not one."""
        needed = needed_of(self._names(), batch)
        if not needed:
            return None
        reader = self._spark.read.schema(self._schema).options(**_READ)
        return reader.parquet(*[f"{self._folder}/{name}" for name in needed])

    def _names(self) -> list[str]:
        names = names_in(*listing(self._spark, self._folder, "."))
        return [name for name in names if name.removesuffix(_WHOLE).isdecimal()]

    def add(self, rows: DataFrame, batch: int) -> None:
        """Add the values of a batch."""
        self._write(rows, str(batch))

    def replace(self, rows: DataFrame, batch: int) -> None:
        """Replace all values by those that have not fired after a batch."""
        self._write(rows, f"{batch}{_WHOLE}")

    def _write(self, rows: DataFrame, name: str) -> None:
        # A batch may have hundreds of partitions with a few rows each.
        few = rows.coalesce(self._spark.sparkContext.defaultParallelism)
        with _settings(rows.sparkSession, _WRITE):
            few.write.mode("overwrite").option("compression", "snappy").parquet(
                f"{self._folder}/{name}"
            )

    def clean(self, batch: int) -> None:
        """Delete what a batch does not read. Every older batch is done, so none reads it again."""
        names = self._names()
        needed = needed_of(names, batch)
        jvm: JavaObject = self._spark._jvm  # noqa: SLF001
        path = jvm.org.apache.hadoop.fs.Path
        files = path(self._folder).getFileSystem(configuration(self._spark))
        for name in names:
            if _number(name) < batch and name not in needed:
                files.delete(path(self._folder, name), True)


@contextmanager
def _settings(session: SparkSession, settings: Mapping[str, str]) -> Generator[None]:
    """Set settings of a session. The session is the query's own, and its batches run one by one."""
    before = {name: session.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, value)


def needed_of(names: list[str], batch: int) -> list[str]:
    """Return the folders that a batch reads: the newest whole one before it, and those after that.

    >>> needed_of(["1", "2.whole", "3", "5.whole", "6", "7", "9"], 7)
    ['5.whole', '6']
    >>> needed_of(["1", "2"], 2), needed_of([], 0)
    (['1'], [])
    """
    older = sorted((name for name in names if _number(name) < batch), key=_number)
    wholes = [_number(name) for name in older if name.endswith(_WHOLE)]
    newest = max(wholes, default=-1)
    return [name for name in older if _number(name) > newest or name == f"{newest}{_WHOLE}"]


def _number(name: str) -> int:
    return int(name.removesuffix(_WHOLE))
