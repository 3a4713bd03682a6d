"""The start of a query by Spark."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.driver.late_rows import LateRows
from spark_agent.driver.window_notes import check_note
from spark_agent.jvm.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Launch:
    """A query that Spark is to start."""

    writer: DataStreamWriter
    links: Collection[str]
    """Ids of its linked sources."""
    checkpoint: Checkpoint
    late_rows: LateRows
    sources: int
    """Number of sources in its plan."""
    ranges: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of ranges of each keyed stage, if the query has operators with state."""
    windows: str | None = None
    """The note on its windows, if they fire more than once, or are not dated by their ends."""

    def check(self) -> None:
        """Check that the checkpoint is of such a query. Raises `ValueError`."""
        if not self._is_new:
            check_note(self.checkpoint.windows(), self.windows)
        self._check_ranges()
        before = self.checkpoint.sources()
        if before is not None and before != self.sources:
            raise ValueError(
                f"the checkpoint is of a query with {before} sources, and this one has {self.sources}, "
                f"so Spark would fail. The plan of a query with split_late() names each of its sources "
                f"twice, so a query that begins or ceases to split its rows is another query: start "
                f"over, with Pipeline.reset(), a new checkpoint and an empty output, or go on as before"
            )

    def _check_ranges(self) -> None:
        kept = self.checkpoint.partitions() if self.ranges else None
        for stage, ranges in self.ranges.items():
            if kept is not None and kept != ranges:
                raise ValueError(
                    f"stage {stage!r} has {ranges} ranges, and the checkpoint keeps Spark's state in "
                    f"{kept} partitions, whatever spark.sql.shuffle.partitions is now: to go on, give "
                    f'the stage "ranges": {kept} again, with Pipeline(…, replace=True), and set '
                    f"spark.sql.shuffle.partitions to {kept}; or start over, with Pipeline.reset(), a "
                    f"new checkpoint and an empty output"
                )

    def start(self, spark: SparkSession, properties: Mapping[str, str]) -> StreamingQuery:
        """Start the query. Its tasks have these local properties."""
        if self._is_new:
            self.checkpoint.note_windows(self.windows)
        self.late_rows.begin()
        with _local_properties(spark, properties):
            return self.writer.start()

    @property
    def _is_new(self) -> bool:
        return self.checkpoint.read().planned is None


@contextmanager
def _local_properties(spark: SparkSession, properties: Mapping[str, str]) -> Generator[None]:
    """Set local properties for a query's tasks: a query inherits those of the thread that starts it.

    Other threads may start other queries at the same time.
    """
    context = spark.sparkContext
    before = {name: context.getLocalProperty(name) for name in properties}
    for name, value in properties.items():
        context.setLocalProperty(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            # None removes a property, despite the annotation.
            context.setLocalProperty(name, old)  # pyright: ignore[reportArgumentType]
