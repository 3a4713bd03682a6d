# pyright: basic
# ruff: noqa: SLF001
"""The batch with which a query begins, from its checkpoint and its output, read by Spark's own rules.

A checkpoint has two logs, with a file for each batch, named by its number. A file in `offsets` is the
plan of a batch, and is written before the batch runs. A file in `commits` is the end of a batch, and is
written before Spark's listeners are notified, so before the epoch is committed to the service. Spark
begins with the newest planned batch if it is not committed, and else with the one after it. See also
`spark_agent.jvm.plan`.

Spark's file sink keeps a log of the same kind in its folder, and skips a batch that the log has.

The agent's own notes are beside Spark's logs, in the checkpoint's folder `tidegauge`, so a copy of the
checkpoint includes them: `generation` is the job's generation of the checkpoint, `run` the run of its
stages, and `rereads` the epoch of the job up to which the query deliberately repeats batches. The notes
are logs of empty files named by a number: a file exists or not, on every file system, wherever a driver
is killed. `joined/GENERATION/STAGE` has an empty file for each shard that has joined a dynamic source.
`topics/SOURCE-TOPIC` has an empty file, named by the id of the topic, for a source of Kafka.
`states/STAGE` has the states of a source's strategy, in a file named by the epoch they are after. The
file is written under a hidden name, and renamed. `windows` is a file of a query whose windows fire more
than once, and `unfired` the folder with those that have not fired.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.exceptions import QueryFailedError
from spark_agent.jvm import JavaObject
from spark_agent.jvm.writer import format_of, option_of

_NO_FOLDERS = frozenset({"console", "foreach", "foreachbatch", "kafka", "memory", "noop"})
"""Sinks that ignore a path. Any other may be a file sink: a format has many names, and a class."""

_WRITTEN = "_spark_metadata"
_COMPACT = ".compact"

_BY_POSITION = "v1"
"""The version of an offset log that has the sources in their order in the plan."""

_PARTITIONS = "spark.sql.shuffle.partitions"

_NOTES = "tidegauge"
_GENERATION = f"{_NOTES}/generation"
_REREADS = f"{_NOTES}/rereads"
_RUN = f"{_NOTES}/run"
_JOINED = f"{_NOTES}/joined"
_STATES = f"{_NOTES}/states"
_TOPICS = f"{_NOTES}/topics"
_WINDOWS = f"{_NOTES}/windows"
_UNFIRED = f"{_NOTES}/unfired"


@dataclass(frozen=True, slots=True)
class Beginning:
    """Position at which a query begins."""

    next_batch: int
    """Number of the first batch; 0 for a new checkpoint."""
    planned: int | None = None
    """The newest batch that the checkpoint has planned, done or not."""
    written: int | None = None
    """The newest batch in the query's output, if the output is a folder of Spark's file sink."""
    output: str = ""
    generation: int | None = None
    """The job's generation when the checkpoint's first batch was planned; None: new, or not noted."""
    rereads_to: int | None = None
    """The epoch of the job up to which the query deliberately repeats batches."""
    run: int | None = None
    """The newest run of the query's stages at its last start."""

    @property
    def skips(self) -> bool:
        """True if the file sink would skip a batch that has not been planned yet.

        A planned batch may have been written before the driver was killed: its repetition writes the
        same.
        """
        return self.written is not None and (self.planned is None or self.written > self.planned)


