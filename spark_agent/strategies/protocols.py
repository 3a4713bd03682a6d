"""The kinds of strategies, and the rows that a strategy with state is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EARLIEST_MS: Final = -62_135_596_800_000
"""0001-01-01T00:00:00Z: no promise is earlier."""
LATEST_MS: Final = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z: no promise is later, except that of a final shard."""


class Strategy(Protocol):
    """Derivation of a shard's promise from its newest row. A class with `promise_ms` is a strategy.

    A strategy is pickled and sent to the executors, so it keeps no state. State is not necessary: the
    service never lowers a promise, so a batch of old rows changes nothing. A strategy for shards whose
    days are complete once a row of the next day arrives:

    >>> class Daily:
    ...     def promise_ms(self, newest_ms: int) -> int:
    ...         return newest_ms - newest_ms % 86_400_000
    >>> Daily().promise_ms(1_357_041_600_000)
    1356998400000
    """

    def promise_ms(self, newest_ms: int) -> int | None:
        """Return the promise (ms, UTC): all later rows of the shard have this event time or a later one.

        `newest_ms` is the shard's newest event time in this batch, rounded down. A promise that is
        too high makes on-time rows late. A promise that is too low only delays results. None: the
        rows promise nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one shard in one batch, for a strategy with state.

    Rows without an event time are left out, and so are rows dated too far ahead of the clock.

    >>> rows = Rows(count=3, oldest_ms=5_000, newest_ms=9_000, read_at_ms=60_000)
    >>> rows.newest_ms - rows.oldest_ms
    4000
    """

    count: int
    """Number of rows; 1 or more."""
    oldest_ms: int
    """The oldest event time (ms), rounded down."""
    newest_ms: int
    """The newest event time (ms), rounded down."""
    read_at_ms: int = 0
    """The wall clock (ms) when Spark began the batch."""
    times_ms: NDArray[np.int64] | None = None
    """All event times (ms), rounded down, in no order; None unless the strategy has `wants_times`."""
    digests: tuple[bytes, ...] = ()
    """Results of the strategy's `digest`, one for each task that has read rows of the shard, and for
    each of its chunks of rows; empty unless the strategy has that method."""


def merged(parts: Iterable[Rows]) -> Rows:
    """Return the rows of several tasks as one.

    >>> merged([Rows(2, 5, 9, digests=(b"a",)), Rows(1, 7, 11, digests=(b"b",))])
    Rows(count=3, oldest_ms=5, newest_ms=11, read_at_ms=0, times_ms=None, digests=(b'a', b'b'))
    """
    first, *others = parts
    if not others:
        return first
    return Rows(
        sum(each.count for each in (first, *others)),
        min(each.oldest_ms for each in (first, *others)),
        max(each.newest_ms for each in (first, *others)),
        first.read_at_ms,
        _joined([each.times_ms for each in (first, *others)]),
        tuple(digest for each in (first, *others) for digest in each.digests),
    )


def _joined(parts: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    import numpy  # noqa: ICN001, PLC0415  (only where it is needed: tasks start faster without)

    return numpy.concatenate(found)


class StatefulStrategy(Protocol):
    """Derivation of a shard's promise from a state that every batch updates. A class with `update` and
    `promise` is such a strategy.

    The driver calls it once for each shard with rows in a batch, after Spark has committed the batch, in
    the order of batches. The states are kept beside the query's checkpoint, so they survive restarts. A
    repeated batch is counted once. A state is made of what JSON has: numbers, text, booleans, None,
    lists, and dictionaries with text as keys.

    A class with `wants_times = True` gets the rows' event times, each 8 bytes that pass from the task to
    the driver. With `digest(times_ms) -> bytes`, a task sends the result for its rows instead.

    Flink's `BoundedOutOfOrdernessGenerator`:

    >>> class BoundedOutOfOrdernessGenerator:
    ...     def update(self, state: int | None, rows: Rows) -> int:
    ...         return rows.newest_ms if state is None else max(state, rows.newest_ms)
    ...     def promise(self, state: int) -> int:
    ...         return state - 3_500
    >>> generator = BoundedOutOfOrdernessGenerator()
    >>> generator.promise(generator.update(9_000, Rows(1, 5_000, 5_000, read_at_ms=0)))
    5500

    Flink's `TimeLagWatermarkGenerator`, which advances with rows here; `WallClock` needs none:

    >>> class TimeLagWatermarkGenerator:
    ...     def update(self, state: int | None, rows: Rows) -> int:
    ...         return rows.read_at_ms
    ...     def promise(self, state: int) -> int:
    ...         return state - 5_000
    >>> generator = TimeLagWatermarkGenerator()
    >>> generator.promise(generator.update(None, Rows(1, 0, 0, read_at_ms=60_000)))
    55000
    """

    def update(self, state: Any, rows: Rows) -> Any:  # noqa: ANN401  (what JSON has)
        """Return the shard's state after a batch. `state` is None before the shard's first rows."""
        ...

    def promise(self, state: Any) -> int | None:  # noqa: ANN401
        """Return the promise (ms, UTC), as `Strategy.promise_ms` does; None: not yet."""
        ...


class ClockStrategy(Protocol):
    """Derivation of a source's promise from the driver's clock: `WallClock`, `IngressTime`."""

    def promise_at(self, read_ms: int) -> int:
        """Return the promise (ms, UTC) of a shard of which everything is read that was available at
        `read_ms` (ms, UTC).
        """
        ...
