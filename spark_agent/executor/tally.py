"""Tallies that tasks send to the driver, besides their reports to the service.

A tally travels in a Spark accumulator. Spark merges the updates of a batch's successful tasks before it
completes the batch, so the driver has all of them when it commits the epoch, and can report whatever
did not reach the service (see `spark_agent.supervision`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pyspark import AccumulatorParam

from spark_agent.client.reports import RangeReport
from spark_agent.strategies import Rows
from spark_agent.strategies.protocols import merged
from spark_agent.times import MAX_MS

TallyKey = tuple[str, str, int]
"""The name of the query's start, the stage, the epoch."""


class Count(StrEnum):
    """Kinds of rare rows and events that are counted."""

    REPORTS_DROPPED = "reports_dropped"
    """Ranges that a task could not report: the service was unavailable or slow, or fenced the task."""
    EARLY_ROWS = "early_rows"
    """Rows that left a stage older than its promise: for downstream stages they are late."""
    LATE_ROWS = "late_rows"
    """Rows older than the promise of their source: its strategy promises too much. Windows that are
    still open include them, closed ones do not."""
    DROPPED_ROWS = "dropped_rows"
    """Rows that were dropped as late. With `late="drop"` each row counts. Where Spark's operators drop
    them, and Spark aggregates before its state, as it does for windows, the rows of one key and window
    count once."""
    ROWS_ASIDE = "rows_aside"
    """Late rows that were put aside by `split_late`."""
    CORRECTIONS = "corrections"
    """Values of windows that had fired before, with `allowed_lateness`."""
    ROWS_BEFORE_1970 = "rows_before_1970"
    """Rows dated before 1970, the lowest watermark of Spark: its operators drop them as late."""
    UNDATED_ROWS = "undated_rows"
    """Rows of a source without an event time: windows leave them out, outer joins and groups by time
    keep them for ever, and no watermark covers them."""
    UNDATED_RESULTS = "undated_results"
    """Rows that leave a keyed stage without an event time, as an unmatched row of an outer join that is
    stamped by the other side: windows of a downstream stage leave them out."""
    FAR_FUTURE_ROWS = "far_future_rows"
    """Rows dated further ahead of the clock than the tolerance allows; they do not raise a promise."""
    UNKNOWN_SHARD_ROWS = "unknown_shard_rows"
    """Rows of a shard that the stage does not have, or that cannot join by its name; they pass, but
    nothing waits for them."""
    SPLIT_SHARDS = "split_shards"
    """Shards whose rows were in several tasks of a batch, although `partitioned_by_shard` was set."""


@dataclass(frozen=True, slots=True, order=True)
class EarlyRow:
    """The oldest row that left a stage behind its published watermark (both ms)."""

    row_ms: int
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Tally:
    """The promises and counts of a stage's tasks in one epoch."""

    promises: Mapping[str, RangeReport] = field(default_factory=dict[str, RangeReport])
    """Report of each shard's task: its promise, and its number of rows."""
    counts: Mapping[int, Mapping[str, int]] = field(default_factory=dict[int, Mapping[str, int]])
    """By partition, then by `Count`."""
    partitions: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """The partitions in which each shard had rows."""
    early: EarlyRow | None = None
    in_flight: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """By shard, a sketch of the event times that its task has read and its promise has not passed; only
    for a source that declares percentiles."""
    rows: Mapping[str, Mapping[int, Rows]] = field(default_factory=dict[str, Mapping[int, Rows]])
    """By shard and partition, the rows that a strategy with state needs; only for such a strategy."""

    def __add__(self, other: Tally) -> Tally:
        """Merge two tallies. Of two promises for a shard (a retried task), the smaller one counts.

        If a partition was counted more than once, the larger count is taken, not the sum:
        `foreachBatch` may read its rows several times.

        >>> a, b = RangeReport(5), RangeReport(3)
        >>> both = Tally({"a": a}, {0: {"x": 1}}) + Tally({"a": b, "b": a}, {0: {"x": 1}, 1: {"x": 2}})
        >>> [report.watermark_ms for report in both.promises.values()], both.total
        ([3, 5], {'x': 3})
        """
        promises = dict(self.promises)
        for shard, report in other.promises.items():
            promises[shard] = min(report, promises.get(shard, report), key=_promised_ms)
        partitions = dict(self.partitions)
        for shard, some in other.partitions.items():
            partitions[shard] = partitions.get(shard, frozenset()) | some
        return Tally(
            promises,
            {
                partition: dict(
                    Counter(self.counts.get(partition, {}))
                    | Counter(other.counts.get(partition, {}))
                )
                for partition in self.counts.keys() | other.counts.keys()
            },
            partitions,
            min((each for each in (self.early, other.early) if each is not None), default=None),
            # Two sketches of a shard are of two attempts at one task: either will do.
            {**other.in_flight, **self.in_flight},
            {
                shard: _of_more_rows(self.rows.get(shard, {}), other.rows.get(shard, {}))
                for shard in self.rows.keys() | other.rows.keys()
            },
        )

    @property
    def total(self) -> dict[str, int]:
        """The counts of all partitions together."""
        found: Counter[str] = Counter()
        for counts in self.counts.values():
            found.update(counts)
        return dict(found)


