"""Strategies that promise by the driver's clock, also while there are no rows."""

from __future__ import annotations

from dataclasses import dataclass

from spark_agent.strategies.protocols import EARLIEST_MS
from spark_agent.times import Duration, duration_ms


@dataclass(frozen=True, slots=True, init=False)
class WallClock:
    """Strategy for shards whose rows arrive at most `delay` after their event time.

    The promise is the clock minus `delay`, and advances without rows, so a quiet shard does not hold
    anything back. It never passes what is unread: the clock counts from when the query last listed its
    source and has read everything since. Rows with a longer delay are late. Flink's counterpart is its
    `TimeLagWatermarkGenerator`.

    >>> WallClock("5 seconds").promise_at(1_357_041_600_000)
    1357041595000
    """

    delay_ms: int

    def __init__(self, delay: Duration) -> None:
        """Set the delay. Raises `ValueError` if it cannot be read."""
        object.__setattr__(self, "delay_ms", duration_ms(delay, name="delay"))

    def promise_at(self, read_ms: int) -> int:
        """See `ClockStrategy`."""
        return max(read_ms - self.delay_ms, EARLIEST_MS)


@dataclass(frozen=True, slots=True)
class IngressTime:
    """Strategy for sources whose event time is when Spark has read the row.

    `Pipeline.source` adds the column, named by `event_time`: Spark's time of the batch, which Spark logs
    with the batch's plan, so that a repeated batch has it again. The watermark is perfect: not one row
    is late. If the clock goes back, the next batch waits until the clock has reached the promise again.

    >>> IngressTime().promise_at(1_357_041_600_000)
    1357041600000
    """

    def promise_at(self, read_ms: int) -> int:
        """See `ClockStrategy`."""
        return read_ms
