"""Sources of Kafka's topics, as a query may read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Node, TopicsSource
from spark_agent.sources.kafka import ISOLATION_OPTION, check_limit, loss_message


def checked_topics(plan: Node) -> Sequence[TopicsSource]:
    """Return the sources of Kafka's topics. Raises `ValueError`."""
    found = [node.topics_source for node in plan.walk() if node.topics_source is not None]
    for each in found:
        if not each.fails_on_loss:
            raise UnsoundPlanError(loss_message())
        if each.limit is not None:
            check_limit(each.limit)
    for one, other in combinations(found, 2):
        clash = clusters_clash(one, other) or isolation_clash(one, other)
        if clash is not None:
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


def isolation_clash(one: TopicsSource, other: TopicsSource) -> str | None:
    """Return the reason why a query cannot read both sources; None: it can.

    Without isolation, a source reads rows of an open transaction, and promises past them. Spark's latest
    offset of `read_committed` is before these rows, which a batch therefore reads after the watermark.

    >>> rides = TopicsSource("s", frozenset({"rides"}))
    >>> isolated = TopicsSource("", rides.topics, isolation="read_committed")
    >>> isolation_clash(rides, rides), isolation_clash(isolated, isolated)
    (None, None)
    >>> isolation_clash(TopicsSource("s", frozenset({"lifts"})), isolated)
    >>> isolation_clash(rides, isolated)[:64]
    "topic 'rides' is read with two isolation levels, read_committed "
    >>> isolation_clash(TopicsSource("", frozenset()), isolated)[:64]
    'topics, by pattern or by partition, are read with two isolation '
    """
    if one.isolation == other.isolation or not one.may_share(other):
        return None
    shared = sorted(one.topics & other.topics)
    found = f"topic {shared[0]!r} is" if shared else "topics, by pattern or by partition, are"
    by_name = "" if shared else ". If they are other topics, name them with 'subscribe'"
    levels = " and ".join(sorted((one.isolation, other.isolation)))
    return (
        f"{found} read with two isolation levels, {levels}: rows of an open transaction would move the "
        f"watermark in one reading, and would be late in the other, which waits for their commit. Set "
        f"{ISOLATION_OPTION!r} to the same value in the options of each reading, read_kafka() "
        f"included{by_name}"
    )
