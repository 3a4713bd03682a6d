"""Leases of a query's stages while none of its tasks holds them, and the work that waits meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from spark_agent.client.errors import LeaseConflict
from spark_agent.client.reports import Lease, RangeReport
from spark_agent.clock import Clock
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.committed import Committed
from spark_agent.supervision.driver_reporter import DriverReporter

_RENEWALS_PER_LEASE: Final = 3
"""Renewals of a lease that the driver keeps, before the lease would expire."""

_NOTHING_NEW: Final = RangeReport(records=0)


class LeaseKeeper:
    """Keeps the leases that a query's tasks leave to the driver, so that its stages have a worker.

    A query without new data, or one that waits for its next trigger or its throttle, runs no task for
    longer than a lease lasts. A query that continues from its checkpoint may take long for its first
    batch. The next batch's tasks outrank the driver's claim. Before the first batch of a new checkpoint
    is committed, the driver does not claim: it would outrank that batch's own tasks.

    Tasks hold their ranges from their report on. In a batch that runs for long, the driver reports
    the oldest work of the ranges that it is granted, until the batch is committed, so that a stuck batch
    shows. Reports are at least as far apart as the batch before was long: the service takes a range for
    stalled after three of them, and so a batch that takes thrice the time of the one before.

    Shards of a source with an idle policy are left out: see `UnwatchedLeases`.
    """

    def __init__(
        self,
        query: StartedQuery,
        is_in_batch: Callable[[], bool],
        not_final: Mapping[str, Collection[str]],
        clock: Clock,
    ) -> None:
        """`is_in_batch` returns whether a batch runs now; `not_final`: shards of each source."""
        watched = query.stages.watched
        self._stages = [name for name in query.stages.names if name not in watched]
        self._interval_ms = query.timing.ttl_ms // _RENEWALS_PER_LEASE
        self._is_in_batch = is_in_batch
        self._not_final = not_final
        self._clock = clock
        self._epoch: int | None = None
        """The last committed epoch that it has seen."""
        self._due_ms = 0
        self._due_soon: frozenset[str] = frozenset()
        """Stages that are due before."""
        self._work_due_ms = 0
        self._with_work: dict[str, set[str]] = {}
        """By source: shards that are reported to have work."""

    @property
    def due_ms(self) -> int:
        """The instant of the next claims, on the steady clock."""
        return self._due_ms

    def renew_soon(self, stages: Collection[str]) -> None:
        """Let the next step claim these stages: they were held by short leases, which nothing renews."""
        self._due_soon |= frozenset(stages)

    def keep(
        self,
        reporter: DriverReporter,
        committed: Committed,
        *,
        oldest_ms: int,
        waits: bool,
        held: Collection[str] = (),
    ) -> None:
        """Claim every stage's ranges, as often as the leases need it, and report their work.

        `oldest_ms`: everything that arrived before this moment of the wall clock is committed. `waits`:
        the next batch waits, and is not planned. `held`: stages that are idle, and held by other leases.
        """
        now_ms = self._clock.steady_ms()
        if committed.epoch != self._epoch:
            # First: if the service does not answer, the next step does it again.
            self._end_work(reporter)
            self._epoch = committed.epoch
            self._work_due_ms = now_ms + self._between_works_ms(committed)
        is_due = now_ms >= self._due_ms
        due_ms = now_ms + self._interval_ms if is_due else self._due_ms
        is_work_due = is_due and committed.epoch >= 0 and now_ms >= self._work_due_ms
        has_work = is_work_due and not waits and self._is_in_batch()
        if has_work:
            self._work_due_ms = now_ms + self._between_works_ms(committed)
        for stage in self._stages:
            if stage in held or not (is_due or stage in self._due_soon):
                continue
            try:
                lease = reporter.claim_some(stage, None)
            except LeaseConflict as conflict:
                free_ms = conflict.free_in_ms
            else:
                free_ms = lease.free_in_ms
                if has_work:
                    self._report_work(reporter, stage, lease, committed, oldest_ms)
            if free_ms is not None:
                # A task's lease expires: its range would be without a worker until the next claim.
                due_ms = min(due_ms, now_ms + free_ms)
        self._due_ms, self._due_soon = due_ms, frozenset()

    def _between_works_ms(self, committed: Committed) -> int:
        return max(self._interval_ms, committed.duration_ms)

    def _report_work(
        self,
        reporter: DriverReporter,
        stage: str,
        lease: Lease,
        committed: Committed,
        oldest_ms: int,
    ) -> None:
        if stage in committed.progress:
            progress = committed.progress[stage]
            reporter.report_progress(stage, lease, progress, oldest_work_ms=oldest_ms)
        elif stage in self._not_final:
            shards = set(lease.granted).intersection(self._not_final[stage])
            work = RangeReport(records=0, oldest_work_ms=oldest_ms)
            if shards and reporter.report(stage, lease, dict.fromkeys(sorted(shards), work)):
                self._with_work.setdefault(stage, set()).update(shards)

    def _end_work(self, reporter: DriverReporter) -> None:
        """Report that the work is done: the commit did so for the shards alone of which it had rows.

        A shard that a task holds has rows, which the next commit reports.
        """
        for stage in list(self._with_work):
            left = self._with_work[stage].intersection(self._not_final[stage])
            reporter.report_shards(stage, dict.fromkeys(left, _NOTHING_NEW))
            del self._with_work[stage]
