"""What tasks tell the driver, beside what they tell the service.

A Spark accumulator carries it: Spark adds up what the successful tasks of a batch said before it
calls the batch done, so the driver has it all when it commits the epoch. With it the driver can
put right whatever did not reach the service (see `spark_agent.supervisor`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pyspark import AccumulatorParam

TallyKey = tuple[str, str, int]
"""The started query (its incarnation), the stage, the epoch."""


class Count(StrEnum):
    """What is counted, because it should not happen often."""

    REPORTS_DROPPED = "reports_dropped"
    """Ranges that a task could not report: the aggregator was away, slow, or fenced it."""
    EARLY_ROWS = "early_rows"
    """Rows that left a stage older than what it had already promised: readers have them as late."""
    LATE_ROWS = "late_rows"
    """Rows older than what their source had promised: its strategy promises too much. Windows that
    are still open take them in, closed ones do not."""
    DROPPED_ROWS = "dropped_rows"
    """Rows that Spark's operators dropped as late. Where Spark adds up before its state, as it does
    before windows, a group of rows with one key and window counts once."""
    ROWS_BEFORE_1970 = "rows_before_1970"
    """Rows dated before 1970, where Spark's watermark begins: its operators drop them as late."""
    FAR_FUTURE_ROWS = "far_future_rows"
    """Rows dated further ahead of the clock than tolerated; they moved nothing."""
    UNKNOWN_SHARD_ROWS = "unknown_shard_rows"
    """Rows of a shard that the stage does not have; they passed, but moved nothing."""
    SPLIT_SHARDS = "split_shards"
    """Shards whose rows were in several tasks of a batch, although they were said to be together."""


@dataclass(frozen=True, slots=True, order=True)
class EarlyRow:
    """The oldest row that left a stage behind its published watermark (both ms)."""

    row_ms: int
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Tally:
    """What the tasks of one stage said in one epoch."""

    promises: Mapping[str, int] = field(default_factory=dict[str, int])
    """Promises (ms) by shard."""
    counts: Mapping[int, Mapping[str, int]] = field(default_factory=dict[int, Mapping[str, int]])
    """By partition, then by the words of `Count`."""
    partitions: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """The partitions in which each shard had rows."""
    early: EarlyRow | None = None

    def __add__(self, other: Tally) -> Tally:
        """Take both together. Of two promises in one epoch (a retried task) the smaller counts.

        What a partition has counted twice it has seen twice: `foreachBatch` may read its rows several
        times. It counts once.

        >>> both = Tally({"a": 5}, {0: {"x": 1}}) + Tally({"a": 3, "b": 9}, {0: {"x": 1}, 1: {"x": 2}})
        >>> both.promises, both.total
        ({'a': 3, 'b': 9}, {'x': 3})
        """
        promises = dict(self.promises)
        for shard, promise in other.promises.items():
            promises[shard] = min(promise, promises.get(shard, promise))
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
        )

    @property
    def total(self) -> dict[str, int]:
        """The counts of all partitions together."""
        found: Counter[str] = Counter()
        for counts in self.counts.values():
            found.update(counts)
        return dict(found)


Tallies = dict[TallyKey, Tally]


class TallyParam(AccumulatorParam[Tallies]):
    """How Spark adds tallies up."""

    def zero(self, value: Tallies) -> Tallies:  # noqa: ARG002  (the base class has it)
        """Start from nothing."""
        return {}

    def addInPlace(self, value1: Tallies, value2: Tallies) -> Tallies:  # noqa: N802
        """Add the second to the first."""
        for key, tally in value2.items():
            value1[key] = value1.get(key, Tally()) + tally
        return value1


def pop_tallies(tallies: Tallies, query: str, stage: str, through_epoch: int) -> list[Tally]:
    """Remove and return what was said of a stage up to an epoch, oldest first.

    Safe beside Spark's accumulator thread: each `pop` is atomic, and the epochs asked for are
    done, so that nothing more is added to them but by tasks that lost, whose word is not needed.
    """
    keys = sorted(
        key for key in list(tallies) if key[:2] == (query, stage) and key[2] <= through_epoch
    )
    return [tally for key in keys if (tally := tallies.pop(key, None)) is not None]
