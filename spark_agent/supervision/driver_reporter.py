"""The driver's own claims and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.errors import InputAhead, LeaseConflict, LeaseLost
from spark_agent.client.reports import Lease, RangeReport, Rank, StageProgress

DRIVER_ATTEMPT: Final = 2**53
"""The attempt in the driver's claims: the largest number that the service takes. A task's is a count of
all tasks of its application, in 64 bits. The driver outranks all tasks of its epoch, which have ended by
then, but not the next epoch's tasks, since the epoch is compared first. Once the query has ended, the
next epoch's tasks were interrupted, and what they hold is claimed too."""

WATCH_MS: Final = 1_500
"""The driver's lease on shards that it watches. It ends soon after a batch has begun to read."""


def _not_one(stage: str) -> frozenset[str]:
    """Return the retired ranges of a stage, where none is."""
    del stage
    return frozenset()


@dataclass(frozen=True, slots=True)
class DriverReporter:
    """Claims ranges and reports for them, with the driver's rank after one epoch.

    A report ends the retirement of its range. So of a retired range, only news are reported: a report
    of facts alone is left out, as if it had been made. While the retired ranges cannot be looked up,
    facts are left out of any range, unless the service could be early without them.
    """

    client: Client
    job: str
    query: str
    ttl_ms: int
    """Default time to live of its leases."""
    run: int
    epoch: int
    """The last epoch that was committed; -1: none."""
    resumed_after: int = -1
    """The last batch that Spark had committed when the query started; -1: none."""
    has_ended: bool = False
    """True once the query has ended: a batch that it leaves uncommitted was interrupted."""
    retired: Callable[[str], frozenset[str] | None] = _not_one
    """Returns the retired ranges of a stage; None: they are not known now."""

    def claim(
        self, stage: str, ranges: Sequence[str] | None, *, ttl_ms: int | None = None
    ) -> Lease | None:
        """Claim ranges (None: all); return None if others hold them."""
        try:
            return self.claim_some(stage, ranges, ttl_ms=ttl_ms)
        except LeaseConflict:
            return None

    def hold(
        self, stage: str, ranges: Sequence[str], held: Lease | None, *, ttl_ms: int
    ) -> Lease | None:
        """Renew a lease on ranges, or claim them; return None if others hold them.

        A claim ends the idleness of its ranges, and a renewal does not. A lease that lacks some of the
        ranges is claimed anew, and so is one that has lost some: packed reports are of all that was
        granted.
        """
        kept = () if held is None else self.client.renew(self.job, [held])
        if held and kept and set(ranges) <= set(kept[0].granted) == set(held.granted):
            return kept[0]
        return self.claim(stage, ranges, ttl_ms=ttl_ms)

    def claim_some(
        self,
        stage: str,
        ranges: Sequence[str] | None,
        *,
        ttl_ms: int | None = None,
        watched: bool = True,
    ) -> Lease:
        """Claim ranges (None: all). Raises `LeaseConflict` if others hold them."""
        return self.client.claim(
            self.job,
            stage,
            ranges,
            holder=self._holder,
            ttl_ms=ttl_ms or self.ttl_ms,
            rank=self._rank,
            watched=watched,
        )

    @property
    def _holder(self) -> str:
        return f"{self.query}.driver"

    @property
    def _rank(self) -> Rank:
        done = max(self.epoch, self.resumed_after)
        outranked = done + 1 if self.has_ended else max(done, 0)
        return Rank(self.run, outranked, DRIVER_ATTEMPT)

    @property
    def may_hold(self) -> bool:
        """True if its claims leave the tasks of the next batch theirs. Before the first batch of a new
        checkpoint is committed, they would outrank that batch's own tasks.
        """
        return max(self.epoch, self.resumed_after) >= 0

    def report_shards(
        self,
        stage: str,
        reports: Mapping[str, RangeReport],
        *,
        ttl_ms: int | None = None,
        watched: bool = True,
    ) -> list[str]:
        """Report for shards of a source; return the granted ones, and the retired ones left out."""
        left_out = sorted(self._left_out(stage, reports))
        due = {shard: reports[shard] for shard in sorted(reports) if shard not in left_out}
        if left_out and self.retired(stage) is None:
            left_out = []  # they are due again
        if not due:
            return left_out
        try:
            reported = self.client.claim_and_report(
                self.job,
                stage,
                due,
                holder=self._holder,
                ttl_ms=ttl_ms or self.ttl_ms,
                rank=self._rank,
                watched=watched,
            )
        except LeaseConflict:
            return left_out
        return [*reported.granted, *left_out]

    def _left_out(self, stage: str, reports: Mapping[str, RangeReport]) -> frozenset[str]:
        facts = {name for name, report in reports.items() if not report.has_news}
        retired = self.retired(stage) if facts else frozenset[str]()
        if retired is not None:
            return retired & facts
        # Any other report keeps a shard from looking quiet.
        return frozenset(
            each
            for each in facts
            if reports[each].records == 0
            and not reports[each].backlog
            and not reports[each].pending
        )

    def report(self, stage: str, lease: Lease, reports: Mapping[str, RangeReport]) -> bool:
        """Report under a lease; return whether it was not lost to the next batch's tasks meanwhile."""
        left_out = self._left_out(stage, reports)
        due = {shard: report for shard, report in reports.items() if shard not in left_out}
        if not due:
            return True
        try:
            self.client.report(self.job, stage, lease, due)
        except LeaseLost:
            return False
        return True

    def report_progress(
        self,
        stage: str,
        lease: Lease,
        progress: StageProgress,
        *,
        idle: bool = False,
        oldest_work_ms: int | None = None,
        is_new: bool = False,
    ) -> bool:
        """Report a keyed stage's progress for what a lease has granted; return whether it counts.

        Progress `is_new` if a batch has made it: the report is in place of a task's, and ends the
        retirement of a range. Other progress is a fact: the promise of the stage is that of the ranges
        that are not retired.
        """
        report = RangeReport(idle=idle, holds=progress.holds, oldest_work_ms=oldest_work_ms)
        left_out = frozenset[str]() if is_new else self.retired(stage)
        if left_out is None:
            return True
        reports = {each: report for each in lease.granted if each not in left_out}
        if not reports:
            return True
        try:
            self.client.report(self.job, stage, lease, reports, input_ms=progress.input_ms)
        except (InputAhead, LeaseLost):
            return False
        return True
