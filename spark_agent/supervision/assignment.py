"""A supervisor's assignment: its query, the control of that query, and its last committed epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spark_agent.client.reports import StageProgress
from spark_agent.client.spec import StageSpec
from spark_agent.executor.task import Reaction
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.soundness.operators import Promise


@dataclass(frozen=True, slots=True)
class Assignment:
    """A started query, and the stages that it executes."""

    job: str
    query: str
    """The name of this start of the query, which its tasks use too."""
    sources: Sequence[StageSpec]
    keyed: Sequence[StageSpec]
    promises: Mapping[str, Promise]
    """Derivation of each keyed stage's promise from Spark's watermark."""
    bounded: bool
    ttl_ms: int
    finish_timeout_ms: int
    """The longest wait for a service that is away, once a bounded query has read everything."""
    on_fenced: Reaction = "stop"
    on_lost_checkpoint: Reaction = "stop"
    reads_all: bool = True
    """True if each batch reads all available data: no source is rate limited."""
    looks_often: bool = True
    """True if it polls for new data all the time, so that the result of its last trigger is current."""
    may_idle: Collection[str] = ()
    """The keyed stages below a source that may be idle."""
    by_shard: Collection[str] = ()
    """The sources of ours, which tell the shards that have something unread."""
    inputs: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    """By keyed stage: every stage that its input watermark depends on."""

    @property
    def stages(self) -> list[str]:
        """The names of all stages."""
        return [stage.name for stage in (*self.sources, *self.keyed)]

    @property
    def watched(self) -> list[str]:
        """The sources whose shards the service may take for idle."""
        return [stage.name for stage in self.sources if stage.has_idle_policy]


@dataclass(frozen=True, slots=True)
class QueryHandle:
    """Control and inspection of a supervised query."""

    stop: Callable[[], None]
    """Stop it, once its stages are final."""
    fail: Callable[[str], None]
    """Make it fail with this error."""
    has_no_new_data: Callable[[], bool]
    """Return whether the latest trigger found no new data in any source."""
    recent_batch: Callable[[], CommittedBatch | None]
    """Its latest batch, which its supervisor may not have been notified of yet; None: there is none."""
    has_just_found_nothing: Callable[[], bool]
    """Return whether no trigger runs now, and the latest one found no new data."""
    failure: Callable[[], str | None]
    """The error that it has ended with, in a line; None: it has not."""
    has_ended_by_itself: Callable[[], bool]
    """Return whether an end without an error means that all of the query's work is done."""
    has_control_sources: bool = True
    """True if it has control sources: the feed detects then when its input is drained."""


@dataclass(frozen=True, slots=True)
class Committed:
    """State after the last epoch that was committed to the service."""

    epoch: int = -1
    """-1: none has been committed since the query started."""
    progress: Mapping[str, StageProgress] = field(default_factory=dict[str, StageProgress])
    """By keyed stage: how far it is; none while Spark has no watermark."""
    emitted_ms: Mapping[str, int] = field(default_factory=dict[str, int])
    """The input watermark of each keyed stage that keeps nothing that has not come out."""

    @property
    def input_ms(self) -> int | None:
        """The furthest input watermark of its keyed stages."""
        reached = [each.input_ms for each in self.progress.values() if each.input_ms is not None]
        return max(reached, default=None)
