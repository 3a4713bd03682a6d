"""Adoption of a control source's watermark by Spark."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

from spark_agent.jvm.progress import CommittedBatch
from spark_agent.sources.driver_link import Offset

_log: Final = logging.getLogger("spark_agent")

STALLED_AFTER_BATCHES: Final = 3
"""Spark must have adopted a watermark this many batches after it was handed over."""


@dataclass(frozen=True, slots=True)
class _StalledWatermark:
    """A watermark handed to Spark that Spark has not adopted yet."""

    watermark_ms: int
    since_epoch: int
    logged: bool = False


class Adoption:
    """Watches that Spark's watermark follows the watermarks it is handed.

    A control row becomes Spark's watermark at the end of its batch. Without stateful operators, Spark
    would not run another batch until data arrives. With several control sources, Spark adopts the
    smallest of their watermarks.
    """

    def __init__(self) -> None:
        self._handed_ms: dict[str, int | None] = {}
        """By reader: the watermark of its latest offset; None: not any yet."""
        self._stalled: _StalledWatermark | None = None

    def is_awaited(self, reader: str, at: Offset, latest: CommittedBatch | None) -> bool:
        """Return whether Spark needs another batch to adopt the watermarks of its latest offsets.

        The offset of another reader may be of the trigger before. If it has advanced since, that reader
        is still to be polled in this trigger, and awaits the adoption itself.
        """
        self._handed_ms[reader] = at.watermark_ms
        # Spark's own watermark starts at 1970.
        handed_ms = min(0 if each is None else each for each in self._handed_ms.values())
        if latest is None or handed_ms <= max(latest.watermark_ms, 0):
            self._stalled = None
            return False
        stalled = self._stalled
        if stalled is None or stalled.watermark_ms != handed_ms:
            stalled = _StalledWatermark(handed_ms, latest.epoch)
        batches = latest.epoch - stalled.since_epoch
        if batches >= STALLED_AFTER_BATCHES and not stalled.logged:
            stalled = replace(stalled, logged=True)
            _log.warning(
                "Spark's watermark is stuck at %d ms, although the control source handed it %d ms "
                "%d batches ago. Either its batches are not computed: the function of foreachBatch "
                "does not use its rows, or the output folder has these batches already, from another "
                "checkpoint. Or something holds it back: a withWatermark on another source of this "
                "query, or an optimiser rule that drops the control rows",
                latest.watermark_ms,
                handed_ms,
                batches,
            )
        self._stalled = stalled
        return batches < STALLED_AFTER_BATCHES
