"""Leases of a query's stages while none of its tasks holds them."""

from __future__ import annotations

from typing import Final

from spark_agent.clock import Clock
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.driver_reporter import DriverReporter

_RENEWALS_PER_LEASE: Final = 3
"""Renewals of a lease that the driver keeps, before the lease would expire."""


class LeaseKeeper:
    """Keeps the leases of a query between its batches, so that its stages have a worker.

    A query without new data, or one that waits for its next trigger or its throttle, runs no task for
    longer than a lease lasts. The next batch's tasks outrank the driver's claim. Before the first batch
    is committed, the driver does not claim: it would outrank that batch's own tasks.
    """

    def __init__(self, query: StartedQuery, clock: Clock) -> None:
        # For a source with an idle policy, the lease would prove that the query polls it.
        self._stages = [name for name in query.stages.names if name not in query.stages.watched]
        self._interval_ms = query.timing.ttl_ms // _RENEWALS_PER_LEASE
        self._clock = clock
        self._due_ms: int | None = None

    def keep(self, reporter: DriverReporter) -> None:
        """Claim every stage's ranges, as often as the leases need it."""
        now_ms = self._clock.steady_ms()
        if self._due_ms is not None and now_ms >= self._due_ms:
            for stage in self._stages:
                reporter.claim(stage, None)
        if self._due_ms is None or now_ms >= self._due_ms:
            self._due_ms = now_ms + self._interval_ms
