"""Sources whose batches may leave rows unread.

A watermark covers rows that another query has written. A query that closes by the watermark must have
read these rows: a row that is left for a later batch is late. So a source that may leave rows unread is
rejected below another query's stage, unless the watermark can wait for its rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import SOURCE_TAG, Node
from spark_agent.sources.kafka import TOPIC_LIMIT


def is_limited(node: Node) -> bool:
    """Return whether a node is a source that may leave rows unread."""
    return bool(node.limits or node.format_with_limits)


def unreported_limited(node: Node) -> Iterator[Node]:
    """Yield the limited sources that this query does not report with `source()`."""
    if node.tag.startswith(SOURCE_TAG):
        return
    if is_limited(node):
        yield node
    for child in node.children:
        yield from unreported_limited(child)


def awaited_topics(node: Node) -> frozenset[str]:
    """Return the topics of a limited source whose watermark can wait until they are read so far."""
    if node.topics_source is None or node.limits != (TOPIC_LIMIT,):
        return frozenset()
    return node.topics_source.topics


def check_limits(stage: str, data: Node) -> None:
    """Check that a keyed stage's data is read in time. Raises `UnsoundPlanError`."""
    for node in unreported_limited(data):
        if not awaited_topics(node):
            raise UnsoundPlanError(_error(stage, node))


def _error(stage: str, node: Node) -> str:
    if node.limits:
        source = f"a source that is limited by {', '.join(node.limits)}"
        advice = "Leave out the limit"
    else:
        source = f"the format {node.format_with_limits!r}, which may limit its batches by itself"
        advice = "Let the stage above write files or a topic of Kafka"
    return (
        f"stage {stage!r} reads {source}. This query does not report the source: rows that the "
        f"watermark already covers could be left for a later batch, and be late by then. {advice}, or "
        f"report the source in this query with source()"
    )
