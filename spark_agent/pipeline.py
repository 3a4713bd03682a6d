"""What a user calls: a pipeline whose Spark queries report to tidegauge and close by its word."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, Literal, Self
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructField, StructType, TimestampType

from spark_agent import control_source, plan
from spark_agent.arrow import has_type, watch_column, watch_two_columns
from spark_agent.checks import QueryStages, ReportCall, check
from spark_agent.client import AggregatorError, Client, StageWatermark, Unavailable
from spark_agent.clock import Clock, SystemClock
from spark_agent.control_source import ControlSource
from spark_agent.durations import Duration, duration_ms
from spark_agent.event_router import EventRouter
from spark_agent.feed import Feed, FeedConfig
from spark_agent.link import LinkServer, NotStartedError, Offset
from spark_agent.reporting import (
    QUERY_PROPERTY,
    RUN_PROPERTY,
    RangeReporter,
    ReportTarget,
    SourceReporter,
)
from spark_agent.spec import StageSpec, ancestors, check_name, read_spec, upstream
from spark_agent.strategies import Strategy
from spark_agent.supervisor import Assignment, QueryHandle, Signal, Supervisor
from spark_agent.tally import Tallies, TallyParam

_log: Final = logging.getLogger("spark_agent")

_BEFORE_ALL_TIME: Final = "0001-01-01 00:00:00"
_JOIN_MS: Final = 10_000
_LINK_MARGIN_MS: Final = 5_000
"""How much longer a control source waits for the driver than the driver for the service."""

_MAX_ASSIGNED_SHARDS: Final = 64
"""So many shards are dealt out to tasks one by one; more are hashed."""

_AVAILABLE_NOW: Final = "AvailableNowTrigger"
_ONCE: Final = "OneTimeTrigger"
_UNSUPPORTED_TRIGGERS: Final[Mapping[str, str]] = {
    "ContinuousTrigger": "continuous processing has no micro-batches, which tidegauge's epochs are",
    "RealTimeTrigger": "real-time mode does not bring a batch's tasks to an end before the next",
}


def _short_id() -> str:
    return uuid4().hex[:12]


class FinalSourceError(ValueError):
    """A source is final, which was to say that nothing more comes from it."""


class StageTakenError(ValueError):
    """Another query of this pipeline executes the stage."""


class Pipeline:
    """A job's stages, and the Spark queries of this driver that execute them.

    `spec` is the job's `stages`, as the service takes them. `replace` allows it to take the place
    of another layout of the job. `lease_ttl` must be longer than a few batches, `patience` is
    what one call to the service may cost a task, `poll` how often an idle query asks for its
    watermark.

    Use it as a context manager, or call `stop`. One stage is executed by one query at a time. A
    query that another driver starts for a stage takes it over, and fences the older one.
    """

    def __init__(
        self,
        url: str,
        job: str,
        spec: Mapping[str, Mapping[str, Any]],
        *,
        spark: SparkSession | None = None,
        replace: bool = False,
        lease_ttl: Duration = "60 s",
        patience: Duration = "2 s",
        poll: Duration = "100 ms",
        clock: Clock | None = None,
        new_id: Callable[[], str] = _short_id,
    ) -> None:
        """Declare the job. An aggregator that is away is asked again when a query needs it.

        Raises `ValueError` for a specification that cannot be read, `DeclaredOtherwise` if the job
        has other stages and `replace` is not given, `Refused` for one that the service does not
        take, `RuntimeError` for Spark Connect, or if Spark's workers would run another Python than
        this one.
        """
        _check_url(url)
        check_name("job", job)
        self._spark = spark or SparkSession.builder.getOrCreate()
        _check_session(self._spark)
        self._url = url
        self._job = job
        self._stages = read_spec(spec)
        self._spec = {name: dict(stage) for name, stage in spec.items()}
        self._replace = replace
        self._ttl_ms = duration_ms(lease_ttl, name="lease_ttl")
        self._patience_ms = duration_ms(patience, name="patience")
        self._poll_ms = duration_ms(poll, name="poll")
        self._clock = clock or SystemClock()
        self._new_id = new_id
        self._client = Client(url, patience_ms=max(self._patience_ms, 1_000), clock=self._clock)
        self._tallies: Tallies = {}
        self._accumulator = self._spark.sparkContext.accumulator(self._tallies, TallyParam())
        self._events = EventRouter()
        self._lock = threading.RLock()
        self._started: list[tuple[StreamingQuery, Supervisor]] = []
        self._past_counts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._reports: dict[str, ReportCall] = {}
        self._idle_after_ms: dict[str, int] = {}
        self._feeds: dict[str, tuple[str, Feed | None]] = {}
        self._token = token_hex(16)
        self._link = LinkServer(self._token, self._next_offset)
        self._plans = plan.PlanReader(self._spark)
        self._spark.dataSource.register(ControlSource)
        self._declare()
        self._listener = plan.Listener(
            self._spark,
            batch_committed=self._events.batch_committed,
            query_ended=self._events.query_ended,
        )

    @property
    def counts(self) -> Counter[str]:
        """What should not have happened often, added up over all queries; keys as in `Count`."""
        with self._lock:
            total = Counter(self._past_counts)
            for _, supervisor in self._started:
                total.update(supervisor.counts)
            return total

    def source(
        self,
        frame: DataFrame,
        *,
        stage: str,
        shard: str,
        event_time: str,
        strategy: Strategy,
        tolerance: Duration = "1 day",
        tasks: int | None = None,
        partitioned_by_shard: bool = False,
        idle_after: Duration | None = None,
    ) -> DataFrame:
        """Report the source's progress as its rows pass; the rows are what they were.

        `shard` and `event_time` are columns, `strategy` says what the newest event time of a
        shard promises. Rows dated further ahead of the clock than `tolerance` promise nothing.

        Brings all rows of a shard into one of `tasks` tasks (by default one for each core, at
        most one for each shard), so that each shard has one worker to speak for it.
        `partitioned_by_shard=True` says that the source does so already, and saves that shuffle;
        where it is not so, a warning says it and the driver speaks for the shard.

        With `idle_after`, a shard that had no row for so long, while nothing was left to read, is
        idle: nobody waits for it until it has rows again. Those may then be late.

        Raises `ValueError`.
        """
        spec = self._stage(stage, "source")
        _check_strategy(strategy)
        _check_column(frame, shard)
        _check_time(frame, event_time)
        target = self._target(stage, partitioned_by_shard=partitioned_by_shard)
        reporter = SourceReporter(
            target,
            shards=frozenset(spec.shards),
            strategy=strategy,
            tolerance_ms=duration_ms(tolerance, name="tolerance"),
        )
        if tasks is not None and (type(tasks) is not int or tasks < 1):
            raise ValueError(f"tasks {tasks!r} is no number of tasks: 1 or more")
        self._idle_after_ms.pop(stage, None)
        if idle_after is not None:
            self._idle_after_ms[stage] = duration_ms(idle_after, name="idle_after")
        if not partitioned_by_shard:
            cores = self._spark.sparkContext.defaultParallelism
            frame = _by_shard(frame, shard, spec.shards, tasks or min(cores, len(spec.shards)))
        mark = f"{plan.SOURCE_MARK}{next(self._numbers)}.{stage}"
        shards = _column(shard).cast("string")
        return watch_two_columns(frame, mark, reporter, shards, _column(event_time))

    def watermarked(
        self,
        frame: DataFrame,
        *,
        stage: str,
        event_time: str,
        deduplicate_within: Duration | None = None,
    ) -> DataFrame:
        """Give the data frame the stage's input watermark, in place of `withWatermark`.

        What follows closes its windows, and drops late rows, by the service's watermark alone. It
        may be called for several data frames of one stage, as for the two sides of a join. Data
        that another query writes must not come rate limited (`maxFilesPerTrigger`).

        `deduplicate_within` is how far apart duplicates may be that `dropDuplicatesWithinWatermark`
        is to find. Raises `ValueError`.
        """
        self._stage(stage, "keyed stage")
        _check_time(frame, event_time)
        if any(node.operator == "EventTimeWatermark" for node in self._plans.read(frame).walk()):
            raise ValueError(
                f"stage {stage!r}: the data frame has a withWatermark of its own, which would hold "
                f"Spark's watermark back behind the service's; leave it out"
            )
        delay_ms = duration_ms(deduplicate_within or 0, name="deduplicate_within")
        # Only the control rows pass through `withWatermark`, so Spark's watermark is theirs,
        # whatever dates the data has. The union's columns are its first branch's, so its event
        # time carries the mark by which windows know the watermark. The control rows themselves
        # must not come out; but no rule of Spark's optimiser may find that out. One that did would
        # throw the branch away, or drop its rows before they are seen, and the watermark would
        # stand for ever. So the control rows have every column of the data, and their filter is
        # not deterministic: it cannot be folded, nor can another be moved through it.
        control_id = str(next(self._numbers))
        self._feeds[control_id] = stage, None
        control = (
            self._spark.readStream.format(control_source.FORMAT)
            .options(
                stage=stage,
                control=control_id,
                port=str(self._link.port),
                token=self._token,
                timeoutMs=str(3 * self._patience_ms + _LINK_MARGIN_MS),
                schema=_control_schema(frame).json(),
                pollMs=str(self._poll_ms),
                eventTime=event_time,
                delayMs=str(delay_ms),
            )
            .load()
            .withWatermark(_quoted(event_time), f"{delay_ms} milliseconds")
            .filter(
                (_column(event_time) < F.lit(_BEFORE_ALL_TIME).cast("timestamp"))
                | (F.spark_partition_id() < 0)
            )
        )
        # With names of their own, since Spark makes one union of unions that meet: then it could not
        # be told what has come through here, and what was unioned with it later.
        return control.union(frame.alias("tidegauge_data")).alias("tidegauge")

    def report(
        self,
        frame: DataFrame,
        *,
        stage: str,
        event_time: str | None = None,
        delay: Duration | None = None,
        on_early: Literal["count", "fail"] = "count",
    ) -> DataFrame:
        """Report the keyed stage's progress behind its operators; rows are what they were.

        `event_time` is the column that dates the rows for whoever reads them: a timestamp, or a
        window, which stands for its end. It may be left out where just one column can be meant. It
        must be the event time as it came, a window's end, or `window_time()`. Of anything else,
        and of state functions' rows, only you know how old they may be: say it with `delay`, how
        far behind the watermark a row may be beside what Spark's operators tell (`"0 s"`: never).

        Rows that leave older than what the stage had already promised are counted (`early_rows`);
        with `on_early="fail"` they fail the query. Call it last, with nothing behind it that holds
        rows back or unions others. Raises `ValueError`, also unless the stage has as many ranges as
        Spark has partitions of state.
        """
        spec = self._stage(stage, "keyed stage")
        partitions = int(self._spark.conf.get("spark.sql.shuffle.partitions") or "200")
        if partitions != len(spec.ranges):
            raise ValueError(
                f"stage {stage!r} has {len(spec.ranges)} ranges, but Spark keeps its state in "
                f"{partitions} partitions, and each of them is a range: set "
                f"spark.sql.shuffle.partitions to {len(spec.ranges)} or give the stage "
                f'"ranges": {partitions}'
            )
        if on_early not in {"count", "fail"}:
            raise ValueError(f"on_early {on_early!r} is not known: write 'count' or 'fail'")
        event_time = _event_time(frame, stage, event_time)
        mark = f"{plan.RANGES_MARK}{next(self._numbers)}.{stage}"
        delay_ms = None if delay is None else duration_ms(delay, name="delay")
        self._reports[mark] = ReportCall(stage, event_time, delay_ms)
        reporter = RangeReporter(
            self._target(stage),
            spec.ranges,
            has_event_time=event_time is not None,
            fail_on_early=on_early == "fail",
        )
        times = F.spark_partition_id() if event_time is None else _time_of(frame, event_time)
        return watch_column(frame, mark, reporter, times)

    def start(
        self,
        writer: DataStreamWriter,
        *,
        bounded: bool = False,
        on_fenced: Literal["stop", "continue"] = "stop",
    ) -> StreamingQuery:
        """Open a run for the stages that the query goes through, and start it.

        Triggers are as in Spark. `availableNow` reads what was there at the start, closes what that
        closes, and ends; the next run goes on from there.

        A `bounded` query is the last one: once it has read all that is there, its sources are
        final, so that the last windows come out, and nothing may follow. Once every stage it
        executes is final, it stops. One without sources of its own ends with its upstreams.

        If another driver takes its stages over, the query ends with an error that says so, or goes
        on unreported with `on_fenced="continue"`.

        Raises `ValueError`, also as `UnsoundPlanError`, `FinalSourceError` or `StageTakenError`, if
        the query does not do what its stages need.
        """
        _check_is_writer(writer)
        trigger = _check_writer(writer, bounded=bounded)
        if on_fenced not in {"stop", "continue"}:
            raise ValueError(f"on_fenced {on_fenced!r} is not known: write 'stop' or 'continue'")
        tree = self._plans.read(plan.frame_of(writer))
        query_stages = check(tree, self._stages, self._reports)
        controls = [node.control.id for node in tree.walk() if node.control is not None]
        self._check_settings(controls)
        with self._lock:
            self._remove_ended()
            self._check_not_taken([*query_stages.sources, *query_stages.promises])
            watermarks = self._fetch_watermarks()
            self._check_not_final(query_stages, watermarks, bounded=bounded)
            return self._start(
                writer,
                query_stages,
                controls,
                trigger,
                watermarks,
                bounded=bounded,
                on_fenced=on_fenced,
            )

    def _start(
        self,
        writer: DataStreamWriter,
        query_stages: QueryStages,
        controls: Sequence[str],
        trigger: str,
        watermarks: Mapping[str, StageWatermark] | None,
        *,
        bounded: bool,
        on_fenced: str,
    ) -> StreamingQuery:
        sources = [self._stages[each] for each in query_stages.sources]
        keyed = [self._stages[each] for each in query_stages.promises]
        inputs = {each: ancestors(self._stages, each) for each in query_stages.promises}
        name = f"{_host()}-{os.getpid()}.{self._new_id()}"
        run = self._try_open_run([stage.name for stage in (*sources, *keyed)])
        supervisor = Supervisor(
            Assignment(
                job=self._job,
                query=name,
                sources=sources,
                keyed=keyed,
                promises=query_stages.promises,
                bounded=bounded,
                ttl_ms=self._ttl_ms,
                reads_all=query_stages.reads_all,
                inputs=inputs,
                idle_after_ms={
                    each: self._idle_after_ms[each]
                    for each in query_stages.sources
                    if each in self._idle_after_ms
                },
            ),
            client=self._client,
            run=run,
            open_run=self._open_run,
            tallies=self._tallies,
            clock=self._clock,
        )
        holder: list[StreamingQuery] = []
        feed = Feed(
            FeedConfig(
                job=self._job,
                promises=query_stages.promises,
                caps_ms=self._caps_ms(query_stages, watermarks)
                if trigger == _AVAILABLE_NOW
                else {},
                inputs=inputs,
                bounded=bounded,
                ends_when_idle=trigger == _AVAILABLE_NOW,
                patience_ms=self._patience_ms,
                poll_ms=self._poll_ms,
            ),
            supervisor=supervisor,
            client=self._client,
            progress=lambda: plan.last_progress(holder[0]) if holder else None,
            clock=self._clock,
        )
        for control in controls:
            stage, _ = self._feeds[control]
            self._feeds[control] = stage, feed
        supervisor.start()
        properties = {QUERY_PROPERTY: name, RUN_PROPERTY: "" if run is None else str(run)}
        with self._events.starting(), self._local_properties(properties):
            try:
                query = writer.start()
            except BaseException:
                supervisor.notify(Signal.STOP)
                raise
            holder.append(query)
            stops = trigger != _AVAILABLE_NOW
            supervisor.attach(
                QueryHandle(
                    stop=lambda: _stop_quietly(query) if stops else None,
                    fail=lambda message: plan.fail(self._spark, query, message),
                    stops_when_fenced=on_fenced == "stop",
                    has_no_new_data=lambda: plan.has_no_new_data(query),
                    failed=lambda: plan.has_failed(query),
                    has_control_sources=bool(controls),
                )
            )
            self._started.append((query, supervisor))
            self._events.register(str(query.runId), supervisor)
        return query

    def reset(self) -> None:
        """Start the job over: its next generation has no watermarks, and no source is final.

        Spark's checkpoints know nothing of it: give every query a new one, and an empty output.
        Raises `RuntimeError` while a query of this pipeline runs, `Unavailable`.
        """
        with self._lock:
            self._remove_ended()
            running = [stage for _, supervisor in self._started for stage in supervisor.stages]
            if running:
                raise RuntimeError(
                    f"a query of this pipeline still executes {', '.join(running)}: stop it before "
                    f"reset()"
                )
            self._client.reset(self._job)

    def stop(self) -> None:
        """Stop the queries that still run, commit what they have done, and follow no more."""
        for query, _ in self._started:
            _stop_quietly(query)
        for query, supervisor in self._started:
            _notify_end(query, supervisor, Signal.STOP)
        for _, supervisor in self._started:
            supervisor.join(_JOIN_MS)
        self._listener.close()
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

    def _next_offset(self, control: str, reader: str, at: Offset) -> Offset:
        """Answer a control source, through the link. Raises `NotStartedError`."""
        stage, feed = self._feeds.get(control, ("", None))
        if feed is None:
            raise NotStartedError(stage)
        return feed.next(reader, stage, at)

    def _remove_ended(self) -> None:
        """Keep only the counts of queries that are over: a driver may start them by the thousand."""
        for query, supervisor in list(self._started):
            if not query.isActive and supervisor.alive:
                _notify_end(query, supervisor, Signal.ENDED)
                supervisor.join(_JOIN_MS)
            if not supervisor.alive and not query.isActive:
                self._past_counts.update(supervisor.counts)
                self._started.remove((query, supervisor))
                for control, (stage, feed) in self._feeds.items():
                    if feed is not None and feed.supervisor is supervisor:
                        self._feeds[control] = stage, None

    def _check_not_taken(self, stages: Sequence[str]) -> None:
        for query, supervisor in self._started:
            for stage in stages:
                if stage in supervisor.stages and query.isActive:
                    named = query.name or str(query.id)
                    raise StageTakenError(
                        f"stage {stage!r} is executed by query {named!r} of this pipeline, and only "
                        f"one query can promise for it. Stop that one; or, where several queries "
                        f"read the same data, call source() in one of them and let the others begin "
                        f"with watermarked(), or declare a source stage for each"
                    )

    def _check_settings(self, controls: Sequence[str]) -> None:
        several = "spark.sql.streaming.statefulOperator.allowMultiple"
        if str(self._spark.conf.get(several, "true")).lower() != "true":
            raise ValueError(
                f"{several} is off, and Spark then knows no watermark of each operator's own, from "
                f"which a stage's promise is read: leave it at true"
            )
        policy = self._spark.conf.get("spark.sql.streaming.multipleWatermarkPolicy", "min")
        if len(controls) > 1 and str(policy).lower() != "min":
            raise ValueError(
                f"spark.sql.streaming.multipleWatermarkPolicy is {policy!r}: with several "
                f"watermarked() in one query it must be 'min'"
            )

    def _fetch_watermarks(self) -> Mapping[str, StageWatermark] | None:
        """See where all stages are, before the query's sources settle what they will read."""
        try:
            return self._client.watermarks(self._job)
        except AggregatorError as error:
            _log.warning("job %s: where its stages are is not known now: %s", self._job, error)
            return None

    def _check_not_final(
        self,
        query_stages: QueryStages,
        watermarks: Mapping[str, StageWatermark] | None,
        *,
        bounded: bool,
    ) -> None:
        """Refuse to run a final source again, but let an interrupted bounded run come to its end."""
        if watermarks is None:
            return
        final = [
            each for each in query_stages.sources if each in watermarks and watermarks[each].final
        ]
        unfinished = [
            each
            for each in query_stages.promises
            if each in watermarks and not watermarks[each].final
        ]
        if not final or (bounded and unfinished):
            return
        raise FinalSourceError(
            f"source {final[0]!r} of job {self._job!r} is final: a bounded query has promised that "
            f"nothing more comes from it, so whatever it read now would be late. To run it again, "
            f"start the job over with Pipeline.reset() or `tidegauge reset {self._job}`, with new "
            f"checkpoints and an empty output; for a job that runs every day, leave out bounded=True"
        )

    def _caps_ms(
        self, query_stages: QueryStages, watermarks: Mapping[str, StageWatermark] | None
    ) -> dict[str, int | None]:
        """Say how far the stages that read other queries' output may go in an `availableNow` run.

        Such a run reads what was there at its start. A watermark that another query publishes
        later covers rows that this run will not read. What was published before the start does not.
        """
        executed = {*query_stages.sources, *query_stages.promises}
        caps_ms: dict[str, int | None] = {}
        for stage in query_stages.promises:
            others = upstream(self._stages, stage, executed)
            if not others:
                continue
            if watermarks is None:
                caps_ms[stage] = None
            elif not query_stages.sources:
                caps_ms[stage] = watermarks[stage].input_ms
            else:
                outputs = [watermarks[other].output_ms for other in others]
                known = [output for output in outputs if output is not None]
                caps_ms[stage] = min(known) if len(known) == len(outputs) else None
        return caps_ms

    def _declare(self) -> None:
        try:
            self._client.declare(self._job, self._spec, replace=self._replace)
        except Unavailable as error:
            _log.warning("job %s is not declared yet: %s", self._job, error)

    def _try_open_run(self, stages: Sequence[str]) -> int | None:
        """Open a run if the service is there; if not, the query starts all the same.

        Its tasks then report nothing. Its supervisor goes on asking for a run, and with it reports for
        them.
        """
        try:
            return self._open_run(stages)
        except Unavailable as error:
            _log.warning("starting %s without a run: %s", ", ".join(stages), error)
            return None

    def _open_run(self, stages: Sequence[str]) -> int:
        self._client.declare(self._job, self._spec, replace=self._replace)
        return self._client.open_run(self._job, stages, holder=f"driver-{_host()}-{os.getpid()}")

    def _stage(self, name: str, role: str) -> StageSpec:
        spec = self._stages.get(name)
        if spec is None:
            raise ValueError(
                f"stage {name!r} is not in the specification of job {self._job!r}; it has "
                f"{', '.join(sorted(self._stages))}"
            )
        if spec.role != role:
            raise ValueError(f"stage {name!r} is a {spec.role} in the specification, not a {role}")
        return spec

    def _target(self, stage: str, *, partitioned_by_shard: bool = False) -> ReportTarget:
        return ReportTarget(
            url=self._url,
            job=self._job,
            stage=stage,
            ttl_ms=self._ttl_ms,
            patience_ms=self._patience_ms,
            clock=self._clock,
            tallies=self._accumulator,
            partitioned_by_shard=partitioned_by_shard,
        )

    @contextmanager
    def _local_properties(self, properties: Mapping[str, str]) -> Generator[None]:
        """Set what the query's tasks are to know: a query inherits the properties of the thread
        that starts it. Other threads may start other queries at the same time.
        """
        context = self._spark.sparkContext
        before = {name: context.getLocalProperty(name) for name in properties}
        for name, value in properties.items():
            context.setLocalProperty(name, value)
        try:
            yield
        finally:
            for name, old in before.items():
                # None takes a property away, whatever its annotation says.
                context.setLocalProperty(name, old)  # pyright: ignore[reportArgumentType]


