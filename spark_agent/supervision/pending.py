"""Reports of committed epochs that have not reached the service with their commit."""

from __future__ import annotations

from collections.abc import Mapping

from spark_agent.messages import RangeReport, StageProgress
from spark_agent.supervision.reporter import DriverReporter


class PendingReports:
    """What the driver still has to report for tasks that could not."""

    def __init__(self) -> None:
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

    def set_progress(self, stage: str, progress: StageProgress | None) -> None:
        """Set how far a keyed stage is; None: the service knows."""
        if progress is None:
            self._progress.pop(stage, None)
        else:
            self._progress[stage] = progress

    def report(self, reporter: DriverReporter) -> None:
        """Report what is pending. It still holds: Spark has committed the epochs it belongs to.

        A range that a task of the next batch already holds is denied and stays pending: that batch's
        commit covers it, or the driver's next claim outranks that task's.
        """
        for stage, reports in list(self._shards.items()):
            for shard in reporter.report_shards(stage, reports):
                del reports[shard]
            if not reports:
                del self._shards[stage]
        for stage, progress in list(self._progress.items()):
            lease = reporter.claim(stage, None)
            if lease is None:
                continue
            if reporter.report_progress(stage, lease, progress) and not lease.denied:
                del self._progress[stage]


def add_reports(reports: dict[str, RangeReport], later: Mapping[str, RangeReport]) -> None:
    """Add later reports, by shard."""
    for shard, report in later.items():
        reports[shard] = reports[shard] + report if shard in reports else report
