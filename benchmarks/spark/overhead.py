"""Overhead of tidegauge for a query: the same session windows with it and without it, by turns."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock, patch

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.servers import processor_seconds
from benchmarks.spark.data import BOUND_S, GAP_S, Clicks, Files, Input
from spark_agent import Pipeline
from spark_agent.client.spec import read_spec
from spark_agent.soundness.operators import Promise
from spark_agent.soundness.query_stages import QueryStages

RANGES: Final = 2
_STAGE: Final = "sessions"
_SOURCE: Final = "clicks"


class Variant(StrEnum):
    """Source of a query's watermark. Each variant adds a part of tidegauge to the one before."""

    PLAIN = "plain Spark"
    DELAYED = "plain Spark, closing as late"
    """With tidegauge a window closes one batch later than with plain Spark: what a batch has shown
    is published when it is done, comes with the next one, and closes windows in the one after. So
    it keeps the sessions of one more batch in its state. Each batch is one slice of event time:
    plain Spark with its watermark delayed by a slice closes in the same batches, and keeps as many.
    """
    PYTHON = "plain Spark, through Python"
    """Each row of the output goes through a function that returns it."""
    SOURCE = "with source()"
    """The watermark is Spark's own, delayed like that."""
    CONTROL = "with source(), watermarked()"
    """The watermark is tidegauge's; only the driver reports for the ranges."""
    WHOLE = "with source(), watermarked(), report()"


MOST: Final = (Variant.PLAIN, Variant.DELAYED, Variant.WHOLE)
_PLAIN: Final = frozenset({Variant.PLAIN, Variant.DELAYED, Variant.PYTHON})


@dataclass(frozen=True)
class Run:
    """One run of a query over all clicks."""

    seconds: float
    processor_seconds: float
    """Processor time of all processes together: Spark's, its Python workers', the service's."""
    batches: int
    state_rows: int
    """Average number of sessions kept after a batch."""
    durations_ms: Mapping[str, int]
    """Spark's own account of the driver's time, added up over its batches."""
    batch_ms: float
    """Duration of a batch once the query runs: the median of those that read about as much as most."""


@dataclass
class Case:
    """An input, and the runs of queries over it."""

    name: str
    input: Input
    variants: Sequence[Variant]
    ranges: int = RANGES
    """Key ranges of the stage, and Spark's state partitions."""
    runs: dict[Variant, list[Run]] = field(default_factory=dict[Variant, list[Run]])

    def seconds(self, variant: Variant) -> float:
        return statistics.median(run.seconds for run in self.runs[variant])

    def processor_seconds(self, variant: Variant) -> float:
        return statistics.median(run.processor_seconds for run in self.runs[variant])

    def ratio(self, variant: Variant, to: Variant) -> tuple[float, str]:
        """The median of the ratios within each round, and their range."""
        ratios = [
            a.seconds / b.seconds for a, b in zip(self.runs[variant], self.runs[to], strict=True)
        ]
        return statistics.median(ratios), f"{min(ratios):.2f}-{max(ratios):.2f}"

    def batch_ms(self, variant: Variant) -> float:
        return statistics.median(run.batch_ms for run in self.runs[variant])

    def batch_ratio(self, variant: Variant, to: Variant) -> tuple[float, str]:
        """Likewise, of what a batch takes once the query runs."""
        ratios = [
            a.batch_ms / b.batch_ms for a, b in zip(self.runs[variant], self.runs[to], strict=True)
        ]
        return statistics.median(ratios), f"{min(ratios):.2f}-{max(ratios):.2f}"

    def state_rows(self, variant: Variant) -> int:
        return round(statistics.median(run.state_rows for run in self.runs[variant]))


