# pyright: basic
# ruff: noqa: SLF001
"""What a query begins with, from its checkpoint and its output, read as Spark reads them.

A checkpoint has two logs, with a file for each batch, named by its number. `offsets` says what a batch
is to read: it is written before the batch runs. `commits` says that it is done, and is written before
anybody is told of it, so before the epoch is committed to the service. Spark begins with the newest
planned batch if that is not done, and else with the one after it. See also `spark_agent.plan`.

Spark's file sink keeps a log of the same kind in its folder, and skips a batch that it has there.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import plan

_NO_FOLDERS = frozenset({"console", "foreach", "foreachbatch", "kafka", "memory", "noop"})
"""Sinks that ignore a path. Any other may be a file sink: formats go by many names, and by classes."""

_WRITTEN = "_spark_metadata"
_COMPACT = ".compact"


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a query begins with."""

    next_batch: int
    """The number of the batch that Spark will begin with; 0 for a new checkpoint."""
    planned: int | None = None
    """The newest batch that the checkpoint has planned, done or not."""
    written: int | None = None
    """The newest batch that the query's output has, if that is a folder of Spark's file sink."""
    output: str = ""

    @property
    def skips(self) -> bool:
        """Whether the file sink would skip a batch that has not been planned yet.

        A batch that was planned may have been written before the driver was killed, and is the same.
        """
        return self.written is not None and (self.planned is None or self.written > self.planned)


def beginning(spark: SparkSession, writer: DataStreamWriter) -> Beginning:
    """Read what a query will begin with. Nothing is written.

    Checkpoint and output may be anywhere where Spark can have one.
    """
    output = plan.option_of(writer, "path") or ""
    is_folder = bool(output) and plan.format_of(writer) not in _NO_FOLDERS
    # In this order: a driver that still runs plans a batch, and then writes it.
    written = _newest(spark, output, _WRITTEN) if is_folder else None
    location = _location(spark, writer)
    planned = None if location is None else _newest(spark, location, "offsets")
    if planned is None:
        return Beginning(0, None, written, output)
    is_done = _exists(spark, f"{location}/commits/{planned}")
    return Beginning(planned + 1 if is_done else planned, planned, written, output)


def _newest(spark: SparkSession, location: str, log: str) -> int | None:
    """Return the newest batch in a log; None: there is none."""
    jvm: plan.JavaObject = spark._jvm
    hadoop = jvm.org.apache.hadoop.fs
    folder = hadoop.Path(location, log)
    files = folder.getFileSystem(_configuration(spark))
    if not files.exists(folder):
        return None
    # One text of all paths: with a call for each of them, a long log would take seconds.
    paths = hadoop.FileUtil.stat2Paths(files.listStatus(folder))
    shown = str(paths[0].getParent().toString()) if len(paths) else ""
    return newest_in(str(jvm.scala.runtime.ScalaRunTime.stringOf(paths)), shown)


def _exists(spark: SparkSession, location: str) -> bool:
    jvm: plan.JavaObject = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(location)
    return bool(path.getFileSystem(_configuration(spark)).exists(path))


def _configuration(spark: SparkSession) -> plan.JavaObject:
    session: plan.JavaObject = spark._jsparkSession
    return session.sessionState().newHadoopConf()


def newest_in(listing: str, folder: str) -> int | None:
    """Return the newest batch of a log, given the paths of all files in its folder.

    >>> paths = "Array(file:/c, 9/offsets/9, file:/c, 9/offsets/10, file:/c, 9/offsets/.11.tmp)"
    >>> newest_in(paths, "file:/c, 9/offsets")
    10
    >>> newest_in("Array(/out/_spark_metadata/9.compact, /out/_spark_metadata/.9.compact.crc)",
    ...     "/out/_spark_metadata")
    9
    >>> newest_in("Array()", "") is None
    True
    """
    # Names have no slash, so the folder's own path is found where each of them begins.
    names = [each.rstrip(", )").removesuffix(_COMPACT) for each in listing.split(f"{folder}/")]
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)


def _location(spark: SparkSession, writer: DataStreamWriter) -> str | None:
    """Return where a query's checkpoint is; None: Spark will make a folder of its own for it."""
    own = plan.option_of(writer, "checkpointLocation")
    if own is not None:
        return own
    root = spark.conf.get("spark.sql.streaming.checkpointLocation", None)
    name = plan.option_of(writer, "queryName")
    return f"{root}/{name}" if root and name else None
