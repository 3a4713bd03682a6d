"""State of a query after the last epoch that was committed to the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_agent.client.reports import StageProgress


@dataclass(frozen=True, slots=True)
class Committed:
    """State after the last epoch that was committed to the service."""

    epoch: int = -1
    """-1: none has been committed since the query started."""
    progress: Mapping[str, StageProgress] = field(default_factory=dict[str, StageProgress])
    """By keyed stage: how far it is; none while Spark has no watermark."""
    emitted_ms: Mapping[str, int] = field(default_factory=dict[str, int])
    """The input watermark of each keyed stage that keeps nothing that has not come out."""
    duration_ms: int = 0
    """Duration of its batch."""

    @property
    def input_ms(self) -> int | None:
        """The furthest input watermark of its keyed stages."""
        reached = [each.input_ms for each in self.progress.values() if each.input_ms is not None]
        return max(reached, default=None)
