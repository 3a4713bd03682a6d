"""Strategies: promises of a source's task, derived from the event times that it has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from spark_agent.times import Duration, duration_ms

EARLIEST_MS: Final = -62_135_596_800_000
"""0001-01-01T00:00:00Z: no promise is earlier."""


class Strategy(Protocol):
    """Derivation of a shard's promise. It is pickled and sent to the executors, so it keeps no state.

    It needs none: the service never lets a promise go down, so a batch of old rows changes nothing.
    """

    def promise_ms(self, newest_ms: int) -> int:
        """Return the event time (ms, UTC) that no row still to come from the shard is older than.

        `newest_ms` is the shard's newest event time in this batch, rounded down. A promise that is
        too high makes on-time rows late; one that is too low only delays results.
        """
        ...


@dataclass(frozen=True, slots=True, init=False)
class BoundedOutOfOrderness:
    """Rows may be up to `bound` older than the newest row of their shard before them.

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
    """The rows of a shard arrive in event time order."""

    def promise_ms(self, newest_ms: int) -> int:
        """See `Strategy`. More rows with the same event time may follow, so it is not exceeded."""
        return newest_ms
