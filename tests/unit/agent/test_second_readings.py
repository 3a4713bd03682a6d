"""Readings of data beside a source's own, whose ends `availableNow` fixes in the order of the plan."""

from __future__ import annotations

import pytest

from spark_agent.client.spec import read_spec
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Node
from spark_agent.jvm.writer import Trigger
from spark_agent.soundness.second_readings import check_second_readings
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


def test_a_reading_of_another_query_s_output_ends_in_any_order() -> None:
    """Its watermark is capped at the start of the run."""
    check(joined(relation(), source(), "both"), "both")
    third = watermarked(relation(), "both")
    with pytest.raises(UnsoundPlanError, match="availableNow fixes the end"):
        check(join(joined(relation(), source(), "both"), third, None), "both")


def test_one_reading_of_a_source_is_left_alone() -> None:
    check(watermarked(source()))
    check(watermarked(), "both")