class Checkpoint:
    """A query's checkpoint and output, on any file system of Spark's."""

    def __init__(
        self, spark: SparkSession, writer: DataStreamWriter, *others: DataStreamWriter
    ) -> None:
        """`others` write late rows in the same query: they have outputs of their own."""
        self._spark = spark
        self._location = _location(spark, writer)
        self._outputs = [each for each in map(output_of, (writer, *others)) if each]

    @property
    def location(self) -> str | None:
        """The folder, if the user has given it."""
        return self._location

    def read(self) -> Beginning:
        """Return the position at which the query begins. Writes nothing."""
        spark, location = self._spark, self._location
        # In this order: a driver that still runs plans a batch, and then writes it.
        written, output = self._newest_written()
        planned = None if location is None else _newest(spark, location, "offsets")
        if location is None or planned is None:
            return Beginning(0, None, written, output)
        is_done = _exists(spark, f"{location}/commits/{planned}")
        return Beginning(
            planned + 1 if is_done else planned,
            planned,
            written,
            output,
            _newest(spark, location, _GENERATION),
            _newest(spark, location, _REREADS),
            _newest(spark, location, _RUN),
        )

    def _newest_written(self) -> tuple[int | None, str]:
        """Return the newest batch in the outputs, and the output that has it."""
        found = [(_newest(self._spark, each, _WRITTEN), each) for each in self._outputs]
        written = [(batch, each) for batch, each in found if batch is not None]
        if not written:
            return None, next(iter(self._outputs), "")
        return max(written)

    def sources(self) -> int | None:
        """Return the number of sources in the newest planned batch; None: not planned, or unknown."""
        location = self._location
        planned = None if location is None else _newest(self._spark, location, "offsets")
        if planned is None:
            return None
        version, _, *offsets = _text(self._spark, f"{location}/offsets/{planned}").splitlines()
        return len(offsets) if version == _BY_POSITION else None

    def partitions(self) -> int | None:
        """Return the number of partitions of Spark's state, which Spark keeps; None: not planned yet."""
        location = self._location
        planned = None if location is None else _newest(self._spark, location, "offsets")
        if planned is None:
            return None
        _, metadata, *_ = _text(self._spark, f"{location}/offsets/{planned}").splitlines()
        found = json.loads(metadata).get("conf", {}).get(_PARTITIONS)
        return None if found is None else int(found)

    def watermark_before(self, batch: int) -> int:
        """Return Spark's watermark (ms) in the batch before, by which rows of this batch are late.

        Spark begins at 1970. Raises `QueryFailedError` if the batch before is not in the checkpoint.
        """
        if batch == 0 or self._location is None:
            return 0
        path = f"{self._location}/offsets/{batch - 1}"
        if not _exists(self._spark, path):
            raise QueryFailedError(
                f"batch {batch - 1} is not in the checkpoint {self._location}, and the watermark in it "
                f"decides which rows of batch {batch} are late: give the query a complete copy of its "
                f"checkpoint"
            )
        # The first line has the version of the format, the second one the batch's metadata.
        _, metadata, *_ = _text(self._spark, path).splitlines()
        return int(json.loads(metadata)["batchWatermarkMs"])

    def note(self, generation: int, rereads_to: int | None, run: int) -> None:
        """Note its generation and run, and the epoch up to which it repeats batches."""
        if self._location is None:
            return
        jvm: JavaObject = self._spark._jvm
        path = jvm.org.apache.hadoop.fs.Path
        files = path(self._location).getFileSystem(configuration(self._spark))
        # If the driver is killed in between, the notes are missing, as in a checkpoint of an older
        # agent.
        for each in (_GENERATION, _RUN, _REREADS):
            files.delete(path(self._location, each), True)
        files.create(path(self._location, f"{_GENERATION}/{generation}"), True).close()
        files.create(path(self._location, f"{_RUN}/{run}"), True).close()
        if rereads_to is not None:
            files.create(path(self._location, f"{_REREADS}/{rereads_to}"), True).close()

    @property
    def unfired(self) -> str:
        """The folder with the windows that have not fired."""
        return f"{self._location}/{_UNFIRED}"

    def windows(self) -> str | None:
        """Return the note on windows that fire more than once; None: not such a query."""
        path = f"{self._location}/{_WINDOWS}"
        if self._location is None or not _exists(self._spark, path):
            return None
        return _text(self._spark, path)

    def note_windows(self, note: str | None) -> None:
        """Note on windows that fire more than once, of a query that has not begun."""
        if self._location is None or note == self.windows():
            return
        jvm: JavaObject = self._spark._jvm
        path = jvm.org.apache.hadoop.fs.Path
        files = path(self._location).getFileSystem(configuration(self._spark))
        files.delete(path(self._location, _WINDOWS), True)
        if note is None:
            return
        hidden = path(self._location, f"{_NOTES}/.windows")
        stream = files.create(hidden, True)
        stream.write(bytearray(note.encode()))
        stream.close()
        files.rename(hidden, path(self._location, _WINDOWS))

    def joined(self, generation: int, stage: str) -> frozenset[str]:
        """Return the noted shards of a dynamic source."""
        return self._names(f"{_JOINED}/{generation}/{stage}")

    def note_joined(self, generation: int, stage: str, shards: Iterable[str]) -> None:
        """Note shards that have joined a dynamic source."""
        self._note_names(f"{_JOINED}/{generation}/{stage}", shards)

    def topic_ids(self, topic: str) -> frozenset[str]:
        """Return the noted ids of a source's topic: one, or none."""
        return self._names(f"{_TOPICS}/{topic}")

    def note_topic_id(self, topic: str, id_: str) -> None:
        """Note the id of a source's topic."""
        self._note_names(f"{_TOPICS}/{topic}", [id_])

    def _names(self, folder: str) -> frozenset[str]:
        if self._location is None:
            return frozenset()
        return frozenset(names_in(*listing(self._spark, self._location, folder)))

    def _note_names(self, folder: str, names: Iterable[str]) -> None:
        """Write empty files."""
        if self._location is None:
            return
        jvm: JavaObject = self._spark._jvm
        path = jvm.org.apache.hadoop.fs.Path
        files = path(self._location).getFileSystem(configuration(self._spark))
        for each in names:
            files.create(path(self._location, f"{folder}/{each}"), True).close()

    def states(self, stage: str) -> tuple[int, str] | None:
        """Return the newest noted states of a source's strategy, with the epoch they are after."""
        folder = f"{_STATES}/{stage}"
        epoch = None if self._location is None else _newest(self._spark, self._location, folder)
        if self._location is None or epoch is None:
            return None
        return epoch, _text(self._spark, f"{self._location}/{folder}/{epoch}")

    def note_states(self, stage: str, epoch: int, states: str) -> None:
        """Note the states of a source's strategy after an epoch, in place of older ones."""
        if self._location is None:
            return
        jvm: JavaObject = self._spark._jvm
        path = jvm.org.apache.hadoop.fs.Path
        files = path(self._location).getFileSystem(configuration(self._spark))
        folder = f"{_STATES}/{stage}"
        older = names_in(*listing(self._spark, self._location, folder))
        # One name for all: what a killed driver leaves is overwritten.
        hidden = path(self._location, f"{folder}/.new")
        stream = files.create(hidden, True)
        stream.write(bytearray(states.encode()))
        stream.close()
        files.rename(hidden, path(self._location, f"{folder}/{epoch}"))
        for each in older:
            files.delete(path(self._location, f"{folder}/{each}"), True)


