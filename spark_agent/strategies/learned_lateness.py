"""A bound of out-of-orderness that is learned from the lateness of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from spark_agent.strategies import lateness
from spark_agent.strategies.protocols import EARLIEST_MS, Rows
from spark_agent.times import Duration, duration_ms, duration_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spark_agent.strategies.lateness import Integers

_WINDOWS: Final = 8
"""Number of windows in the ring, with the one that is being filled."""
_LATE_ROWS_OF_A_WINDOW: Final = 16
"""Number of late rows that a window expects before it is closed."""
_BATCHES_OF_A_WINDOW: Final = 16
"""Number of batches in a window, at least. The late rows of one batch often have one cause."""
_ENOUGH_LATE_ROWS: Final = 10
"""Number of late rows that the ring expects before the quantile is used."""
_LATE_ROWS_KEPT: Final = 64
"""Multiple of the expected late rows whose lateness a window keeps apart."""
_BUCKETS_KEPT: Final = 256
_SURPRISE: Final = math.log(10_000)
"""The logarithm of the odds against chance at which the bound rises at once."""


@dataclass(frozen=True, slots=True, init=False)
class LearnedLateness:
    """Strategy for shards whose rows arrive out of order, by a bound that is learned from them.

    `quantile` is the share of rows that are to be on time: of the rows of each shard, a share of about
    1 - `quantile` is late. The lateness of a row is the time by which the row is older than the newest
    row of its shard in earlier batches. The bound is this quantile of the lateness, within `at_least` and
    `at_most`. The promise is the newest event time minus the bound. `at_least` and `at_most` are text
    such as `12 hours`, a `timedelta`, or milliseconds.

    The bound rises after the first batch with more late rows than chance explains (with odds of 10,000
    to 1), and is back when eight windows have passed. A window has at least 16 batches and
    16 / (1 - `quantile`) rows: 16,000 for 0.999. The rows that make the bound rise are themselves late.

    Until a shard has had 10 / (1 - `quantile`) rows after its first batch, the bound is `at_most`.
    Without an `at_most`, nothing is promised until then.

    The bound is rounded up, by 1/64 at most. The state takes 1 to 5 kB for each shard, 16 kB at most, and
    a task's digest less than 2 kB.

    >>> import numpy as np
    >>> strategy = LearnedLateness(0.99, at_most="1 hour")
    >>> state, random = None, np.random.default_rng(0)
    >>> for batch in range(20):
    ...     times_ms = 10_000 * batch + random.integers(-2_000, 10_000, 1_000)
    ...     rows = Rows(1_000, int(times_ms.min()), int(times_ms.max()), read_at_ms=0,
    ...                 digests=(strategy.digest(times_ms),))
    ...     state = strategy.update(state, rows)
    >>> strategy.bound_ms(state), rows.newest_ms - strategy.promise(state)
    (1887, 1887)
    """

    quantile: float
    at_least_ms: int
    at_most_ms: int | None

    def __init__(
        self,
        quantile: float = 0.999,
        *,
        at_least: Duration = "0 s",
        at_most: Duration | None = None,
    ) -> None:
        """Raises `ValueError` for a quantile or a duration that cannot be used."""
        object.__setattr__(self, "quantile", _share(quantile))
        object.__setattr__(self, "at_least_ms", duration_ms(at_least, name="at_least"))
        most_ms = None if at_most is None else duration_ms(at_most, name="at_most")
        object.__setattr__(self, "at_most_ms", most_ms)
        if most_ms is not None and most_ms < self.at_least_ms:
            raise ValueError(
                f"at_most, {duration_text(most_ms)}, is less than at_least,"
                f" {duration_text(self.at_least_ms)}"
            )

    def digest(self, times_ms: NDArray[np.int64]) -> bytes:
        """Summarize the event times of a task's rows: see `StatefulStrategy`."""
        return lateness.pack(times_ms)

    def update(self, state: Mapping[str, Any] | None, rows: Rows) -> dict[str, Any]:
        """See `StatefulStrategy`. Rows without a digest move the newest event time alone."""
        digests = [lateness.unpack(each) for each in rows.digests if each]
        newest_ms = max([rows.newest_ms, *(each.newest_ms for each in digests)])
        if state is None:
            return {"newest": newest_ms, "bound": None, "windows": []}
        before_ms: int = state["newest"]
        windows = [_Window.of(each) for each in state["windows"]]
        if digests:
            windows = self._added(windows, lateness.count_rows(digests, before_ms))
        return {
            "newest": max(before_ms, newest_ms),
            "bound": self._bound_ms(windows),
            "windows": [each.as_json() for each in windows],
        }

    def promise(self, state: Mapping[str, Any]) -> int | None:
        """See `StatefulStrategy`. None: too few rows were observed, and there is no `at_most`."""
        bound_ms = self.bound_ms(state)
        return None if bound_ms is None else max(state["newest"] - bound_ms, EARLIEST_MS)

    def bound_ms(self, state: Mapping[str, Any] | None) -> int | None:
        """Return the bound of a shard (ms), for logs and metrics; None: there is none yet.

        >>> LearnedLateness(at_most="1 min").bound_ms(None), LearnedLateness().bound_ms(None)
        (60000, None)
        """
        learned_ms: int | None = None if state is None else state["bound"]
        if learned_ms is None:
            return self.at_most_ms
        bound_ms = max(learned_ms, self.at_least_ms)
        return bound_ms if self.at_most_ms is None else min(bound_ms, self.at_most_ms)

    def _late(self, rows: int) -> float:
        """Return the number of rows that are expected to be late."""
        return (1 - self.quantile) * rows

    def _added(self, windows: Sequence[_Window], counts: Integers) -> list[_Window]:
        """Return the ring with one more batch, the newest window last."""
        rows = int(counts.sum())
        last = windows[-1] if windows else None
        if last is None or (
            last.batches >= _BATCHES_OF_A_WINDOW and self._late(last.rows) >= _LATE_ROWS_OF_A_WINDOW
        ):
            windows, last = [*windows, _EMPTY][-_WINDOWS:], _EMPTY
        kept = max(_LATE_ROWS_KEPT, math.ceil(_LATE_ROWS_KEPT * self._late(last.rows + rows)))
        grown = _Window(
            last.rows + rows,
            last.batches + 1,
            max(last.peak_ms, lateness.at_rank(counts, surprising(self._late(rows)))),
            lateness.sparse(last.counts() + counts, kept, _BUCKETS_KEPT),
        )
        return [*windows[:-1], grown]

    def _bound_ms(self, windows: Sequence[_Window]) -> int | None:
        """Return the bound that follows from the ring; None: too few rows."""
        rows = sum(each.rows for each in windows)
        if self._late(rows) < _ENOUGH_LATE_ROWS:
            return None
        found_ms = [each.peak_ms for each in windows]
        counts, counted = _EMPTY.counts(), 0
        for each in reversed(windows):
            counts, counted = counts + each.counts(), counted + each.rows
            found_ms.append(lateness.at_rank(counts, surprising(self._late(counted))))
        found_ms.append(lateness.at_rank(counts, math.floor(self._late(rows)) + 1))
        return max(found_ms)


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows of successive batches."""

    rows: int
    batches: int
    peak_ms: int
    """The greatest lateness that a single batch has had surprisingly often."""
    pairs: Sequence[int]
    """See `lateness.sparse`."""

    def counts(self) -> Integers:
        return lateness.dense(self.pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "batches": self.batches,
            "peak": self.peak_ms,
            "late": list(self.pairs),
        }

    @staticmethod
    def of(kept: Mapping[str, Any]) -> _Window:
        return _Window(kept["rows"], kept["batches"], kept["peak"], kept["late"])


_EMPTY: Final = _Window(0, 0, 0, ())


def surprising(expected: float) -> int:
    """Return the number of events from which chance is no explanation, of as many expected.

    Chernoff's bound for a Poisson variable: P(X ≥ x) ≤ exp(x - expected - x ln(x / expected)) for each
    x above the expectation (*Annals of Mathematical Statistics* 23, 1952).

    >>> [surprising(expected) for expected in (0.001, 0.1, 1, 16, 128, 10_000)]
    [2, 4, 8, 37, 180, 10433]
    """
    low, high = math.floor(expected), math.ceil(2 * expected + 2 * _SURPRISE)
    while high - low > 1:
        middle = (low + high) // 2
        if middle * math.log(middle / expected) - middle + expected >= _SURPRISE:
            high = middle
        else:
            low = middle
    return high


def _share(quantile: object) -> float:
    """Check a quantile. Raises `ValueError`."""
    if isinstance(quantile, int | float) and 0 < quantile < 1:
        return float(quantile)
    raise ValueError(f"invalid quantile {quantile!r}: write a share between 0 and 1, such as 0.999")
