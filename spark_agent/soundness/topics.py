"""Sources of Kafka's topics, as a query may read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Node, TopicsSource
from spark_agent.sources.kafka import check_limit, loss_message


def checked_topics(plan: Node) -> Sequence[TopicsSource]:
    """Return the sources of Kafka's topics. Raises `ValueError`."""
    found = [node.topics_source for node in plan.walk() if node.topics_source is not None]
    for each in found:
        if not each.fails_on_loss:
            raise UnsoundPlanError(loss_message())
        if each.limit is not None:
            check_limit(each.limit)
    for one, other in combinations(found, 2):
        if (clash := clusters_clash(one, other)) is not None:
            raise UnsoundPlanError(clash)
    return found


def clusters_clash(one: TopicsSource, other: TopicsSource) -> str | None:
    """Return the reason why a query cannot read both sources; None: it can.

    Spark's progress names topics, and not clusters.

    >>> rides = TopicsSource("s", frozenset({"rides"}), servers=frozenset({"a:9092", "b:9092"}))
    >>> clusters_clash(rides, TopicsSource("", frozenset({"rides"}), servers=frozenset({"b:9092"})))
    >>> clusters_clash(rides, TopicsSource("", frozenset({"lifts"}), servers=frozenset({"c:9092"})))
    >>> clusters_clash(rides, TopicsSource("", rides.topics, servers=frozenset({"c:9092"})))[:64]
    "topic 'rides' is read from two clusters, a:9092,b:9092 and c:909"
    >>> clusters_clash(rides, TopicsSource("", frozenset(), servers=frozenset({"c:9092"})))[:64]
    'topics of two clusters, a:9092,b:9092 and c:9092, are read by pa'
    """
    if one.servers & other.servers:
        return None
    clusters = " and ".join(",".join(sorted(each.servers)) for each in (one, other))
    if not one.topics or not other.topics:
        return (
            f"topics of two clusters, {clusters}, are read by pattern or by partition: partitions of "
            f"topics of one name would be taken for each other's. Name the topics with 'subscribe', or "
            f"read each cluster in a query of its own"
        )
    for topic in sorted(one.topics & other.topics):
        return (
            f"topic {topic!r} is read from two clusters, {clusters}: their partitions would be taken "
            f"for each other's. Read each cluster in a query of its own. If the cluster is one, write "
            f"the same addresses twice"
        )
    return None
