"""A strategy as the pipeline uses it: its part in the tasks, and its part in the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql import Column

from spark_agent.exceptions import StrategyError
from spark_agent.strategies.by_clock import IngressTime, WallClock
from spark_agent.strategies.by_newest_row import Expression, Punctuated
from spark_agent.strategies.protocols import (
    EARLIEST_MS,
    LATEST_MS,
    ClockStrategy,
    StatefulStrategy,
    Strategy,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LONGEST_SHOWN: Final = 200
"""In characters."""

AnyStrategy: TypeAlias = Strategy | StatefulStrategy | ClockStrategy | str
"""An argument of `Pipeline.source`. Text is an `Expression`."""

TaskPromise: TypeAlias = Callable[[int], int | None]
"""Derives a shard's promise (ms) from its newest mark (ms), in a task; None: it promises nothing."""


def promised_ms(promise: TaskPromise, mark_ms: int | None) -> int | None:
    """Return the promise that a shard's newest mark allows; None: none, or not one row is marked.

    Raises `StrategyError` if the strategy returns anything else than a time or None.

    >>> promised_ms(lambda newest_ms: newest_ms - 5, 7), promised_ms(lambda newest_ms: newest_ms, None)
    (2, None)
    """
    if mark_ms is None:
        return None
    return checked_ms(promise(mark_ms), f"{getattr(promise, '__qualname__', promise)}({mark_ms})")


def checked_ms(promise: object, call: str) -> int | None:
    """Return a promise that a strategy has made. Raises `StrategyError`.

    >>> checked_ms(5, "Daily.promise_ms(7)")
    5
    >>> checked_ms(5.0, "Daily.promise_ms(7)")
    Traceback (most recent call last):
    spark_agent.exceptions.StrategyError: Daily.promise_ms(7) has returned 5.0: return milliseconds \
since the Unix epoch within the years 1 to 9999, an int, or None
    """
    if promise is None:
        return None
    # NumPy's integers are Integral. True is one, too, and a mistake.
    if not isinstance(promise, bool) and isinstance(promise, Integral):
        found_ms = int(promise)
        if EARLIEST_MS <= found_ms <= LATEST_MS:
            return found_ms
    raise StrategyError(
        f"{call} has returned {shown(promise)}: return milliseconds since the Unix epoch within the "
        f"years 1 to 9999, an int, or None"
    )


def shown(value: object) -> str:
    """Write a value of a user's class for an error, whatever the value is.

    >>> shown({1, 2}), shown(10**5_000)
    ('{1, 2}', 'an int')
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (an integer of too many digits, or a repr that fails)
        return f"an {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


@dataclass(frozen=True, slots=True)
class Summary:
    """The part of a shard's rows that a strategy with state needs. Pickled and sent to executors."""

    wants_times: bool = False
    digest: Callable[[NDArray[np.int64]], bytes] | None = None

    @property
    def needs_times(self) -> bool:
        """True if a task has to keep the event times."""
        return self.wants_times or self.digest is not None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A strategy's parts. In the driver it has at most one of `stateful` and `clock`."""

    promise: TaskPromise
    mark: Callable[[Column], Column] | None = None
    """Makes the column whose newest value moves the promise, from the event time; None: that itself."""
    stateful: StatefulStrategy | None = None
    clock: ClockStrategy | None = None

    @property
    def needs_polls(self) -> bool:
        """True if the driver takes part before each batch."""
        return self.stateful is not None or self.clock is not None

    @property
    def summary(self) -> Summary | None:
        """The part of the rows that the driver needs; None: it needs none."""
        if self.stateful is None:
            return None
        return Summary(
            bool(getattr(self.stateful, "wants_times", False)),
            getattr(self.stateful, "digest", None),
        )


def _no_promise(newest_ms: int) -> None:
    """Promise nothing in the task: the driver promises."""


def resolved(strategy: object) -> Resolved:
    """Find the parts of a strategy. Raises `ValueError` if the argument is not a strategy.

    >>> resolved("at - INTERVAL 5 SECONDS").mark is None
    False
    >>> resolved(7)
    Traceback (most recent call last):
    ValueError: invalid strategy 7: write BoundedOutOfOrderness('10 minutes'), Ascending(), SQL like \
'at - INTERVAL 10 MINUTES', or a class of your own with promise_ms, or with update and promise
    """
    given: Any = Expression(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(given, type):
        if isinstance(given, IngressTime | WallClock):
            return Resolved(_no_promise, clock=given)
        if callable(getattr(given, "update", None)) and callable(getattr(given, "promise", None)):
            return Resolved(_no_promise, stateful=given)
        if isinstance(given, Punctuated):
            return Resolved(given.behind.promise_ms, given.mark)
        if callable(getattr(given, "promise_ms", None)):
            has_mark = callable(getattr(given, "mark", None))
            return Resolved(given.promise_ms, given.mark if has_mark else None)
    raise ValueError(
        f"invalid strategy {strategy!r}: write BoundedOutOfOrderness('10 minutes'), Ascending(), SQL "
        f"like 'at - INTERVAL 10 MINUTES', or a class of your own with promise_ms, or with update and "
        f"promise"
    )
