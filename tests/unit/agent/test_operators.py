"""Rows that leave each operator, derived from plans made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from spark_agent.client.spec import read_spec
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Bounds, Column, Control, Node, Stamp
from spark_agent.soundness.operators import (
    TABLE,
    OutputRows,
    Promise,
    output_rows,
    promise_of,
)
from spark_agent.soundness.query_stages import QueryStages, ReportCall, check
from spark_agent.soundness.settings import check_days

AT = Column(1, "at", Stamp.TIME)
KEY = Column(2, "key")
WINDOW = Column(3, "window", Stamp.WINDOW)
COUNT = Column(4, "count")
STAGES = read_spec(
    {
        "taps": {"shards": ["a"]},
        "pipes": {"shards": ["a"]},
        "hourly": {"inputs": ["taps"], "ranges": 1},
    }
)
SOURCE = "tidegauge.source.1.taps"
RANGES = "tidegauge.ranges.2.hourly"


def relation(
    *, limits: tuple[str, ...] = (), format_with_limits: str = "", path: str = "file:/taps"
) -> Node:
    output = (Column(1, "at"), KEY)
    return Node(
        "StreamingRelation",
        output=output,
        limits=limits,
        format_with_limits=format_with_limits,
        paths=frozenset({path}),
    )


def source(below: Node | None = None, tag: str = SOURCE) -> Node:
    below = below or relation()
    return Node("Filter", (below,), output=below.output, tag=tag, event_time=AT.id)


def watermarked(data: Node | None = None, stage: str = "hourly", delay_ms: int = 0) -> Node:
    source = Node("StreamingRelationV2", control=Control(stage, "1"))
    declared = Node("EventTimeWatermark", (source,), delay_ms=delay_ms)
    return Node("Union", (Node("Filter", (declared,)), data or relation()), output=(AT, KEY))


def windows(child: Node, window: Column = WINDOW) -> Node:
    """Return windows over the child's first column, as Spark's rule for `window(…)` makes them."""
    copies = {each.id: (each.id, "") for each in child.output}
    made = Node(
        "Project",
        (child,),
        output=(window, *child.output),
        copies=copies,
        window_times={window.id: child.output[0].id},
    )
    return Node("Aggregate", (made,), output=(window, COUNT), groups=(window, KEY))


def join(left: Node, right: Node, bounds: Bounds | None) -> Node:
    return Node("Join", (left, right), output=(AT, KEY), bounds=bounds)


def project(child: Node, *columns: tuple[int, str, int, str]) -> Node:
    """Columns by id, name, the id of what they come from and its field."""
    return Node(
        "Project",
        (child,),
        output=tuple(Column(number, name) for number, name, _, _ in columns),
        copies={number: (origin, part) for number, _, origin, part in columns},
    )


def promise(node: Node, column: str | None = None, delay_ms: int | None = None) -> Promise:
    found = None if column is None else next(each for each in node.output if each.name == column)
    return promise_of("hourly", output_rows(node), found, delay_ms)


def reported(child: Node, tag: str = RANGES) -> Node:
    return Node("Filter", (child,), output=child.output, tag=tag)


def checked(plan: Node, event_time: str | None = None) -> QueryStages:
    return check(plan, STAGES, {RANGES: ReportCall("hourly", event_time, None)})


class TestStamps:
    def test_a_window_stands_for_its_end(self) -> None:
        assert promise(windows(watermarked()), "window") == Promise(buffered=True)

    def test_the_end_of_a_window(self) -> None:
        node = project(windows(watermarked()), (9, "ended_at", WINDOW.id, "end"))
        assert promise(node, "ended_at") == Promise(buffered=True)

    def test_the_start_of_a_window_needs_its_length(self) -> None:
        node = project(windows(watermarked()), (9, "started_at", WINDOW.id, "start"))
        with pytest.raises(UnsoundPlanError, match=r"'started_at' is the start .* stamp rows with"):
            promise(node, "started_at")
        assert promise(node, "started_at", 3_600_000).declared_ms == 3_600_000

    def test_an_aggregate_of_times_is_nobody_s_time(self) -> None:
        node = replace(windows(watermarked()), output=(WINDOW, Column(8, "latest")))
        with pytest.raises(UnsoundPlanError, match=r"does not bound the age of 'latest'"):
            promise(node, "latest")

    def test_renamed_columns_are_followed(self) -> None:
        once = project(watermarked(), (10, "when", AT.id, ""), (KEY.id, "key", KEY.id, ""))
        assert promise(project(once, (11, "then", 10, "")), "then") == Promise()

    def test_what_a_function_made_must_be_declared(self) -> None:
        node = Node("MapInPandas", (watermarked(),), output=(AT, KEY))
        with pytest.raises(UnsoundPlanError, match="delay='0 s'"):
            promise(node, "at")
        assert promise(node, "at", 0) == Promise()

    @pytest.mark.parametrize(
        "above",
        [
            windows,
            lambda rows: Node("Aggregate", (rows,), output=(AT, COUNT), groups=(AT,)),
            lambda rows: Node("Deduplicate", (rows,), output=(AT, KEY)),
            lambda rows: join(rows, watermarked(), Bounds(1, 1)),
            lambda rows: join(watermarked(), rows, Bounds(1, 1)),
        ],
        ids=["window", "groups", "dropDuplicates", "left", "right"],
    )
    def test_a_column_that_spark_takes_for_event_time_is_event_time(
        self, above: Callable[[Node], Node]
    ) -> None:
        """Spark drops rows by its mark on a column, and a union has the marks of its first branch."""
        shifted = Node("Project", (watermarked(),), output=(Column(21, "at"), KEY))
        unions = (
            Node("Union", branches, output=(replace(AT, id=31), KEY))
            for branches in ((watermarked(), shifted), (shifted, watermarked()))
        )
        by_schema = Node("Project", (watermarked(),), output=(replace(AT, id=31), KEY))
        for rows in (*unions, by_schema):
            with pytest.raises(
                UnsoundPlanError, match=r"Spark takes '(at|window)' for event time by"
            ):
                output_rows(above(rows))

    def test_what_a_function_made_is_known_again_behind_a_window(self) -> None:
        """Spark drops late rows and holds windows by the column, if the function's schema marks it."""
        node = windows(Node("MapInPandas", (watermarked(),), output=(AT, KEY)))
        assert promise(node, "window") == Promise(buffered=True)

    def test_a_union_is_as_good_as_the_worse_branch(self) -> None:
        made = Node("MapInPandas", (watermarked(),), output=(replace(AT, id=21), KEY))
        both = Node("Union", (watermarked(), made), output=(AT, KEY))
        with pytest.raises(UnsoundPlanError, match="the plan does not bound the age of 'at'"):
            promise(both, "at")
        assert promise(Node("Union", (watermarked(), watermarked()), output=(AT, KEY)), "at")


