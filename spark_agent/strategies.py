"""How a source's task judges, from the event times that it saw, what may still come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from spark_agent.durations import Duration, duration_ms

EARLIEST_MS: Final = -62_135_596_800_000
"""0001-01-01T00:00:00Z: no promise is earlier."""


class Strategy(Protocol):
    """What a shard may promise. A value: it travels to the executors, and keeps no state.

    It needs none: the service never lets a promise go down, so a batch of old rows changes nothing.
    """

    def promise_ms(self, newest_ms: int) -> int:
        """Say from which event time on (ms, UTC) everything is that is still to come from a shard.

        `newest_ms` is the largest event time that the shard has shown in this batch, rounded down.
        A promise that turns out too high makes on-time rows late; one too low costs only waiting.
        """
        ...


@dataclass(frozen=True, slots=True, init=False)
class BoundedOutOfOrderness:
    """Rows come at most `bound` later than newer ones of their shard.

    >>> BoundedOutOfOrderness("12 hours").promise_ms(1_357_041_600_000)
    1356998400000
    """

    bound_ms: int

    def __init__(self, bound: Duration) -> None:
        object.__setattr__(self, "bound_ms", duration_ms(bound, name="bound"))

    def promise_ms(self, newest_ms: int) -> int:
        """See `Strategy`."""
        return max(newest_ms - self.bound_ms, EARLIEST_MS)


@dataclass(frozen=True, slots=True)
class Ascending:
    """Rows of a shard come in the order of their event times."""

    def promise_ms(self, newest_ms: int) -> int:
        """See `Strategy`. The same instant may come again, so it is not promised away."""
        return newest_ms
