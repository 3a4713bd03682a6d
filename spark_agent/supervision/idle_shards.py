"""Reports of the driver for shards without rows, while its query finds nothing to read.

The service takes a shard for idle only while somebody looks and finds nothing. So the driver holds the
leases of such shards for as long as that is so, and gives them back when it no longer is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.reports import Lease, RangeReport, StageProgress
from spark_agent.clock import Clock
from spark_agent.executor.tally import Tallies, shards_with_rows
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.supervision.assignment import Assignment, Committed, QueryHandle
from spark_agent.supervision.driver_reporter import WATCH_MS, DriverReporter
from spark_agent.supervision.in_flight_reports import InFlightReports
from spark_agent.times import MAX_MS

_LOOK_MS: Final = 2_000
"""Interval of the reports of a query that has nothing to read."""
_RENEWALS_PER_LEASE: Final = 3

NO_BACKLOG: Final = RangeReport(records=0, backlog=0)
SOME_BACKLOG: Final = RangeReport(backlog=1)
"""A backlog of unknown size: files are counted, not their rows."""


class QuietWatch:
    """Watches a query that finds nothing to read, and reports that nothing waits."""

    def __init__(
        self,
        assignment: Assignment,
        not_final: Mapping[str, Collection[str]],
        *,
        client: Client,
        tallies: Tallies,
        in_flight: InFlightReports,
        unread: Mapping[str, Collection[str]],
        clock: Clock,
    ) -> None:
        """`not_final` are the shards of each source that are not final yet, `unread` those of each
        source of ours that have something unread; both change.
        """
        self._assignment = assignment
        self._not_final = not_final
        self._client = client
        self._tallies = tallies
        self._in_flight = in_flight
        self._unread = unread
        self._clock = clock
        self._told_backlogs = set(assignment.watched)  # perhaps by the driver before this one
        self._leases: dict[str, Lease] = {}
        self._found_nothing_ms: int | None = None
        self._watch_again_ms: int | None = None
        self._look_again_ms: int | None = None

    def report_backlogs(self, reporter: DriverReporter, batch: CommittedBatch) -> None:
        """Report that shards without rows in a batch may have some that it has not read.

        Either their source is rate limited, or nobody knows how it reads; a source of ours tells which
        they are. How many rows, nobody knows. A shard that is denied is being read by a task.
        """
        for stage in self._assignment.watched:
            seen = shards_with_rows(self._tallies, self._assignment.query, stage, batch.epoch)
            unread = self._may_have_more(stage, batch).difference(seen)
            if unread:
                self._told_backlogs.add(stage)
                reporter.report_shards(stage, dict.fromkeys(unread, SOME_BACKLOG), ttl_ms=WATCH_MS)

    def _may_have_more(self, stage: str, batch: CommittedBatch) -> set[str]:
        if stage in self._assignment.by_shard:
            return self._left_unread(stage)
        reads_all = self._assignment.reads_all
        if reads_all or (batch.read_nothing and self._assignment.looks_often):
            return set()
        return set(self._not_final[stage])

    def _left_unread(self, stage: str) -> set[str]:
        """Return the shards whose source has told that they wait, although they have more."""
        return set(self._not_final[stage]).intersection(self._unread.get(stage, ()))

    def watch(
        self,
        reporter: DriverReporter,
        committed: Committed,
        query: QueryHandle | None,
        *,
        drained: bool,
    ) -> None:
        """Tell the service that a query looks and finds nothing, while that is so.

        `query` is None while it does not look, or is about to say what it has found. Once it has
        `drained` its input, it has nothing more to look for.
        """
        now_ms = self._clock.steady_ms()
        if query is None or not self._finds_nothing(query, now_ms):
            self._end()
            return
        if self._watch_again_ms is None or now_ms >= self._watch_again_ms:
            self._hold_watched(reporter, committed)
            self._watch_again_ms = now_ms + WATCH_MS // _RENEWALS_PER_LEASE
        if self._look_again_ms is None:
            self._look_again_ms = now_ms + _LOOK_MS
        if now_ms >= self._look_again_ms and committed.epoch >= 0 and not drained:
            self._report_looks(reporter, committed)
            self._look_again_ms = now_ms + _LOOK_MS

    def _finds_nothing(self, query: QueryHandle, now_ms: int) -> bool:
        """Return whether the query has looked just now, and found nothing.

        What its last trigger found is known once that has ended. One that hangs, since its storage does
        not answer, proves nothing.
        """
        if not self._assignment.looks_often:
            return False
        if query.has_just_found_nothing():
            self._found_nothing_ms = now_ms
        found_ms = self._found_nothing_ms
        found_nothing = found_ms is not None and now_ms - found_ms <= WATCH_MS
        return found_nothing and query.has_no_new_data()

    def _hold_watched(self, reporter: DriverReporter, committed: Committed) -> None:
        """Hold the leases of what the service may take for idle.

        The lease proves that somebody looks. When a batch finds something to read, nobody renews it.
        """
        self._leases.clear()
        for stage in self._assignment.watched:
            self._in_flight.forget(stage)
            shards = sorted(self._not_final[stage])
            left = self._left_unread(stage)
            if stage in self._told_backlogs or left:
                reports = _looked(shards, left)
                told = reporter.report_shards(stage, reports, ttl_ms=WATCH_MS)
                if len(told) == len(shards) and not left:
                    self._told_backlogs.discard(stage)
                else:
                    self._told_backlogs.add(stage)
            elif shards and (lease := reporter.claim(stage, shards, ttl_ms=WATCH_MS)):
                self._leases[stage] = lease
        for stage, input_ms in committed.emitted_ms.items():
            if stage in self._assignment.may_idle and input_ms != MAX_MS:
                # Its ranges keep nothing that has not come out.
                lease = reporter.claim(stage, None, ttl_ms=WATCH_MS)
                if lease is not None:
                    reporter.report_progress(stage, lease, StageProgress(input_ms), idle=True)

    def _report_looks(self, reporter: DriverReporter, committed: Committed) -> None:
        """Report that nothing is left to do.

        Else the processing watermark would stand at the last batch, as if work were waiting since then.
        """
        for stage, shards in self._not_final.items():
            if stage not in self._assignment.watched:
                reporter.report_shards(stage, _looked(shards, self._left_unread(stage)))
            elif stage in self._leases:
                lease = self._leases[stage]
                reporter.report(stage, lease, _looked(lease.granted, self._left_unread(stage)))
        for stage, progress in committed.progress.items():
            # A report that does not say it would end a range's idleness, which is reported on its own.
            if stage not in committed.emitted_ms or stage not in self._assignment.may_idle:
                lease = reporter.claim(stage, None)
                if lease is not None:
                    reporter.report_progress(stage, lease, progress)

    def _end(self) -> None:
        """Give the leases back: they neither prove anything now, nor shall they look like lost ones."""
        self._watch_again_ms = None
        self._look_again_ms = None
        leases, self._leases = self._leases, {}
        if leases:
            self._client.release(self._assignment.job, list(leases.values()))


def _looked(shards: Collection[str], left: Collection[str]) -> dict[str, RangeReport]:
    """Return what a look has found, by shard: nothing, or what was `left`."""
    return {shard: SOME_BACKLOG if shard in left else NO_BACKLOG for shard in shards}
