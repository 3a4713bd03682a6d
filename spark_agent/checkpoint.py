# pyright: basic
# ruff: noqa: SLF001
"""Which batch a query begins with, from its checkpoint: read as Spark reads it, before Spark does.

A checkpoint has two logs, with a file for each batch, named by its number. `offsets` says what a batch
is to read: it is written before the batch runs. `commits` says that it is done, and is written before
anybody is told of it, so before the epoch is committed to the service. Spark begins with the newest
planned batch if that is not done, and else with the one after it. See also `spark_agent.plan`.
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import plan


def next_batch(spark: SparkSession, writer: DataStreamWriter) -> int:
    """Return the number of the batch that Spark will begin with; 0 for a new checkpoint.

    It may be anywhere where Spark can have one. Nothing is written.
    """
    location = _location(spark, writer)
    if location is None:
        return 0
    jvm: plan.JavaObject = spark._jvm
    session: plan.JavaObject = spark._jsparkSession
    hadoop = jvm.org.apache.hadoop.fs
    offsets = hadoop.Path(location, "offsets")
    files = offsets.getFileSystem(session.sessionState().newHadoopConf())
    if not files.exists(offsets):
        return 0
    # One text of all paths: with a call for each of them, a long log would take seconds.
    paths = hadoop.FileUtil.stat2Paths(files.listStatus(offsets))
    folder = str(paths[0].getParent().toString()) if len(paths) else ""
    planned = newest_in(str(jvm.scala.runtime.ScalaRunTime.stringOf(paths)), folder)
    if planned is None:
        return 0
    commit = hadoop.Path(hadoop.Path(location, "commits"), str(planned))
    return planned + 1 if files.exists(commit) else planned


def newest_in(listing: str, folder: str) -> int | None:
    """Return the highest number among the names of files in a folder, given all their paths.

    >>> paths = "Array(file:/c, 9/offsets/9, file:/c, 9/offsets/10, file:/c, 9/offsets/.11.tmp)"
    >>> newest_in(paths, "file:/c, 9/offsets")
    10
    >>> newest_in("Array()", "") is None
    True
    """
    # Names have no slash, so the folder's own path is found where each of them begins.
    names = [each.rstrip(", )") for each in listing.split(f"{folder}/")]
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)


def _location(spark: SparkSession, writer: DataStreamWriter) -> str | None:
    """Return where a query's checkpoint is; None: Spark will make a folder of its own for it."""
    own = plan.option_of(writer, "checkpointLocation")
    if own is not None:
        return own
    root = spark.conf.get("spark.sql.streaming.checkpointLocation", None)
    name = plan.option_of(writer, "queryName")
    return f"{root}/{name}" if root and name else None
