"""Counts of rows that should be rare, and the warnings about them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import Counter as Metric

from spark_agent.executor.tally import Count, Tally
from spark_agent.times import instant_text

_ROWS: Final = Metric(
    "tidegauge_agent_events",
    "Rows that should be rare, by job, stage and kind (early_rows, late_rows, …).",
    ["job", "stage", "kind"],
)


def count_rows(job: str, stage: str, kind: str, count: int) -> None:
    """Add to the counter of one kind."""
    _ROWS.labels(job, stage, kind).inc(count)


_log: Final = logging.getLogger("spark_agent")

_MESSAGES: Final[Mapping[str, str]] = {
    Count.REPORTS_DROPPED: "reports were dropped by their tasks; the driver sends them instead",
    Count.LATE_ROWS: (
        "rows are older than their source had promised: its strategy promises too much, or their shard "
        "has just joined, or was idle"
    ),
    Count.DROPPED_ROWS: "rows were dropped as late. Rows of one window and key may count as one",
    Count.ROWS_BEFORE_1970: (
        "rows are dated before 1970, where Spark's watermark starts: its operators drop them"
    ),
    Count.UNDATED_ROWS: (
        "rows have no event time: windows leave them out, outer joins and groups by time keep them for "
        "ever, and no watermark covers them. In JSON and CSV a time that Spark cannot parse is none"
    ),
    Count.UNDATED_RESULTS: (
        "rows leave the stage without an event time: windows of a stage below would leave them out. In "
        "an outer join, stamp rows with coalesce() of both sides' times"
    ),
    Count.FAR_FUTURE_ROWS: (
        "rows are dated further ahead of the clock than the tolerance allows, and do not count for the "
        "watermark. A number of milliseconds that is read as a timestamp counts as seconds: compute the "
        "time with timestamp_millis()"
    ),
    Count.UNKNOWN_SHARD_ROWS: (
        "rows belong to a shard that is not in the specification, or that cannot join a dynamic source "
        "by its name: the watermark does not wait for them. A name has up to 128 letters A-Z and a-z, "
        "digits, and . _ -, and starts with a letter or a digit"
    ),
    Count.SPLIT_SHARDS: (
        "times a shard's rows were in several tasks of a batch: this source is not partitioned by "
        "shard, so leave out partitioned_by_shard=True"
    ),
}
_REREAD_MESSAGE: Final = (
    "rows are older than their source had promised: this query rereads input that the job has "
    "already covered, since its checkpoint is new or older than the job"
)


class RowCounts:
    """The counts of one query."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.total: Counter[str] = Counter()
        self.rereads = False
        """True if the query rereads what the job has covered, so that its old rows are expected."""

    def record(self, stage: str, tallies: Sequence[Tally]) -> None:
        """Add what the tasks of an epoch have counted."""
        for tally in tallies:
            split = sum(len(partitions) > 1 for partitions in tally.partitions.values())
            self.add(stage, {**tally.total, Count.SPLIT_SHARDS: split})
            if tally.early is not None and not self.rereads:
                _log.warning(
                    "stage %s: %d rows left it older than it had promised: its published watermark "
                    "was %s, the oldest row is dated %s. To readers they are late. Stamp rows with "
                    "the end of their window, or declare how far behind the watermark they may be: "
                    "report(…, delay=…)",
                    stage,
                    tally.total.get(Count.EARLY_ROWS, 0),
                    instant_text(tally.early.watermark_ms),
                    instant_text(tally.early.row_ms),
                )

    def add(self, stage: str, counts: Mapping[str, int]) -> None:
        """Add counts, and warn of those that are not zero."""
        for what, count in counts.items():
            if not count:
                continue
            before = self.total[what]
            self.total[what] += count
            count_rows(self._job, stage, what, count)
            # Logged at the first, then each time the count gains a digit: it may be every row.
            if what in _MESSAGES and (before == 0 or len(str(before + count)) > len(str(before))):
                again = what == Count.LATE_ROWS and self.rereads
                meaning = _REREAD_MESSAGE if again else _MESSAGES[what]
                _log.warning("stage %s: %d %s", stage, before + count, meaning)
