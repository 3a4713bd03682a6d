"""History of a stage's watermarks in the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from service.frontier.graph import StageWatermark


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The last advance of an interval of wall time."""

    after_ms: int
    """Begin of the interval, this instant excluded. `MIN`: the beginning of time."""
    at_ms: int
    """Instant when the advance was recorded."""
    watermark: StageWatermark
    version: int
    """The stage's version. It rises by one with each advance, so gaps count the advances left out."""
