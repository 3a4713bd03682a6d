"""Topics of Kafka that a query may read together."""

from __future__ import annotations

import pytest

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Node, TopicsSource
from spark_agent.soundness.topics import checked_topics

BROKER = frozenset({"broker:9092"})
ISOLATED = "read_committed"


def reading(*topics: str, stage: str = "", isolation: str = "read_uncommitted") -> Node:
    found = TopicsSource(stage, frozenset(topics), servers=BROKER, isolation=isolation)
    return Node("StreamingRelationV2", topics_source=found)


def check(*readings: Node) -> None:
    assert len(checked_topics(Node("Union", readings))) == len(readings)


def test_a_topic_has_one_isolation_level_in_a_query() -> None:
    check(reading("rides", stage="rides"), reading("rides"))
    check(reading("rides", stage="rides", isolation=ISOLATED), reading("rides", isolation=ISOLATED))
    check(reading("rides", stage="rides"), reading("lifts", isolation=ISOLATED))


@pytest.mark.parametrize("shared", [("lifts", "rides"), ("rides",)])
@pytest.mark.parametrize("is_source_isolated", [False, True])
def test_a_topic_with_two_isolation_levels_is_refused(
    shared: tuple[str, ...], *, is_source_isolated: bool
) -> None:
    levels = ["read_uncommitted", ISOLATED]
    ours, other = reversed(levels) if is_source_isolated else levels
    with pytest.raises(UnsoundPlanError, match=r"^topic 'rides' .* 'kafka.isolation.level' to the"):
        check(
            reading("snow", isolation=other),
            reading("rides", stage="rides", isolation=ours),
            reading(*shared, isolation=other),
        )


def test_topics_of_a_pattern_may_be_topics_with_another_isolation_level() -> None:
    check(reading("rides", stage="rides"), reading())
    with pytest.raises(UnsoundPlanError, match="name them with 'subscribe'"):
        check(reading("rides", stage="rides"), reading(isolation=ISOLATED))