def _notify_end(query: StreamingQuery, supervisor: Supervisor, signal: Signal) -> None:
    """Tell a supervisor that its query is over, but first of its last batch.

    Spark's listener bus may be behind: it tells of a batch some time after the query has ended.
    """
    try:
        newest = plan.last_progress(query)
    except Exception:  # noqa: BLE001  (Spark itself may be gone; then nobody knows of that batch)
        newest = None
    if newest is not None:
        supervisor.notify(newest)
    supervisor.notify(signal)


def _stop_quietly(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception:  # noqa: BLE001  (it has failed or is gone; whoever awaits it hears of that)
        _log.info("query %s did not stop in order", query.id, exc_info=True)


def _column(name: str) -> Column:
    """Name a column, whatever characters are in its name."""
    return F.col(_quoted(name))


def _quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))


def _by_shard(frame: DataFrame, shard: str, shards: Sequence[str], tasks: int) -> DataFrame:
    """Bring all rows of a shard into one task, and as many shards into each task as into the others.

    Hashes of a few names do not spread evenly: two tasks would share eight shards as three and five,
    and each batch would wait for the second. Many names do, and to look each row's name up among many
    would take longer than that costs.
    """
    if len(shards) > _MAX_ASSIGNED_SHARDS:
        return frame.repartition(tasks, _column(shard))
    names = F.array(*[F.lit(name) for name in shards])
    return frame.repartitionById(
        tasks, F.array_position(names, _column(shard).cast("string")).cast("int")
    )


