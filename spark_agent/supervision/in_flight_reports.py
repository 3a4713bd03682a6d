"""The driver's reports of what sources with percentile watermarks have in flight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.client.reports import RangeReport
from spark_agent.client.spec import StageSpec
from spark_agent.clock import Clock
from spark_agent.executor.in_flight import StageInFlight
from spark_agent.executor.tally import Tally
from spark_agent.strategies import EARLIEST_MS
from spark_agent.supervision.driver_reporter import DriverReporter

_REPEAT_MS: Final = 20_000
"""Interval at which rows in flight are reported again. They are soft state of the service."""
_SKETCHES_PER_REPORT: Final = 100
"""Each takes several kilobytes."""


class InFlightReports:
    """Rows in flight of the query's sources, and the part that is still to be reported."""

    def __init__(
        self, stages: Mapping[str, StageInFlight], watched: Collection[str], clock: Clock
    ) -> None:
        """`watched` are the stages whose shards the service may take for idle."""
        self._stages = stages
        self._watched = watched
        self._clock = clock
        self._repeat_ms: int | None = None

    def add(self, stage: StageSpec, tally: Tally, promised: Mapping[str, int]) -> None:
        """Add what the tasks of a committed epoch have brought. `promised` are the promises of shards
        that the driver makes.
        """
        here = self._stages.get(stage.name)
        if here is None:
            return
        for shard, packed in tally.in_flight.items():
            promise_ms = tally.promises[shard].watermark_ms
            if promise_ms is None:
                promise_ms = promised.get(shard, EARLIEST_MS)
            here.add(shard, packed, promise_ms)
        if stage.has_idle_policy:
            # The service takes no shard for idle that has something in flight.
            here.keep_only(tally.promises)

    def forget(self, stage: str) -> None:
        """Forget what a stage has in flight: its shards have become quiet."""
        if stage in self._stages:
            self._stages[stage].keep_only(())

    def report(self, reporter: DriverReporter, not_final: Mapping[str, Collection[str]]) -> None:
        """Report what shards have in flight after the last epoch, except final ones: a claim would let a
        shard that has left a dynamic source join again. `not_final` is by source.

        The tasks cannot: each has the rows of one batch only. A shard that a task of the next batch
        already holds is denied, and is reported after that.
        """
        now_ms = self._clock.steady_ms()
        is_due = self._repeat_ms is None or now_ms >= self._repeat_ms
        if is_due:
            self._repeat_ms = now_ms + _REPEAT_MS
        for stage, in_flight in self._stages.items():
            if is_due:
                in_flight.repeat()
            unreported = in_flight.unreported(_SKETCHES_PER_REPORT)
            in_flight.mark_reported(unreported.keys() - set(not_final[stage]))
            # Without rows: those were reported by the tasks.
            reports = {
                shard: RangeReport(records=0, pending=each)
                for shard, each in unreported.items()
                if shard in not_final[stage]
            }
            # The next batch may be running: its query does not poll these shards.
            watched = stage not in self._watched
            in_flight.mark_reported(reporter.report_shards(stage, reports, watched=watched))
