"""Readings of the live store's clock, compared to a steady clock.

A clock that is set ahead ages each moment that it has given before: every quiet shard would seem to have
been quiet for as long. Set back, it gives moments again that are past. The store cannot notice either,
since it has no other clock. A replica has a steady one, which nobody sets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from service.frontier.timestamps import MAX, MIN

MAX_DRIFT_MS: Final = 100
"""The largest difference between two clocks that is not a step, besides a thousandth of the time."""


@dataclass(frozen=True, slots=True)
class ClockReadings:
    """A series of readings of a clock."""

    since_ms: int
    """The first reading after the last step; without a step, the first of all."""
    last_ms: int
    """The last reading."""
    sent_ms: int
    """On the steady clock: the last reading was requested then."""
    received_ms: int
    """On the steady clock: the last reading was received then."""
    ahead_ms: int = 0
    """Time by which the clock was set ahead since the first reading, and not back since."""
    set_back: int = 0
    """Number of times that it was set back."""
    steps: int = 0
    """Number of times that it was set, ahead or back."""

    @property
    def even_since_ms(self) -> int:
        """The instant since which the clock goes on evenly: `MIN` before the first step. A replica that
        has just begun takes for even what it has not seen.
        """
        return self.since_ms if self.steps else MIN

    def moment(self, given_ms: int) -> int:
        """Return a moment that the clock has given, as an instant of the clock as it goes now.

        A moment ahead of the clock is from before a set-back: it counts as the first one after it.

        >>> readings = ClockReadings(since_ms=100, last_ms=150, sent_ms=0, received_ms=0)
        >>> readings.moment(120), readings.moment(900)
        (120, 100)
        """
        return self.since_ms if given_ms > self.last_ms else given_ms

    def trusted(self) -> ClockReadings:
        """Return the readings for a conclusion that was proved before: only the time after it counts."""
        return replace(self, since_ms=MIN)


EVEN: Final = ClockReadings(MIN, MAX, MIN, MAX)
"""Readings of a clock that is itself steady."""


def step_of(series: ClockReadings, now_ms: int, *, sent_ms: int, received_ms: int) -> int:
    """Return the time by which a clock was set since the last reading: ahead, or (below 0) back.

    The readings are made at unknown instants between request and answer. So a step ahead is rounded up,
    and a step back down.

    >>> series = next_reading(None, 5_000, sent_ms=100, received_ms=102)
    >>> step_of(series, 6_050, sent_ms=1_100, received_ms=1_104)
    0
    >>> step_of(series, 66_000, sent_ms=1_100, received_ms=1_104)
    60002
    >>> step_of(series, 2_000, sent_ms=1_100, received_ms=1_104)
    -3998
    """
    passed_ms = now_ms - series.last_ms
    least_ms, most_ms = sent_ms - series.received_ms, received_ms - series.sent_ms
    allowed_ms = MAX_DRIFT_MS + most_ms // 1_000
    is_even = least_ms - allowed_ms <= passed_ms <= most_ms + allowed_ms
    return 0 if is_even else passed_ms - least_ms


def next_reading(
    series: ClockReadings | None, now_ms: int, *, sent_ms: int, received_ms: int
) -> ClockReadings:
    """Return the series after a reading. After a step, time is measured from the step on.

    >>> series = next_reading(None, 5_000, sent_ms=100, received_ms=100)
    >>> next_reading(series, 6_000, sent_ms=1_100, received_ms=1_100).since_ms
    5000
    >>> ahead = next_reading(series, 66_000, sent_ms=1_100, received_ms=1_100)
    >>> ahead.since_ms, ahead.ahead_ms, ahead.set_back
    (66000, 60000, 0)
    >>> back = next_reading(ahead, 6_500, sent_ms=1_600, received_ms=1_600)
    >>> back.since_ms, back.ahead_ms, back.set_back
    (6500, 0, 1)
    """
    if series is None:
        return ClockReadings(now_ms, now_ms, sent_ms, received_ms)
    step_ms = step_of(series, now_ms, sent_ms=sent_ms, received_ms=received_ms)
    return ClockReadings(
        since_ms=now_ms if step_ms else series.since_ms,
        last_ms=now_ms,
        sent_ms=sent_ms,
        received_ms=received_ms,
        ahead_ms=max(0, series.ahead_ms + step_ms),
        set_back=series.set_back + (step_ms < 0),
        steps=series.steps + (step_ms != 0),
    )
