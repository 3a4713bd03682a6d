"""A started query as one value: the input of its supervisor, its feed and its throttle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from spark_agent.executor.task import Reaction
from spark_agent.jvm.open_sessions import ReadSessions
from spark_agent.jvm.writer import Trigger
from spark_agent.soundness.query_stages import QueryStages
from spark_agent.strategies import ClockStrategy, StatefulStrategy

_LONGEST_INTERVAL_MS: Final = 1_000
"""A query that polls for new data less often than this does not prove that a shard is quiet now."""


def not_one(batch: int) -> int:
    """Return the number of corrections in a batch, where each window fires once."""
    del batch
    return 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts and intervals of a query."""

    ttl_ms: int
    """A task's or the driver's lease."""
    patience_ms: int
    """The longest that one call to the service may block a task."""
    poll_ms: int
    """The pause between two polls of a watermark."""
    finish_timeout_ms: int
    """The longest wait for an unavailable service, at the end of a query that ends by itself."""


@dataclass(frozen=True, slots=True)
class StartedQuery:
    """A started query: its stages, their promises, its trigger and its timing."""

    job: str
    name: str
    """The name of this start of the query, which its tasks use too."""
    stages: QueryStages
    trigger: Trigger
    timing: Timing
    bounded: bool = False
    """True if nothing follows the query: its sources become final at its end."""
    on_fenced: Reaction = "stop"
    on_lost_checkpoint: Reaction = "stop"
    counts_state: bool = True
    """True if Spark counts the rows that its operators keep. If not, Spark reports zero."""
    stateful: Mapping[str, StatefulStrategy] = field(default_factory=dict[str, StatefulStrategy])
    """Strategies with state, by source."""
    clocks: Mapping[str, ClockStrategy] = field(default_factory=dict[str, ClockStrategy])
    """Strategies that go by the clock, by source."""
    corrections: Callable[[int], int] = not_one
    """The number of corrections of windows in a batch that this start has run."""
    open_sessions: ReadSessions | None = None
    """Reader of the start (ms) of the earliest session after a batch; None: promises do not need it."""

    @property
    def ends(self) -> bool:
        """True if the query ends by itself."""
        return self.bounded or self.trigger.ends

    @property
    def polls_often(self) -> bool:
        """True if the query polls its sources all the time: its last trigger shows their backlog now."""
        often = self.trigger.interval_ms <= _LONGEST_INTERVAL_MS
        return often and not self.stages.may_wait_for_more

    @property
    def may_idle(self) -> Collection[str]:
        """The keyed stages that may be idle: Spark proves that they keep nothing."""
        return self.stages.below_idle if self.counts_state else ()
