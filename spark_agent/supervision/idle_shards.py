"""Reports of the driver for shards without rows, while its query finds nothing to read.

The service takes a shard for idle only while a query polls its source and finds nothing. So the driver
holds the leases of such shards as long as its query finds nothing, and unwatched ones after that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.reports import Lease, RangeReport, StageProgress
from spark_agent.clock import Clock
from spark_agent.executor.tally import Tallies, shards_with_rows, unreported_shards
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.jvm.running_query import RunningQuery
from spark_agent.sources.kafka import positions, unread
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.driver_reporter import WATCH_MS, DriverReporter
from spark_agent.supervision.in_flight_reports import InFlightReports
from spark_agent.supervision.unwatched_leases import UnwatchedLeases
from spark_agent.times import MAX_MS

_REPORT_MS: Final = 2_000
"""Interval of the reports of a query that has nothing to read."""
_RENEWALS_PER_LEASE: Final = 3

NO_BACKLOG: Final = RangeReport(records=0, backlog=0)
SOME_BACKLOG: Final = RangeReport(backlog=1)
"""A backlog of unknown size: files are counted, not their rows."""


class QuietWatch:
    """Watches a query that finds nothing to read, and reports that nothing waits."""

    def __init__(
        self,
        query: StartedQuery,
        running: RunningQuery,
        not_final: Mapping[str, Collection[str]],
        *,
        client: Client,
        tallies: Tallies,
        in_flight: InFlightReports,
        waits: BatchWaits,
        clock: Clock,
    ) -> None:
        """`not_final` are the shards of each source that are not final yet; they change."""
        self._query = query
        self._stages = query.stages
        self._running = running
        self._not_final = not_final
        self._client = client
        self._tallies = tallies
        self._in_flight = in_flight
        self._waits = waits
        self._clock = clock
        self._reported_backlogs = set(query.stages.watched)  # perhaps by the driver before this one
        self._positions: dict[str, Mapping[str, str]] = {}
        """By source of topics: where the last batch has read its partitions to."""
        self._leases: dict[str, Lease] = {}
        self._idle: dict[str, Lease] = {}
        """By keyed stage that is idle: the lease on its ranges."""
        self._idle_after: int | None = None
        """The epoch after which the leases were claimed."""
        self._unwatched = UnwatchedLeases(query, not_final, client, clock)
        self._found_nothing_ms: int | None = None
        self._watch_again_ms: int | None = None
        self._report_again_ms: int | None = None

    @property
    def due_ms(self) -> int | None:
        """The instant at which unwatched leases are due, on the steady clock; None: there are none."""
        return self._unwatched.due_ms

    @property
    def held(self) -> frozenset[str]:
        """The keyed stages that are held by short leases, since they are idle."""
        return frozenset(self._idle)

    def report_backlogs(self, reporter: DriverReporter, batch: CommittedBatch) -> None:
        """Report that shards without rows in a batch may have some that it has not read.

        Either their source is rate limited, or reads in a way of its own; logs in folders report which
        shards have more. The number of rows is unknown, except of topics. A task reads a shard that is
        denied.

        A shard with rows whose task could not report has a backlog, too: by the commit alone it would
        look quiet. Its report is pending, and ends the backlog. A shard that is denied was reported, or
        is read by a task of the next batch.
        """
        for stage, topics in self._stages.topics.items():
            self._positions[stage] = positions(batch.read, topics)
        for stage in self._stages.watched:
            of_batch = (self._tallies, self._query.name, stage, batch.epoch)
            unreported = unreported_shards(*of_batch).intersection(self._not_final[stage])
            reports = dict.fromkeys(unreported, SOME_BACKLOG) | self._may_have_more(stage, batch)
            left = reports.keys() - (shards_with_rows(*of_batch) - unreported)
            self._report_backlog(reporter, stage, {each: reports[each] for each in left})

    def report_unread(self, reporter: DriverReporter, batch: CommittedBatch) -> None:
        """Report the rows of topics that a batch has left unread, after the commit of its epoch.

        The commit applies the tasks' own reports, and a task does not know what is behind its rows.
        """
        for stage in self._stages.topics:
            self._report_backlog(reporter, stage, self._unread(stage, batch))

    def _report_backlog(
        self, reporter: DriverReporter, stage: str, reports: Mapping[str, RangeReport]
    ) -> None:
        if reports:
            self._reported_backlogs.add(stage)
            # The next batch may be running: its query does not poll these shards.
            reporter.report_shards(stage, reports, watched=stage not in self._stages.watched)

    def _may_have_more(self, stage: str, batch: CommittedBatch) -> dict[str, RangeReport]:
        """Return reports of the shards of which a batch may have left rows unread."""
        if self._query.trigger.ends:
            # The run reads what was there at its start. Rows that have come since wait for the next run.
            later = dict.fromkeys(self._not_final[stage], SOME_BACKLOG)
            return later | self._unread(stage, batch)
        if stage in self._stages.topics:
            return self._unread(stage, batch)
        if stage in self._stages.by_shard:
            return dict.fromkeys(self._left_unread(stage), SOME_BACKLOG)
        if self._stages.reads_all or (batch.read_nothing and self._query.polls_often):
            return {}
        return dict.fromkeys(self._not_final[stage], SOME_BACKLOG)

    def _unread(self, stage: str, batch: CommittedBatch) -> dict[str, RangeReport]:
        """Return reports of the partitions of which a batch has left rows unread."""
        topics = self._stages.topics.get(stage, frozenset())
        at = self._positions.get(stage, {})
        return {
            shard: RangeReport(backlog=rows, position=at.get(shard, ""))
            for shard, rows in unread(batch.read, batch.latest, topics).items()
            if rows and shard in self._not_final[stage]
        }

    def _left_unread(self, stage: str) -> set[str]:
        """Return the shards that have more to read and wait, as their source has reported."""
        return set(self._not_final[stage]).intersection(self._waits.unread.get(stage, ()))

    def watch(
        self,
        reporter: DriverReporter,
        committed: Committed,
        *,
        polls: bool,
        drained: bool,
    ) -> frozenset[str]:
        """Report that a query polls its sources and finds nothing, while that is so. Return the keyed
        stages for which that has ended with this call: their leases are short, and others have to take
        their place.

        It does not poll while it waits, and a batch that it has just ended is still to be committed.
        Once it has `drained` its input, nothing more is to come.
        """
        now_ms = self._clock.steady_ms()
        if not polls or not self._finds_nothing(now_ms):
            ended = self.held
            self._end(reporter, keeps=reporter.may_hold and not drained)
            return ended
        self._unwatched.drop()
        if self._watch_again_ms is None or now_ms >= self._watch_again_ms:
            self._hold_watched(reporter, committed)
            self._watch_again_ms = now_ms + WATCH_MS // _RENEWALS_PER_LEASE
        if self._report_again_ms is None:
            self._report_again_ms = now_ms + _REPORT_MS
        if now_ms >= self._report_again_ms and committed.epoch >= 0 and not drained:
            self._report_backlogs(reporter, committed)
            self._report_again_ms = now_ms + _REPORT_MS
        return frozenset()

    def _finds_nothing(self, now_ms: int) -> bool:
        """Return whether the query has polled its sources just now, and found nothing.

        The result of a trigger is there once the trigger has ended. A trigger that hangs, since its
        storage does not answer, proves nothing.
        """
        if not self._query.polls_often:
            return False
        if self._running.has_just_found_nothing():
            self._found_nothing_ms = now_ms
        found_ms = self._found_nothing_ms
        found_nothing = found_ms is not None and now_ms - found_ms <= WATCH_MS
        return found_nothing and self._running.has_no_new_data()

    def _hold_watched(self, reporter: DriverReporter, committed: Committed) -> None:
        """Hold the leases of what the service may take for idle.

        The lease proves that the query polls. Once a batch has something to read, it is not renewed.
        """
        for stage in self._stages.watched:
            self._in_flight.forget(stage)
            shards = sorted(self._not_final[stage])
            left = self._left_unread(stage)
            if stage in self._reported_backlogs or left:
                reports = self._polled(stage, shards, left)
                reported = reporter.report_shards(stage, reports, ttl_ms=WATCH_MS)
                held = self._leases.pop(stage, None)
                if shards and not reported:
                    # Without a lease, the shards would look like those of a lost worker.
                    _set(self._leases, stage, reporter.hold(stage, shards, held, ttl_ms=WATCH_MS))
                if len(reported) == len(shards) and not left:
                    self._reported_backlogs.discard(stage)
                else:
                    self._reported_backlogs.add(stage)
            elif shards:
                held = self._leases.get(stage)
                lease = reporter.hold(stage, shards, held, ttl_ms=WATCH_MS)
                _set(self._leases, stage, lease)
        if committed.epoch != self._idle_after:
            # A task of the batch may have taken one of the ranges.
            self._idle.clear()
            self._idle_after = committed.epoch
        for stage, input_ms in committed.emitted_ms.items():
            if stage in self._query.may_idle and input_ms != MAX_MS:
                # Its ranges keep nothing that has not come out.
                self._hold_idle(reporter, stage, StageProgress(input_ms))

    def _hold_idle(self, reporter: DriverReporter, stage: str, progress: StageProgress) -> None:
        """Report that a keyed stage is idle, and claim its ranges unless the report renews a lease."""
        held = self._idle.get(stage)
        if held is not None and reporter.report_progress(stage, held, progress, idle=True):
            return
        lease = reporter.claim(stage, None, ttl_ms=WATCH_MS)
        if lease is not None:
            reporter.report_progress(stage, lease, progress, idle=True)
        _set(self._idle, stage, lease)

    def _report_backlogs(self, reporter: DriverReporter, committed: Committed) -> None:
        """Report that nothing is left to do.

        Else the processing watermark would stand at the last batch, as if work were waiting since then.
        """
        for stage, shards in self._not_final.items():
            if stage not in self._stages.watched:
                reporter.report_shards(stage, self._polled(stage, shards, self._left_unread(stage)))
            elif stage in self._leases:
                lease = self._leases[stage]
                reports = self._polled(stage, lease.granted, self._left_unread(stage))
                reporter.report(stage, lease, reports)
        for stage, progress in committed.progress.items():
            # A report without `idle` would end a range's idleness, which is reported on its own.
            if stage not in committed.emitted_ms or stage not in self._query.may_idle:
                lease = reporter.claim(stage, None)
                if lease is not None:
                    reporter.report_progress(stage, lease, progress)

    def _polled(
        self, stage: str, shards: Collection[str], left: Collection[str]
    ) -> dict[str, RangeReport]:
        """Return a report for each polled shard: an empty backlog, or some if it has rows `left`."""
        at = self._positions.get(stage)
        if at:
            return {each: replace(NO_BACKLOG, position=at.get(each, "")) for each in shards}
        return {each: SOME_BACKLOG if each in left else NO_BACKLOG for each in shards}

    def _end(self, reporter: DriverReporter, *, keeps: bool) -> None:
        """Replace the leases by unwatched ones, or give them back. They must not expire like a lost
        worker's.
        """
        if keeps:
            self._unwatched.keep(reporter)
            self._leases.clear()
        self._idle.clear()
        self._watch_again_ms = None
        self._report_again_ms = None
        leases, self._leases = self._leases, {}
        if leases:
            self._client.release(self._query.job, list(leases.values()))


def _set(leases: dict[str, Lease], stage: str, lease: Lease | None) -> None:
    if lease is None:
        leases.pop(stage, None)
    else:
        leases[stage] = lease
