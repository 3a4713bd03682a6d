"""Readings of data beside a source's own, whose ends `availableNow` fixes in the order of the plan."""

from __future__ import annotations

import pytest

from spark_agent.client.spec import read_spec
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Node, TopicsSource
from spark_agent.jvm.writer import Trigger
from spark_agent.soundness.second_readings import check_second_readings, may_share_rows
from tests.unit.agent.queries import CONTINUOUS, NIGHTLY
from tests.unit.agent.test_operators import join, relation, source, watermarked

STAGES = read_spec(
    {
        "taps": {"shards": ["a"]},
        "pipes": {"shards": ["a"]},
        "hourly": {"inputs": ["taps"], "ranges": 1},
        "both": {"inputs": ["taps", "pipes"], "ranges": 1},
    }
)


def joined(left: Node, right: Node, stage: str = "hourly") -> Node:
    return join(watermarked(left, stage), watermarked(right, stage), None)


def check(
    plan: Node, stage: str = "hourly", *, trigger: Trigger = NIGHTLY, sources: int | None = None
) -> None:
    """Check a query that executes the source `taps`."""
    check_second_readings(plan, trigger, STAGES, ["taps", stage], sources or plan.sources)


def test_a_second_reading_ends_after_the_source() -> None:
    check(joined(source(), relation()))
    with pytest.raises(UnsoundPlanError, match=r"'hourly'.* source 'taps'.* Put it first"):
        check(joined(relation(), source()))


def test_another_trigger_reads_the_rest_in_its_next_batch() -> None:
    check(joined(relation(), source()), trigger=CONTINUOUS)


def test_more_sources_end_in_any_order() -> None:
    with pytest.raises(UnsoundPlanError, match=r"The plan has 5 sources, and beyond 4"):
        check(joined(source(), relation()), sources=5)


def test_readings_of_other_queries_outputs_end_in_any_order() -> None:
    """Their watermark is capped at the start of the run."""
    outputs = relation(path="file:/pipes"), relation(path="file:/pipes-by-hour")
    check(joined(outputs[0], source(), "both"), "both", sources=5)
    check(join(joined(outputs[0], source(), "both"), watermarked(outputs[1], "both"), None), "both")


def test_a_second_reading_is_known_by_its_data_and_not_by_their_number() -> None:
    """The stage `pipes` is not read at all: one reading beside the source is not its output."""
    with pytest.raises(UnsoundPlanError, match=r"'both'.* source 'taps'.* Put it first"):
        check(joined(relation(), source(), "both"), "both")
    check(joined(source(), relation(), "both"), "both")


def topics(*names: str) -> Node:
    found = TopicsSource("", frozenset(names))
    return Node(
        "StreamingRelationV2", output=relation().output, topics_source=found, format="kafka"
    )


def table(name: str) -> Node:
    return Node("StreamingRelationV2", output=relation().output, format=name)


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (relation(path="file:/in"), relation(path="file:/in/taps"), True),
        (relation(path="file:/in/*/taps"), relation(path="file:/in/north"), True),
        (relation(path="file:/in/[a-m]*"), relation(path="file:/in/{n,t}aps"), True),
        (relation(path="file:/in/tap?"), relation(path="file:/in/pipes"), False),
        (relation(path="file:/in"), relation(path="hdfs://host/in"), False),
        (topics("taps"), topics("pipes", "taps"), True),
        (topics("taps"), topics("pipes"), False),
        (topics("taps"), topics(), True),
        (topics("taps"), relation(), False),
        (relation(), table("taps"), False),
        (table("taps"), table("taps"), True),
        (table("taps"), table("pipes"), False),
    ],
)
def test_data_that_two_readings_may_share(first: Node, second: Node, *, shares: bool) -> None:
    assert may_share_rows(first, second) is shares
    assert may_share_rows(second, first) is shares


def test_one_reading_of_a_source_is_left_alone() -> None:
    check(watermarked(source()))
    check(watermarked(), "both")
