"""The user's entry point: a pipeline whose Spark queries close their windows by tidegauge."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, Literal, Self
from uuid import uuid4

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter
from pyspark.sql.types import StructType

from spark_agent.arguments import (
    allowed_lateness_ms,
    check_can_fire,
    check_can_split,
    check_clock_strategy,
    check_clocks,
    check_continues,
    check_early_not_bounded,
    check_early_passes,
    check_flag,
    check_is_writer,
    check_keeps_checkpoint,
    check_late,
    check_lease_ttl,
    check_output_time,
    check_reads_rest,
    check_session,
    check_tasks,
    check_url,
    check_writer,
    strategy_of,
)
from spark_agent.arrow import watch_column, watch_columns
from spark_agent.client.client import Client
from spark_agent.client.spec import StageSpec, ancestors
from spark_agent.clock import Clock, SystemClock
from spark_agent.columns import (
    as_wall_clock,
    by_shard,
    column,
    control_schema,
    event_time_of,
    is_case_sensitive,
    is_wall_clock,
    mark_of,
    name_in,
    name_of,
    quoted,
    time_name_of,
    time_of,
    with_ingress_time,
    with_output_time,
)
from spark_agent.driver.firings import Firings
from spark_agent.driver.job import DeclaredJob, host
from spark_agent.driver.late_rows import LateRows
from spark_agent.driver.launch import Launch
from spark_agent.driver.queries import Queries
from spark_agent.driver.window_notes import note_of
from spark_agent.executor.reporters import RangeReporter, SourceReporter
from spark_agent.executor.tally import Tallies, TallyParam
from spark_agent.executor.task import Reaction, ReportTarget
from spark_agent.firing_frames import kept_schema
from spark_agent.jvm.catalyst import DELAY
from spark_agent.jvm.cell import Cell
from spark_agent.jvm.checkpoint import Checkpoint
from spark_agent.jvm.nodes import LATE_ALIAS, RANGES_TAG, SOURCE_TAG, Control, LateFate, Node
from spark_agent.jvm.open_sessions import ReadSessions, reader_of
from spark_agent.jvm.plan import PlanReader
from spark_agent.jvm.progress import LATE_COUNT, late_metric, links_of, program_of
from spark_agent.jvm.several_sinks import Writers, check_late_writer
from spark_agent.jvm.sql import clauses_of
from spark_agent.jvm.unfired import Unfired
from spark_agent.jvm.writer import frame_of, output_mode_of
from spark_agent.late_frames import FLAG, is_late, split
from spark_agent.soundness.endless_state import endless_deduplications
from spark_agent.soundness.firings import Firing, firing_of
from spark_agent.soundness.late_rows import (
    check_late_rows,
    check_shares_shuffles,
    has_state,
    lateness_by_call,
)
from spark_agent.soundness.output_time_plans import check_reads_state, output_times_of
from spark_agent.soundness.output_times import OutputTime, OutputTimes
from spark_agent.soundness.query_stages import (
    QueryStages,
    ReportCall,
    check,
    check_early,
    check_event_times,
    stage_of,
)
from spark_agent.soundness.second_readings import check_second_readings
from spark_agent.soundness.settings import (
    check_days,
    check_percentile,
    check_reuses_shuffles,
    check_settings,
    counts_state,
)
from spark_agent.soundness.unseen_partitions import unseen_partitions
from spark_agent.sources import control, kafka, logs
from spark_agent.sources.arguments import check_logs
from spark_agent.sources.control import ControlSource
from spark_agent.sources.driver_link import LinkServer
from spark_agent.sources.logs import LogsSource
from spark_agent.sql import UnpromisedSource, UnpromisedSources
from spark_agent.started_query import StartedQuery, Timing, not_one
from spark_agent.strategies import EARLIEST_MS, AnyStrategy, IngressTime
from spark_agent.strategies.resolved import Resolved, resolved
from spark_agent.times import Duration, duration_ms

_log: Final = logging.getLogger("spark_agent")
_LINK_MARGIN_MS: Final = 5_000
"""Wait of a control source for the driver, beyond the driver's own wait for the service."""


def _short_id() -> str:
    return uuid4().hex[:12]