def _time_of(frame: DataFrame, name: str) -> Column:
    column = _column(name)
    return column if isinstance(frame.schema[name].dataType, TimestampType) else column["end"]


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40].strip("-") or "driver"


def _control_schema(frame: DataFrame) -> StructType:
    """Take the data's columns, any of which may be null in a control row.

    Raises `ValueError` for a type that Arrow does not have.
    """
    for field in frame.schema:
        if not has_type(field):
            raise ValueError(
                f"column {field.name!r} is of type {field.dataType.simpleString()}, which cannot go "
                f"through watermarked(): cast it, or leave it out"
            )
    return StructType([StructField(f.name, f.dataType, nullable=True) for f in frame.schema])


def _is_window(field: StructField) -> bool:
    data_type = field.dataType
    return (
        isinstance(data_type, StructType)
        and data_type.names == ["start", "end"]
        and isinstance(data_type["end"].dataType, TimestampType)
    )


def _event_time(frame: DataFrame, stage: str, name: str | None) -> str | None:
    """Find the column that dates a stage's rows; None if none does. Raises `ValueError`."""
    candidates = [
        field.name
        for field in frame.schema
        if isinstance(field.dataType, TimestampType) or _is_window(field)
    ]
    if name is None:
        if len(candidates) > 1:
            raise ValueError(
                f"stage {stage!r}: {', '.join(candidates)} could each be the event time of what "
                f"leaves it: say which, report(…, event_time={candidates[-1]!r})"
            )
        return candidates[0] if candidates else None
    _check_column(frame, name)
    if name not in candidates:
        data_type = frame.schema[name].dataType.simpleString()
        raise ValueError(
            f"event time {name!r} is of type {data_type}; it must be a timestamp (with local time zone) "
            f"or a window"
        )
    return name


