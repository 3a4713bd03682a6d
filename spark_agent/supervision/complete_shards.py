"""Making the shards final whose folders are complete, in queries of every kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.clock import Clock
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.batch_waits import BatchWaits
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.finalisation import Finalisation
from spark_agent.supervision.pending_reports import PendingReports

_VERIFY_AFTER_MS: Final = 5_000
"""Longer than the service takes to save a promise, unless its checkpoint interval is set to more."""


class CompleteShards:
    """Reports of shards as final, once nothing follows in their folders.

    Such a report is never early. A shard is due once Spark has committed a batch whose offset has the
    shard as complete (`spark_agent.sources.offsets`): then all rows of the folder have been emitted, the
    checkpoint has the fact, and each later file fails the query. Nor is a report lost: the source sends
    what the checkpoint has at each start, a shard that is due stays so until the service has taken its
    report, and a while later the driver checks that the service still has it.
    """

    def __init__(
        self, query: StartedQuery, waits: BatchWaits, finalisation: Finalisation, clock: Clock
    ) -> None:
        self._waits = waits
        self._finalisation = finalisation
        self._clock = clock
        self._dynamic = frozenset(query.stages.dynamic)
        self._verify_at_ms: int | None = None

    def is_due(self, committed_epoch: int) -> bool:
        """Return whether a report is still to be made."""
        due = self._waits.complete_after(committed_epoch)
        return any(
            len(self._left(stage, shards)) > self._keeps_one(stage, shards)
            for stage, shards in due.items()
        )

    def report(
        self, reporter: DriverReporter, pending: PendingReports, committed_epoch: int
    ) -> None:
        """Report the shards that are due. Those that are denied are retried later."""
        due = self._waits.complete_after(committed_epoch)
        self._verify(due)
        for stage, shards in due.items():
            left = self._left(stage, shards)
            if left and self._keeps_one(stage, shards):
                left.remove(self._finalisation.furthest(stage, left))
            if left and self._finalisation.report_final(reporter, pending, stage, left):
                self._verify_at_ms = self._clock.steady_ms() + _VERIFY_AFTER_MS

    def verify_soon(self) -> None:
        """Check with the next report that the service has the earlier ones: it has a new ledger."""
        self._verify_at_ms = self._clock.steady_ms()

    def _verify(self, due: Mapping[str, Collection[str]]) -> None:
        """Find reports that the service has lost, because it was killed before it had saved them."""
        if self._verify_at_ms is None or self._clock.steady_ms() < self._verify_at_ms:
            return
        for stage, shards in due.items():
            self._finalisation.find_lost(stage, shards)
        self._verify_at_ms = None

    def _left(self, stage: str, due: Collection[str]) -> set[str]:
        """Return the shards that are due and not final."""
        return self._finalisation.not_final[stage].intersection(due)

    def _keeps_one(self, stage: str, due: Collection[str]) -> bool:
        """Return whether the furthest of the shards that are due is not reported yet.

        A dynamic source stays open when all of its shards are complete: a new folder may join. It would
        be final if its last shard were. So the furthest one stays as it is, until another one has
        joined. The watermark stands there meanwhile, where it has been.
        """
        return stage in self._dynamic and self._finalisation.not_final[stage].issubset(due)
