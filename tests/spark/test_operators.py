"""The table of operators against Spark itself: what it says of its own running plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.state import GroupState

from spark_agent.jvm.nodes import Bounds, Node
from spark_agent.jvm.plan import PlanReader
from spark_agent.soundness.operators import TABLE, OutputWatermark
from tests.spark.flow import ended

pytestmark = pytest.mark.spark

WATERMARK_MS = 8_000_000_000_000
"""Beyond what a Java int holds, so that it arrives as a long."""
HOUR_MS = 3_600_000

Frames = Callable[[str], DataFrame]


def nothing(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Any:
    del key, state
    yield from frames


@dataclass(frozen=True)
class Case:
    name: str
    operator: str
    """Spark's name of the logical node."""
    build: Callable[[Frames], DataFrame]
    behind_ms: int | None = 0
    """Distance of leaving rows behind Spark's watermark; None: nothing leaves."""


def windows(frame: DataFrame) -> DataFrame:
    return frame.groupBy(F.window("at", "10 minutes"), "key").count()


def between(left: DataFrame, right: DataFrame, how: str) -> DataFrame:
    near = F.expr("key = other AND at BETWEEN there - INTERVAL 1 HOUR AND there")
    return left.join(renamed(right), near, how)


def renamed(frame: DataFrame) -> DataFrame:
    return frame.select(F.col("key").alias("other"), F.col("at").alias("there"))


CASES = [
    Case("tumbling", "Aggregate", lambda f: windows(f("a"))),
    Case(
        "session",
        "Aggregate",
        lambda f: f("a").groupBy(F.session_window("at", "5 minutes"), "key").count(),
    ),
    Case("inner join", "Join", lambda f: between(f("a"), f("b"), "inner"), HOUR_MS + 1),
    Case("left outer join", "Join", lambda f: between(f("a"), f("b"), "left"), HOUR_MS + 1),
    Case(
        "a join that a later where bounds",
        "Join",
        lambda f: (
            f("a")
            .join(renamed(f("b")), F.expr("key = other"))
            .where("at >= there - INTERVAL 1 HOUR AND at < there + INTERVAL 2 HOURS")
        ),
        2 * HOUR_MS,
    ),
    Case(
        "join on the event time",
        "Join",
        lambda f: f("a").join(renamed(f("b")), F.expr("key = other AND at = there")),
    ),
    Case("dropDuplicates", "Deduplicate", lambda f: f("a").dropDuplicates(["key", "at"])),
    Case("within", "DeduplicateWithinWatermark", lambda f: f("a").dropDuplicatesWithinWatermark()),
    Case(
        "applyInPandasWithState",
        "FlatMapGroupsInPandasWithState",
        lambda f: (
            f("a")
            .groupBy("key")
            .applyInPandasWithState(
                nothing, "key string, at timestamp", "n int", "append", "EventTimeTimeout"
            )
        ),
        None,
    ),
]


@pytest.fixture
def frames(spark: SparkSession, tmp_path: Path) -> Frames:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "1.json").write_text(json.dumps({"key": "a", "at": "2026-01-01T00:00:00Z"}))

    def frame(name: str) -> DataFrame:
        del name
        read = spark.readStream.schema("key string, at timestamp").json(str(inbox))
        return read.withWatermark("at", "0 seconds")

    return frame


def run(frame: DataFrame, folder: Path) -> StreamingQuery:
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(folder / "state"))
    query = writer.trigger(availableNow=True).start()
    ended(query)
    return query


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_leaves_an_operator_is_what_spark_says(
    case: Case, spark: SparkSession, frames: Frames, tmp_path: Path
) -> None:
    frame = case.build(frames)
    plan = PlanReader(spark).read(frame)
    [node] = [each for each in plan.walk() if each.operator == case.operator]
    said = output_watermarks(run(frame, tmp_path))
    assert said == [None if case.behind_ms is None else WATERMARK_MS - case.behind_ms]
    assert (
        TABLE[case.operator].output
        is {
            True: OutputWatermark.DECLARED,
            False: OutputWatermark.BOUNDS if node.bounds else OutputWatermark.SAME,
        }[case.behind_ms is None]
    )
    if node.bounds is not None:
        bounds = node.bounds
        assert max(bounds.left_ms or 0, bounds.right_ms or 0) == case.behind_ms


def output_watermarks(query: StreamingQuery) -> list[int | None]:
    """Ask each stateful operator of the last batch's plan."""
    wrapped: Any = query._jsq
    execution = wrapped.streamingQuery().lastExecution()
    return list(_produced(execution.executedPlan()))