def _check_is_writer(writer: object) -> None:
    if not isinstance(writer, DataStreamWriter):
        raise ValueError(  # noqa: TRY004  (a wrong argument, as all that start() refuses)
            f"start() takes what frame.writeStream… gives, in place of its own start(), not {writer!r}"
        )


def _check_writer(writer: DataStreamWriter, *, bounded: bool) -> str:
    """Check what a writer asks of Spark, and return its trigger's name. Raises `ValueError`."""
    trigger = plan.trigger_of(writer)
    if trigger in _UNSUPPORTED_TRIGGERS:
        raise ValueError(
            f"the trigger does not fit: {_UNSUPPORTED_TRIGGERS[trigger]}; use processingTime or "
            f"availableNow"
        )
    if bounded and trigger == _ONCE:
        raise ValueError(
            "a bounded query needs more than one batch to bring its last windows out: use "
            "trigger(availableNow=True) in place of once=True"
        )
    if plan.output_mode_of(writer) == "complete":
        raise ValueError(
            "complete mode writes every window again in each batch, however old, so no watermark "
            "holds for what leaves the query: use append, or update, and let the reader keep the "
            "newest row of each window"
        )
    if plan.is_async(writer):
        raise ValueError(
            "asyncProgressTrackingEnabled commits batches later than it runs them: leave it out"
        )
    return trigger