def _of_more_rows(one: Mapping[int, Rows], other: Mapping[int, Rows]) -> dict[int, Rows]:
    """Return the rows of each partition. `foreachBatch` may first read a part of a partition."""
    found = dict(one)
    for partition, rows in other.items():
        found[partition] = max(rows, found.get(partition, rows), key=_count)
    return found


def _count(rows: Rows) -> int:
    return rows.count


def _promised_ms(report: RangeReport) -> int:
    return MAX_MS if report.watermark_ms is None else report.watermark_ms


Tallies = dict[TallyKey, Tally]


class TallyParam(AccumulatorParam[Tallies]):
    """Merge of tallies by Spark."""

    def zero(self, value: Tallies) -> Tallies:  # noqa: ARG002  (the base class has it)
        """Start from nothing."""
        return {}

    def addInPlace(self, value1: Tallies, value2: Tallies) -> Tallies:  # noqa: N802
        """Merge the second into the first."""
        for key, tally in value2.items():
            value1[key] = value1.get(key, Tally()) + tally
        return value1


def shards_with_rows(
    tallies: Tallies, query: str, stage: str, through_epoch: int
) -> frozenset[str]:
    """Return the shards of a source with rows in the epochs up to one. Safe like `pop_tallies`."""
    return frozenset(
        shard
        for key, tally in list(tallies.items())
        if key[:2] == (query, stage) and key[2] <= through_epoch
        for shard in tally.promises
    )


def unreported_shards(
    tallies: Tallies, query: str, stage: str, through_epoch: int
) -> frozenset[str]:
    """Return the shards of a source with rows whose report the commit of an epoch may not apply.

    A task may have dropped the report, or the report is of an earlier epoch, which is not committed on
    its own. A shard that was reported is among them if another one of its stage was not. Safe like
    `pop_tallies`.
    """
    return frozenset(
        shard
        for key, tally in list(tallies.items())
        if key[:2] == (query, stage) and key[2] <= through_epoch
        if key[2] < through_epoch or tally.total.get(Count.REPORTS_DROPPED, 0)
        for shard in tally.promises
    )


def pop_rows(
    tallies: Tallies, query: str, stage: str, through_epoch: int
) -> list[tuple[int, Mapping[str, Rows]]]:
    """Remove and return the rows of a source's shards in each batch up to an epoch, with the batch's
    epoch, oldest first, for a strategy with state. The rest of the tallies stays.

    Safe like `pop_tallies`. While the service is away, tallies are kept for long, and event times would
    fill the driver's memory.
    """
    found: list[tuple[int, Mapping[str, Rows]]] = []
    for key in sorted(tallies):
        # Other queries' keys may be gone by now.
        if key[:2] == (query, stage) and key[2] <= through_epoch and tallies[key].rows:
            tally = tallies[key]
            tallies[key] = replace(tally, rows={})
            rows = {shard: merged(parts.values()) for shard, parts in tally.rows.items()}
            found.append((key[2], rows))
    return found


def pop_tallies(tallies: Tallies, query: str, stage: str, through_epoch: int) -> list[Tally]:
    """Remove and return a stage's tallies up to an epoch, oldest first.

    Safe while Spark's accumulator thread runs. Each `pop` is atomic. The batches of these epochs are
    committed, so only tasks that lost to another attempt still add to them, and these can be ignored.
    """
    keys = sorted(
        key for key in list(tallies) if key[:2] == (query, stage) and key[2] <= through_epoch
    )
    return [tally for key in keys if (tally := tallies.pop(key, None)) is not None]
