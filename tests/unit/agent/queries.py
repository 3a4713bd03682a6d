"""Started queries, as `Queries.start` describes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spark_agent.client.spec import StageSpec
from spark_agent.jvm.writer import AVAILABLE_NOW, Trigger
from spark_agent.soundness.operators import Promise
from spark_agent.soundness.query_stages import QueryStages
from spark_agent.started_query import StartedQuery, Timing

TIMING = Timing(ttl_ms=10_000, patience_ms=3_000, poll_ms=100, finish_timeout_ms=60_000)
"""The patience is generous: a busy machine is not a fault of the code."""
CONTINUOUS = Trigger("ProcessingTimeTrigger")
NIGHTLY = Trigger(AVAILABLE_NOW)


class NoNotes:
    """A checkpoint without joined shards."""

    def joined(self, stage: str) -> Collection[str]:
        return ()

    def topic_ids(self, topic: str) -> Collection[str]:
        raise NotImplementedError

    def note_topic_id(self, topic: str, id_: str) -> None:
        raise NotImplementedError

    def note_joined(self, stage: str, shards: Collection[str]) -> None:
        raise AssertionError(stage)

    def states(self, stage: str) -> tuple[int, str] | None:
        raise AssertionError(stage)

    def note_states(self, stage: str, epoch: int, states: str) -> None:
        raise AssertionError(stage)


def source(name: str, *, has_idle_policy: bool = False, is_dynamic: bool = False) -> StageSpec:
    return StageSpec(
        name, shards=("a", "b"), has_idle_policy=has_idle_policy, is_dynamic=is_dynamic
    )


def started(
    sources: Sequence[StageSpec] = (),
    promises: Mapping[str, Promise] | None = None,
    *,
    inputs: Mapping[str, Collection[str]] | None = None,
    by_shard: Collection[str] = (),
    reads_all: bool = True,
    trigger: Trigger = CONTINUOUS,
    timing: Timing = TIMING,
    **options: Any,
) -> StartedQuery:
    promises = promises or {}
    stages = QueryStages(
        sources=tuple(sources),
        keyed=tuple(StageSpec(each, ranges=("0",)) for each in promises),
        promises=promises,
        inputs={stage: frozenset(above) for stage, above in (inputs or {}).items()},
        by_shard=frozenset(by_shard),
        reads_all=reads_all,
    )
    return StartedQuery("j", "q", stages, trigger, timing, **options)