class TestOperators:
    def test_every_row_says_what_a_user_writes(self) -> None:
        for row in TABLE.values():
            assert row.in_code

    def test_a_row_at_the_watermark_may_prolong_a_session(self) -> None:
        """Spark lets a session take in a row that is dated exactly at its end."""
        session = Column(5, "session_window", Stamp.SESSION)
        node = windows(watermarked(), session)
        assert promise(node, "session_window") == Promise(spark_lag_ms=1, buffered=True)
        ended = project(node, (9, "ended_at", session.id, "end"))
        assert promise(ended, "ended_at") == Promise(spark_lag_ms=1, buffered=True)
        by_time = Node("Aggregate", (watermarked(),), output=(AT, COUNT), groups=(AT,))
        assert promise(by_time, "at") == Promise(spark_lag_ms=1, buffered=True)

    def test_an_aggregation_in_sql_may_name_the_end_itself(self) -> None:
        node = replace(windows(watermarked()), output=(Column(9, "ended_at"),))
        node = replace(node, copies={9: (WINDOW.id, "end")})
        assert promise(node, "ended_at") == Promise(buffered=True)

    def test_totals_over_all_time_never_close(self) -> None:
        groups = (WINDOW, KEY, Column(6, "spark_grouping_id"))
        node = Node("Aggregate", (watermarked(),), output=(WINDOW, KEY), groups=groups)
        with pytest.raises(UnsoundPlanError, match="rollup and cube have groups over all time"):
            promise(node, "window")

    def test_spark_takes_one_event_time_to_group_by(self) -> None:
        node = Node("Aggregate", (watermarked(),), output=(WINDOW, AT), groups=(WINDOW, AT))
        with pytest.raises(UnsoundPlanError, match=r"several event times \(window, at\)"):
            promise(node, "window")

    def test_groups_of_no_event_time_never_close(self) -> None:
        node = Node("Aggregate", (watermarked(),), output=(KEY, COUNT), groups=(KEY,))
        with pytest.raises(UnsoundPlanError, match=r"call watermarked\(\) after that function"):
            promise(node)

    def test_a_join_holds_back_by_the_wider_bound(self) -> None:
        node = join(watermarked(), watermarked(), Bounds(3_600_001, 1))
        assert promise(node, "at") == Promise(3_600_001, spark_lag_ms=1, buffered=True)
        assert promise(windows(node), "window").behind_ms == 3_600_001
        twice = join(node, watermarked(), Bounds(1, 1_000))
        assert promise(twice, "at").behind_ms == 3_601_001

    def test_what_is_held_back_has_the_name_of_what_keeps_it(self) -> None:
        joined = join(watermarked(), watermarked(), Bounds(60, 1))
        assert promise(joined, "at").progress(1_000).holds == {"join": 940}
        assert promise(windows(joined), "window").progress(1_000).holds == {"window": 940}
        assert promise(windows(watermarked()), "window").progress(1_000).holds == {}
        starts = promise(windows(watermarked()), "window", 100)
        assert starts.progress(1_000).holds == {"window": 900}
        late = promise(watermarked(), "at", 100)
        assert late.progress(1_000).holds == {"delay": 900}

    def test_a_declared_delay_holds_also_while_spark_keeps_nothing(self) -> None:
        joined = join(watermarked(), watermarked(), Bounds(60, 1))
        assert promise(joined, "at").may_idle
        assert promise(windows(joined), "window").may_idle
        assert not promise(joined, "at", 100).may_idle
        assert not promise(windows(watermarked()), "window", 100).may_idle

    def test_a_join_needs_bounds_on_both_sides(self) -> None:
        for bounds, side in ((Bounds(None, 1), "left"), (Bounds(1, None), "right")):
            with pytest.raises(
                UnsoundPlanError, match=f"does not bound the age of its {side} side"
            ):
                promise(join(watermarked(), watermarked(), bounds), "at")

    def test_a_join_by_the_event_time_of_one_side_alone(self) -> None:
        with pytest.raises(UnsoundPlanError, match="would drop that other side's rows"):
            promise(join(watermarked(), watermarked(), Bounds(0, 0, one_sided_equality=True)), "at")

    def test_a_join_needs_a_watermark_on_both_sides(self) -> None:
        with pytest.raises(UnsoundPlanError, match=r"watermarked\(\) on both sides"):
            promise(join(watermarked(), relation(), Bounds(1, 1)), "at")

    def test_a_table_passes_rows_on(self) -> None:
        table = Node("LogicalRelation", streaming=False)
        assert promise(join(watermarked(), table, None), "at") == Promise()

    def test_deduplication_takes_rows_at_the_watermark(self) -> None:
        for name in ("Deduplicate", "DeduplicateWithinWatermark"):
            node = Node(name, (watermarked(),), output=(AT, KEY))
            assert promise(node, "at") == Promise(spark_lag_ms=1)

    def test_state_functions_must_be_declared(self) -> None:
        for name in ("FlatMapGroupsInPandasWithState", "TransformWithStateInPySpark"):
            node = Node(name, (watermarked(),), output=(AT,))
            with pytest.raises(
                UnsoundPlanError, match="does not bound the age of the rows that your state"
            ):
                promise(node, "at")
            assert promise(node, "at", 5_000) == Promise(
                declared_ms=5_000, spark_lag_ms=1, buffered=True
            )
            with pytest.raises(
                UnsoundPlanError, match="does not bound the age of the rows that your state"
            ):
                promise(project(node, (9, "then", AT.id, "")), "then")

    def test_an_event_time_column_of_a_state_function_is_spark_s_to_guard(self) -> None:
        state = Node("TransformWithStateInPySpark", (watermarked(),))
        node = Node("UpdateEventTimeWatermarkColumn", (state,), output=(AT,))
        assert promise(node, "at") == Promise(spark_lag_ms=1, buffered=True)

    @pytest.mark.parametrize(
        ("name", "advice"),
        [
            ("Sort", "sort where the output is read"),
            ("FlatMapGroupsInPandas", "use applyInPandasWithState"),
            ("WithCTE", "turn the WITH clause of your SQL into a temporary view"),
            ("NeverHeardOf", "write its output to files"),
        ],
    )
    def test_what_is_not_in_the_table_is_refused(self, name: str, advice: str) -> None:
        message = f"operator {name} is not supported, .*: {advice}"
        with pytest.raises(UnsoundPlanError, match=message):
            output_rows(Node(name, (watermarked(),)))

    def test_rows_that_never_were_watermarked(self) -> None:
        with pytest.raises(UnsoundPlanError, match=r"did not come through watermarked\(\)"):
            promise(Node("Union", (relation(), watermarked()), output=(AT, KEY)), "at")

    def test_a_table_alone_has_no_watermark(self) -> None:
        assert output_rows(Node("LogicalRelation", streaming=False)) == OutputRows()


