"""The user's entry point: a pipeline whose Spark queries close their windows by tidegauge."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from secrets import token_hex
from types import TracebackType
from typing import Any, Final, Literal, Self
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import control_source, plan
from spark_agent.arguments import (
    AVAILABLE_NOW,
    ONCE,
    check_is_writer,
    check_session,
    check_strategy,
    check_url,
    check_writer,
)
from spark_agent.arrow import watch_column, watch_two_columns
from spark_agent.checks import EarlyStage, QueryStages, ReportCall, check, check_early
from spark_agent.client import (
    AggregatorError,
    Client,
    NotAllowed,
    NoUsableKey,
    StageWatermark,
    Unavailable,
)
from spark_agent.clock import Clock, SystemClock
from spark_agent.columns import (
    by_shard,
    check_column,
    check_time,
    column,
    control_schema,
    event_time_of,
    quoted,
    time_of,
)
from spark_agent.control_source import ControlSource
from spark_agent.durations import Duration, duration_ms
from spark_agent.early import EarlyConfig, EarlyFeed
from spark_agent.event_router import EventRouter
from spark_agent.feed import Feed, FeedConfig
from spark_agent.in_flight import StageInFlight
from spark_agent.link import Hold, LinkServer, NotStartedError, Offset
from spark_agent.reporting import (
    QUERY_PROPERTY,
    RUN_PROPERTY,
    RangeReporter,
    ReportTarget,
    SourceReporter,
)
from spark_agent.spec import StageSpec, ancestors, check_name, read_spec, upstream
from spark_agent.starting import (
    caps_ms,
    check_inputs_final,
    check_not_final,
    check_percentile,
    check_settings,
)
from spark_agent.strategies import Strategy
from spark_agent.supervision.assignment import Assignment, QueryHandle
from spark_agent.supervision.supervisor import Signal, Supervisor
from spark_agent.tally import Tallies, TallyParam
from spark_agent.throttle import SourceThrottle, ThrottleConfig

_log: Final = logging.getLogger("spark_agent")

_BEFORE_ALL_TIME: Final = "0001-01-01 00:00:00"
_JOIN_MS: Final = 10_000
_LINK_MARGIN_MS: Final = 5_000
"""How much longer a control source waits for the driver than the driver waits for the service."""

_THROTTLE_PATIENCE_MS: Final = 30_000
"""How long a query that ends by itself waits for shards that make no progress."""

_OFTEN_MS: Final = 1_000
"""A query that looks for new data less often cannot say that a shard is quiet now."""


def _short_id() -> str:
    return uuid4().hex[:12]


class StageTakenError(ValueError):
    """Another query of this pipeline executes the stage."""


class Pipeline:
    """A job's stages, and the Spark queries of this driver that execute them.

    `spec` is the job's `stages`, in the service's format. `throttle` is its `throttle`: while the
    service asks all shards that a query reads to pause, its next batch waits. `replace` allows both to
    replace a different specification of the job. `lease_ttl` must be longer than a few batches.
    `patience` is how long one call to the service may block a task, `poll` how often an idle query
    polls its watermark.

    `key_file` is the path of a file with the service's key, on the driver and on every executor. Without
    it, the key is where `TIDEGAUGE_KEY_FILE` or `TIDEGAUGE_KEY` says in their environments.

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
        check_name("job", job)
        self._spark = spark or SparkSession.builder.getOrCreate()
        check_session(self._spark)
        self._url = url
        self._job = job
        self._stages = read_spec(spec)
        self._spec = {name: dict(stage) for name, stage in spec.items()}
        self._throttle = None if throttle is None else dict(throttle)
        self._is_throttled = self._throttle is not None
        self._replace = replace
        self._ttl_ms = duration_ms(lease_ttl, name="lease_ttl")
        self._patience_ms = duration_ms(patience, name="patience")
        self._poll_ms = duration_ms(poll, name="poll")
        self._clock = clock or SystemClock()
        self._new_id = new_id
        self._key_file = None if key_file is None else fspath(key_file)
        self._client = Client(
            url,
            patience_ms=max(self._patience_ms, 1_000),
            key_file=self._key_file,
            clock=self._clock,
        )
        self._tallies: Tallies = {}
        self._accumulator = self._spark.sparkContext.accumulator(self._tallies, TallyParam())
        self._events = EventRouter()
        self._lock = threading.RLock()
        self._started: list[tuple[StreamingQuery, Supervisor]] = []
        self._past_counts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._reports: dict[str, ReportCall] = {}
        self._feeds: dict[str, tuple[str, Feed | EarlyFeed | None]] = {}
        self._early: list[tuple[StreamingQuery, EarlyFeed]] = []
        # It outlives a query: what the next one reads may be only the end of what is in flight.
        self._in_flight = {
            stage.name: StageInFlight()
            for stage in self._stages.values()
            if stage.role == "source" and stage.percentiles
        }
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
        """Counts of what should be rare, summed over all queries; keys as in `Count`."""
        with self._lock:
            total = Counter(self._past_counts)
            for _, supervisor in self._started:
                total.update(supervisor.counts)
            return total

    @property
    def waits(self) -> dict[str, str]:
        """Why the next batch of a query has to wait, by the source stages that it executes."""
        with self._lock:
            return {
                stage.name: because
                for _, supervisor in self._started
                if (because := supervisor.waits_because) is not None
                for stage in supervisor.sources
            }

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
    ) -> DataFrame:
        """Report the source's progress as its rows pass through unchanged.

        `shard` and `event_time` are columns. `strategy` derives a shard's promise from its newest
        event time. Rows dated further ahead of the clock than `tolerance` are not counted.

        All rows of a shard are brought into one of `tasks` tasks (by default one per core, at most
        one per shard), so that one task reports for the shard. `partitioned_by_shard=True` declares
        that the source is already partitioned like that, which saves the shuffle. Where that is
        wrong, a warning is logged and the driver reports for the shard.

        A source may have an `idle` policy in the specification. Then the stage does not wait for a
        shard that has had no rows for so long while nothing was left to read, until it has rows again.
        Those may be late.

        Raises `ValueError`.
        """
        spec = self._stage(stage, "source")
        check_strategy(strategy)
        check_column(frame, shard)
        check_time(frame, event_time)
        target = self._target(stage, partitioned_by_shard=partitioned_by_shard)
        reporter = SourceReporter(
            target,
            shards=frozenset(spec.shards),
            strategy=strategy,
            tolerance_ms=duration_ms(tolerance, name="tolerance"),
            tracks_in_flight=bool(spec.percentiles),
        )
        if tasks is not None and (type(tasks) is not int or tasks < 1):
            raise ValueError(f"tasks {tasks!r} is not a number of tasks: write 1 or more")
        if stage in _throttled(self._throttle or {}, self._stages):
            # A query without watermarked() has no control source that could hold it back.
            frame = frame.union(self._control_rows(frame, stage, event_time, is_gate=True))
        if not partitioned_by_shard:
            cores = self._spark.sparkContext.defaultParallelism
            frame = by_shard(frame, shard, spec.shards, tasks or min(cores, len(spec.shards)))
        mark = f"{plan.SOURCE_MARK}{next(self._numbers)}.{stage}"
        shards = column(shard).cast("string")
        return watch_two_columns(frame, mark, reporter, shards, column(event_time))

    def watermarked(
        self,
        frame: DataFrame,
        *,
        stage: str,
        event_time: str,
        deduplicate_within: Duration | None = None,
        percentile: int | None = None,
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
        it reads must declare this percentile in the specification. Raises `ValueError`.
        """
        self._stage(stage, "keyed stage")
        if percentile is not None:
            check_percentile(self._stages, stage, percentile)
        check_time(frame, event_time)
        if any(node.operator == "EventTimeWatermark" for node in self._plans.read(frame).walk()):
            raise ValueError(
                f"stage {stage!r}: the data frame has a withWatermark of its own, which would hold "
                f"back Spark's watermark: leave it out"
            )
        delay_ms = duration_ms(deduplicate_within or 0, name="deduplicate_within")
        # Only the control rows pass through `withWatermark`, so Spark's watermark follows them and
        # not the dates in the data. A union takes its columns from its first branch, so its event
        # time carries the metadata that windows need.
        control = self._control_rows(
            frame, stage, event_time, delay_ms=delay_ms, percentile=percentile
        )
        # The aliases keep Spark from flattening nested unions. Otherwise the plan would not show
        # what came through here and what was unioned with it later.
        return control.union(frame.alias("tidegauge_data")).alias("tidegauge")

    def _control_rows(
        self,
        frame: DataFrame,
        stage: str,
        event_time: str,
        *,
        delay_ms: int = 0,
        is_gate: bool = False,
        percentile: int | None = None,
    ) -> DataFrame:
        """Return a control source, none of whose rows comes out, with the columns of a data frame.

        Spark's optimiser must not be able to prove that nothing comes out: it would remove the branch,
        or drop the rows too early, and the watermark would never advance. So the control rows have every
        column of the data, and their filter is non-deterministic: it can neither be folded nor have
        other filters pushed through it.
        """
        control_id = str(next(self._numbers))
        self._feeds[control_id] = stage, None
        rows = (
            self._spark.readStream.format(control_source.FORMAT)
            .options(
                stage=stage,
                control=control_id,
                port=str(self._link.port),
                token=self._token,
                timeoutMs=str(3 * self._patience_ms + _LINK_MARGIN_MS),
                schema=control_schema(frame).json(),
                pollMs=str(self._poll_ms),
                eventTime=event_time,
                delayMs=str(delay_ms),
                gate=str(is_gate).lower(),
                percentile="" if percentile is None else str(percentile),
            )
            .load()
        )
        if not is_gate:
            rows = rows.withWatermark(quoted(event_time), f"{delay_ms} milliseconds")
        return rows.filter(
            (column(event_time) < F.lit(_BEFORE_ALL_TIME).cast("timestamp"))
            | (F.spark_partition_id() < 0)
        )

    def report(
        self,
        frame: DataFrame,
        *,
        stage: str,
        event_time: str | None = None,
        delay: Duration | None = None,
        on_early: Literal["count", "fail"] = "count",
    ) -> DataFrame:
        """Report the keyed stage's progress after its operators; rows pass through unchanged.

        `event_time` is the column by which readers date the rows: a timestamp, or a window, which
        stands for its end. It may be left out if only one column qualifies. It must be the unchanged
        event time, a window's end, or `window_time()`. For any other column, and for rows from state
        functions, only you know how old they may be. Declare it with `delay`: how far behind the
        watermark a row may be, in addition to what Spark's operators allow (`"0 s"`: never behind).

        Rows that leave older than the stage has already promised are counted (`early_rows`); with
        `on_early="fail"` they fail the query. Call it last: nothing after it may hold rows back or
        union others. Raises `ValueError`, also if the number of the stage's ranges is not Spark's
        number of state partitions.
        """
        spec = self._stage(stage, "keyed stage")
        partitions = int(self._spark.conf.get("spark.sql.shuffle.partitions") or "200")
        if partitions != len(spec.ranges):
            raise ValueError(
                f"stage {stage!r} has {len(spec.ranges)} ranges, but Spark keeps its state in "
                f"{partitions} partitions, and each partition must be a range: set "
                f"spark.sql.shuffle.partitions to {len(spec.ranges)}, or give the stage "
                f'"ranges": {partitions}'
            )
        if on_early not in {"count", "fail"}:
            raise ValueError(f"on_early {on_early!r} is not known: write 'count' or 'fail'")
        event_time = event_time_of(frame, stage, event_time)
        mark = f"{plan.RANGES_MARK}{next(self._numbers)}.{stage}"
        delay_ms = None if delay is None else duration_ms(delay, name="delay")
        self._reports[mark] = ReportCall(stage, event_time, delay_ms)
        reporter = RangeReporter(
            self._target(stage),
            spec.ranges,
            has_event_time=event_time is not None,
            fail_on_early=on_early == "fail",
        )
        times = F.spark_partition_id() if event_time is None else time_of(frame, event_time)
        return watch_column(frame, mark, reporter, times)

    def start(
        self,
        writer: DataStreamWriter,
        *,
        bounded: bool = False,
        on_fenced: Literal["stop", "continue"] = "stop",
        on_lost_checkpoint: Literal["stop", "continue"] = "stop",
    ) -> StreamingQuery:
        """Open a run for the stages that the query goes through, and start the query.

        Triggers work as in Spark. `availableNow` reads what is there at the start, closes the
        windows that this completes, and ends; the next run continues from there.

        A `bounded` query is the last one. Once it has read all its input, its sources become final,
        so that the last windows come out, and nothing may follow. It stops when every stage that it
        executes is final. Without sources of its own it ends when its upstream stages are final.

        If another driver takes its stages over, the query fails with an error that says so. With
        `on_fenced="continue"` it goes on, unreported.

        If its checkpoint is new or old, while the job is further, the query fails after its first
        batch: it would write again what readers have taken for complete. With
        `on_lost_checkpoint="continue"` it goes on, and what it rereads is late.

        Raises `ValueError` if the query does not meet its stages' requirements, in some cases as
        `UnsoundPlanError`, `FinalSourceError` or `StageTakenError`; `NotAllowed` if the service does not
        accept the key.
        """
        check_is_writer(writer)
        trigger = check_writer(writer, bounded=bounded)
        if on_fenced not in {"stop", "continue"}:
            raise ValueError(f"on_fenced {on_fenced!r} is not known: write 'stop' or 'continue'")
        if on_lost_checkpoint not in {"stop", "continue"}:
            raise ValueError(
                f"on_lost_checkpoint {on_lost_checkpoint!r} is not known: write 'stop' or 'continue'"
            )
        tree = self._plans.read(plan.frame_of(writer))
        early = check_early(tree)
        if early is not None:
            controls = [node.control for node in tree.walk() if node.control is not None]
            check_settings(self._spark, controls)
            return self._start_early(writer, early, controls, trigger, bounded=bounded)
        query_stages = check(tree, self._stages, self._reports)
        controls = [node.control for node in tree.walk() if node.control is not None]
        check_settings(self._spark, [each for each in controls if not each.is_gate])
        with self._lock:
            self._remove_ended()
            self._check_not_taken([*query_stages.sources, *query_stages.promises])
            watermarks = self._fetch_watermarks()
            check_not_final(self._job, query_stages, watermarks, bounded=bounded)
            if bounded and trigger == AVAILABLE_NOW:
                check_inputs_final(self._stages, query_stages, watermarks)
            return self._start(
                writer,
                query_stages,
                controls,
                trigger,
                watermarks,
                bounded=bounded,
                on_fenced=on_fenced,
                on_lost_checkpoint=on_lost_checkpoint,
            )

    def _start(
        self,
        writer: DataStreamWriter,
        query_stages: QueryStages,
        controls: Sequence[plan.Control],
        trigger: str,
        watermarks: Mapping[str, StageWatermark] | None,
        *,
        bounded: bool,
        on_fenced: str,
        on_lost_checkpoint: str,
    ) -> StreamingQuery:
        available_now = trigger == AVAILABLE_NOW
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
                stops_when_fenced=on_fenced == "stop",
                stops_when_rereading=on_lost_checkpoint == "stop",
                reads_all=query_stages.reads_all,
                looks_often=plan.interval_ms_of(writer) <= _OFTEN_MS
                and not query_stages.may_wait_for_more,
                may_idle=[
                    each
                    for each, above in inputs.items()
                    if any(self._stages[name].has_idle_policy for name in above)
                    and self._counts_state()
                ],
                inputs=inputs,
            ),
            client=self._client,
            run=run,
            open_run=self._open_run,
            tallies=self._tallies,
            in_flight={
                stage.name: self._in_flight[stage.name] for stage in sources if stage.percentiles
            },
            clock=self._clock,
        )
        holder: list[StreamingQuery] = []
        feed = Feed(
            FeedConfig(
                job=self._job,
                promises=query_stages.promises,
                caps_ms=caps_ms(self._stages, query_stages, watermarks) if available_now else {},
                inputs=inputs,
                bounded=bounded,
                ends_when_idle=available_now,
                patience_ms=self._patience_ms,
                poll_ms=self._poll_ms,
            ),
            supervisor=supervisor,
            client=self._client,
            progress=lambda: plan.last_progress(holder[0]) if holder else None,
            clock=self._clock,
            throttle=self._source_throttle(
                name, query_stages, ends=bounded or available_now or trigger == ONCE
            ),
            is_active=lambda: not holder or plan.is_active(holder[0]),
        )
        for control in controls:
            self._feeds[control.id] = control.stage, feed
        supervisor.start()
        properties = {QUERY_PROPERTY: name, RUN_PROPERTY: "" if run is None else str(run)}
        with self._events.starting(), self._local_properties(properties):
            try:
                query = writer.start()
            except BaseException:
                supervisor.notify(Signal.STOP)
                raise
            holder.append(query)
            supervisor.attach(
                QueryHandle(
                    stop=lambda: None if available_now else _stop_quietly(query),
                    fail=lambda message: plan.fail(self._spark, query, message),
                    has_no_new_data=lambda: plan.has_no_new_data(query),
                    has_just_found_nothing=lambda: plan.has_just_found_nothing(query),
                    failed=lambda: plan.has_failed(query),
                    has_control_sources=any(not each.is_gate for each in controls),
                )
            )
            self._started.append((query, supervisor))
            self._events.register(str(query.runId), supervisor)
        return query

    def _start_early(
        self,
        writer: DataStreamWriter,
        early: EarlyStage,
        controls: Sequence[plan.Control],
        trigger: str,
        *,
        bounded: bool,
    ) -> StreamingQuery:
        if bounded:
            raise ValueError(
                f"stage {early.stage!r}: early results make nothing final: leave out bounded=True, and "
                f"use trigger(availableNow=True) for a query that ends"
            )
        config = EarlyConfig(
            job=self._job,
            stage=early.stage,
            inputs=upstream(self._stages, early.stage, ()),
            percentile=early.percentile,
            stays=trigger in {AVAILABLE_NOW, ONCE},
            poll_ms=self._poll_ms,
        )
        feed = EarlyFeed(config, client=self._client, clock=self._clock)
        with self._lock:
            self._remove_ended()
            for control in controls:
                self._feeds[control.id] = control.stage, feed
            query = writer.start()
            self._early.append((query, feed))
        return query

    def _counts_state(self) -> bool:
        """Return whether Spark counts the rows that its operators keep. If not, it reports zero."""
        counts = "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows"
        return str(self._spark.conf.get(counts, "true")).lower() == "true"

    def _source_throttle(
        self, query: str, query_stages: QueryStages, *, ends: bool
    ) -> SourceThrottle | None:
        if not query_stages.sources or not self._is_throttled:
            return None
        config = ThrottleConfig(
            job=self._job,
            query=query,
            sources=query_stages.sources,
            poll_ms=self._poll_ms,
            keep_ms=self._ttl_ms,
            patience_ms=_THROTTLE_PATIENCE_MS if ends else None,
        )
        return SourceThrottle(config, client=self._client, clock=self._clock)

    def reset(self) -> None:
        """Start the job over: its next generation has no watermarks, and no source is final.

        Spark's checkpoints do not change: give every query a new one, and an empty output.
        Raises `RuntimeError` while a query of this pipeline runs, `Unavailable`.
        """
        with self._lock:
            self._remove_ended()
            running = [stage for _, supervisor in self._started for stage in supervisor.stages]
            running += [f"early results of {feed.stage}" for _, feed in self._early]
            if running:
                raise RuntimeError(
                    f"a query of this pipeline still executes {', '.join(running)}: stop it before "
                    f"reset()"
                )
            self._client.reset(self._job)
            for in_flight in self._in_flight.values():
                in_flight.clear()

    def stop(self) -> None:
        """Stop the queries that still run, and commit what they have done."""
        for query, _ in (*self._started, *self._early):
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

    def _next_offset(self, control: str, reader: str, at: Offset) -> Offset | Hold:
        """Answer a control source, through the link. Raises `NotStartedError`."""
        stage, feed = self._feeds.get(control, ("", None))
        if feed is None:
            raise NotStartedError(stage)
        return feed.next(at) if isinstance(feed, EarlyFeed) else feed.next(reader, stage, at)

    def _remove_ended(self) -> None:
        """Keep only the counts of queries that have ended: a driver may start thousands."""
        for query, supervisor in list(self._started):
            if not query.isActive and supervisor.alive:
                _notify_end(query, supervisor, Signal.ENDED)
                supervisor.join(_JOIN_MS)
            if not supervisor.alive and not query.isActive:
                self._past_counts.update(supervisor.counts)
                self._started.remove((query, supervisor))
                self._remove_feeds(
                    lambda feed, ended=supervisor: (
                        isinstance(feed, Feed) and feed.supervisor is ended
                    )
                )
        for query, early in list(self._early):
            if not query.isActive:
                self._early.remove((query, early))
                self._remove_feeds(lambda feed, ended=early: feed is ended)

    def _remove_feeds(self, has_ended: Callable[[Feed | EarlyFeed | None], bool]) -> None:
        for control, (stage, feed) in self._feeds.items():
            if has_ended(feed):
                self._feeds[control] = stage, None

    def _check_not_taken(self, stages: Sequence[str]) -> None:
        for query, supervisor in self._started:
            for stage in stages:
                if stage in supervisor.stages and query.isActive:
                    named = query.name or str(query.id)
                    raise StageTakenError(
                        f"stage {stage!r} is executed by query {named!r} of this pipeline, and only "
                        f"one query can report for it. Stop that one. If several queries read the "
                        f"same data, call source() in one of them and begin the others with "
                        f"watermarked(), or declare a source stage for each"
                    )

    def _fetch_watermarks(self) -> Mapping[str, StageWatermark] | None:
        """Fetch all watermarks, before the query's sources fix what they will read."""
        try:
            return self._client.watermarks(self._job)
        except (NotAllowed, NoUsableKey):
            raise
        except AggregatorError as error:
            _log.warning("job %s: its watermarks are not known yet: %s", self._job, error)
            return None

    def _declare(self) -> None:
        try:
            self._declare_now()
        except Unavailable as error:
            _log.warning("job %s is not declared yet: %s", self._job, error)

    def _declare_now(self) -> None:
        stored = self._client.declare(
            self._job, self._spec, throttle=self._throttle, replace=self._replace
        )
        self._is_throttled = bool(stored.get("throttle"))

    def _try_open_run(self, stages: Sequence[str]) -> int | None:
        """Open a run; None if the service does not answer, in which case the query starts anyway.

        Its tasks then report nothing. Its supervisor keeps trying to open a run, and then reports for
        them.
        """
        try:
            return self._open_run(stages)
        except Unavailable as error:
            _log.warning("starting %s without a run: %s", ", ".join(stages), error)
            return None

    def _open_run(self, stages: Sequence[str]) -> int:
        self._declare_now()
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
            key_file=self._key_file,
            partitioned_by_shard=partitioned_by_shard,
            releases=self._stages[stage].has_idle_policy,
        )

    @contextmanager
    def _local_properties(self, properties: Mapping[str, str]) -> Generator[None]:
        """Set local properties for a query's tasks: a query inherits those of the thread that starts
        it. Other threads may start other queries at the same time.
        """
        context = self._spark.sparkContext
        before = {name: context.getLocalProperty(name) for name in properties}
        for name, value in properties.items():
            context.setLocalProperty(name, value)
        try:
            yield
        finally:
            for name, old in before.items():
                # None removes a property, whatever the annotation says.
                context.setLocalProperty(name, old)  # pyright: ignore[reportArgumentType]


def _notify_end(query: StreamingQuery, supervisor: Supervisor, signal: Signal) -> None:
    """Notify a supervisor of its query's last batch, then of its end.

    Spark's listener bus may lag: it may report a batch only after the query has ended.
    """
    try:
        newest = plan.last_progress(query)
    except Exception:  # noqa: BLE001  (Spark itself may be gone, and the batch with it)
        newest = None
    if newest is not None:
        supervisor.notify(newest)
    supervisor.notify(signal)


def _stop_quietly(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception:  # noqa: BLE001  (it has failed or is gone; awaitTermination() raises that)
        _log.info("query %s did not stop cleanly", query.id, exc_info=True)


def _throttled(throttle: Mapping[str, Any], stages: Mapping[str, StageSpec]) -> set[str]:
    """Return the stages that a job's `throttle` may hold back."""
    found = {stage for group in throttle.get("groups", ()) for stage in group["stages"]}
    for slow in throttle.get("stages", {}):
        if slow in stages:
            found |= ancestors(stages, slow)
    return found


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40].strip("-") or "driver"
