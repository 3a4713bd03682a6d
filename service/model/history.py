"""History of a stage's watermarks in the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.frontier.agreement import Agreement
from service.frontier.graph import StageWatermark


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows that the ranges of a stage have reported so far."""

    records: int
    late: int


def row_counts(
    agreements: Mapping[str, Agreement], stages: Iterable[str]
) -> Mapping[str, RowCounts]:
    """Return the rows of those of these stages that have ranges.

    >>> row_counts({"s": Agreement(5, records=7, late=1)}, ["s", "passthrough"])
    {'s': RowCounts(records=7, late=1)}
    """
    found = ((stage, agreements.get(stage)) for stage in stages)
    return {n: RowCounts(each.records, each.late) for n, each in found if each is not None}


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
    counts: RowCounts | None = None
    """The rows up to the advance; None: unknown, as for a stage without ranges."""
