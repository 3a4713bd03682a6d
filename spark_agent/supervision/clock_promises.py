"""Promises of sources whose strategy goes by the clock. The driver makes them, for all shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.client.reports import RangeReport
from spark_agent.clock import Clock
from spark_agent.started_query import StartedQuery
from spark_agent.strategies import IngressTime
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.read_through import ReadThrough

_INTERVAL_MS: Final = 1_000
"""Interval of the reports while no batch is committed."""


class ClockPromises:
    """Reports a query's promises by the clock after each epoch, and every second between."""

    def __init__(
        self,
        query: StartedQuery,
        read: ReadThrough,
        not_final: Mapping[str, Collection[str]],
        clock: Clock,
    ) -> None:
        """`not_final` are the shards of each source that are not final yet; they change."""
        self._strategies = query.clocks
        self._read = read
        self._not_final = not_final
        self._clock = clock
        self._reported: dict[str, dict[str, int]] = {stage: {} for stage in query.clocks}
        self._epoch: int | None = None
        self._due_ms = 0

    def report(self, reporter: DriverReporter, *, at_end: bool) -> None:
        """Report promises that have advanced, if that is due.

        Before the first commit, the driver's claim would outrank the tasks of the first batch. A shard
        that a task of the next batch holds is denied, and is reported after that batch.
        """
        now_ms = self._clock.steady_ms()
        if reporter.epoch < 0:
            return
        if reporter.epoch == self._epoch and now_ms < self._due_ms and not at_end:
            return
        for stage in self._strategies:
            reported = self._reported[stage]
            promises = {
                shard: promise
                for shard, promise in self._promises(stage).items()
                if shard not in reported or promise > reported[shard]
            }
            reports = {shard: RangeReport(promise) for shard, promise in promises.items()}
            for shard in reporter.report_shards(stage, reports):
                reported[shard] = promises[shard]
        self._epoch, self._due_ms = reporter.epoch, now_ms + _INTERVAL_MS

    def _promises(self, stage: str) -> dict[str, int]:
        shards, strategy = self._not_final[stage], self._strategies[stage]
        if isinstance(strategy, IngressTime):
            # Any batch that is still to come is planned after the latest poll, and its rows get a later
            # time: the driver lets none be planned while the clock is behind.
            polled_ms = self._read.polled_ms
            through = {} if polled_ms is None else dict.fromkeys(shards, polled_ms)
        else:
            through = self._read.of(stage, shards)
        return {shard: strategy.promise_at(ms) for shard, ms in through.items()}
