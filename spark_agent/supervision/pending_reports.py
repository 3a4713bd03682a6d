"""Reports of committed epochs that have not reached the service with their commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.client.reports import RangeReport, StageProgress
from spark_agent.clock import Clock
from spark_agent.supervision.driver_reporter import DriverReporter

_REPEAT_AFTER_MS: Final = 5_000
"""Longer than the service takes to save a promise, unless its checkpoint interval is set to more."""


class PendingReports:
    """Reports that the driver still has to send for tasks that could not.

    It reports outside epochs. The service may be killed before it has saved such a promise, and a shard
    without new rows would never make it again. So such a promise is made twice.
    """

    def __init__(self, clock: Clock, watched: Collection[str] = ()) -> None:
        """`watched`: sources with an idle policy. Their promises are made once, under unwatched leases,
        since any other would prove that their shards are quiet while a batch reads.
        """
        self._clock = clock
        self._watched = watched
        self._repeats: dict[str, dict[str, RangeReport]] = {}
        self._repeat_at_ms: int | None = None
        self._shards: dict[str, dict[str, RangeReport]] = {}
        self._progress: dict[str, StageProgress] = {}

    def __bool__(self) -> bool:
        return bool(self._shards or self._progress)

    def add(self, stage: str, reports: Mapping[str, RangeReport]) -> None:
        """Add reports for a source's shards to those that are pending."""
        add_reports(self._shards.setdefault(stage, {}), reports)

    def remove(self, stage: str, shard: str) -> None:
        """Drop what is pending for a shard."""
        self._shards.get(stage, {}).pop(shard, None)
        self._repeats.get(stage, {}).pop(shard, None)

    def remove_all(self, stage: str) -> None:
        """Drop what is pending for all shards of a source."""
        self._shards.pop(stage, None)
        self._repeats.pop(stage, None)

    def set_progress(self, stage: str, progress: StageProgress | None) -> None:
        """Set how far a keyed stage is; None: the service has it."""
        if progress is None:
            self._progress.pop(stage, None)
        else:
            self._progress[stage] = progress

    def report(self, reporter: DriverReporter) -> None:
        """Report what is pending. It still holds: Spark has committed the epochs it belongs to.

        A range that a task of the next batch already holds is denied and stays pending: that batch's
        commit covers it, or the driver's next claim outranks that task's. If the query ends within that
        batch, the driver's claim outranks its tasks at once.
        """
        for stage, reports in list(self._shards.items()):
            watched = stage not in self._watched
            for shard in reporter.report_shards(stage, reports, watched=watched):
                self._repeat_later(stage, shard, reports.pop(shard))
            if not reports:
                del self._shards[stage]
        self._repeat(reporter)
        for stage, progress in list(self._progress.items()):
            lease = reporter.claim(stage, None)
            if lease is None:
                continue
            is_taken = reporter.report_progress(stage, lease, progress, is_new=True)
            if is_taken and not lease.denied:
                del self._progress[stage]

    def _repeat_later(self, stage: str, shard: str, report: RangeReport) -> None:
        if stage in self._watched or (report.watermark_ms is None and not report.final):
            return
        # Without its rows, which were counted with the first report.
        again = RangeReport(report.watermark_ms, final=report.final)
        self._repeats.setdefault(stage, {})[shard] = again
        self._repeat_at_ms = self._clock.steady_ms() + _REPEAT_AFTER_MS

    def _repeat(self, reporter: DriverReporter) -> None:
        """Make promises a second time. Those of shards that a task holds come later."""
        now_ms = self._clock.steady_ms()
        if self._repeat_at_ms is None or now_ms < self._repeat_at_ms:
            return
        for stage, reports in list(self._repeats.items()):
            for shard in reporter.report_shards(stage, reports):
                del reports[shard]
            if not reports:
                del self._repeats[stage]
        self._repeat_at_ms = now_ms + _REPEAT_AFTER_MS if self._repeats else None


def add_reports(reports: dict[str, RangeReport], later: Mapping[str, RangeReport]) -> None:
    """Add later reports, by shard."""
    for shard, report in later.items():
        reports[shard] = reports[shard] + report if shard in reports else report
