"""Strategies without state: the promise follows from a shard's newest row, or its newest mark.

The sources are Flink's built-in generators, and its `WATERMARK FOR … AS …`. A watermark W here is
Flink's watermark + 1 ms: W allows a row at W, where Flink's watermark allows one after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent.strategies.protocols import EARLIEST_MS
from spark_agent.times import Duration, duration_ms


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
        return max(newest_ms, EARLIEST_MS)


@dataclass(frozen=True, slots=True)
class NoWatermarks:
    """Strategy for shards whose rows may be as old as they like: nothing is promised.

    A shard promises nothing until it is final, at the end of a bounded query. Until then the stages
    below have no watermark, and their windows stay open.

    >>> NoWatermarks().promise_ms(1_357_041_600_000) is None
    True
    """

    def promise_ms(self, newest_ms: int) -> None:
        """See `Strategy`."""


class Punctuated:
    """Strategy for shards with markers: only rows that satisfy a condition move the promise.

    `when` is the condition, as SQL text or as a column. The promise is the newest event time among the
    rows that satisfy it, minus `bound`. Flink calls such watermarks punctuated: *buy* in each minute,
    for example, or the last row of a transaction.

    >>> Punctuated(when="action = 'buy'", bound="1 minute").promise_ms(1_357_041_600_000)
    1357041540000
    """

    def __init__(self, when: str | Column, bound: Duration = "0 s") -> None:
        """Set the condition and the bound. Raises `ValueError` if one of them cannot be read."""
        is_given = isinstance(when, str | Column)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_given or (isinstance(when, str) and not when.strip()):
            raise ValueError(
                f"invalid condition {when!r}: write SQL like \"action = 'buy'\", or a column"
            )
        self._when = when
        self.behind = BoundedOutOfOrderness(bound)
        """Derives the promise in a task, without the condition: a column cannot be sent to executors."""

    def mark(self, event_time: Column) -> Column:
        """Return the column whose newest value moves the promise; null where a row does not."""
        when = F.expr(self._when) if isinstance(self._when, str) else self._when
        return F.when(when, event_time)

    def promise_ms(self, newest_ms: int) -> int:
        """See `Strategy`. `newest_ms` is the newest event time of a row that satisfies the condition."""
        return self.behind.promise_ms(newest_ms)


@dataclass(frozen=True, slots=True)
class Expression:
    """Strategy that is written in SQL: the greatest value of an expression over a shard's rows.

    `sql` is evaluated by Spark for each row, and gives a timestamp. The promise is the greatest value in
    a batch, as in Flink's `WATERMARK FOR at AS at - INTERVAL 5 SECONDS`. A null promises nothing, so
    `"CASE WHEN is_last THEN at END"` is possible, too. Text in place of a strategy is an `Expression`.

    >>> Expression("at - INTERVAL 5 SECONDS").promise_ms(1_357_041_600_000)
    1357041600000
    """

    sql: str

    def __post_init__(self) -> None:
        if not isinstance(self.sql, str) or not self.sql.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"invalid expression {self.sql!r}: write SQL like 'at - INTERVAL 5 SECONDS'"
            )

    def mark(self, event_time: Column) -> Column:  # noqa: ARG002  (it names its columns itself)
        """Return the column whose greatest value is the promise."""
        return F.expr(self.sql)

    def promise_ms(self, newest_ms: int) -> int:
        """See `Strategy`. `newest_ms` is the greatest value of the expression."""
        return max(newest_ms, EARLIEST_MS)
