"""The times before which the rows of a query's next batch are late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from spark_agent.exceptions import QueryFailedError
from spark_agent.jvm.checkpoint import Beginning
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.soundness.late_rows import Lateness
from spark_agent.sources.control import END_MS
from spark_agent.times import instant_text


class Number(Protocol):
    """A number that each batch of the query reads: `spark_agent.jvm.cell.Cell`."""

    def set(self, value: int) -> None:
        """Set the number for the next batch."""
        ...


class LoggedWatermarks(Protocol):
    """A query's checkpoint: `spark_agent.jvm.checkpoint.Checkpoint`."""

    def read(self) -> Beginning:
        """Return the position at which the query begins."""
        ...

    def watermark_before(self, batch: int) -> int:
        """Return Spark's watermark (ms) in the batch before. Raises `QueryFailedError`."""
        ...


class LateRows:
    """Sets, before each batch, the time from which a row of each call is on time.

    Only Spark's own watermark of a batch that is done counts. So a batch that is repeated after a
    restart finds the same rows late, and a row that is set apart is one that Spark would drop.
    """

    def __init__(
        self,
        rules: Mapping[str, Lateness],
        first_on_time_us: Mapping[str, Number],
        checkpoint: LoggedWatermarks,
    ) -> None:
        """Rules and numbers are by call. A query without such a call has no rules."""
        self._rules = rules
        self._first_on_time_us = first_on_time_us
        self._checkpoint = checkpoint
        self._watermark_ms = 0

    def begin(self) -> None:
        """Set the times for the first batch of a start, which may repeat a batch.

        Raises `QueryFailedError` if the checkpoint lacks the batch before.
        """
        if self._rules:
            self._set(self._checkpoint.watermark_before(self._checkpoint.read().next_batch))

    def note_batch(self, latest: CommittedBatch | None) -> None:
        """Set the times for the batch after the latest one. Call it before each batch is planned.

        An older batch changes nothing: Spark's watermark does not go down.
        """
        if not self._rules or latest is None:
            return
        if _distinct_ms(latest.watermark_ms) > self._watermark_ms:
            self._set(latest.watermark_ms)

    def check(self, batch: int) -> None:
        """Check that a batch was planned with the right times, before the batch is written.

        Else rows that Spark has dropped were not put aside. Raises `QueryFailedError`: the batch is
        repeated by the next start.
        """
        if not self._rules:
            return
        needed_ms = _distinct_ms(self._checkpoint.watermark_before(batch))
        if needed_ms != self._watermark_ms:
            raise QueryFailedError(
                f"batch {batch} was planned to find rows late at {instant_text(self._watermark_ms)}, "
                f"and Spark drops them at {instant_text(needed_ms)}. Nothing was written: start the "
                f"query again"
            )

    def _set(self, watermark_ms: int) -> None:
        self._watermark_ms = _distinct_ms(watermark_ms)
        for call, rule in self._rules.items():
            self._first_on_time_us[call].set(rule.first_on_time_us(self._watermark_ms))


def _distinct_ms(watermark_ms: int) -> int:
    """Return a watermark as a query's progress and its checkpoint both have it.

    Operators with a row at the watermark late have the end of time a millisecond before the others. The
    checkpoint has this millisecond, and `parse_watermark_ms` does not. No row is as late as either.

    >>> _distinct_ms(END_MS) == _distinct_ms(END_MS - 1), _distinct_ms(5)
    (True, 5)
    """
    return min(watermark_ms, END_MS - 1)
