"""A strategy as the pipeline uses it: its part in the tasks, and its part in the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql import Column

from spark_agent.strategies.by_clock import IngressTime, WallClock
from spark_agent.strategies.by_newest_row import Expression, Punctuated
from spark_agent.strategies.protocols import ClockStrategy, StatefulStrategy, Strategy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AnyStrategy: TypeAlias = Strategy | StatefulStrategy | ClockStrategy | str
"""An argument of `Pipeline.source`. Text is an `Expression`."""

TaskPromise: TypeAlias = Callable[[int], int | None]
"""Derives a shard's promise (ms) from its newest mark (ms), in a task; None: it promises nothing."""


def promised_ms(promise: TaskPromise, mark_ms: int | None) -> int | None:
    """Return the promise that a shard's newest mark allows; None: none, or not one row is marked.

    >>> promised_ms(lambda newest_ms: newest_ms - 5, 7), promised_ms(lambda newest_ms: newest_ms, None)
    (2, None)
    """
    return None if mark_ms is None else promise(mark_ms)


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
            return Resolved(given.promise_ms, getattr(given, "mark", None))
    raise ValueError(
        f"invalid strategy {strategy!r}: write BoundedOutOfOrderness('10 minutes'), Ascending(), SQL "
        f"like 'at - INTERVAL 10 MINUTES', or a class of your own with promise_ms, or with update and "
        f"promise"
    )
