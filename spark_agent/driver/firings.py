"""Firings of a query's windows that fire more than once, in each of its batches.

Spark runs such a query in update mode, with its watermark behind the stage's by the allowed lateness. A
batch brings the newest value of each window that it has changed. Values of windows that have fired are
corrections, and leave at once. Those of other windows are kept in the checkpoint until the stage's
watermark has passed the window's end.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, Protocol

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent.firing_frames import end_us, ending, fired, kept, newest, open_after
from spark_agent.soundness.firings import Firing

_WHOLE_EVERY: Final = 64
"""So many batches may add to the kept windows before they are written as a whole."""
_US_PER_MS: Final = 1_000
_NOT_YET_US: Final = -(2**63)


class Kept(Protocol):
    """The windows that have not fired: `spark_agent.jvm.unfired.Unfired`."""

    def read(self, batch: int) -> DataFrame | None:
        """Return the values that older batches have added; None: not one."""
        ...

    def add(self, rows: DataFrame, batch: int) -> None:
        """Add the values of a batch."""
        ...

    def replace(self, rows: DataFrame, batch: int) -> None:
        """Replace all values by those that have not fired after a batch."""
        ...

    def clean(self, batch: int) -> None:
        """Delete what a batch does not read."""
        ...


class LoggedWatermarks(Protocol):
    """A query's checkpoint: `spark_agent.jvm.checkpoint.Checkpoint`."""

    def watermark_before(self, batch: int) -> int:
        """Return Spark's watermark (ms) in the batch before. Raises `QueryFailedError`."""
        ...


class Firings:
    """The firings of one query."""

    def __init__(self, firing: Firing, checkpoint: LoggedWatermarks, windows: Kept) -> None:
        self._firing = firing
        self._checkpoint = checkpoint
        self._windows = windows
        self._corrections: dict[int, int] = {}

    @contextmanager
    def fire(self, rows: DataFrame, batch: int) -> Generator[DataFrame]:
        """Return the windows that fire in a batch, and keep the values of those that do not.

        `rows` are the values that the batch has changed. A repeated batch has the same firings: what it
        keeps is read by later batches only, and they run after Spark has committed it.
        """
        window = self._firing.window
        before_ms, now_ms = self._watermark_ms(batch), self._watermark_ms(batch + 1)
        before_us, now_us = _us(before_ms), _us(now_ms)
        end = end_us(rows, window)
        [counts] = rows.agg(F.count_if(end <= before_us), F.count_if(end > now_us)).collect()
        self._corrections[batch] = counts[0]
        corrections = fired(rows.filter(end <= before_us), batch, F.lit(False))
        values = kept(rows.filter(end > before_us), window, batch)
        self._windows.clean(batch)
        fires = self._firing.fires(before_ms, now_ms)
        if not fires and batch % _WHOLE_EVERY:
            if counts[1]:
                self._windows.add(values, batch)
            yield corrections
            return
        older = self._windows.read(batch)
        if older is not None:
            # Computed once: some are kept, and the others leave.
            values = newest(values.union(older), self._firing.keys).persist()
        try:
            self._windows.replace(open_after(values, now_us), batch)
            first = ending(values, before_us, now_us)
            yield corrections.union(fired(first, batch, F.lit(True)))
        finally:
            values.unpersist()

    def corrections(self, batch: int) -> int:
        """Return the number of corrections in a batch, once: a batch is committed once."""
        return self._corrections.pop(batch, 0)

    def _watermark_ms(self, batch: int) -> int | None:
        """Return the stage's watermark (ms) in the batch before; None: not yet."""
        return self._firing.watermark_ms(self._checkpoint.watermark_before(batch))


def _us(watermark_ms: int | None) -> int:
    return _NOT_YET_US if watermark_ms is None else watermark_ms * _US_PER_MS