def _check_session(spark: SparkSession) -> None:
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise RuntimeError(
            "Spark Connect is not supported: tidegauge needs accumulators, local properties and the "
            "query's plan, which a Connect client does not have. Run the driver as a classic Spark "
            "application (spark-submit, or SparkSession.builder.master(…))"
        )
    worker = shutil.which(spark.sparkContext.pythonExec)
    if worker is None or Path(worker).parent != Path(sys.executable).parent:
        raise RuntimeError(
            f"Spark's Python workers would run {spark.sparkContext.pythonExec!r}, not "
            f"{sys.executable!r}, and miss its packages: set the environment variable "
            f"PYSPARK_PYTHON to sys.executable before the session starts"
        )


def _check_url(url: object) -> None:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"url {url!r} is no address of a service: write it like http://host:8000")


def _check_strategy(strategy: object) -> None:
    if isinstance(strategy, type) or not callable(getattr(strategy, "promise_ms", None)):
        raise ValueError(  # noqa: TRY004  (as above)
            f"strategy {strategy!r} is none: write BoundedOutOfOrderness('10 minutes') or Ascending()"
        )


def _check_column(frame: DataFrame, name: object) -> None:
    if not isinstance(name, str):
        raise ValueError(  # noqa: TRY004  (as above)
            f"a column is named by its name, a string, not by {name!r}"
        )
    if name not in frame.columns:
        raise ValueError(f"there is no column {name!r}; there are {', '.join(frame.columns)}")


def _check_time(frame: DataFrame, name: str) -> None:
    _check_column(frame, name)
    data_type = frame.schema[name].dataType
    if not isinstance(data_type, TimestampType):
        raise ValueError(  # noqa: TRY004  (a wrong value of a right type: a column's name)
            f"event time {name!r} is of type {data_type.simpleString()}; it must be a timestamp (with "
            f"local time zone)"
        )