def _newest(spark: SparkSession, location: str, log: str) -> int | None:
    """Return the newest batch in a log; None: the log is empty."""
    return newest_in(*listing(spark, location, log))


def listing(spark: SparkSession, location: str, log: str) -> tuple[str, str]:
    """Return the paths of all files in a folder, as one text, and the folder's own path in it."""
    jvm: JavaObject = spark._jvm
    hadoop = jvm.org.apache.hadoop.fs
    folder = hadoop.Path(location, log)
    files = folder.getFileSystem(configuration(spark))
    if not files.exists(folder):
        return "", ""
    # One text of all paths: with a call for each path, a long log would take seconds.
    paths = hadoop.FileUtil.stat2Paths(files.listStatus(folder))
    shown = str(paths[0].getParent().toString()) if len(paths) else ""
    return str(jvm.scala.runtime.ScalaRunTime.stringOf(paths)), shown


def qualified(spark: SparkSession, location: str) -> str:
    """Return a location in the one form that its file system has for it. Local links are followed."""
    jvm: JavaObject = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(location)
    uri = path.getFileSystem(configuration(spark)).makeQualified(path).toUri()
    is_local = str(uri.getScheme()) == "file"
    return os.path.realpath(str(uri.getPath())) if is_local else str(uri.toString())


def _exists(spark: SparkSession, location: str) -> bool:
    jvm: JavaObject = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(location)
    return bool(path.getFileSystem(configuration(spark)).exists(path))


def _text(spark: SparkSession, location: str) -> str:
    jvm: JavaObject = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(location)
    stream = path.getFileSystem(configuration(spark)).open(path)
    try:
        return bytes(stream.readAllBytes()).decode()
    finally:
        stream.close()


def configuration(spark: SparkSession) -> JavaObject:
    """Return the session's settings of file systems."""
    session: JavaObject = spark._jsparkSession
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
    names = [name.removesuffix(_COMPACT) for name in names_in(listing, folder)]
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)


def names_in(listing: str, folder: str) -> list[str]:
    """Return the names of the visible files, given the paths of all files in their folder.

    >>> names_in("Array(file:/c, 9/joined/s/a, file:/c, 9/joined/s/.a.crc)", "file:/c, 9/joined/s")
    ['a']
    >>> names_in("", "")
    []
    """
    # Names contain no slash, so each occurrence of the folder's path is the beginning of a name.
    names = [each.rstrip(", )") for each in listing.split(f"{folder}/")[1:]]
    return [name for name in names if not name.startswith(".")]


def output_of(writer: DataStreamWriter) -> str:
    """Return the folder that a writer writes; empty: another kind of sink."""
    output = option_of(writer, "path") or ""
    return "" if format_of(writer) in _NO_FOLDERS else output


def _location(spark: SparkSession, writer: DataStreamWriter) -> str | None:
    """Return the location of a query's checkpoint; None: a temporary folder that Spark makes."""
    own = option_of(writer, "checkpointLocation")
    if own is not None:
        return own
    root = spark.conf.get("spark.sql.streaming.checkpointLocation", None)
    name = option_of(writer, "queryName")
    return f"{root}/{name}" if root and name else None
