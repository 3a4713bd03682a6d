"""What a user calls: a pipeline whose Spark queries report to tidegauge and close by its word."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import TimestampType

from spark_agent import control_source, plan
from spark_agent.client import Client, Unavailable
from spark_agent.clock import Clock, SystemClock
from spark_agent.control_source import ControlSource
from spark_agent.durations import Duration, duration_ms
from spark_agent.keeper import Assignment, Keeper, Progressed, Signal
from spark_agent.reporting import (
    QUERY_PROPERTY,
    RUN_PROPERTY,
    Place,
    RangeReporter,
    SourceReporter,
)
from spark_agent.spec import StageSpec, read_spec
from spark_agent.strategies import Strategy
from spark_agent.tally import Tallies, TallyParam

_log: Final = logging.getLogger("spark_agent")

_BEFORE_ALL_TIME: Final = "0001-01-01 00:00:00"
_EARLY_EVENTS: Final = 1_000
_JOIN_MS: Final = 10_000


def _short_id() -> str:
    return uuid4().hex[:12]


class Pipeline:
    """A job's stages, and the Spark queries of this driver that execute them.

    `spec` is the job's `stages`, as the service takes them. `replace` allows it to take the place
    of another layout of the job. `lease_ttl` must be longer than a few batches, `patience` is
    what one call to the service may cost a task, `poll` how often an idle query asks for its
    watermark.

    Use it as a context manager, or call `stop`. One stage is executed by one query at a time: a
    query started later takes its stages over, and fences the older one.
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

        Raises `ValueError` for a specification that cannot be read, `Refused` for one that the
        service does not take, `RuntimeError` if Spark's workers would run another Python than
        this one.
        """
        self._spark = spark or SparkSession.builder.getOrCreate()
        _check_workers(self._spark)
        self._url = url
        self._job = job
        self._spec = {name: dict(stage) for name, stage in spec.items()}
        self._stages = read_spec(spec)
        self._replace = replace
        self._ttl_ms = duration_ms(lease_ttl, name="lease_ttl")
        self._patience_ms = duration_ms(patience, name="patience")
        self._poll_ms = duration_ms(poll, name="poll")
        self._clock = clock or SystemClock()
        self._new_id = new_id
        self._client = Client(url, patience_ms=max(self._patience_ms, 1_000), clock=self._clock)
        self._tallies: Tallies = {}
        self._accumulator = self._spark.sparkContext.accumulator(self._tallies, TallyParam())
        self._board = _Board()
        self._started: list[tuple[StreamingQuery, Keeper]] = []
        self._past_counts: Counter[str] = Counter()
        self._spark.dataSource.register(ControlSource)
        self._declare()
        self._spark.streams.addListener(self._board)

    @property
    def counts(self) -> Counter[str]:
        """What should not have happened often, added up over all queries; keys as in `Count`."""
        total = Counter(self._past_counts)
        for _, keeper in self._started:
            total.update(keeper.counts)
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
    ) -> DataFrame:
        """Report the source's progress as its rows pass; the rows are what they were.

        `shard` and `event_time` are columns, `strategy` says what the newest event time of a
        shard promises. Rows dated further ahead of the clock than `tolerance` promise nothing.
        Brings all rows of a shard into one of `tasks` tasks (by default one for each core, at
        most one for each shard), so that each shard has one worker to speak for it. Raises
        `ValueError`.
        """
        spec = self._stage(stage, "source")
        _check_column(frame, shard)
        _check_time(frame, event_time)
        cores = self._spark.sparkContext.defaultParallelism
        reporter = SourceReporter(
            self._place(stage),
            shards=frozenset(spec.shards),
            shard=shard,
            event_time=event_time,
            strategy=strategy,
            tolerance_ms=duration_ms(tolerance, name="tolerance"),
        )
        together = frame.repartition(tasks or min(cores, len(spec.shards)), F.col(shard))
        return _map(together, reporter)

    def watermarked(self, frame: DataFrame, *, stage: str, event_time: str) -> DataFrame:
        """Give the data frame the stage's input watermark, in place of `withWatermark`.

        What follows closes its windows, and drops late rows, by the service's watermark alone. The
        data must not come rate limited from files that another query writes (`maxFilesPerTrigger`):
        rows could lie unread below the watermark. Raises `ValueError`.
        """
        self._stage(stage, "keyed stage")
        _check_time(frame, event_time)
        if plan.passage(frame).own_watermarks:
            raise ValueError(
                f"stage {stage!r}: the data frame has a withWatermark of its own, which would hold "
                f"Spark's watermark back behind the service's; leave it out"
            )
        # Only the control rows pass through `withWatermark`, so Spark's watermark is theirs,
        # whatever dates the data has. The union's columns are its first branch's, so its event
        # time carries the mark by which windows know the watermark. The control rows themselves
        # must not come out; but Spark moves filters towards the source unless they read the event
        # time, and moved below `withWatermark` this one would leave the watermark standing for
        # ever.
        control = (
            self._spark.readStream.format(control_source.FORMAT)
            .options(url=self._url, job=self._job, stage=stage, pollMs=str(self._poll_ms))
            .load()
            .withColumnRenamed(control_source.TIME_COLUMN, event_time)
            .withWatermark(event_time, "0 seconds")
            .filter(F.col(event_time) < F.lit(_BEFORE_ALL_TIME).cast("timestamp"))
        )
        columns = [
            F.col(event_time)
            if field.name == event_time
            else F.lit(None).cast(field.dataType).alias(field.name)
            for field in frame.schema.fields
        ]
        return control.select(*columns).union(frame)

    def report(self, frame: DataFrame, *, stage: str) -> DataFrame:
        """Report the keyed stage's progress behind its stateful operator; rows are what they were.

        Call it right behind the aggregation, with nothing that shuffles or unions between. Rows
        that come out must be stamped, for whoever reads them, with the *end* of their window.
        Raises `ValueError` unless the stage has as many ranges as Spark has partitions of state.
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
        return _map(frame, RangeReporter(self._place(stage), spec.ranges))

    def start(self, writer: DataStreamWriter, *, bounded: bool | None = None) -> StreamingQuery:
        """Open a run for the stages that the query goes through, and start it.

        A `bounded` query ends: once it has read all that is there, its sources are final, so that
        the last windows come out; once every stage it executes is final, it stops. By default a
        query is bounded if its trigger is `availableNow`; with `bounded=False` that trigger
        leaves the sources open for a next time. A bounded query without sources of its own ends
        with its upstreams.

        Raises `ValueError` if the query does not do what its stages need.
        """
        ends_by_itself = plan.ends_by_itself(writer)
        if bounded is None:
            bounded = ends_by_itself
        if bounded and ends_by_itself:
            # That trigger settles at the start what it will read, so the watermark that results
            # from reading it would come too late for it. The keeper ends the query instead.
            writer = writer.trigger(processingTime="0 seconds")
        self._forget_ended()
        sources, keyed = self._executed(plan.passage(plan.frame_of(writer)))
        name, run = self._new_id(), self._first_run([*sources, *keyed])
        properties = {QUERY_PROPERTY: name, RUN_PROPERTY: "" if run is None else str(run)}
        with self._board.starting(), self._local_properties(properties):
            query = writer.start()
            keeper = Keeper(
                Assignment(
                    job=self._job,
                    query=name,
                    sources=[self._stages[each] for each in sources],
                    keyed=[self._stages[each] for each in keyed],
                    bounded=bounded,
                    ttl_ms=self._ttl_ms,
                ),
                client=self._client,
                run=run,
                open_run=self._open_run,
                tallies=self._tallies,
                on_final=lambda: _stop_quietly(query),
                clock=self._clock,
            )
            self._started.append((query, keeper))
            keeper.start()
            self._board.register(str(query.runId), keeper)
        if bounded and sources:
            threading.Thread(
                target=_tell_when_drained,
                args=(query, keeper),
                name=f"tidegauge-{name}-drain",
                daemon=True,
            ).start()
        return query

    def stop(self) -> None:
        """Stop the queries that still run, commit what they have done, and follow no more."""
        for query, _ in self._started:
            _stop_quietly(query)
        for _, keeper in self._started:
            keeper.tell(Signal.STOP)
        for _, keeper in self._started:
            keeper.join(_JOIN_MS)
        self._spark.streams.removeListener(self._board)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _forget_ended(self) -> None:
        """Keep only the counts of queries that are over: a driver may start them by the thousand."""
        for query, keeper in list(self._started):
            if not keeper.alive and not query.isActive:
                self._past_counts.update(keeper.counts)
                self._started.remove((query, keeper))

    def _declare(self) -> None:
        try:
            self._client.declare(self._job, self._spec, replace=self._replace)
        except Unavailable as error:
            _log.warning("job %s is not declared yet: %s", self._job, error)

    def _first_run(self, stages: Sequence[str]) -> int | None:
        """Open a run if the service is there; if not, the query starts all the same.

        Its tasks then report nothing. Its keeper goes on asking for a run, and with it reports for
        them.
        """
        try:
            return self._open_run(stages)
        except Unavailable as error:
            _log.warning("starting %s without a run: %s", ", ".join(stages), error)
            return None

    def _open_run(self, stages: Sequence[str]) -> int:
        self._client.declare(self._job, self._spec, replace=self._replace)
        return self._client.open_run(self._job, stages, holder=f"driver-{os.getpid()}")

    def _executed(self, passed: plan.Passage) -> tuple[list[str], list[str]]:
        """Return the sources and the keyed stages that a query executes, if it is sound."""
        if not passed.sources and not passed.watermarked:
            raise ValueError(
                "the query goes through no stage: build it with source() or watermarked()"
            )
        for stage in passed.repeated:
            raise ValueError(
                f"stage {stage!r} is in this query more than once: Spark would read or compute it "
                f"once for each, and one would promise for the others; write it to files first"
            )
        for stage in set(passed.watermarked) ^ set(passed.reported):
            missing = "report()" if stage in passed.watermarked else "watermarked()"
            raise ValueError(
                f"stage {stage!r} misses {missing} in this query: its windows close by "
                f"watermarked() and its progress is told by report()"
            )
        for stage in passed.reported_below_union:
            raise ValueError(
                f"stage {stage!r}: its rows are unioned with others behind report(), which leaves "
                f"its tasks not knowing which range they are; write them by a query of their own"
            )
        for stage in (*passed.sources, *passed.watermarked):
            self._stage(stage, "source" if stage in passed.sources else "keyed stage")
        return list(passed.sources), list(passed.watermarked)

    def _stage(self, name: str, kind: str) -> StageSpec:
        spec = self._stages.get(name)
        if spec is None:
            raise ValueError(
                f"stage {name!r} is not in the specification of job {self._job!r}; it has "
                f"{', '.join(sorted(self._stages))}"
            )
        if spec.kind != kind:
            raise ValueError(f"stage {name!r} is a {spec.kind} in the specification, not a {kind}")
        return spec

    def _place(self, stage: str) -> Place:
        return Place(
            url=self._url,
            job=self._job,
            stage=stage,
            ttl_ms=self._ttl_ms,
            patience_ms=self._patience_ms,
            clock=self._clock,
            tallies=self._accumulator,
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


class _Board(StreamingQueryListener):
    """Passes Spark's events on to the keepers; never blocks Spark's listener bus."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._keepers: dict[str, Keeper] = {}
        self._starting = 0
        # A query's first events may come before `start` has returned its id to us.
        self._early: deque[tuple[str, Progressed | Signal]] = deque(maxlen=_EARLY_EVENTS)

    @contextmanager
    def starting(self) -> Generator[None]:
        """Keep events of unknown queries meanwhile: one of them is being started."""
        with self._lock:
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                if not self._starting:
                    self._early.clear()

    def register(self, run_id: str, keeper: Keeper) -> None:
        """Pass a query's events on, the early ones first."""
        with self._lock:
            self._keepers[run_id] = keeper
            for early_run_id, event in self._early:
                if early_run_id == run_id:
                    keeper.tell(event)

    def _pass_on(self, run_id: str, event: Progressed | Signal) -> None:
        with self._lock:
            keeper = self._keepers.get(run_id)
            if keeper is not None:
                keeper.tell(event)
                if event is Signal.ENDED:
                    del self._keepers[run_id]
            elif self._starting:
                self._early.append((run_id, event))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Nothing to do: `start` knows."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Pass on that a batch is in Spark's commit log."""
        progress = event.progress
        spark_ms = plan.parse_watermark_ms(progress.eventTime.get("watermark"))
        watermark_ms = None if spark_ms is None else control_source.from_spark_ms(spark_ms)
        self._pass_on(str(progress.runId), Progressed(progress.batchId, watermark_ms))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Nothing to do."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Pass on that the query has ended, one way or the other."""
        self._pass_on(str(event.runId), Signal.ENDED)


def _tell_when_drained(query: StreamingQuery, keeper: Keeper) -> None:
    """Wait until a trigger has found nothing new in any of the query's sources."""
    try:
        query.processAllAvailable()
    except StreamingQueryException:
        return  # Whoever awaits the query hears of it.
    # A query that was stopped lets go of its waiters too, and may have left something unread: were
    # its sources called final, the rest would be late next time.
    if query.isActive:
        keeper.tell(Signal.DRAINED)


def _stop_quietly(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception:  # noqa: BLE001  (it has failed or is gone; whoever awaits it hears of that)
        _log.info("query %s did not stop in order", query.id, exc_info=True)


def _map(frame: DataFrame, reporter: SourceReporter | RangeReporter) -> DataFrame:
    """Send the rows through a reporter."""
    return frame.mapInArrow(reporter, frame.schema)  # pyright: ignore[reportUnknownMemberType]


def _check_workers(spark: SparkSession) -> None:
    """Raise unless Python workers run this interpreter, with its packages."""
    worker = shutil.which(spark.sparkContext.pythonExec)
    if worker is None or Path(worker).parent != Path(sys.executable).parent:
        raise RuntimeError(
            f"Spark's Python workers would run {spark.sparkContext.pythonExec!r}, not "
            f"{sys.executable!r}, and miss its packages: set the environment variable "
            f"PYSPARK_PYTHON to sys.executable before the session starts"
        )


def _check_column(frame: DataFrame, name: str) -> None:
    if name not in frame.columns:
        raise ValueError(f"there is no column {name!r}; there are {', '.join(frame.columns)}")


def _check_time(frame: DataFrame, name: str) -> None:
    _check_column(frame, name)
    kind = frame.schema[name].dataType
    if not isinstance(kind, TimestampType):
        raise ValueError(  # noqa: TRY004  (a wrong value of a right type: a column's name)
            f"event time {name!r} is of type {kind.simpleString()}; it must be a timestamp (with "
            f"local time zone)"
        )
