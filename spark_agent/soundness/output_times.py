"""Output times: the event times of a stage's results, in relation to the window that each is of.

A stage promises by them: until a window has fired, its result may still leave with its output time
(Akidau, Chernyak and Lax, *Streaming Systems*, chapter 3, "Event time watermarks: Output timestamps";
Beam's `TimestampCombiner`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spark_agent.jvm.nodes import WindowGrid

_US_PER_MS: Final = 1_000


class OutputTime(StrEnum):
    """The time that dates a window's result for the stages below.

    `report` takes the value or its text.

    >>> OutputTime("earliest") is OutputTime.EARLIEST
    True
    """

    END_OF_WINDOW = "end_of_window"
    """The window's end."""
    EARLIEST = "earliest"
    """The time of the window's earliest row, `min(at)`."""
    LATEST = "latest"
    """The time of the window's latest row, `max(at)`."""


@dataclass(frozen=True, slots=True)
class DatedBy:
    """Choice of an output time, with the declared length of the longest session."""

    output_time: OutputTime
    longest_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """The sessions that Spark keeps after a batch."""

    epoch: int
    """The batch."""
    spark_ms: int
    """Spark's watermark in the batch."""
    earliest_ms: int | None
    """The start of the earliest session; None: not one is open."""


@dataclass(frozen=True, slots=True)
class OutputTimes:
    """The output times of a stage's windows: each is after the window's end less the reach, or then."""

    window: str
    """The column with the window, or with its end."""
    reach_us: int
    windows: WindowGrid | None = None
    """Tumbling or sliding windows; None: sessions, which may end at any time."""
    reads_state: bool = False
    """True if a session's output time is its start. The reach is then the gap: a session that is not
    open yet begins at most the gap before the watermark. The open ones are read from Spark's state."""

    def earliest_ms(self, watermark_ms: int) -> int:
        """Return the earliest output time of windows that the watermark (ms) has not passed.

        The end of a tumbling or sliding window, less the slide, is the end of the window before. So
        windows that end after W have output times from the last end on that W has passed.

        >>> hour = 3_600_000
        >>> tumbling = OutputTimes("window", hour * 1_000, WindowGrid(hour * 1_000, hour * 1_000, 0))
        >>> [tumbling.earliest_ms(ms) // hour for ms in (hour - 1, hour, 2 * hour - 1)]
        [0, 1, 1]
        >>> sliding = OutputTimes("window", 5_000, WindowGrid(12_000, 5_000, 0))
        >>> [sliding.earliest_ms(ms) for ms in (11, 12, 16, 17)]
        [7, 12, 12, 17]
        >>> OutputTimes("session_window", 1_500).earliest_ms(60_000)
        59998
        """
        if self.windows is None:
            return (watermark_ms * _US_PER_MS - self.reach_us) // _US_PER_MS
        grid = self.windows
        end_us = grid.first_open_us(watermark_ms) + grid.size_us
        return (end_us - grid.slide_us) // _US_PER_MS
