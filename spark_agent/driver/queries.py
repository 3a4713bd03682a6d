"""The Spark queries that this driver has started."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.client.client import Client
from spark_agent.clock import Clock
from spark_agent.driver.early_feed import EarlyFeed
from spark_agent.driver.event_router import EventRouter
from spark_agent.driver.feeds import Feeds
from spark_agent.driver.job import Commits, DeclaredJob, new_holder
from spark_agent.driver.late_rows import LateRows
from spark_agent.driver.launch import Launch
from spark_agent.driver.preconditions import (
    Resumption,
    Watermarks,
    caps_ms,
    check_inputs_final,
    check_not_final,
    final_by_marker,
)
from spark_agent.driver.watermark_feed import WatermarkFeed
from spark_agent.exceptions import StageTakenError
from spark_agent.executor.in_flight import StageInFlight
from spark_agent.executor.tally import Tallies
from spark_agent.executor.task import (
    ON_LOST_CHECKPOINT_PROPERTY,
    QUERY_PROPERTY,
    RUN_PROPERTY,
)
from spark_agent.jvm import progress
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.jvm.writer import Trigger
from spark_agent.soundness.query_stages import EarlyStage
from spark_agent.started_query import StartedQuery, Timing
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.read_through import ReadThrough
from spark_agent.supervision.supervisor import Signal, Supervisor
from spark_agent.throttle.source_throttle import SourceThrottle

_JOIN_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Supervised:
    """A started query with what serves it."""

    supervisor: Supervisor
    waits: BatchWaits
    feed: WatermarkFeed

    @property
    def running(self) -> RunningQuery:
        """The query itself."""
        return self.supervisor.running

    @property
    def goes_on(self) -> bool:
        """True while the query runs and is supervised."""
        return self.supervisor.alive and not self.running.has_ended


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
    ) -> None:
        self._job = job
        self._spark = spark
        self._client = client
        self._tallies = tallies
        self._timing = timing
        self._clock = clock
        self._lock = threading.RLock()
        self._stopped = False
        self._events = EventRouter()
        self._started: list[_Supervised] = []
        self._early: list[tuple[RunningQuery, EarlyFeed]] = []
        self._past_counts: Counter[str] = Counter()
        self.feeds = Feeds()
        # It outlives a query: what the next one reads may be only the end of what is in flight.
        self._in_flight = {
            stage.name: StageInFlight()
            for stage in job.stages.values()
            if stage.role == "source" and stage.percentiles
        }
        self._listener = progress.Listener(
            spark,
            batch_committed=self._events.batch_committed,
            query_ended=self._on_end,
        )

    @property
    def counts(self) -> Counter[str]:
        """The counts of all queries; keys as in `Count`."""
        with self._lock:
            total = Counter(self._past_counts)
            for each in self._started:
                total.update(each.supervisor.counts)
            return total

    @property
    def waits(self) -> dict[str, str]:
        """The reasons why the next batch of a query waits, by the source stages that it executes."""
        with self._lock:
            return {
                stage.name: each.waits.because
                for each in self._started
                if each.waits.because is not None and each.goes_on
                for stage in each.supervisor.query.stages.sources
            }

    @property
    def shard_waits(self) -> dict[str, dict[str, str]]:
        """The reasons why shards read nothing or less in the next batch, by source stage and shard."""
        with self._lock:
            return {
                stage: waits
                for each in self._started
                if each.goes_on
                for stage, waits in each.waits.shards.items()
            }

    @property
    def bounds(self) -> dict[str, dict[str, int]]:
        """The learned bounds of running queries, by source and shard (ms)."""
        with self._lock:
            return {
                stage: dict(bounds)
                for each in self._started
                for stage, bounds in each.supervisor.bounds.items()
            }

    def start(self, query: StartedQuery, launch: Launch) -> StreamingQuery:
        """Open a run for the stages and start the query, unless it could not keep what it promises.

        Every check comes before the run is opened: opening it fences the query that has the stages.
        """
        stages = query.stages.names
        with self._lock:
            self._check_not_stopped()
            self._remove_ended()
            self._check_not_taken(stages)
            watermarks = self._job.fetch_watermarks()
            if watermarks is not None:
                check_not_final(query, watermarks)
                check_inputs_final(query, self._job.stages, watermarks)
            launch.check()
            resumption = Resumption(query, launch.checkpoint)
            holder = new_holder()
            run = self._job.try_open_run(stages, holder, resumption.check, resumption.opened)
            if run is None:
                # The supervisor opens one later, and compares then. What there is now is read now: by
                # then, checkpoint and output have what the query has done.
                resumption.check_output()
            query = replace(query, on_lost_checkpoint=resumption.on_lost_checkpoint)
            supervised = self._supervised(
                query, run, holder, watermarks, resumption, launch.late_rows
            )
            return self._start_supervised(supervised, run, launch)

    def _supervised(
        self,
        query: StartedQuery,
        run: int | None,
        holder: str,
        watermarks: Watermarks | None,
        resumption: Resumption,
        late_rows: LateRows,
    ) -> _Supervised:
        running = RunningQuery(self._spark)
        waits = BatchWaits(query)
        read = ReadThrough(query, self._clock.wall_ms())
        if watermarks is not None:
            waits.final_sources = final_by_marker(query, watermarks)
        check = partial(
            self._check_later, query, resumption, waits, were_known=watermarks is not None
        )
        supervisor = Supervisor(
            query,
            running,
            client=self._client,
            run=run,
            open_run=partial(
                self._job.open_run, holder=holder, check=check, opened=resumption.opened
            ),
            newer_own_run=partial(
                self._job.newer_own_run,
                stages=query.stages.names,
                holder=holder,
                other_generation=resumption.other_generation,
            ),
            notes=resumption,
            tallies=self._tallies,
            in_flight={
                stage.name: self._in_flight[stage.name]
                for stage in query.stages.sources
                if stage.percentiles
            },
            waits=waits,
            read=read,
            resumed_after=resumption.beginning.next_batch - 1,
            clock=self._clock,
        )
        is_throttled = bool(query.stages.sources) and self._job.is_throttled
        feed = WatermarkFeed(
            query,
            running,
            supervisor=supervisor,
            waits=waits,
            read=read,
            late_rows=late_rows,
            caps_ms=caps_ms(query, self._job.stages, watermarks),
            other_generation=resumption.other_generation,
            throttle=SourceThrottle(query, client=self._client, clock=self._clock)
            if is_throttled
            else None,
            client=self._client,
            clock=self._clock,
        )
        return _Supervised(supervisor, waits, feed)

    def _check_later(
        self,
        query: StartedQuery,
        resumption: Resumption,
        waits: BatchWaits,
        has: Commits,
        *,
        were_known: bool,
    ) -> None:
        """Check before a run is opened what could not be checked at the start: the service was away.

        Raises `OldCheckpointError`, `FinalSourceError`, `AggregatorError`.
        """
        resumption.check(has)
        if not were_known:
            watermarks = self._client.watermarks(query.job)
            check_not_final(query, watermarks)
            waits.final_sources = final_by_marker(query, watermarks)

    def _start_supervised(
        self, supervised: _Supervised, run: int | None, launch: Launch
    ) -> StreamingQuery:
        supervisor = supervised.supervisor
        properties = {
            QUERY_PROPERTY: supervisor.query.name,
            RUN_PROPERTY: "" if run is None else str(run),
            ON_LOST_CHECKPOINT_PROPERTY: supervisor.query.on_lost_checkpoint,
        }
        with (
            self.feeds.connecting(launch.links, supervised.feed),
            self._events.starting(),
        ):
            supervisor.start()
            try:
                query = launch.start(self._spark, properties)
            except BaseException as error:
                supervisor.abandon(progress.cause_line(str(error)))
                raise
            supervised.running.attach(query)
            self._started.append(supervised)
            self._events.register(str(query.runId), supervisor)
        self._disconnect_ended()
        return query

    def start_early(
        self, early: EarlyStage, trigger: Trigger, writer: DataStreamWriter, links: Collection[str]
    ) -> StreamingQuery:
        """Start a query for early results, which reports nothing."""
        feed = EarlyFeed(
            self._job.name,
            early,
            stays=trigger.ends,
            poll_ms=self._timing.poll_ms,
            client=self._client,
            clock=self._clock,
        )
        running = RunningQuery(self._spark)
        with self._lock:
            self._check_not_stopped()
            self._remove_ended()
            with self.feeds.connecting(links, feed):
                query = writer.start()
            running.attach(query)
            self._early.append((running, feed))
        self._disconnect_ended()
        return query

    def _on_end(self, run_id: str) -> None:
        self._events.query_ended(run_id)
        self._disconnect_ended()

    def _disconnect_ended(self) -> None:
        """Disconnect the sources of queries that have ended: another start needs a new feed.

        At the end of each query, and after each start, in case the query has ended before it was listed.
        Without the lock, for which Spark's listener bus would wait during a start. That is safe: a feed
        is disconnected by identity, so a later start of the same data frame keeps its own.
        """
        for each in list(self._started):
            if each.running.has_ended:
                self.feeds.disconnect(each.feed)
        for running, feed in list(self._early):
            if running.has_ended:
                self.feeds.disconnect(feed)

    def reset(self) -> None:
        """Start the job over. Raises `RuntimeError` while a query runs."""
        with self._lock:
            self._remove_ended()
            busy = [name for each in self._started for name in each.supervisor.query.stages.names]
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
        for each in self._started:
            each.running.stop()
        for running, _ in self._early:
            running.stop()
        for each in self._started:
            each.supervisor.notify_end(Signal.STOP)
        for each in self._started:
            # One whose query has read everything still makes its sources final.
            each.supervisor.join(_JOIN_MS + self._timing.finish_timeout_ms)
        self._listener.close()

    def _remove_ended(self) -> None:
        """Keep only the counts of queries that have ended: a driver may start thousands."""
        for each in [each for each in self._started if each.running.has_ended]:
            supervisor = each.supervisor
            if supervisor.alive:
                supervisor.notify_end(Signal.ENDED)
                supervisor.join(_JOIN_MS)
            if not supervisor.alive:
                self._past_counts.update(supervisor.counts)
                self._started.remove(each)
                self.feeds.disconnect(each.feed)
        for running, feed in [each for each in self._early if each[0].has_ended]:
            self._early.remove((running, feed))
            self.feeds.disconnect(feed)

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise RuntimeError(
                "this pipeline was stopped, at the end of its with block or by stop(): a query would "
                "have nothing that reports for it. Start it within the block, and wait there for its "
                "end; or make a new Pipeline"
            )

    def _check_not_taken(self, stages: Sequence[str]) -> None:
        for each in self._started:
            for stage in stages:
                if stage in each.supervisor.query.stages.names and not each.running.has_ended:
                    raise StageTakenError(
                        f"stage {stage!r} is executed by query {each.running.label!r} of this "
                        f"pipeline, and only one query can report for it. Stop that one. If several "
                        f"queries read the same data, call source() in one of them and begin the others "
                        f"with watermarked(), or declare a source stage for each"
                    )
