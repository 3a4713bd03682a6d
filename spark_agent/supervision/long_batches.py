"""Reports of the oldest work of a batch that runs for long, so that a stuck batch is seen as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from spark_agent.client.reports import RangeReport
from spark_agent.clock import Clock
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.driver_reporter import DriverReporter

_REPORTS_PER_LEASE: Final = 3
_NOTHING_NEW: Final = RangeReport(records=0)


class LongBatches:
    """Reports for the ranges that a running batch leaves to the driver, until the batch is committed.

    Tasks hold their ranges for as long as a lease, after which the driver's claims are granted. Reports
    are as far apart as the batch before was long, at least a third of a lease: the service takes a range
    for stalled after three of them, and so a batch that takes thrice the time of the one before. Shards
    of a source with an idle policy are left out: a lease while a batch reads would prove that they are
    quiet.
    """

    def __init__(
        self,
        query: StartedQuery,
        is_running: Callable[[], bool],
        not_final: Mapping[str, Collection[str]],
        clock: Clock,
    ) -> None:
        """`is_running` returns whether a batch runs now."""
        watched = query.stages.watched
        self._sources = [each.name for each in query.stages.sources if each.name not in watched]
        self._shortest_ms = query.timing.ttl_ms // _REPORTS_PER_LEASE
        self._is_running = is_running
        self._not_final = not_final
        self._clock = clock
        self._epoch: int | None = None
        self._due_ms = 0
        self._reported: dict[str, set[str]] = {}
        """By source: shards that are reported to have work."""

    def report(
        self, reporter: DriverReporter, committed: Committed, *, oldest_ms: int, waits: bool
    ) -> None:
        """Report if a batch has been running for long. `oldest_ms`: everything that arrived before this
        moment of the wall clock is committed. `waits`: the next batch waits, and is not planned.
        """
        now_ms = self._clock.steady_ms()
        if committed.epoch < 0:
            # A claim would outrank the tasks of the first batch.
            return
        if committed.epoch != self._epoch:
            self._epoch = committed.epoch
            self._due_ms = now_ms + self._interval_ms(committed)
            self._end(reporter)
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + self._interval_ms(committed)
        if waits or not self._is_running():
            return
        for stage in self._sources:
            work = dict.fromkeys(
                self._not_final[stage], RangeReport(records=0, oldest_work_ms=oldest_ms)
            )
            granted = reporter.report_shards(stage, work)
            self._reported.setdefault(stage, set()).update(granted)
        for stage, progress in committed.progress.items():
            lease = reporter.claim(stage, None)
            if lease is not None:
                reporter.report_progress(stage, lease, progress, oldest_work_ms=oldest_ms)

    def _interval_ms(self, committed: Committed) -> int:
        return max(self._shortest_ms, committed.duration_ms)

    def _end(self, reporter: DriverReporter) -> None:
        """Report that the work is done: the commit did so for the shards alone of which it had rows.

        A shard that a task holds has rows, which the next commit reports.
        """
        reported, self._reported = self._reported, {}
        for stage, shards in reported.items():
            reporter.report_shards(
                stage, dict.fromkeys(shards.intersection(self._not_final[stage]), _NOTHING_NEW)
            )
