# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""Writes of one query into several of Spark's sinks, from Spark's internal objects.

Spark's sinks recognise a batch that they have by its number, so a batch that failed between two sinks,
and is repeated, is in each of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.exceptions import QueryFailedError
from spark_agent.firing_frames import with_firing
from spark_agent.jvm import JavaObject
from spark_agent.jvm.checkpoint import output_of, qualified
from spark_agent.jvm.progress import cause_line
from spark_agent.jvm.writer import (
    format_of,
    frame_of,
    option_of,
    output_mode_of,
    setting,
    trigger_of,
)
from spark_agent.late_frames import FLAG, rows_of, together

_ADAPTIVE: Final = "AdaptiveSparkPlan"
_FLAGGED: Final = f" AS {FLAG}#"
"""In the text of a plan, once for each place that computes the flag."""
_OF_THE_QUERY: Final = ("checkpointLocation", "queryName")
"""Options of the query, not of its output."""
_OUTPUT: Final = (
    "source",
    "outputMode",
    "extraOptions",
    "partitioningColumns",
    "clusteringColumns",
    "foreachBatchWriter",
)
"""Fields of Spark's writer that are of its output."""


Fire = Callable[[DataFrame, int], AbstractContextManager[DataFrame]]
"""Return the results that leave in a batch, as long as they are being written."""


def _as_they_are(rows: DataFrame, batch: int) -> AbstractContextManager[DataFrame]:
    del batch
    return nullcontext(rows)


class Writers:
    """The writer of a query's results, and those of its late rows, if any."""

    def __init__(
        self, spark: SparkSession, results: DataStreamWriter, late: Sequence[DataStreamWriter] = ()
    ) -> None:
        self._spark = spark
        self._results = results
        self._all = (results, *late)
        self.frame = together([frame_of(writer) for writer in self._all])
        """The rows of all of them, each in a column of its own."""

    def as_one(
        self,
        check: Callable[[int], None],
        shuffles: int,
        fire: Fire | None = None,
    ) -> DataStreamWriter:
        """Return one writer for all of them, with the trigger and the checkpoint of the results.

        `check` is called with the number of each batch before the batch is written. `shuffles` is the
        number of those that the results and the late rows share. `fire` is given where windows fire more
        than once. Raises `ValueError` for a sink that Spark can only write alone, and for two outputs in
        one folder.
        """
        self._check_apart()
        results, *late = self._all
        if fire is not None:
            results = _copy(results, with_firing(frame_of(results)))
        sinks = [self._sink(writer) for writer in (results, *late)]

        def write(batch: DataFrame, epoch: int) -> None:
            check(epoch)
            if shuffles:
                self._check_shared(epoch, shuffles)
            batch.persist()
            try:
                for part, sink in enumerate(sinks):
                    rows = rows_of(batch, part)
                    fires = fire if part == 0 and fire is not None else _as_they_are
                    with fires(rows, epoch) as leaving:
                        sink.addBatch(epoch, leaving._jdf)
            finally:
                batch.unpersist()

        one = self.frame.writeStream.foreachBatch(write)
        for name in _OF_THE_QUERY:
            value = option_of(self._results, name)
            if value is not None:
                one = one.option(name, value)
        one._jwrite.trigger(setting(self._results, "trigger"))
        one._jwrite.outputMode(setting(self._results, "outputMode"))
        return one if fire is None else one.outputMode("update")

    def _check_apart(self) -> None:
        # A folder has one log of the batches in it, and the second sink would skip each batch.
        outputs = [output_of(writer) for writer in self._all]
        folders = [qualified(self._spark, output) for output in outputs if output]
        for folder in folders:
            if folders.count(folder) > 1:
                raise ValueError(
                    f"two outputs of this query are in the folder {folder}, where Spark would skip the "
                    f"second of them in each batch: give each output a folder of its own"
                )

    def _check_shared(self, epoch: int, shuffles: int) -> None:
        """Check that the running batch computes each shuffle of flagged rows once at most.

        A batch without new rows has none. A plan with adaptive execution shares equal shuffles at run
        time, and its text has all of them. Raises `QueryFailedError`.
        """
        query = self._spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        streams: JavaObject = self._spark.streams._jsqm
        execution = streams.get(query).streamingQuery().lastExecution()
        # One text: with a call for each node, a plan would take a second.
        plan = str(execution.executedPlan().toString())
        if _ADAPTIVE not in plan and plan.count(_FLAGGED) > shuffles:
            raise QueryFailedError(
                f"batch {epoch}: Spark does not read one shuffle for the results and for the late rows, "
                f"so a row could be in both outputs, or in neither. Nothing was written. Before "
                f"split_late(), leave out expressions and functions that change from run to run"
            )

    def _sink(self, writer: DataStreamWriter) -> JavaObject:
        jvm: JavaObject = self._spark._jvm
        function = setting(writer, "foreachBatchWriter")
        if function is not None:
            encoder = frame_of(writer)._jdf.exprEnc()
            sinks = jvm.org.apache.spark.sql.execution.streaming.sources
            return sinks.ForeachBatchSink(function, encoder)
        jwriter: JavaObject = writer._jwrite
        options = setting(writer, "extraOptions")
        try:
            gateway: JavaObject = self._spark.sparkContext._gateway
            found = jwriter.getClass().getDeclaredMethod(
                "createV1Sink", _array(gateway, jvm.Class, options.getClass())
            )
            found.setAccessible(True)
            return found.invoke(jwriter, _array(gateway, jvm.Object, options))
        except Py4JJavaError as error:
            cause: JavaObject = error.java_exception
            cause = cause.getCause() or cause
            raise ValueError(
                f"the output of format {format_of(writer)!r} cannot be written: "
                f"{cause_line(str(cause.getMessage()))}. With late= or allowed_lateness, write files, "
                f"or use foreachBatch"
            ) from error


def _copy(writer: DataStreamWriter, frame: DataFrame) -> DataStreamWriter:
    """Return a writer of another data frame, with the settings of its output."""
    found = frame.writeStream
    jwriter: JavaObject = found._jwrite
    for name in _OUTPUT:
        field = jwriter.getClass().getDeclaredField(name)
        field.setAccessible(True)
        field.set(jwriter, setting(writer, name))
    return found


def _array(gateway: JavaObject, of: JavaObject, item: JavaObject) -> JavaObject:
    found = gateway.new_array(of, 1)
    found[0] = item
    return found


def check_late_writer(writer: DataStreamWriter) -> None:
    """Check that a writer of late rows has no setting of a query's. Raises `ValueError`."""
    found = [name for name in _OF_THE_QUERY if option_of(writer, name) is not None]
    found += ["trigger"] if trigger_of(writer).interval_ms or trigger_of(writer).ends else []
    found += ["outputMode"] if output_mode_of(writer) != "append" else []
    if found:
        raise ValueError(
            f"the writer of late rows has {', '.join(found)}, and it is written by the query of the "
            f"results, with that query's settings: leave it out"
        )
