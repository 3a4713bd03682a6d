"""Topics of Kafka that are read by hand, whose partitions are shards only once they have rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spark_agent.client.spec import StageSpec
from spark_agent.jvm.nodes import SOURCE_TAG, Node
from spark_agent.soundness.query_stages import stage_of


def unseen_partitions(plan: Node, stages: Mapping[str, StageSpec]) -> list[str]:
    """Return a warning for each dynamic source that reads topics by hand."""
    return [
        f"stage {stage} reads {', '.join(sorted(topics)) or 'topics'} by hand: the watermark does not "
        f"wait for a partition that has never had rows, whose first rows may be late. Read with "
        f"read_kafka(), which computes columns before the source, columns={{'at': "
        f"'timestamp_millis(ms)'}}; or name each partition among the shards of the stage"
        for node in plan.walk()
        if node.tag.startswith(SOURCE_TAG)
        if stages[stage := stage_of(node.tag)].is_dynamic
        for topics in _read_by_hand(node)
    ]


def _read_by_hand(source: Node) -> list[Collection[str]]:
    found = [node.topics_source for node in source.walk() if node.topics_source is not None]
    return [each.topics for each in found if not each.stage]
