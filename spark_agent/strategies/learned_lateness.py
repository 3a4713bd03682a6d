"""A bound of out-of-orderness that is learned from the lateness of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from spark_agent.strategies import lateness
from spark_agent.strategies.protocols import EARLIEST_MS, Rows
from spark_agent.times import Duration, duration_ms, duration_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spark_agent.strategies.lateness import Integers

_WINDOWS: Final = 4
"""Number of windows in the ring, with the one that is being filled."""
_LATE_ROWS_OF_A_WINDOW: Final = 16
"""Number of late rows that a window expects before it is closed."""
_BATCHES_OF_A_WINDOW: Final = 16
"""Number of batches in a window, at least. The late rows of one batch often have one cause."""
_ENOUGH_LATE_ROWS: Final = 10
"""Number of late rows that the ring expects before the quantile is used."""
_LATE_ROWS_KEPT: Final = 16
"""Multiple of the expected late rows whose lateness a window keeps apart."""
_BUCKETS_KEPT: Final = 640
"""Number of buckets in the window that is being filled, at most: factors of 1,000 in lateness."""
_STEP_OF_A_CLOSED_WINDOW: Final = 1 / 32
"""Share of the expected late rows up to which the buckets of a closed window are joined."""
_SURPRISE: Final = math.log(10_000)
"""The logarithm of the odds against chance at which the bound rises at once."""
_MOST_CREDIT_RINGS: Final = 1
"""Credit for fewer late rows than expected: as many as the ring expects, at most."""
_MOST_DEBT_RINGS: Final = 16
"""Debt of more late rows than expected: as many as 16 rings expect, at most. More is forgotten."""


@dataclass(frozen=True, slots=True, init=False)
class LearnedLateness:
    """Strategy for shards whose rows arrive out of order, by a bound that is learned from them.

    `quantile` is the share of rows that are to be on time: of the rows of each shard, a share of about
    1 - `quantile` is late. The lateness of a row is the time by which the row is older than the newest
    row of its shard in earlier batches. The bound is this quantile of the shard's last rows, within
    `at_least` and `at_most`. The promise is the newest event time minus the bound. `at_least` and
    `at_most` are text such as `12 hours`, a `timedelta`, or milliseconds.

    The bound rises at the end of the first batch with more late rows than chance explains. The late rows
    of this batch stay late. The bound falls once old rows are forgotten: after 64 batches that have
    64 / (1 - `quantile`) rows, 64,000 for 0.999. After more late rows than expected, the bound does not
    fall until enough rows were on time to make up for them, at most 16 times as long.

    Until a shard has had 10 / (1 - `quantile`) rows after its first batch, the bound is `at_most`.
    Without an `at_most`, nothing is promised until then. Rows later than `at_most` are late.

    The bound is rounded up, by 1/64 at most. The state takes about 2 kB for each shard, 14 kB at most. A
    task's digest takes less than 2 kB.

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
        """Check the arguments. Raises `ValueError`."""
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
            return self._promised(_Learned(newest_ms)).as_json()
        before = _Learned.of(state)
        after = self._observed(before, digests) if digests else before
        return self._promised(replace(after, newest_ms=max(before.newest_ms, newest_ms))).as_json()

    def promise(self, state: Mapping[str, Any]) -> int | None:
        """See `StatefulStrategy`. None: too few rows were observed, and there is no `at_most`."""
        return self._promise_ms(_Learned.of(state))

    def bound_ms(self, state: Mapping[str, Any] | None) -> int | None:
        """Return the bound of a shard (ms), for logs and metrics; None: there is none yet.

        >>> LearnedLateness(at_most="1 min").bound_ms(None), LearnedLateness().bound_ms(None)
        (60000, None)
        """
        return self._within_limits(None if state is None else state["bound"])

    def _promise_ms(self, learned: _Learned) -> int | None:
        bound_ms = self._within_limits(learned.bound_ms)
        return None if bound_ms is None else max(learned.newest_ms - bound_ms, EARLIEST_MS)

    def _within_limits(self, learned_ms: int | None) -> int | None:
        if learned_ms is None:
            return self.at_most_ms
        bound_ms = max(learned_ms, self.at_least_ms)
        return bound_ms if self.at_most_ms is None else min(bound_ms, self.at_most_ms)

    def _expected(self, rows: int) -> float:
        """Return the number of rows that are expected to be late."""
        # 1 - 0.9 is less than 0.1, and 100 rows would expect less than 10.
        return round((1 - self.quantile) * rows, 6)

    def _observed(self, before: _Learned, digests: Sequence[lateness.Digest]) -> _Learned:
        """Return the state with the lateness of one more batch."""
        counts = lateness.count_rows(digests, before.newest_ms)
        windows = self._added(before.windows, counts)
        debt = self._debt(before, digests, sum(each.rows for each in windows))
        learned_ms = self._learned_ms(windows, counts, debt)
        if learned_ms is not None and before.bound_ms is not None and debt > 0:
            learned_ms = max(learned_ms, before.bound_ms)
        return replace(before, windows=windows, debt=debt, bound_ms=learned_ms)

    def _added(self, windows: Sequence[_Window], counts: Integers) -> Sequence[_Window]:
        """Return the ring with one more batch, the newest window last."""
        last = windows[-1] if windows else _EMPTY
        if (
            last.batches >= _BATCHES_OF_A_WINDOW
            and self._expected(last.rows) >= _LATE_ROWS_OF_A_WINDOW
        ):
            windows, last = [*windows[:-1], self._closed(last), _EMPTY], _EMPTY
        rows = last.rows + int(counts.sum())
        kept = math.ceil(_LATE_ROWS_KEPT * max(1, self._expected(rows)))
        pairs = lateness.sparse(last.counts() + counts, kept, _BUCKETS_KEPT)
        return [*windows[:-1], _Window(rows, last.batches + 1, pairs)][-_WINDOWS:]

    def _closed(self, window: _Window) -> _Window:
        """Return a window in a few hundred bytes. Only once: the errors of repetitions would add up."""
        step = _STEP_OF_A_CLOSED_WINDOW * self._expected(window.rows)
        counts = lateness.thin(window.counts(), step)
        return replace(window, pairs=lateness.sparse(counts, window.rows, _BUCKETS_KEPT))

    def _debt(self, before: _Learned, digests: Sequence[lateness.Digest], in_ring: int) -> float:
        """Return the number of rows that were late in excess of the expected number.

        Debt corrects the quantile, and keeps the bound from falling. Otherwise too many rows would be
        late while lateness changes. Adaptive conformal inference (Gibbs and Candès, NeurIPS 2021) adds
        up the same difference for the same reason. Credit and debt are limited, so neither an
        uneventful nor a bad year counts for ever. Rows later than `at_most` do not count: a greater
        bound is not allowed.
        """
        if before.promised_ms is None:
            return 0
        oldest_ms = EARLIEST_MS if self.at_most_ms is None else before.newest_ms - self.at_most_ms
        late = sum(each.rows_between(oldest_ms, before.promised_ms) for each in digests)
        debt = before.debt + late - self._expected(sum(each.rows for each in digests))
        expected = self._expected(in_ring)
        return min(max(debt, -_MOST_CREDIT_RINGS * expected), _MOST_DEBT_RINGS * expected)

    def _learned_ms(
        self, windows: Sequence[_Window], last_counts: Integers, debt: float
    ) -> int | None:
        """Return the bound that follows from the ring; None: too few rows.

        A surprising number of late rows, in the last batch or in the last windows, makes it rise before
        the quantile of the whole ring does. ADWIN (Bifet and Gavaldà, SDM 2007) compares windows so.
        """
        rows = sum(each.rows for each in windows)
        if self._expected(rows) < _ENOUGH_LATE_ROWS:
            return None
        found_ms = [self._surprising_ms(last_counts)]
        counts = _EMPTY.counts()
        for each in reversed(windows):
            counts += each.counts()
            found_ms.append(self._surprising_ms(counts))
        expected = self._expected(rows)
        # Fewer late rows pay back the debt. Half of the expected rows at least are allowed: the greatest
        # lateness of all is a poor estimate for the next rows.
        allowed = min(max(expected - debt, expected / 2), expected)
        found_ms.append(lateness.at_rank(counts, math.floor(allowed) + 1))
        return max(found_ms)

    def _surprising_ms(self, counts: Integers) -> int:
        """Return the greatest lateness that surprisingly many of these rows have."""
        return lateness.at_rank(counts, surprising(self._expected(int(counts.sum()))))

    def _promised(self, learned: _Learned) -> _Learned:
        """Return the state with its greatest promise: none is taken back when the bound rises."""
        promises_ms = (learned.promised_ms, self._promise_ms(learned))
        found_ms = [each for each in promises_ms if each is not None]
        return replace(learned, promised_ms=max(found_ms, default=None))


@dataclass(frozen=True, slots=True)
class _Learned:
    """The state of a shard."""

    newest_ms: int
    promised_ms: int | None = None
    """The greatest promise so far."""
    bound_ms: int | None = None
    """The bound, not limited by `at_least` and `at_most`."""
    debt: float = 0
    windows: Sequence[_Window] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "newest": self.newest_ms,
            "promised": self.promised_ms,
            "bound": self.bound_ms,
            "debt": self.debt,
            "windows": [[each.rows, each.batches, list(each.pairs)] for each in self.windows],
        }

    @staticmethod
    def of(state: Mapping[str, Any]) -> _Learned:
        return _Learned(
            state["newest"],
            state["promised"],
            state["bound"],
            state["debt"],
            [_Window(*each) for each in state["windows"]],
        )


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows of successive batches."""

    rows: int
    batches: int
    pairs: Sequence[int]
    """See `lateness.sparse`."""

    def counts(self) -> Integers:
        return lateness.dense(self.pairs)


_EMPTY: Final = _Window(0, 0, ())


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