class Bench:
    """Runs the variants by turns."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._numbers = itertools.count()

    def measure(
        self, case: Case, rounds: int, say: Callable[[str], None], *, is_warm: bool = False
    ) -> None:
        """Run every variant once to warm up, unless Spark is warm, and then so many rounds of them."""
        for number in range(1 if is_warm else 0, rounds + 1):
            for variant in case.variants if number % 2 else reversed(case.variants):
                run = self.run(variant, case.input, case.ranges)
                say(f"{case.name}, round {number}, {variant}: {run.seconds:.2f} s")
                if number:
                    case.runs.setdefault(variant, []).append(run)

    def run(self, variant: Variant, read: Input, ranges: int = RANGES) -> Run:
        """Run one query, and make sure that it has written what it should."""
        folder = self._folder / f"run-{next(self._numbers)}"
        self._spark.conf.set("spark.sql.shuffle.partitions", ranges)
        with ExitStack() as stack:
            frame, start = self._build(variant, read, ranges, stack)
            writer = (
                frame.writeStream.format("parquet")
                .option("path", str(folder / "output"))
                .option("checkpointLocation", str(folder / "checkpoint"))
                .trigger(availableNow=True)
            )
            began, used = time.perf_counter(), _used_s()
            query = start(writer)
            query.awaitTermination()
            seconds, used = time.perf_counter() - began, _used_s() - used
            run = _run(query, seconds, used)
        found = self._spark.read.parquet(str(folder / "output")).agg(F.count("*"), F.sum("clicks"))
        if found.collect() != [(read.clicks.sessions, read.clicks.rows)]:
            raise RuntimeError(f"{variant} has written {found.collect()}")
        # Spark may still write to its state there.
        shutil.rmtree(folder, ignore_errors=True)
        return run

    def idle_share(self, service_pid: int, read: Input, seconds: float) -> float:
        """Return the part of a core that the service uses for a query that finds nothing more to read.

        Spark looks for rows every ten milliseconds. The service's use without the query is subtracted.
        """
        folder = self._folder / f"run-{next(self._numbers)}"
        with ExitStack() as stack:
            frame, start = self._build(Variant.WHOLE, read, RANGES, stack)
            without = _used_in_s(service_pid, seconds)
            writer = frame.writeStream.format("noop")
            query = start(writer.option("checkpointLocation", str(folder / "checkpoint")))
            stack.callback(query.stop)
            while not _is_idle(query):
                time.sleep(1)
            share = (_used_in_s(service_pid, seconds) - without) / seconds
        shutil.rmtree(folder, ignore_errors=True)
        return share

    def _build(
        self, variant: Variant, read: Input, ranges: int, stack: ExitStack
    ) -> tuple[DataFrame, Callable[[DataStreamWriter], StreamingQuery]]:
        is_plain = variant in {Variant.PLAIN, Variant.PYTHON}
        late_s = BOUND_S if is_plain else BOUND_S + read.clicks.span_s
        if variant in _PLAIN:
            clicks = read.read(self._spark).withWatermark("at", f"{late_s} seconds")
            sessions = _sessions(clicks)
            if variant is Variant.PYTHON:
                frame: Any = sessions
                sessions = frame.mapInArrow(_unchanged, sessions.schema)
            return sessions, DataStreamWriter.start
        spec = {
            _SOURCE: read.source,
            _STAGE: {"inputs": [_SOURCE], "ranges": ranges},
        }
        job = f"bench-{next(self._numbers)}"
        pipeline = stack.enter_context(Pipeline(self._url, job, spec, spark=self._spark))
        source = read.read_by(pipeline, self._spark, _SOURCE)
        if variant is Variant.SOURCE:
            return _sessions(source.withWatermark("at", f"{late_s} seconds")), pipeline.start
        sessions = _sessions(pipeline.watermarked(source, stage=_STAGE, event_time="at"))
        if variant is Variant.WHOLE:
            return pipeline.report(sessions, stage=_STAGE), pipeline.start
        # A stage without report() is refused; here it is what is to be measured.
        stages = read_spec(spec)
        query_stages = QueryStages(
            sources=(stages[_SOURCE],),
            keyed=(stages[_STAGE],),
            promises={_STAGE: Promise()},
            inputs={_STAGE: frozenset({_SOURCE})},
            reads_all=False,
        )
        stack.enter_context(patch("spark_agent.pipeline.check", Mock(return_value=query_stages)))
        return sessions, pipeline.start


def _is_idle(query: StreamingQuery) -> bool:
    """Return whether the query has run batches, and found nothing for ten seconds since.

    By default, Spark then sends its progress without a batch.
    """
    last = query.lastProgress
    return last is not None and last.batchId > 0 and "addBatch" not in last.durationMs


def _used_in_s(pid: int, seconds: float) -> float:
    """Return the processor time that a process uses in so many seconds."""
    before = processor_seconds(pid)
    time.sleep(seconds)
    return processor_seconds(pid) - before


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


def _sessions(clicks: DataFrame) -> DataFrame:
    return (
        clicks.groupBy(F.session_window("at", f"{GAP_S} seconds").alias("during"), "person")
        .agg(F.count("*").alias("clicks"), F.sum("amount").alias("amount"))
        .select("person", F.col("during.end").alias("ended_at"), "clicks", "amount")
    )


def _used_s() -> float:
    """The processor time of this process and of all that it has started, directly or not."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            # With those of its children that have ended.
            ticks[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


def _run(query: StreamingQuery, seconds: float, used_s: float) -> Run:
    progress = [json.loads(each.json) for each in query.recentProgress]
    durations: Counter[str] = Counter()
    for each in progress:
        durations.update(each["durationMs"])
    state = [operator["numRowsTotal"] for each in progress for operator in each["stateOperators"]]
    most = max(each["numInputRows"] for each in progress)
    full = [each["durationMs"] for each in progress if each["numInputRows"] > most // 2]
    batch_ms = statistics.median(each["triggerExecution"] for each in full)
    return Run(seconds, used_s, len(progress), round(statistics.mean(state)), durations, batch_ms)


def cases(folder: Path, rows: int, slices: int, few: int) -> Iterator[Case]:
    """The cases; their files are still to be written."""
    for name, variants, number, by_shard in (
        (
            f"{slices} files",
            [each for each in Variant if each is not Variant.PYTHON],
            slices,
            False,
        ),
        (f"{few} files", MOST, few, False),
        (f"{slices} files of each shard", MOST, slices, True),
    ):
        yield Case(name, Files(folder / name, Clicks(rows, number), by_shard), variants)
