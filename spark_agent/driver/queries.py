"""The Spark queries that this driver has started, and the control sources in them."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.client.client import Client, StageWatermark
from spark_agent.client.spec import ancestors, upstream
from spark_agent.clock import Clock
from spark_agent.driver.early_feed import EarlyConfig, EarlyFeed
from spark_agent.driver.event_router import EventRouter
from spark_agent.driver.job import Check, Commits, DeclaredJob, host
from spark_agent.driver.preconditions import (
    Resumption,
    caps_ms,
    check_inputs_final,
    check_not_final,
)
from spark_agent.driver.watermark_feed import WatermarkFeed, WatermarkFeedConfig
from spark_agent.exceptions import NotStartedError, StageTakenError
from spark_agent.executor.in_flight import StageInFlight
from spark_agent.executor.tally import Tallies
from spark_agent.executor.task import (
    ON_LOST_CHECKPOINT_PROPERTY,
    QUERY_PROPERTY,
    RUN_PROPERTY,
    Reaction,
)
from spark_agent.jvm import progress
from spark_agent.jvm.checkpoint import Checkpoint
from spark_agent.jvm.nodes import Control, Reader
from spark_agent.jvm.writer import AVAILABLE_NOW, ONCE, interval_ms_of
from spark_agent.soundness.query_stages import EarlyStage, QueryStages
from spark_agent.sources.admission import Admission, Wanted
from spark_agent.sources.driver_link import Hold, Offset
from spark_agent.supervision.assignment import Assignment, QueryHandle
from spark_agent.supervision.supervisor import Signal, Supervisor
from spark_agent.throttle.source_throttle import SourceThrottle, ThrottleConfig

_log: Final = logging.getLogger("spark_agent")

_JOIN_MS: Final = 10_000

_THROTTLE_PATIENCE_MS: Final = 30_000
"""Timeout of a bounded query's wait for shards that make no progress."""

_OFTEN_MS: Final = 1_000
"""A query that looks for new data less often cannot say that a shard is quiet now."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts and intervals of a query."""

    ttl_ms: int
    """A task's or the driver's lease."""
    patience_ms: int
    """The longest that one call to the service may block a task."""
    poll_ms: int
    """The pause between two polls of a watermark."""
    finish_timeout_ms: int
    """The longest wait, at the end of a query that ends by itself, for a service that is away."""


@dataclass(frozen=True, slots=True)
class Start:
    """Description of a query to start."""

    writer: DataStreamWriter
    controls: Sequence[Control]
    trigger: str
    bounded: bool
    readers: Sequence[Reader] = ()
    """Its sources of ours."""
    on_fenced: Reaction = "stop"
    on_lost_checkpoint: Reaction = "stop"

    @property
    def available_now(self) -> bool:
        """True if the query reads what is there at its start, and ends."""
        return self.trigger == AVAILABLE_NOW

    @property
    def ends(self) -> bool:
        """True if the query ends by itself."""
        return self.bounded or self.trigger in {AVAILABLE_NOW, ONCE}


