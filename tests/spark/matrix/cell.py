"""A cell of the matrix: an operator under a trigger, in a pipeline of two stages and two queries.

Stage 1 is the operator. Stage 2 reads the files that it writes, by its stamps, and counts them in
windows. Each start of a query is a pipeline of its own, as it is where cron starts it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import Ascending, BoundedOutOfOrderness, Pipeline
from spark_agent.executor.tally import Count
from spark_agent.strategies import AnyStrategy
from tests.spark.flow import RANGES
from tests.spark.matrix import answers
from tests.spark.matrix.answers import SECOND_WINDOW, Answers, Lines, counted, due
from tests.spark.matrix.data import BOUND_MIN, DAYS, FILES_A_DAY, SCHEMA, SHARDS, Log, iso, logs
from tests.spark.matrix.kept import KeptRows
from tests.spark.matrix.observer import Observer, Output
from tests.spark.matrix.rows import Operator

FIRST: Final = "first"
SECOND: Final = "second"
DEADLINE_S: Final = 240
MAX_MS: Final = 2**63 - 1
_STATE_STORE: Final = "spark.sql.streaming.stateStore.providerClass"


class Trigger(StrEnum):
    """A column of the matrix."""

    AVAILABLE_NOW = "availableNow"
    """Once over all that is there; and once more, bounded, for what is then still open."""
    PROCESSING_TIME = "processingTime"
    """Both stages run while files land; then once more, bounded."""
    BOUNDED = "bounded"
    """Once over all that is there, which is all there will be; a day in each batch."""
    CRON = "cron"
    """Once a day over what has landed that day; on the last day, bounded."""


class Cell:
    """Runs an operator under a trigger; each method raises AssertionError if it is not right."""

    def __init__(
        self, spark: SparkSession, url: str, job: str, folder: Path, operator: Operator
    ) -> None:
        self.operator = operator
        self.outputs = {
            FIRST: Output(
                folder / FIRST,
                operator.stamp,
                logged=operator.sink == "files",
                fires=operator.allowed_lateness is not None,
            ),
            SECOND: Output(folder / SECOND, "closed_at"),
        }
        self._spark = spark
        self._url = url
        self._job = job
        self._folder = folder
        self._files_a_batch = 1
        self._late: dict[str, DataStreamWriter] = {}
        self._logs = [logs(ascending=operator.ascending)[name] for name in operator.sources]
        self.observer = Observer(url, job, self.outputs)
        self.counts: Counter[str] = Counter()
        """Counts of its pipelines: all of them should be zero."""
        self._kept = {FIRST: KeptRows(), SECOND: KeptRows()}
        for name in (FIRST, SECOND, *operator.sources):
            (folder / name).mkdir()

    def run(self, trigger: Trigger, batch: Answers) -> None:
        """Run both stages to their end, and compare with the batch answer on the way and then."""
        answer = batch.of(self.operator)
        with self._state_store(), self.observer:
            match trigger:
                case Trigger.BOUNDED:
                    self._files_a_batch = FILES_A_DAY
                    self.land(range(DAYS))
                    self._both(bounded=True)
                case Trigger.AVAILABLE_NOW:
                    self.land(range(DAYS))
                    self._both(bounded=False)
                    self._check_so_far(answer, DAYS - 1)
                    self._both(bounded=True)
                case Trigger.CRON:
                    for day in range(DAYS):
                        self.land([day])
                        last = day == DAYS - 1
                        self._both(bounded=last)
                        if not last:
                            self._check_so_far(answer, day)
                case Trigger.PROCESSING_TIME:
                    self._keep_running(answer)
                    self._both(bounded=True)
            self._await(FIRST, MAX_MS)
            self._await(SECOND, MAX_MS)
        self._check(answer)

    def refuse(self, trigger: Trigger) -> None:
        """Start stage 1, which is to be refused."""
        self.land(range(1))
        with self._state_store(), self._pipeline() as pipeline:
            writer = self._writer(FIRST, self._first(pipeline))
            if trigger is not Trigger.PROCESSING_TIME:
                writer = writer.trigger(availableNow=True)
            query = pipeline.start(writer, bounded=trigger is Trigger.BOUNDED)
            query.stop()

    def once(self, stage: str, *, bounded: bool) -> None:
        """Run a stage over all that is there, to its end."""
        with self._pipeline() as pipeline:
            writer = self._writer(stage, self._frame(stage, pipeline)).trigger(availableNow=True)
            query = pipeline.start(writer, late=self._late_of(stage), bounded=bounded)
            _ended(stage, query)
        self._check_state(stage, query)

    def _late_of(self, stage: str) -> list[DataStreamWriter]:
        """Return the writers of late rows, of the frames that were built last."""
        return list(self._late.values()) if stage == FIRST else []

    def _both(self, *, bounded: bool) -> None:
        self.once(FIRST, bounded=bounded)
        self.once(SECOND, bounded=bounded)

    def _keep_running(self, answer: Lines) -> None:
        """Two days at once, and two more when stage 2 has closed what it can of those."""
        with self._pipeline() as pipeline:
            started = {
                stage: pipeline.start(
                    self._writer(stage, self._frame(stage, pipeline)).trigger(
                        processingTime="0 seconds"
                    ),
                    late=self._late_of(stage),
                )
                for stage in (FIRST, SECOND)
            }
            queries = list(started.values())
            for day in (1, DAYS - 1):
                self.land([day - 1, day])
                self._await(FIRST, self._through_ms(day), queries)
                self._await(SECOND, self._through_ms(day), queries)
                if self.operator.promises_less:
                    # The watermark does not show that everything is read.
                    for query in queries:
                        query.processAllAvailable()
            self._check_so_far(answer, DAYS - 1)
        for stage, query in started.items():
            self._check_state(stage, query)

    def _check_state(self, stage: str, query: StreamingQuery) -> None:
        """Check that the windows of this run, which has ended, kept the rows of their state."""
        self._kept[stage].check(json.loads(each.json) for each in query.recentProgress)

    # The queries.

    @contextmanager
    def _pipeline(self) -> Generator[Pipeline]:
        spec: Mapping[str, Mapping[str, object]] = {
            **{name: {"shards": list(SHARDS)} for name in self.operator.sources},
            FIRST: {"inputs": list(self.operator.sources), "ranges": RANGES},
            SECOND: {"inputs": [FIRST], "ranges": RANGES},
        }
        with Pipeline(self._url, self._job, spec, spark=self._spark, poll="50 ms") as pipeline:
            yield pipeline
        self.counts.update(pipeline.counts)

    def _frame(self, stage: str, pipeline: Pipeline) -> DataFrame:
        return self._first(pipeline) if stage == FIRST else self._second(pipeline)

    def _first(self, pipeline: Pipeline) -> DataFrame:
        operator = self.operator
        frames: dict[str, DataFrame] = {}
        for name in operator.sources:
            raw = self._read(name)
            read = pipeline.source(
                operator.before_source(raw) if operator.before_source else raw,
                stage=name,
                shard="shard",
                event_time="at",
                strategy=self._strategy(),
            )
            if operator.sql is not None:
                read.createOrReplaceTempView(name)
                continue
            frames[name] = self._watermarked(
                pipeline, name, operator.before(read) if operator.before else read
            )
        if operator.sql is not None:
            return self._from_sql(pipeline, operator.sql)
        return pipeline.report(
            operator.apply(frames),
            stage=FIRST,
            event_time=operator.event_time,
            delay=operator.delay,
            output_time=operator.output_time,
            longest=operator.longest,
        )

    def _from_sql(self, pipeline: Pipeline, query: str) -> DataFrame:
        operator = self.operator
        assert operator.late != "aside"
        return pipeline.sql(
            query,
            stage=FIRST,
            event_time=operator.event_time,
            output_time=operator.output_time,
            late=operator.late,
        )

    def _watermarked(self, pipeline: Pipeline, source: str, rows: DataFrame) -> DataFrame:
        within = self.operator.deduplicate_within
        if self.operator.late != "aside":
            return pipeline.watermarked(
                rows,
                stage=FIRST,
                event_time="at",
                deduplicate_within=within,
                late=self.operator.late,
                allowed_lateness=self.operator.allowed_lateness,
            )
        on_time, late = pipeline.split_late(
            rows, stage=FIRST, event_time="at", deduplicate_within=within
        )
        path = str(self._folder / f"{source}-late")
        self._late[source] = late.writeStream.format("json").option("path", path)
        return on_time

    def _read(self, source: str) -> DataFrame:
        return (
            self._spark.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", self._files_a_batch)
            .json(str(self._folder / source))
        )

    def _strategy(self) -> AnyStrategy | None:
        if self.operator.sql is not None:
            return None
        if self.operator.strategy is not None:
            return self.operator.strategy()
        is_ordered = self.operator.ascending
        return Ascending() if is_ordered else BoundedOutOfOrderness(f"{BOUND_MIN} minutes")

    def _second(self, pipeline: Pipeline) -> DataFrame:
        top = self.operator.stamp.split(".")[0]
        kind = "struct<start: timestamp, end: timestamp>" if top == "window" else "timestamp"
        stamped = (
            self._spark.readStream.schema(f"{top} {kind}")
            .json(str(self._folder / FIRST))
            .select(F.col(self.operator.stamp).alias("at"))
        )
        windowed = pipeline.watermarked(stamped, stage=SECOND, event_time="at")
        counts = windowed.groupBy(F.window("at", SECOND_WINDOW)).agg(F.count("*").alias("rows"))
        return pipeline.report(
            counts.select(F.col("window.end").alias("closed_at"), "rows"),
            stage=SECOND,
            event_time="closed_at",
        )

    def _writer(self, stage: str, frame: DataFrame) -> DataStreamWriter:
        checkpoint = str(self._folder / f"{stage}-checkpoint")
        writer = frame.writeStream.option("checkpointLocation", checkpoint)
        if stage == SECOND or self.operator.sink == "files":
            return writer.format("json").option("path", str(self._folder / stage))
        return writer.outputMode(self.operator.mode).foreachBatch(self._write_batch)

    def _write_batch(self, batch: DataFrame, number: int) -> None:
        """A file for each batch, there at once and as a whole; a batch done again replaces it."""
        rows = batch.select(F.to_json(F.struct("*")).alias("line")).collect()
        if rows:
            hidden = self._folder / FIRST / f".{number}"
            hidden.write_text("\n".join(row["line"] for row in rows))
            hidden.rename(self._folder / FIRST / f"{number}.json")

    @contextmanager
    def _state_store(self) -> Generator[None]:
        """Spark's default, unless the operator needs another."""
        if self.operator.state_store is None:
            yield
            return
        self._spark.conf.set(_STATE_STORE, self.operator.state_store)
        try:
            yield
        finally:
            self._spark.conf.unset(_STATE_STORE)

    def land(self, days: Iterable[int]) -> None:
        """Let the files of these days come."""
        for day in days:
            for log in self._logs:
                log.write(self._folder / log.name, day)

    # Waits and checks.

    def _through_ms(self, day: int) -> int:
        """Return the watermark that the stages must reach with that day's files."""
        if self.operator.promises_less:
            return -1
        return _promised_ms(self._logs, day) - self.operator.lag_ms

    def _await(
        self, stage: str, watermark_ms: int, queries: list[StreamingQuery] | None = None
    ) -> None:
        """Wait until the observer has been told that a stage is so far."""
        deadline = time.monotonic() + DEADLINE_S
        while self.observer.seen.get(stage, -1) < watermark_ms:
            for query in queries or []:
                assert query.isActive, f"a query has ended: {query.exception()}"
            if time.monotonic() > deadline or self.observer.error:
                shown = [_progress(query.name or "", query) for query in queries or []]
                raise AssertionError(
                    f"{stage} is at {_shown(self.observer.seen.get(stage))}, its input at "
                    f"{_shown(self.observer.inputs.get(stage))}; it should be at "
                    f"{_shown(watermark_ms)}\n{''.join(shown)}"
                )
            time.sleep(0.02)

    def _check_so_far(self, answer: Lines, day: int) -> None:
        """Check that the windows which the days close are closed, and that nothing wrong has come."""
        operator = self.operator
        for stage in (FIRST, SECOND):
            self._await(stage, self._through_ms(day))
        self._complain()
        # First what was told, then what is there: it must be there by then.
        told = {FIRST: -1, SECOND: -1, **self.observer.seen}
        first, second = (self.outputs[stage].lines() for stage in (FIRST, SECOND))
        expected = due(
            answer, operator.stamp, told[FIRST], at_watermark=operator.comes == "when closed"
        )
        if operator.comes == "at once" and day == DAYS - 1:
            expected = answer
        wrong = answers.missing(operator, expected, first)
        wrong += answers.foreign(operator, answer, first)
        _none_of(wrong, f"stage 1, day {day}, at {_shown(told[FIRST])}")
        written = counted(first, operator.stamp)
        wrong = _missing_counts(written, second, told[SECOND])
        _none_of(wrong, f"stage 2, day {day}, at {_shown(told[SECOND])}")

    def _complain(self) -> None:
        """Fail for rows that were promised not to come, and for all counts."""
        self.observer.check()
        found = +self.counts
        if self.operator.is_undated:
            del found[Count.UNDATED_RESULTS]
        assert not found, f"counted: {dict(found)}"

    def _check(self, answer: Lines) -> None:
        """Everything is there, and is right."""
        self._complain()
        operator = self.operator
        assert bool(self.counts[Count.UNDATED_RESULTS]) == operator.is_undated
        first, second = (self.outputs[stage].lines() for stage in (FIRST, SECOND))
        _none_of(answers.differences(operator, answer, first), "stage 1")
        # The choice of the operator among several rows shows in the rows that came.
        source = answer if operator.equal == "rows" else first
        expected = counted(source, operator.stamp)
        wrong = answers.compared(expected, second)
        _none_of(wrong, "stage 2")
        assert self.observer.turns > 10
        assert self._kept[SECOND].compared
        judged = self.observer.judged
        assert judged[SECOND] or judged[FIRST] or operator.promises_less


def _ended(stage: str, query: StreamingQuery) -> None:
    """Wait until a query has ended by itself, and well."""
    if not query.awaitTermination(DEADLINE_S):
        shown = _progress(stage, query)
        query.stop()
        raise AssertionError(f"{stage} still runs after {DEADLINE_S} s\n{shown}")
    assert query.exception() is None


def _missing_counts(counts: Lines, written: Lines, watermark_ms: int) -> list[str]:
    closed = due(counts, "closed_at", watermark_ms, at_watermark=True)
    return answers.named("missing", closed - written)


def _promised_ms(sources: list[Log], day: int) -> int:
    return min(source.promised_ms(day) for source in sources)


def _progress(stage: str, query: StreamingQuery) -> str:
    found = query.lastProgress
    shown = json.dumps(json.loads(found.json), indent=1) if found else "no batch yet"
    return f"{stage} {query.status}\n{shown}\n"


def _none_of(wrong: list[str], where: str) -> None:
    assert not wrong, f"{where}:\n" + "\n".join(wrong)


def _shown(ms: int | None) -> str:
    if ms is None:
        return "no watermark"
    return "the end of time" if ms == MAX_MS else iso(ms)