class TestQueryStages:
    def test_a_source_and_a_keyed_stage(self) -> None:
        data = source(relation(limits=("maxfilespertrigger",)))
        found = checked(reported(windows(watermarked(data))), "window")
        assert found == QueryStages(
            sources=(STAGES["taps"],),
            keyed=(STAGES["hourly"],),
            promises={"hourly": Promise(buffered=True)},
            inputs={"hourly": frozenset({"taps"})},
            reads_all=False,
        )

    def test_a_limited_source_that_nobody_reports(self) -> None:
        plan = reported(windows(watermarked(relation(limits=("maxfilespertrigger",)))))
        with pytest.raises(UnsoundPlanError, match="limited by maxfilespertrigger"):
            checked(plan)

    def test_a_format_with_limits_of_its_own_that_nobody_reports(self) -> None:
        """A Delta table reads a thousand files at a time, without an option."""
        delta = relation(format_with_limits="delta")
        with pytest.raises(UnsoundPlanError, match=r"the format 'delta'.*files or a topic"):
            checked(reported(windows(watermarked(delta))))
        assert not checked(reported(windows(watermarked(source(delta)))), "window").reads_all

    def test_a_source_that_is_not_upstream(self) -> None:
        data = source(tag="tidegauge.source.1.pipes")
        with pytest.raises(UnsoundPlanError, match="'pipes', which is not among its inputs"):
            checked(reported(watermarked(data)))

    @pytest.mark.parametrize("operator", ["Deduplicate", "Aggregate", "MapInPandas", "Join"])
    def test_nothing_that_holds_rows_back_comes_after_the_report(self, operator: str) -> None:
        plan = Node(operator, (reported(watermarked()),))
        with pytest.raises(UnsoundPlanError, match=rf"{operator} comes after report\(\)"):
            checked(plan)

    def test_the_reported_time_stays_what_it_was(self) -> None:
        """A minute was taken off after the report: the next stage lost its rows as late."""
        plan = reported(watermarked())
        renamed = project(plan, (8, "then", AT.id, ""))
        for changed in (
            Node("Project", (plan,), output=(Column(9, "at"), KEY)),
            Node("Project", (plan,), output=(Column(9, "AT"), KEY)),
            Node("Project", (renamed,), output=(Column(8, "then"), Column(9, "at"))),
        ):
            with pytest.raises(UnsoundPlanError, match="is computed after report"):
                checked(changed, "at")
        for same in (
            Node("Project", (plan,), output=(AT, Column(9, "later"))),
            Node("Project", (plan,), output=(KEY,)),
            renamed,
            project(renamed, (9, "at", 8, "")),
        ):
            assert checked(same, "at").promises.keys() == {"hourly"}
        assert checked(Node("Project", (plan,), output=(Column(9, "at"),))).promises

    def test_stages_that_are_each_reported_may_be_unioned(self) -> None:
        stages = read_spec(
            {"a": {"inputs": ["taps"], "ranges": 1}, "b": {"inputs": ["taps"], "ranges": 1}}
        )
        marks = {"a": "tidegauge.ranges.1.a", "b": "tidegauge.ranges.2.b"}
        branches = [reported(watermarked(stage=each), mark) for each, mark in marks.items()]
        plan = Node("Project", (Node("Union", tuple(branches)),))
        reports = {mark: ReportCall(each, "at", None) for each, mark in marks.items()}
        assert check(plan, stages, reports).promises == {"a": Promise(), "b": Promise()}
        beside = Node("Union", (branches[0], relation()))
        with pytest.raises(UnsoundPlanError, match=r"unioned after report\(\)"):
            check(beside, stages, reports)

    def test_nothing_that_keeps_rows_comes_before_the_watermark(self) -> None:
        """Rows that it let out later would be older than the watermark by then."""
        state = Node("FlatMapGroupsInPandasWithState", (source(),), output=(AT, KEY))
        with pytest.raises(UnsoundPlanError, match=r"call watermarked\(\) before it"):
            checked(reported(watermarked(state)))
        pairs = join(source(), source(tag="tidegauge.source.3.pipes"), Bounds(None, None))
        with pytest.raises(UnsoundPlanError, match=r"watermarked\(\) on both sides"):
            checked(reported(watermarked(pairs)))
        groups = Node("Aggregate", (source(),), output=(AT, KEY), groups=(KEY,))
        with pytest.raises(UnsoundPlanError, match=r"call watermarked\(\) before it"):
            checked(reported(watermarked(groups)))

    def test_what_comes_before_a_source_is_left_to_its_strategy(self) -> None:
        groups = Node("Aggregate", (relation(),), output=(Column(1, "at"), KEY), groups=(KEY,))
        assert checked(reported(watermarked(source(groups)))).sources == (STAGES["taps"],)

    def test_an_event_time_that_is_made_from_the_source_s(self) -> None:
        earlier = Node("Project", (source(),), output=(Column(7, "at"), KEY))
        for data in (earlier, Node("SubqueryAlias", (earlier,), output=earlier.output)):
            with pytest.raises(UnsoundPlanError, match=r"'at', which is not .* before source\(\)"):
                checked(reported(watermarked(data)))
        another = project(source(), (KEY.id, "at", KEY.id, ""))
        with pytest.raises(UnsoundPlanError, match="which is not the event time"):
            checked(reported(watermarked(another)))
        made = Node("MapInPandas", (source(),), output=(Column(7, "at"), KEY))
        with pytest.raises(UnsoundPlanError, match=r"or call mapInPandas\) before source\(\)"):
            checked(reported(watermarked(made)))
        both = Node("Union", (relation(), earlier), output=(Column(1, "at"), KEY))
        with pytest.raises(UnsoundPlanError, match="which is not the event time"):
            checked(reported(watermarked(both)))

    def test_an_event_time_that_is_the_source_s_under_another_name(self) -> None:
        renamed = project(source(), (7, "when", 1, ""), (KEY.id, "key", KEY.id, ""))
        assert checked(reported(watermarked(renamed))).sources == (STAGES["taps"],)
        made = source(Node("MapInPandas", (relation(),), output=(Column(1, "at"), KEY)))
        assert checked(reported(watermarked(made))).sources == (STAGES["taps"],)

    def test_a_watermark_of_spark_s_own(self) -> None:
        node = Node("EventTimeWatermark", (watermarked(),), output=(AT, KEY), delay_ms=5)
        with pytest.raises(UnsoundPlanError, match="leave withWatermark out"):
            checked(reported(node))

    def test_a_report_without_a_watermark(self) -> None:
        with pytest.raises(UnsoundPlanError, match=r"lacks watermarked\(\)"):
            checked(reported(relation()))

    def test_duplicates_within_nothing(self) -> None:
        node = Node("DeduplicateWithinWatermark", (watermarked(),), output=(AT, KEY))
        with pytest.raises(UnsoundPlanError, match="deduplicate_within='1 hour'"):
            checked(reported(node))
        node = Node("DeduplicateWithinWatermark", (watermarked(delay_ms=5),), output=(AT, KEY))
        assert checked(reported(node)).promises["hourly"].spark_lag_ms == 1