def _produced(node: Any) -> Iterator[int | None]:
    methods = {method.getName() for method in node.getClass().getMethods()}
    if "produceOutputWatermark" in methods:
        found = node.produceOutputWatermark(WATERMARK_MS)
        yield None if found.isEmpty() else found.get()
    children = node.children()
    for i in range(children.size()):
        yield from _produced(children.apply(i))


@pytest.mark.parametrize(
    "condition", ["key = other", "key = other AND at <= there", "key = other AND at >= there"]
)
def test_a_join_that_spark_would_call_bounded_is_not(
    condition: str, spark: SparkSession, frames: Frames
) -> None:
    """Spark names an output watermark for these too, and emits rows behind it all the same."""
    frame = frames("a").join(renamed(frames("b")), F.expr(condition))
    [join] = [node for node in PlanReader(spark).read(frame).walk() if node.operator == "Join"]
    assert join.bounds is not None
    assert None in {join.bounds.left_ms, join.bounds.right_ms}


@pytest.mark.parametrize(
    ("condition", "one_sided_equality"),
    [
        ("key = other AND at = there", False),
        ("key = other AND at = date_trunc('hour', there)", True),
        ("key = other AND date_trunc('hour', at) = there", True),
    ],
)
def test_event_time_equal_to_something_else_is_seen(
    condition: str, one_sided_equality: bool, spark: SparkSession, frames: Frames
) -> None:
    frame = frames("a").join(renamed(frames("b")), F.expr(condition))
    [join] = [node for node in PlanReader(spark).read(frame).walk() if node.operator == "Join"]
    assert join.bounds is not None
    assert join.bounds.one_sided_equality == one_sided_equality


@pytest.mark.parametrize(
    ("condition", "left_ms"),
    [
        ("there >= at AND there < w.end", None),
        ("there >= at AND there < ended", None),
        ("there >= at AND there <= deadline", None),
        ("there >= at AND due >= at AND due <= at + INTERVAL 1 HOUR", None),
        ("there BETWEEN at AND at + INTERVAL 2 HOURS", 7_200_001),
        ("there BETWEEN at AND at + INTERVAL 2 HOURS AND there < w.end", 7_200_001),
        ("there = at AND w.end > there", 0),
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_only_event_times_bound_a_join(
    condition: str, left_ms: int | None, spark: SparkSession, frames: Frames, *, kept: bool
) -> None:
    """Spark takes `there < w.end` for a bound, and forgets a row once its own time is behind."""
    left = (
        frames("a")
        .withColumn("w", F.window("at", "2 hours"))
        .withColumn("ended", F.col("w.end"))
        .withColumn("deadline", F.expr("at + INTERVAL 9 HOURS"))
    )
    right = renamed(frames("b")).withColumn("due", F.expr("there + INTERVAL 9 HOURS"))
    frame = left.join(right, F.expr(f"key = other AND {condition}"))
    frame = frame if kept else frame.select("key")
    [join] = [node for node in PlanReader(spark).read(frame).walk() if node.operator == "Join"]
    assert join.bounds is not None
    assert join.bounds.left_ms == left_ms


def test_an_aggregate_is_joined_by_its_window_s_time(spark: SparkSession, frames: Frames) -> None:
    ended = windows(frames("a")).select("key", "window", F.window_time("window").alias("at"))
    for side in (ended, ended.drop("window")):
        joined = between(side, frames("b"), "inner")
        [join] = [node for node in PlanReader(spark).read(joined).walk() if node.operator == "Join"]
        assert join.bounds == Bounds(HOUR_MS + 1, 1)


def test_a_plan_is_read_down_to_what_it_groups_and_renames(
    spark: SparkSession, frames: Frames
) -> None:
    frame = windows(frames("a")).select(F.col("window.end").alias("until"), "count")
    plan = PlanReader(spark).read(frame)
    aggregate = next(node for node in plan.walk() if node.operator == "Aggregate")
    assert {column.stamp for column in aggregate.groups} == {"window", None}
    [until, _] = plan.output
    window = next(column for column in aggregate.output if column.name == "window")
    assert plan.copies[until.id] == (window.id, "end")


def find(plan: Node, operator: str) -> Node:
    return next(node for node in plan.walk() if node.operator == operator)


def test_a_relation_s_limits_are_read(spark: SparkSession, tmp_path: Path) -> None:
    reader = spark.readStream.schema("at timestamp")
    limited = reader.option("maxFilesPerTrigger", 3).json(str(tmp_path))
    relation = find(PlanReader(spark).read(limited), "StreamingRelation")
    assert relation.limits == ("maxfilespertrigger",)
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    assert find(PlanReader(spark).read(rate), "StreamingRelationV2").limits == ()
