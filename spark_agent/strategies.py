"""Strategies: promises of a source's tasks, derived from the event times that a task has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from spark_agent.times import Duration, duration_ms

EARLIEST_MS: Final = -62_135_596_800_000
"""0001-01-01T00:00:00Z: no promise is earlier."""


class Strategy(Protocol):
    """Derivation of a shard's promise. A class with `promise_ms` is a strategy.

    A strategy is pickled and sent to the executors, so it keeps no state. State is not necessary: the
    service never lowers a promise, so a batch of old rows changes nothing. A strategy for shards whose
    days are complete once a row of the next day arrives:

    >>> class Daily:
    ...     def promise_ms(self, newest_ms: int) -> int:
    ...         return newest_ms - newest_ms % 86_400_000
    >>> Daily().promise_ms(1_357_041_600_000)
    1356998400000
    """

    def promise_ms(self, newest_ms: int) -> int:
        """Return the promise (ms, UTC): all later rows of the shard have this event time or a later one.

        `newest_ms` is the shard's newest event time in this batch, rounded down. A promise that is
        too high makes on-time rows late. A promise that is too low only delays results.
        """
        ...


@dataclass(frozen=True, slots=True, init=False)
class BoundedOutOfOrderness:
    """Strategy for shards whose rows arrive out of order, by `bound` at most.

    A row may be up to `bound` older than the newest row of its shard before it. The promise is the
    newest event time minus `bound`. A bound that is too small makes rows late. A bound that is too
    large only delays results. `bound` is text such as `12 hours`, a `timedelta`, or milliseconds.

    >>> BoundedOutOfOrderness("12 hours").promise_ms(1_357_041_600_000)
    1356998400000
    >>> BoundedOutOfOrderness("soon")
    Traceback (most recent call last):
    ValueError: invalid bound 'soon': write it like '12 hours', '4h' or '250 ms'
    """

    bound_ms: int

    def __init__(self, bound: Duration) -> None:
        object.__setattr__(self, "bound_ms", duration_ms(bound, name="bound"))

    def promise_ms(self, newest_ms: int) -> int:
        """See `Strategy`."""
        return max(newest_ms - self.bound_ms, EARLIEST_MS)


@dataclass(frozen=True, slots=True)
class Ascending:
    """Strategy for shards whose rows arrive in event time order, such as an append-only log.

    The promise is the newest event time itself. An older row of the same shard is late.

    >>> Ascending().promise_ms(1_357_041_600_000)
    1357041600000
    """

    def promise_ms(self, newest_ms: int) -> int:
        """See `Strategy`.

        More rows with the same event time may follow, so the promise does not exceed it.
        """
        return newest_ms