@pytest.mark.parametrize(
    ("zone", "hours", "refused"),
    [
        ("America/New_York", 24, True),
        ("America/New_York", 23, False),
        ("UTC", 48, False),
        ("+05:00", 48, False),
    ],
)
def test_a_join_over_days_is_refused_where_clocks_are_changed(
    zone: str, hours: int, refused: bool
) -> None:
    """Spark's condition adds a calendar day, and its state forgets a row after 24 hours."""
    join = Node("Join", (watermarked(), watermarked()), bounds=Bounds(hours * 3_600_000, 0))
    if not refused:
        check_days(join, zone)
        return
    with pytest.raises(UnsoundPlanError, match="which may have 25 hours"):
        check_days(join, zone)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"shards": None}, "shards must be a list, not None"),
        ({"shards": "ab"}, "shards must be a list, not 'ab'"),
        ({"shards": ["a"], "percentiles": 5}, "percentiles must be a list, not 5"),
        ({"inputs": None, "ranges": 1}, "inputs must be a list, not None"),
        ({"inputs": ["s"], "ranges": 0}, "ranges must be 1 or more, not 0"),
        ({"inputs": ["s"], "ranges": "2"}, "ranges must be a number of key ranges, or a list"),
    ],
)
def test_a_specification_that_cannot_be_read_is_refused_in_words(
    stage: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_spec({"x": stage})