class Pipeline:
    """A job's stages, and the Spark queries of this driver that execute them.

    A pipeline takes the place of `withWatermark`. `source` reports what the tasks have read of each
    shard, `watermarked` brings the stage's input watermark from the service into Spark's plan, and
    `report` reports what the stage's operators have emitted. So a window closes once everything before
    its end is in, over all queries and drivers that feed the stage, and not once one query has seen a
    later row.

    An example, where `taps` is a streaming data frame with the columns `tap`, `at` and `litres`:

    ```python
    spec = {
        "taps": {"shards": ["north", "south"]},
        "hourly": {"inputs": ["taps"], "ranges": 4},  # as spark.sql.shuffle.partitions
    }
    with Pipeline(url, job="water", spec=spec) as pipeline:
        strategy = BoundedOutOfOrderness("10 minutes")
        rows = pipeline.source(
            taps, stage="taps", shard="tap", event_time="at", strategy=strategy
        )
        rows = pipeline.watermarked(rows, stage="hourly", event_time="at")
        hourly = rows.groupBy(F.window("at", "1 hour"), "tap").agg(F.sum("litres"))
        writer = pipeline.report(hourly, stage="hourly").writeStream.format("json")
        writer = writer.option("path", f"{folder}/hourly").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
        pipeline.start(writer).awaitTermination()
    ```

    `spec` is the job's `stages`, in the service's format. `throttle` is its `throttle`: while the
    service's advice pauses all shards that a query reads, its next batch waits. `replace` allows both to
    replace a different specification of the job. `lease_ttl` must be longer than a few batches.
    `patience` is how long one call to the service may block a task, `poll` the shortest time between
    two polls of a watermark. An idle query waits for a change in long polls, unless its leases are
    shorter than three seconds. `finish_timeout` is how long an `availableNow` query waits at its end for
    a service that is away: a bounded one then fails, and any other ends without its last windows, which
    come out in the next run. A bounded query with another trigger waits until the service is back.

    `key_file` is the path of a file with the service's key, on the driver and on every executor. Without
    it, the key is in the file of `TIDEGAUGE_KEY_FILE`, or in `TIDEGAUGE_KEY`, in their environments.

    Use it as a context manager, or call `stop`. One query at a time executes a stage. A query that
    another driver starts for a stage takes the stage over and fences the older query.
    """

    def __init__(
        self,
        url: str,
        job: str,
        spec: Mapping[str, Mapping[str, Any]],
        *,
        spark: SparkSession | None = None,
        throttle: Mapping[str, Any] | None = None,
        replace: bool = False,
        lease_ttl: Duration = "60 s",
        patience: Duration = "2 s",
        poll: Duration = "100 ms",
        finish_timeout: Duration = "5 min",
        key_file: str | PathLike[str] | None = None,
        clock: Clock | None = None,
        new_id: Callable[[], str] = _short_id,
    ) -> None:
        """Declare the job. If the aggregator is unavailable, each query retries that when it starts.

        Raises `ValueError` if the specification cannot be read, `DeclaredOtherwise` if the job is
        declared otherwise and `replace` is not set, `Refused` if the service rejects the specification
        (`NotAllowed`: it rejects the key),
        and `RuntimeError` for Spark Connect, or if Spark's workers would run a different Python.
        """
        check_url(url)
        check_flag("replace", replace)
        timing = Timing(
            ttl_ms=duration_ms(lease_ttl, name="lease_ttl"),
            patience_ms=duration_ms(patience, name="patience"),
            poll_ms=duration_ms(poll, name="poll"),
            finish_timeout_ms=duration_ms(finish_timeout, name="finish_timeout"),
        )
        check_lease_ttl(timing.ttl_ms, lease_ttl)
        clock = clock or SystemClock()
        self._spark = spark or SparkSession.builder.getOrCreate()
        check_session(self._spark)
        self._url = url
        self._timing = timing
        self._clock = clock
        self._new_id = new_id
        self._key_file = None if key_file is None else fspath(key_file)
        client = Client(
            url, patience_ms=max(timing.patience_ms, 1_000), key_file=self._key_file, clock=clock
        )
        self._job = DeclaredJob(
            job,
            spec,
            client=client,
            throttle=throttle,
            replace=replace,
            program=program_of(self._spark),
            links=links_of(self._spark),
        )
        self._job.declare()
        tallies: Tallies = {}
        self._accumulator = self._spark.sparkContext.accumulator(tallies, TallyParam())
        self._tags = itertools.count(1)
        self._reports: dict[str, ReportCall] = {}
        self._unpromised = UnpromisedSources()
        self._strategies: dict[str, Resolved] = {}
        """By tag of a source."""
        self._first_on_time_us: dict[str, Cell] = {}
        """By call that sets late rows apart: the time from which a row is on time, in the next batch."""
        self._plans = PlanReader(self._spark)
        self._queries = Queries(
            self._job,
            spark=self._spark,
            client=client,
            tallies=tallies,
            timing=timing,
            clock=clock,
        )
        self._token = token_hex(16)
        self._link = LinkServer(
            self._token, self._queries.feeds.next_offset, self._queries.feeds.admit
        )
        self._spark.dataSource.register(ControlSource)
        self._spark.dataSource.register(LogsSource)

    @property
    def counts(self) -> Counter[str]:
        """Counts of what should be rare, summed over all queries; keys as in `Count`."""
        return self._queries.counts

    @property
    def waits(self) -> dict[str, str]:
        """Why the next batch of a query has to wait, by the source stages that it executes."""
        return self._queries.waits

    @property
    def shard_waits(self) -> dict[str, dict[str, str]]:
        """Why single shards of sources from `read_logs` read nothing in the next batch, or less than
        they could, while others go on: by source stage and shard.
        """
        return self._queries.shard_waits

    @property
    def bounds(self) -> dict[str, dict[str, int]]:
        """Bounds of out-of-orderness that `LearnedLateness` has learned, by source stage and shard, in
        milliseconds. The log has them, too, and the metric `tidegauge_agent_bound_seconds` the largest
        of each stage.
        """
        return self._queries.bounds

    def read_logs(
        self,
        path: str | PathLike[str],
        *,
        stage: str,
        format: Literal["csv", "json", "parquet"],  # noqa: A002  (as Spark calls it)
        schema: StructType | str,
        event_time: str,
        strategy: AnyStrategy | None = None,
        shard: str = "shard",
        max_files_per_shard: int | None = None,
        complete: str | None = None,
        tolerance: Duration = "1 day",
    ) -> DataFrame:
        """Read a source whose shards are folders in `path`, and report its progress, as `source` does.

        A folder's name is its shard, which the column `shard` has, after those of `schema` (a schema
        of Spark, or its text). Files in it are read in the order of their names, at most
        `max_files_per_shard` in a batch. A file must be complete when it gets its name, must sort after
        those that are there, and may be deleted once it was read. What begins with a dot or an
        underscore is skipped. One that comes with a name before the last one that was read fails the
        query before its next batch, since it would never be read. So does one whose size has changed
        since it was read.

        With `complete`, such as `"_SUCCESS"`, a folder that has a file of this name is complete: nothing
        follows in it. Once its files are read and their batches committed, its shard is final, and holds
        the watermark no longer. Once all shards in the specification are final, the last windows come
        out, without `bounded`. A file that comes into a complete folder fails the query.

        JSON has an object in each line, CSV the columns' names in its first line; both may be
        compressed. A CSV or Parquet file without the event time's column fails the query; any other
        column that it lacks is null. Instants without a time zone are in Spark's session time zone. The
        folders must be at the same path for the driver and for every executor.

        Where the job has a `throttle`, single shards wait: one that the advice pauses, or that another
        batch like its last one would take past its group's limit, reads nothing while others go on. A
        rate below 1 lowers the number of its files. `shard_waits` has the reason, and so has the
        offset of the batch, in the query's progress.

        Raises `ValueError`.
        """
        spec = self._job.stage(stage, "source")
        columns = check_logs(
            path,
            form=format,
            schema=schema,
            shard=shard,
            most=max_files_per_shard,
            complete=complete,
        )
        event_time = name_in(columns, event_time, is_case_sensitive=is_case_sensitive(self._spark))
        frame = (
            self._linked_source(logs.FORMAT, columns, event_time)
            .options(
                stage=stage,
                source=self._queries.feeds.new_source(stage),
                folder=os.path.abspath(path),  # noqa: PTH100  (no link is to be resolved)
                files=format,
                shard=shard,
                zone=str(self._spark.conf.get("spark.sql.session.timeZone")),
                most="" if max_files_per_shard is None else str(max_files_per_shard),
                complete=complete or "",
                dynamic=str(spec.is_dynamic).lower(),
            )
            .load()
        )
        return self.source(
            frame,
            stage=stage,
            shard=shard,
            event_time=event_time,
            strategy=strategy,
            tolerance=tolerance,
            partitioned_by_shard=True,
        )

    def read_kafka(
        self,
        servers: str,
        topics: str | Sequence[str],
        *,
        stage: str,
        event_time: str = "timestamp",
        value: StructType | str | None = None,
        columns: Mapping[str, Column | str] | None = None,
        strategy: AnyStrategy | None = None,
        starting: Literal["earliest", "latest"] = "earliest",
        options: Mapping[str, Any] | None = None,
        shard: str = "shard",
        tolerance: Duration = "1 day",
        tasks: int | None = None,
    ) -> DataFrame:
        """Read topics of Kafka, whose partitions are the shards, and report their progress, as `source`
        does.

        `servers` are addresses of brokers, `host:9092,…`. A partition's shard is `topic-partition`, in
        the column `shard`. The columns of Spark's connector come first: `key`, `value`, `topic`,
        `partition`, `offset`, `timestamp`, `timestampType`. With `value`, a schema of Spark or its text,
        the value is JSON, and its members are columns in place of `value`; a value that cannot be read
        has nulls. `columns` are computed from these, one after the other, from expressions or their SQL:
        `columns={"at": "timestamp_millis(ride.ms)"}`. `event_time` is one of all these columns, by
        default the timestamp of Kafka, which is null in a row that its producer has not dated.

        A stage that is `"dynamic": true` has a shard for each partition that there is, also for those
        without rows, and for those that are added later. Each partition is read by one task, without a
        shuffle. By default a task reads one partition; with `tasks`, at most so many tasks read all of
        them, several partitions each.

        `options` are those of Spark's connector, such as `maxOffsetsPerTrigger` and
        `kafka.security.protocol`. Options that split a partition, or by which rows would be left out
        without a word, are rejected.

        Raises `ValueError`.
        """
        self._job.stage(stage, "source")
        kafka.check_servers(servers)
        names = kafka.check_topics(topics)
        check_tasks(tasks)
        given = dict(options or {})
        kafka.check_options(given)
        if starting not in {"earliest", "latest"}:
            raise ValueError(f"invalid starting {starting!r}: write 'earliest' or 'latest'")
        rows = kafka.read(
            self._spark,
            servers=servers,
            topics=names,
            stage=stage,
            starting=starting,
            options=given,
        )
        if tasks is not None:
            # Partitions stay whole, so the rows of a shard are in one task.
            rows = rows.coalesce(tasks)
        return self.source(
            kafka.with_computed(kafka.with_columns(rows, shard, value), shard, columns or {}),
            stage=stage,
            shard=shard,
            event_time=event_time,
            strategy=strategy,
            tolerance=tolerance,
            partitioned_by_shard=True,
        )

    def source(
        self,
        frame: DataFrame,
        *,
        stage: str,
        shard: str,
        event_time: str,
        strategy: AnyStrategy | None = None,
        tolerance: Duration = "1 day",
        tasks: int | None = None,
        partitioned_by_shard: bool = False,
    ) -> DataFrame:
        """Report the source's progress as its rows pass through unchanged.

        `shard` and `event_time` are columns. `strategy` derives a shard's promise, by default from its
        newest event time (see `spark_agent.strategies`); text is an expression of SQL. Without it, the
        strategy is the stage's `watermark` in the specification, or else the clause of the query in SQL
        that reads a view of what is returned (see `sql`). With `IngressTime`, `event_time` names a
        column to be added. Rows dated further ahead of the clock than `tolerance` are not counted.

        All rows of a shard are brought into one of `tasks` tasks (by default one per core, at most
        one per shard), so that one task reports for the shard. `partitioned_by_shard=True` declares
        that the source is already partitioned like that, which saves the shuffle. Where that is
        wrong, a warning is logged and the driver reports for the shard.

        A source may have an `idle` policy in the specification. Then the stage does not wait for a
        shard that has had no rows for so long while nothing was left to read, until it has rows again.
        Those may be late.

        Raises `ValueError`.
        """
        spec = self._job.stage(stage, "source")
        tolerance_ms = duration_ms(tolerance, name="tolerance")
        check_tasks(tasks)
        check_flag("partitioned_by_shard", partitioned_by_shard)
        shard = name_of(frame, shard)
        strategy = strategy_of(spec, strategy)
        if strategy is None:
            event_time = time_name_of(frame, event_time)
            again = partial(
                self.source,
                frame,
                stage=stage,
                shard=quoted(shard),
                event_time=quoted(event_time),
                tolerance=tolerance,
                tasks=tasks,
                partitioned_by_shard=partitioned_by_shard,
            )
            source = UnpromisedSource(stage, event_time, lambda given: again(strategy=given))
            return self._unpromised.add(frame, source)
        parts = resolved(strategy)
        if isinstance(parts.clock, IngressTime):
            frame = with_ingress_time(frame, event_time)
        event_time = time_name_of(frame, event_time)
        marks = (
            ()
            if parts.mark is None
            else (mark_of(frame, event_time, parts.mark(column(event_time))),)
        )
        if parts.clock is not None:
            check_clock_strategy(spec, strategy, is_wall_clock=is_wall_clock(frame, event_time))
        target = self._target(stage, partitioned_by_shard=partitioned_by_shard)
        reporter = SourceReporter(
            target,
            shards=frozenset(spec.shards),
            is_dynamic=spec.is_dynamic,
            promise=parts.promise,
            summary=parts.summary,
            tolerance_ms=tolerance_ms,
            tracks_in_flight=bool(spec.percentiles),
        )
        if parts.needs_polls or stage in _throttled(self._job.throttle, self._job.stages):
            # A query without watermarked() has no control source that could hold it back, or fail a run
            # that would end well.
            gate = self._queries.feeds.new_source(stage)
            control = Control(stage, gate, is_gate=True)
            frame = frame.union(self._control_rows(frame, event_time, control))
        if not partitioned_by_shard:
            cores = self._spark.sparkContext.defaultParallelism
            known = None if spec.is_dynamic else spec.shards
            most = cores if known is None else min(cores, len(known))
            frame = by_shard(frame, shard, known, tasks or most)
        tag = f"{SOURCE_TAG}{next(self._tags)}.{stage}"
        self._strategies[tag] = parts
        shards = column(shard).cast("string")
        return watch_columns(frame, tag, reporter, shards, column(event_time), *marks)

    def watermarked(
        self,
        frame: DataFrame,
        *,
        stage: str,
        event_time: str,
        deduplicate_within: Duration | None = None,
        percentile: int | None = None,
        late: Literal["pass", "drop"] = "pass",
        allowed_lateness: Duration | None = None,
    ) -> DataFrame:
        """Give the data frame the stage's input watermark, instead of `withWatermark`.

        Later operators close windows and drop late rows by the service's watermark alone. It may be
        called for several data frames of one stage, such as the two sides of a join. Data that
        another query writes must not be rate limited (`maxFilesPerTrigger`).

        `deduplicate_within` is how far apart the duplicates may be that
        `dropDuplicatesWithinWatermark` has to find.

        With `percentile` the query writes *early results*: it closes windows when at least so many
        percent of what its input has in flight are not before their end. It promises nothing, so it has
        no `source` or `report`, and another query, which has, writes what is complete. The stages that
        it reads must declare this percentile in the specification.

        `late="drop"` drops late rows before Spark's operators, and counts each of them; with `"pass"`
        the operators drop them. Which rows are late is the same (see `split_late`).

        With `allowed_lateness`, windows that have fired fire again, with the corrected value, in each
        batch that brings rows for them, until the watermark has passed their end by this duration. Rows
        are late only after that. The windows are tumbling or sliding ones, `groupBy(window(…))`, and are
        the query's only operator with state. The rows that are written have two columns more: `on_time`,
        true for the first value of a window, and `version`, which grows from value to value. The writer
        has the mode `append`. Raises `ValueError`.
        """
        check_late(late)
        event_time = self._watermarked_by(frame, stage, event_time)
        lateness_ms = allowed_lateness_ms(allowed_lateness)
        if percentile is not None:
            check_early_passes(stage, late, lateness_ms)
            check_percentile(self._job.stages, stage, percentile)
        call = self._queries.feeds.new_source(stage)
        fate = LateFate(late)
        if fate is LateFate.DROP:
            first = self._first_on_time_us[call] = Cell(self._spark)
            flag = is_late(frame, event_time, first.column)
            metric = F.count_if(flag).alias(LATE_COUNT)
            frame = frame.observe(late_metric(call, stage, fate), metric).filter(~flag)
        delay_ms = duration_ms(deduplicate_within or 0, name="deduplicate_within")
        control = Control(
            stage, call, percentile=percentile, late=fate, allowed_lateness_ms=lateness_ms
        )
        return self._watermarked(frame, event_time, control, delay_ms)

    def sql(
        self,
        query: str,
        *,
        stage: str,
        event_time: str | None = None,
        delay: Duration | None = None,
        output_time: OutputTime | str | None = None,
        longest: Duration | None = None,
        late: Literal["pass", "drop"] = "pass",
        allowed_lateness: Duration | None = None,
    ) -> DataFrame:
        """Return the rows of a stage that is written in SQL, as from `watermarked` and `report`.

        Each stream that the query reads is a view with a clause of Spark 4.2,
        `FROM view WATERMARK column DELAY OF INTERVAL 10 MINUTES`. If the view is of what `source` has
        returned without a strategy, the delay is the bound of the source: `BoundedOutOfOrderness`. Any
        other view has its watermark from elsewhere, and a delay of 0 seconds.

        `event_time`, `delay`, `output_time` and `longest` are those of `report`, `late` and
        `allowed_lateness` those of `watermarked`. Raises `ValueError`.
        """
        self._job.stage(stage, "keyed stage")
        check_late(late)
        clauses = clauses_of(self._spark, query)
        if not clauses:
            raise ValueError(
                f"stage {stage!r}: the query has not a WATERMARK: write FROM view WATERMARK column "
                f"DELAY OF INTERVAL 10 MINUTES, for each stream"
            )
        names: dict[str, str] = {}
        """By temporary view: the name in the text."""
        try:
            for clause in reversed(clauses):
                rows = self._unpromised.read(clause, *self._relation(clause.relation))
                rows = self.watermarked(
                    rows,
                    stage=stage,
                    event_time=quoted(clause.event_time),
                    late=late,
                    allowed_lateness=allowed_lateness,
                )
                view = f"tidegauge_{uuid4().hex}"
                names[view] = clause.relation
                rows.createOrReplaceTempView(view)
                query = clause.replaced(query, view)
            found = self._spark.sql(query)
        except AnalysisException as error:
            message = error.getMessage() or ""
            for view, name in names.items():
                message = message.replace(f"`{view}`", name)
            raise ValueError(f"stage {stage!r}: the query cannot be run: {message}") from error
        finally:
            for view in names:
                self._spark.catalog.dropTempView(view)
        return self.report(
            found,
            stage=stage,
            event_time=event_time,
            delay=delay,
            output_time=output_time,
            longest=longest,
        )

    def _relation(self, name: str) -> tuple[DataFrame, Node]:
        """Return a stream by its name, with its plan. Raises `ValueError`, `AnalysisException`."""
        rows = self._spark.table(name)
        if not rows.isStreaming:
            raise ValueError(
                f"{name} is not a stream, and has not a watermark: leave WATERMARK out, or make a view "
                f"of a readStream"
            )
        return rows, self._plans.read(rows)

    def split_late(
        self,
        frame: DataFrame,
        *,
        stage: str,
        event_time: str,
        deduplicate_within: Duration | None = None,
        allowed_lateness: Duration | None = None,
    ) -> tuple[DataFrame, DataFrame]:
        """Return the rows on time, with the stage's input watermark as from `watermarked`, and the late
        rows, unchanged. One query writes both: `start(writer, late=late.writeStream…)`.

        Each row is in one of the two data frames, once. A row is late for windows if the last of its
        windows has ended, and for other operators if its time is before the watermark. The watermark is
        the one with which the batch before was planned, so a row is late exactly if Spark's operators
        would drop it, a batch that is repeated finds the same rows late, and Spark drops none. For
        session windows, too, a row before the watermark is late, even if a session could still take it.
        A row without an event time is not late. `allowed_lateness` is as for `watermarked`: a row that
        corrects a window is not late.

        The rows on time go through one operator with state, or several in sequence. Both data frames
        read one shuffle of whole rows, which `late="drop"` of `watermarked` does without.
        Raises `ValueError`.
        """
        event_time = self._watermarked_by(frame, stage, event_time)
        check_can_split(stage, frame.columns, is_random=self._plans.is_random(frame))
        call = self._queries.feeds.new_source(stage)
        first = self._first_on_time_us[call] = Cell(self._spark)
        tasks = self._spark.sparkContext.defaultParallelism
        on_time, late = split(frame, event_time, first.column, tasks=tasks)
        count = F.count(F.lit(1)).alias(LATE_COUNT)
        late = late.observe(late_metric(call, stage, LateFate.ASIDE), count)
        delay_ms = duration_ms(deduplicate_within or 0, name="deduplicate_within")
        lateness_ms = allowed_lateness_ms(allowed_lateness)
        control = Control(stage, call, late=LateFate.ASIDE, allowed_lateness_ms=lateness_ms)
        on_time = self._watermarked(on_time, event_time, control, delay_ms)
        return on_time, late.alias(f"{LATE_ALIAS}{call}")

    def _watermarked_by(self, frame: DataFrame, stage: str, event_time: str) -> str:
        """Return the column of the event time, once the data frame is checked. Raises `ValueError`."""
        self._job.stage(stage, "keyed stage")
        event_time = time_name_of(frame, event_time)
        plan = self._plans.read(frame)
        self._unpromised.check(plan)
        if any(node.operator == "EventTimeWatermark" for node in plan.walk()):
            raise ValueError(
                f"stage {stage!r}: the data frame has a withWatermark of its own, which would hold "
                f"back Spark's watermark: leave it out"
            )
        return event_time

    def _watermarked(
        self, frame: DataFrame, event_time: str, control: Control, delay_ms: int
    ) -> DataFrame:
        # Only the control rows pass through `withWatermark`, so Spark's watermark follows them and
        # not the dates in the data. A union takes its columns from its first branch, so its event
        # time carries the metadata that windows need.
        rows = self._control_rows(frame, event_time, control, delay_ms)
        # The aliases keep Spark from flattening nested unions. Otherwise the plan would not show
        # what came through here and what was unioned with it later.
        return rows.union(frame.alias("tidegauge_data")).alias("tidegauge")

    def _linked_source(self, of: str, columns: StructType, event_time: str) -> DataStreamReader:
        """Return the reader of a source that polls the driver, through the link."""
        return self._spark.readStream.format(of).options(
            port=str(self._link.port),
            token=self._token,
            timeoutMs=str(3 * self._timing.patience_ms + _LINK_MARGIN_MS),
            pollMs=str(self._timing.poll_ms),
            schema=columns.json(),
            eventTime=event_time,
        )

    def _control_rows(
        self, frame: DataFrame, event_time: str, of: Control, delay_ms: int = 0
    ) -> DataFrame:
        """Return a control source, none of whose rows comes out, with the columns of a data frame.

        Spark's optimiser must not be able to prove that nothing comes out: it would remove the branch,
        or drop the rows too early, and the watermark would never advance. So the control rows have every
        column of the data, and their filter is non-deterministic: it can neither be folded nor have
        other filters pushed through it.
        """
        rows = (
            self._linked_source(control.FORMAT, control_schema(frame, event_time), event_time)
            .options(
                stage=of.stage,
                control=of.id,
                delayMs=str(delay_ms),
                gate=str(of.is_gate).lower(),
                percentile="" if of.percentile is None else str(of.percentile),
                late=of.late,
                allowedLatenessMs=str(of.allowed_lateness_ms),
            )
            .load()
        )
        if not of.is_gate:
            rows = rows.withWatermark(quoted(event_time), f"{delay_ms} milliseconds")
        rows = rows.filter(
            # An instant: a date in text would be read in the session's time zone.
            (column(event_time) < F.timestamp_millis(F.lit(EARLIEST_MS)))
            | (F.spark_partition_id() < 0)
        )
        if not is_wall_clock(frame, event_time):
            return rows
        return as_wall_clock(rows, event_time, {} if of.is_gate else {DELAY: delay_ms})

    def report(
        self,
        frame: DataFrame,
        *,
        stage: str,
        event_time: str | None = None,
        delay: Duration | None = None,
        output_time: OutputTime | str | None = None,
        longest: Duration | None = None,
        on_early: Literal["count", "fail"] = "count",
    ) -> DataFrame:
        """Report the keyed stage's progress after its operators; rows pass through unchanged.

        `event_time` is the column by which readers date the rows: a timestamp, or a window, which
        stands for its end. It may be left out if only one column qualifies. It must be the unchanged
        event time, a window's end, or `window_time()`. For any other column, and for rows from state
        functions, the plan does not show how old they may be. Declare it with `delay`: how far behind
        the watermark a row may be, in addition to what Spark's operators allow (`"0 s"`: never behind).

        With an `output_time`, the results of windows are dated by it. For `EARLIEST` and `LATEST`,
        `event_time` is the column with `min()` or `max()` of the event time, and may be left out.
        `report` replaces its values in overlapping windows, where an output time is not before the end
        of the window before.
        The start of a session that is open holds the stage's promise back. Or `longest` is the length
        of the longest session: `EARLIEST` of a longer one is that much before its end.

        Rows that leave older than the stage has already promised are counted (`early_rows`); with
        `on_early="fail"` they fail the query. Call it last: nothing after it may hold rows back or
        union others. Raises `ValueError`, also if the number of the stage's ranges is not Spark's
        number of state partitions.
        """
        spec = self._job.stage(stage, "keyed stage")
        partitions = int(self._spark.conf.get("spark.sql.shuffle.partitions") or "200")
        if partitions != len(spec.ranges):
            raise ValueError(
                f"stage {stage!r} has {len(spec.ranges)} ranges, but spark.sql.shuffle.partitions is "
                f"{partitions}, and each partition of Spark's state must be a range: set it to "
                f"{len(spec.ranges)}, or, for a new checkpoint, give the stage "
                f'"ranges": {partitions}'
            )
        if on_early not in {"count", "fail"}:
            raise ValueError(f"invalid on_early {on_early!r}: write 'count' or 'fail'")
        plan = self._plans.read(frame)
        output = None
        if output_time is not None or longest is not None:
            dated_by = check_output_time(stage, output_time, delay=delay, longest=longest)
            event_time = None if event_time is None else name_of(frame, event_time)
            event_time, output = output_times_of(plan, stage, event_time, dated_by)
            if output is not None and not output.reads_state:
                frame = with_output_time(frame, event_time, output.window, output.reach_us)
            event_time = quoted(event_time)
        event_time = event_time_of(frame, stage, event_time)
        tag = f"{RANGES_TAG}{next(self._tags)}.{stage}"
        delay_ms = None if delay is None else duration_ms(delay, name="delay")
        self._reports[tag] = ReportCall(stage, event_time, delay_ms, output)
        corrects = any(
            node.control is not None and node.control.allowed_lateness_ms for node in plan.walk()
        )
        if corrects and on_early == "fail":
            raise ValueError(
                f"stage {stage!r}: a correction is older than the stage's promise, so on_early='fail' "
                f"would fail each query with allowed_lateness: leave it out"
            )
        reporter = RangeReporter(
            self._target(stage),
            spec.ranges,
            # A correction is behind the watermark, and is to be.
            has_event_time=event_time is not None and not corrects,
            on_early=on_early,
        )
        times = F.spark_partition_id() if event_time is None else time_of(frame, event_time)
        return watch_column(frame, tag, reporter, times)

    def start(
        self,
        writer: DataStreamWriter,
        *,
        late: DataStreamWriter | Sequence[DataStreamWriter] = (),
        bounded: bool = False,
        on_fenced: Reaction = "stop",
        on_lost_checkpoint: Reaction = "stop",
    ) -> StreamingQuery:
        """Open a run for the stages that the query goes through, and start the query.

        `late` writes the late rows of `split_late`, in the batches of the same query, which has the
        trigger and the checkpoint of `writer`. A query with several calls of `split_late` has a list of
        writers. Files, and what is written by a `foreachBatch` that recognises a repeated batch by its
        number, then have each row once.

        Triggers work as in Spark. `availableNow` reads what is there at the start, closes the
        windows that this completes, and ends; the next run continues from there.

        A `bounded` query is the last one. Once it has read all its input, its sources become final,
        so that the last windows come out, and nothing may follow. It stops when every stage that it
        executes is final. Without sources of its own it ends when its upstream stages are final.

        If another driver takes its stages over, the query fails with an error that names it. With
        `on_fenced="continue"` it goes on, unreported.

        If its checkpoint is new or an old copy, while the job is further, it is not started: it would
        write again what readers have taken for complete, or lose rows. With
        `on_lost_checkpoint="continue"` it goes on, and what it rereads is late. Nor is it started, in
        either case, if its output folder has batches that its checkpoint has not planned.

        Raises `ValueError` if the query does not meet its stages' requirements, in some cases as
        `UnsoundPlanError`, `FinalSourceError`, `StageTakenError` or `OldCheckpointError`; `NotAllowed`
        if the service does not accept the key; `RuntimeError` if the pipeline was stopped.
        """
        check_is_writer(writer)
        check_flag("bounded", bounded)
        trigger = check_writer(writer, bounded=bounded)
        _check_reaction("on_fenced", on_fenced)
        _check_reaction("on_lost_checkpoint", on_lost_checkpoint)
        late_writers = _listed(late)
        for each in late_writers:
            check_is_writer(each)
            check_late_writer(each)
        frame = frame_of(writer)
        tree = self._plans.read(frame)
        self._unpromised.check(tree)
        late_plans = [self._plans.read(frame_of(each)) for each in late_writers]
        check_late_rows(tree, late_plans)
        controls = [node.control for node in tree.walk() if node.control is not None]
        logs = [node.logs_source for node in tree.walk() if node.logs_source is not None]
        links = [each.id for each in (*controls, *logs)]
        # The state of a bounded query ends with the query.
        _warn(
            [
                *(() if bounded else endless_deduplications(tree)),
                *unseen_partitions(tree, self._job.stages),
            ]
        )
        early = check_early(tree, self._job.stages)
        if early is not None:
            check_settings(self._spark, controls)
            check_event_times(self._plans.several_event_times(frame))
            check_early_not_bounded(early.stage, bounded=bounded)
            return self._queries.start_early(early, trigger, writer, links)
        stages = check(tree, self._job.stages, self._reports)
        check_days(tree, str(self._spark.conf.get("spark.sql.session.timeZone")))
        check_settings(self._spark, [each for each in controls if not each.is_gate])
        check_event_times(self._plans.several_event_times(frame))
        sources = sum(each.sources for each in (tree, *late_plans))
        check_second_readings(tree, trigger, self._job.stages, stages.names, sources)
        strategies = {
            stage_of(node.tag): self._strategies[node.tag]
            for node in tree.walk()
            if node.tag in self._strategies
        }
        check_reads_rest(bounded=bounded, may_wait_for_more=stages.may_wait_for_more)
        check_clocks(strategies, may_wait_for_more=stages.may_wait_for_more)
        checkpoint = Checkpoint(self._spark, writer, *late_writers)
        firing = firing_of(tree)
        if firing is not None:
            check_continues(firing.stage, on_lost_checkpoint)
        firings = None if firing is None else self._firings(firing, writer, checkpoint)
        outputs = {
            stage: each.output for stage, each in stages.promises.items() if each.output is not None
        }
        sessions = self._sessions_reader(tree, outputs, checkpoint)
        query = StartedQuery(
            job=self._job.name,
            name=f"{host()}-{os.getpid()}.{self._new_id()}",
            stages=stages,
            trigger=trigger,
            timing=self._timing,
            bounded=bounded,
            on_fenced=on_fenced,
            on_lost_checkpoint=on_lost_checkpoint,
            counts_state=counts_state(self._spark),
            stateful={stage: each.stateful for stage, each in strategies.items() if each.stateful},
            clocks={stage: each.clock for stage, each in strategies.items() if each.clock},
            corrections=not_one if firings is None else firings.corrections,
            open_sessions=sessions,
        )
        late_rows = LateRows(lateness_by_call(tree), self._first_on_time_us, checkpoint)
        if late_writers or firings is not None:
            writers = Writers(self._spark, writer, late_writers)
            check_keeps_checkpoint(checkpoint)
            check_reuses_shuffles(self._spark)
            shuffles = self._plans.shuffles_with(writers.frame, FLAG)
            check_shares_shuffles(late_plans, shuffles)
            fire = None if firings is None else firings.fire
            writer = writers.as_one(late_rows.check, len(shuffles), fire)
        launch = Launch(
            writer,
            links,
            checkpoint,
            late_rows,
            sources=sources,
            ranges=_kept_ranges(tree, stages),
            windows=note_of(firing, frame.schema, outputs),
        )
        return self._queries.start(query, launch)

    def _sessions_reader(
        self, plan: Node, outputs: Mapping[str, OutputTimes], checkpoint: Checkpoint
    ) -> ReadSessions | None:
        """Return the reader of open sessions if a promise depends on them. Raises `ValueError`."""
        stages = [stage for stage, each in outputs.items() if each.reads_state]
        if not stages:
            return None
        check_reads_state(plan, stages[0])
        return reader_of(self._spark, stages[0], checkpoint.location)

    def _firings(self, firing: Firing, writer: DataStreamWriter, checkpoint: Checkpoint) -> Firings:
        rows = frame_of(writer).schema
        check_can_fire(firing.stage, rows, output_mode_of(writer))
        unfired = Unfired(self._spark, checkpoint.unfired, kept_schema(rows))
        return Firings(firing, checkpoint, unfired)

    def reset(self) -> None:
        """Start the job over: its next generation has no watermarks, and no source is final.

        Spark's checkpoints do not change: give every query a new one, and an empty output.
        Raises `RuntimeError` while a query of this pipeline runs, `Unavailable`.
        """
        self._queries.reset()

    def stop(self) -> None:
        """Stop the queries that still run, and commit what they have done."""
        self._queries.stop()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _target(self, stage: str, *, partitioned_by_shard: bool = False) -> ReportTarget:
        return ReportTarget(
            url=self._url,
            job=self._job.name,
            stage=stage,
            ttl_ms=self._timing.ttl_ms,
            patience_ms=self._timing.patience_ms,
            clock=self._clock,
            tallies=self._accumulator,
            key_file=self._key_file,
            partitioned_by_shard=partitioned_by_shard,
            watched=not self._job.stages[stage].has_idle_policy,
        )


def _warn(of: Sequence[str]) -> None:
    for warning in of:
        _log.warning("%s", warning)


def _listed(late: DataStreamWriter | Sequence[DataStreamWriter]) -> list[DataStreamWriter]:
    """Return the writers of late rows. What is not a writer is refused later."""
    return list(late) if isinstance(late, (list, tuple)) else [late]  # pyright: ignore


def _check_reaction(option: str, reaction: str) -> None:
    if reaction not in {"stop", "continue"}:
        raise ValueError(f"invalid {option} {reaction!r}: write 'stop' or 'continue'")


def _kept_ranges(plan: Node, stages: QueryStages) -> dict[str, int]:
    """Return the number of ranges of each keyed stage if Spark keeps a state in as many partitions."""
    if not any(has_state(node) for node in plan.walk()):
        return {}
    return {stage.name: len(stage.ranges) for stage in stages.keyed}


def _throttled(throttle: Mapping[str, Any], stages: Mapping[str, StageSpec]) -> set[str]:
    """Return the stages that a job's `throttle` may hold back."""
    found = {stage for group in throttle.get("groups", ()) for stage in group["stages"]}
    for slow in throttle.get("stages", {}):
        if slow in stages:
            found |= ancestors(stages, slow)
    return found
