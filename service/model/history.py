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
    """When the advance was recorded."""
    watermark: StageWatermark
    version: int
    """The stage's. It rises by one with each advance, so it tells how many others were left out."""