class Queries:
    """The started queries, each with its supervisor and its feed. Its methods are thread-safe."""

    def __init__(
        self,
        job: DeclaredJob,
        *,
        spark: SparkSession,
        client: Client,
        tallies: Tallies,
        timing: Timing,
        clock: Clock,
        new_id: Callable[[], str],
    ) -> None:
        self._job = job
        self._spark = spark
        self._client = client
        self._tallies = tallies
        self._timing = timing
        self._clock = clock
        self._new_id = new_id
        self._lock = threading.RLock()
        self._stopped = False
        self._events = EventRouter()
        self._started: list[tuple[StreamingQuery, Supervisor]] = []
        self._early: list[tuple[StreamingQuery, EarlyFeed]] = []
        self._past_counts: Counter[str] = Counter()
        self._control_ids = itertools.count(1)
        self._feeds: dict[str, tuple[str, WatermarkFeed | EarlyFeed | None]] = {}
        # It outlives a query: what the next one reads may be only the end of what is in flight.
        self._in_flight = {
            stage.name: StageInFlight()
            for stage in job.stages.values()
            if stage.role == "source" and stage.percentiles
        }
        self._listener = progress.Listener(
            spark,
            batch_committed=self._events.batch_committed,
            query_ended=self._events.query_ended,
        )

    def new_control(self, stage: str) -> str:
        """Return the id of a new control source, which has no answers until its query is started."""
        control_id = str(next(self._control_ids))
        self._feeds[control_id] = stage, None
        return control_id

    def admit(self, source: str, wanted: Wanted) -> Admission:
        """Answer a source of ours, through the link. Raises `NotStartedError`, `QueryFailedError`."""
        stage, feed = self._feeds.get(source, ("", None))
        if not isinstance(feed, WatermarkFeed):
            raise NotStartedError(stage)
        return feed.admit(stage, wanted)

    def next_offset(self, control: str, reader: str, at: Offset) -> Offset | Hold:
        """Answer a control source, through the link. Raises `NotStartedError`."""
        stage, feed = self._feeds.get(control, ("", None))
        if feed is None:
            raise NotStartedError(stage)
        return feed.next(at) if isinstance(feed, EarlyFeed) else feed.next(reader, stage, at)

    @property
    def counts(self) -> Counter[str]:
        """The counts of all queries; keys as in `Count`."""
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

    @property
    def shard_waits(self) -> dict[str, dict[str, str]]:
        """Why single shards get nothing to read in the next batch, or less, by source stage."""
        with self._lock:
            return {
                stage: waits
                for _, supervisor in self._started
                for stage, waits in supervisor.shard_waits.items()
            }

    def start(self, start: Start, query_stages: QueryStages) -> StreamingQuery:
        """Open a run for the stages and start the query, unless it could not keep what it promises.

        What can be refused is refused before the run is opened, which fences whoever has the stages.
        """
        with self._lock:
            self._check_not_stopped()
            self._remove_ended()
            stages = [*query_stages.sources, *query_stages.promises]
            self._check_not_taken(stages)
            watermarks = self._job.fetch_watermarks()
            check_not_final(self._job.name, query_stages, watermarks, bounded=start.bounded)
            if start.bounded and start.available_now:
                check_inputs_final(self._job.stages, query_stages, watermarks)
            name = f"{host()}-{os.getpid()}.{self._new_id()}"
            resumption = Resumption(
                self._job.name,
                name,
                Checkpoint(self._spark, start.writer),
                on_lost_checkpoint=start.on_lost_checkpoint,
                dynamic=[
                    each for each in query_stages.sources if self._job.stages[each].is_dynamic
                ],
            )
            run = self._job.try_open_run(stages, resumption.check, resumption.opened)
            if run is None:
                # The supervisor opens one later, and compares then. It must know what there is now: by
                # then, checkpoint and output have what the query has done.
                resumption.check_output()
            assignment = self._assignment(name, start, query_stages, resumption.on_lost_checkpoint)
            later = partial(self._check_later, resumption, query_stages, start, watermarks)
            supervisor = self._supervisor(assignment, run, later, resumption)
            return self._start_supervised(
                start, supervisor, query_stages, watermarks, run, resumption
            )

    def _assignment(
        self,
        name: str,
        start: Start,
        query_stages: QueryStages,
        on_lost_checkpoint: Reaction,
    ) -> Assignment:
        stages = self._job.stages
        inputs = {each: ancestors(stages, each) for each in query_stages.promises}
        return Assignment(
            job=self._job.name,
            query=name,
            sources=[stages[each] for each in query_stages.sources],
            keyed=[stages[each] for each in query_stages.promises],
            promises=query_stages.promises,
            bounded=start.bounded,
            ttl_ms=self._timing.ttl_ms,
            finish_timeout_ms=self._timing.finish_timeout_ms,
            on_fenced=start.on_fenced,
            on_lost_checkpoint=on_lost_checkpoint,
            reads_all=query_stages.reads_all,
            looks_often=interval_ms_of(start.writer) <= _OFTEN_MS
            and not query_stages.may_wait_for_more,
            may_idle=[
                each
                for each, above in inputs.items()
                if any(stages[name].has_idle_policy for name in above) and self._counts_state()
            ],
            inputs=inputs,
            by_shard=frozenset(each.stage for each in start.readers),
        )

    def _check_later(
        self,
        resumption: Resumption,
        query_stages: QueryStages,
        start: Start,
        watermarks: Mapping[str, StageWatermark] | None,
        has: Commits,
    ) -> None:
        """Check what could not be checked at the start, while the service was away, before a run is
        opened. Raises `OldCheckpointError`, `FinalSourceError`, `AggregatorError`.
        """
        resumption.check(has)
        if watermarks is None:
            found = self._client.watermarks(self._job.name)
            check_not_final(self._job.name, query_stages, found, bounded=start.bounded)

    def _supervisor(
        self, assignment: Assignment, run: int | None, check: Check, resumption: Resumption
    ) -> Supervisor:
        return Supervisor(
            assignment,
            client=self._client,
            run=run,
            open_run=partial(self._job.open_run, check=check, opened=resumption.opened),
            joined_notes=resumption,
            tallies=self._tallies,
            in_flight={
                stage.name: self._in_flight[stage.name]
                for stage in assignment.sources
                if stage.percentiles
            },
            clock=self._clock,
        )

    def _start_supervised(
        self,
        start: Start,
        supervisor: Supervisor,
        query_stages: QueryStages,
        watermarks: Mapping[str, StageWatermark] | None,
        run: int | None,
        resumption: Resumption,
    ) -> StreamingQuery:
        name = supervisor.query
        holder: list[StreamingQuery] = []
        latest = progress.LatestBatch()
        feed = WatermarkFeed(
            WatermarkFeedConfig(
                job=self._job.name,
                promises=query_stages.promises,
                caps_ms=caps_ms(self._job.stages, query_stages, watermarks)
                if start.available_now
                else {},
                inputs={each: ancestors(self._job.stages, each) for each in query_stages.promises},
                bounded=start.bounded,
                ends_when_idle=start.available_now,
                patience_ms=self._timing.patience_ms,
                poll_ms=self._timing.poll_ms,
                finish_timeout_ms=self._timing.finish_timeout_ms,
            ),
            supervisor=supervisor,
            client=self._client,
            progress=lambda: latest.of(holder[0]) if holder else None,
            clock=self._clock,
            other_generation=resumption.other_generation,
            throttle=self._source_throttle(name, query_stages, start),
            is_active=lambda: not holder or progress.is_active(holder[0]),
        )
        for each in (*start.controls, *start.readers):
            self._feeds[each.id] = each.stage, feed
        supervisor.start()
        properties = {
            QUERY_PROPERTY: name,
            RUN_PROPERTY: "" if run is None else str(run),
            ON_LOST_CHECKPOINT_PROPERTY: resumption.on_lost_checkpoint,
        }
        with self._events.starting(), self._local_properties(properties):
            try:
                query = start.writer.start()
            except BaseException as error:
                supervisor.abandon(progress.most_telling_line(str(error)))
                raise
            holder.append(query)
            supervisor.attach(self._handle(query, start))
            self._started.append((query, supervisor))
            self._events.register(str(query.runId), supervisor)
        return query

    def _handle(self, query: StreamingQuery, start: Start) -> QueryHandle:
        return QueryHandle(
            stop=lambda: None if start.available_now else _stop_quietly(query),
            fail=lambda message: progress.fail(self._spark, query, message),
            has_no_new_data=lambda: progress.has_no_new_data(query),
            recent_batch=lambda: progress.recent_batch(query),
            has_just_found_nothing=lambda: progress.has_just_found_nothing(query),
            failure=lambda: progress.failure(query),
            has_ended_by_itself=lambda: (
                start.trigger in {AVAILABLE_NOW, ONCE}
                and progress.has_ended_by_itself(query, available_now=start.available_now)
            ),
            has_control_sources=any(not each.is_gate for each in start.controls),
        )

    def start_early(self, start: Start, early: EarlyStage) -> StreamingQuery:
        """Start a query for early results, which reports nothing. Raises `ValueError`."""
        if start.bounded:
            raise ValueError(
                f"stage {early.stage!r}: early results make nothing final: leave out bounded=True, and "
                f"use trigger(availableNow=True) for a query that ends"
            )
        config = EarlyConfig(
            job=self._job.name,
            stage=early.stage,
            inputs=upstream(self._job.stages, early.stage, ()),
            percentile=early.percentile,
            stays=start.ends,
            poll_ms=self._timing.poll_ms,
        )
        feed = EarlyFeed(config, client=self._client, clock=self._clock)
        with self._lock:
            self._check_not_stopped()
            self._remove_ended()
            for control in start.controls:
                self._feeds[control.id] = control.stage, feed
            query = start.writer.start()
            self._early.append((query, feed))
        return query

    def _counts_state(self) -> bool:
        """Return whether Spark counts the rows that its operators keep. If not, it reports zero."""
        counts = "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows"
        return str(self._spark.conf.get(counts, "true")).lower() == "true"

    def _source_throttle(
        self, query: str, query_stages: QueryStages, start: Start
    ) -> SourceThrottle | None:
        if not query_stages.sources or not self._job.is_throttled:
            return None
        # A run of what is there now ends soon, and whom it would wait for may run only later.
        goes_on = not start.available_now
        config = ThrottleConfig(
            job=self._job.name,
            query=query,
            sources=query_stages.sources,
            poll_ms=self._timing.poll_ms,
            keep_ms=self._timing.ttl_ms,
            patience_ms=_THROTTLE_PATIENCE_MS if start.ends else None,
            looks_ahead=goes_on
            and not any(self._job.stages[stage].has_idle_policy for stage in query_stages.sources),
            shards_look_ahead=goes_on,
            by_shard=frozenset(each.stage for each in start.readers),
        )
        return SourceThrottle(config, client=self._client, clock=self._clock)

    def reset(self) -> None:
        """Start the job over. Raises `RuntimeError` while a query runs."""
        with self._lock:
            self._remove_ended()
            busy = [stage for _, supervisor in self._started for stage in supervisor.stages]
            busy += [f"early results of {feed.stage}" for _, feed in self._early]
            if busy:
                raise RuntimeError(
                    f"a query of this pipeline still executes {', '.join(busy)}: stop it before "
                    f"reset()"
                )
            self._client.reset(self._job.name)
            for in_flight in self._in_flight.values():
                in_flight.clear()

    def stop(self) -> None:
        """Stop the queries that still run, and commit what they have done."""
        with self._lock:
            self._stopped = True
        for query, _ in (*self._started, *self._early):
            _stop_quietly(query)
        for query, supervisor in self._started:
            _notify_end(query, supervisor, Signal.STOP)
        for _, supervisor in self._started:
            # One whose query has read everything still makes its sources final.
            supervisor.join(_JOIN_MS + self._timing.finish_timeout_ms)
        self._listener.close()

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
                        isinstance(feed, WatermarkFeed) and feed.supervisor is ended
                    )
                )
        for query, early in list(self._early):
            if not query.isActive:
                self._early.remove((query, early))
                self._remove_feeds(lambda feed, ended=early: feed is ended)

    def _remove_feeds(self, has_ended: Callable[[WatermarkFeed | EarlyFeed | None], bool]) -> None:
        for control, (stage, feed) in self._feeds.items():
            if has_ended(feed):
                self._feeds[control] = stage, None

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeError(
                "this pipeline was stopped, at the end of its with block or by stop(): nobody would "
                "report for the query. Start it within the block, and wait there for its end; or make "
                "a new Pipeline"
            )

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
        newest = progress.recent_batch(query)
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
