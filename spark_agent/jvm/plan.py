# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""Plans of queries, read from Spark's internal objects, which are not public API.

The rest of the agent gets plain values: a plan is a tree of `Node`s. Support for Spark Connect would
need a second implementation of this module, and of `spark_agent.jvm.progress`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import DELAY, is_a, items, java_walk, metadata, stamp
from spark_agent.jvm.nodes import (
    LATE_ALIAS,
    SOURCE_TAG,
    TAG,
    UNPROMISED_ALIAS,
    WINDOW_TIME,
    Bounds,
    Column,
    Node,
    Stamp,
)
from spark_agent.jvm.relations import (
    control_of,
    format_of,
    format_with_limits,
    limits_of,
    logs_source_of,
    paths_of,
    topics_source_of,
)
from spark_agent.jvm.windows import extremes_of, gaps_of, window_times_of, windows_of

_PROBE_MS: Final = 4_000_000_000_000
"""A sample watermark to probe a join's bound: large enough for py4j to pass a Java long."""

_NO_ID: Final = -1
"""Id of a group that is not in the output of its aggregation."""

_DEDUPLICATIONS: Final = frozenset({"Deduplicate", "DeduplicateWithinWatermark"})
_ATTRIBUTE: Final = "AttributeReference"
_INSTANT, _WALL_CLOCK = "timestamp", "timestamp_ntz"
_EQUALITIES: Final = frozenset({"EqualTo", "EqualNullSafe"})


class PlanReader:
    """Reads the plan of a streaming data frame."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: JavaObject = spark._jvm
        self._spark = spark
        self._optimizer: JavaObject = spark._jsparkSession.sessionState().optimizer()
        package = jvm.org.apache.spark.sql.catalyst.analysis
        self._joins: JavaObject = getattr(getattr(package, "StreamingJoinHelper$"), "MODULE$")
        expressions = jvm.org.apache.spark.sql.catalyst.expressions
        self._attributes: JavaObject = getattr(getattr(expressions, "AttributeSet$"), "MODULE$")
        self._option: JavaObject = jvm.scala.Option
        patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        self._random: JavaObject = patterns.EXPRESSION_WITH_RANDOM_SEED()

    def read(self, frame: DataFrame) -> Node:
        """Read the analysed plan: before optimisation all tags are still in it."""
        analyzed: JavaObject = frame._jdf.queryExecution().analyzed()
        joins = iter(())
        if any(_is_stream_join(node) for node in java_walk(analyzed)):
            # Join conditions are read in the form that Spark will run: with the conditions of a later
            # `where`, and with `BETWEEN` already split into two comparisons.
            optimized = self._optimizer.execute(analyzed)
            joins = iter([self._bounds(n) for n in java_walk(optimized) if _is_stream_join(n)])
        return self._node(analyzed, joins)

    def several_event_times(self, frame: DataFrame) -> list[str]:
        """Return an operator's event time columns if it has several at one input, which Spark rejects.

        Columns without a later use do not count: Spark's optimiser removes them first.
        """
        analyzed: JavaObject = frame._jdf.queryExecution().analyzed()
        if not any(_takes_one_event_time(node) for node in java_walk(analyzed)):
            return []
        for node in java_walk(self._optimizer.execute(analyzed)):
            for child in items(node.children()) if _takes_one_event_time(node) else ():
                found = [each.name for each in _columns(child.output()) if each.stamp is not None]
                if len(found) > 1:
                    return found
        return []

    def is_random(self, frame: DataFrame) -> bool:
        """Return whether a random expression is in the plan. Each batch gives it a new seed."""
        analyzed: JavaObject = frame._jdf.queryExecution().analyzed()
        return bool(analyzed.containsPattern(self._random))

    def shuffles_with(self, frame: DataFrame, column: str) -> list[int]:
        """Return the number of equal shuffles of rows with a column, for each shuffle that differs.

        Spark runs equal ones once. Shuffles are compared as Spark will run them, after optimisation.
        """
        groups: list[list[JavaObject]] = []
        for node in java_walk(self._optimizer.execute(frame._jdf.queryExecution().analyzed())):
            if node.nodeName() != "RepartitionByExpression":
                continue
            if column not in {each.name for each in _columns(node.output())}:
                continue
            equal = next((each for each in groups if each[0].sameResult(node)), None)
            if equal is None:
                groups.append([node])
            else:
                equal.append(node)
        return [len(each) for each in groups]

    def _node(self, node: JavaObject, joins: Iterator[Bounds]) -> Node:
        name, streaming = node.nodeName(), node.isStreaming()
        # Before the children: the joins' bounds are listed top-down.
        bounds = next(joins, Bounds(None, None)) if _is_stream_join(node) else None
        if bounds is not None and bounds.full_outer:
            bounds = replace(bounds, null_keys=_null_keys(node))
        children = tuple(self._node(child, joins) for child in items(node.children()))
        tag = _tag(node) if name == "Filter" else ""
        if not streaming:
            return Node(name, streaming=False)
        return Node(
            operator=name,
            children=children,
            output=_columns(node.output()),
            tag=tag,
            event_time=_reported_time(node) if tag.startswith(SOURCE_TAG) else None,
            copies=_copies(_expressions(node)),
            groups=_groups(node) if name == "Aggregate" else (),
            keys=_columns(node.keys()) if name in _DEDUPLICATIONS else (),
            cast_by_zone=_cast_columns(node.projectList()) if name == "Project" else frozenset(),
            bounds=bounds,
            control=control_of(node) if name == "StreamingRelationV2" else None,
            logs_source=logs_source_of(node) if name == "StreamingRelationV2" else None,
            topics_source=topics_source_of(node) if name == "StreamingRelationV2" else None,
            limits=limits_of(node),
            format_with_limits=format_with_limits(node),
            paths=paths_of(node, self._spark),
            format=format_of(node),
            delay_ms=_delay_ms(node) if name == "EventTimeWatermark" else 0,
            windows=windows_of(node),
            window_times=window_times_of(node),
            gaps_us=gaps_of(node),
            extremes=extremes_of(node),
            late_of=_aliased(node, LATE_ALIAS),
            unpromised=_aliased(node, UNPROMISED_ALIAS),
        )

    def _bounds(self, join: JavaObject) -> Bounds:
        full_outer = join.joinType().sql() == "FULL OUTER"
        if self._joins.isWatermarkInJoinKeys(join):
            return Bounds(0, 0, _has_one_sided_equality(join), full_outer)
        left, right = join.left(), join.right()
        behind_ms = self._behind(left, right, join), self._behind(right, left, join)
        times = [*_event_times(left), *_event_times(right)]
        return Bounds(
            *behind_ms,
            full_outer=full_outer,
            cast_by_zone=tuple(each.name() for each in _casts_by_zone(join.condition())),
            hidden=join.joinType().sql() != "INNER" and any(map(_is_wall_clock, times)),
        )

    def _behind(self, of: JavaObject, other: JavaObject, join: JavaObject) -> int | None:
        """Return the largest distance of one side's rows behind the watermark; None: unbounded.

        Spark takes a comparison of any column (such as a deadline or a window's end) with the other
        side's event time for a bound on this side's event time, and evicts rows too early by it. So a
        bound counts only if the two event times alone imply it. The larger of this bound and Spark's is
        returned.
        """
        bound_by_event_times = self._bound(
            self._set(_event_times(of)), self._set(_event_times(other)), join
        )
        if bound_by_event_times is None:
            return None
        return max(bound_by_event_times, self._bound(of.outputSet(), other.outputSet(), join) or 0)

    def _bound(self, of: JavaObject, other: JavaObject, join: JavaObject) -> int | None:
        probe = self._option.apply(_PROBE_MS)
        found = self._joins.getStateValueWatermark(of, other, join.condition(), probe)
        return None if found.isEmpty() else max(_PROBE_MS - found.get(), 0)

    def _set(self, attributes: list[JavaObject]) -> JavaObject:
        found = self._attributes.empty()
        for each in attributes:
            found = getattr(found, "$plus$plus")(self._attributes.apply(each))
        return found


def _equalities(join: JavaObject) -> list[JavaObject]:
    """Return the parts of a join's condition that equate two values."""
    condition = join.condition()
    parts = [] if condition.isEmpty() else list(_conjuncts(condition.get()))
    return [part for part in parts if part.getClass().getSimpleName() in _EQUALITIES]


def _null_keys(join: JavaObject) -> tuple[str, ...]:
    """Return the equated values of a full outer join that may be null on both sides.

    Spark's state of such a join takes two nulls for equal. For the other joins Spark filters nulls out
    of one side. The operator `<=>` requests equal nulls.
    """
    filtered = _filtered_nulls(join.left()) | _filtered_nulls(join.right())
    return tuple(
        str(each.sql())
        for each in _equalities(join)
        if is_a(each, "EqualTo")
        and _may_be_null(each.left(), filtered)
        and _may_be_null(each.right(), filtered)
    )


def _filtered_nulls(side: JavaObject) -> set[int]:
    """Return the ids of the columns whose nulls were filtered out."""
    return {
        each.child().exprId().id()
        for each in items(side.constraints().toSeq())
        if is_a(each, "IsNotNull") and is_a(each.child(), _ATTRIBUTE)
    }


def _may_be_null(expression: JavaObject, filtered: set[int]) -> bool:
    if not expression.nullable():
        return False
    is_column = is_a(expression, _ATTRIBUTE)
    return not (is_column and expression.exprId().id() in filtered)


def _has_one_sided_equality(join: JavaObject) -> bool:
    equal = _equalities(join)
    return any(_is_event_time(part.left()) != _is_event_time(part.right()) for part in equal)


def _cast_columns(projections: JavaObject) -> frozenset[int]:
    """Return the ids of the columns that are a wall clock, cast to an instant."""
    return frozenset(
        each.exprId().id()
        for each in items(projections)
        if is_a(each, "Alias") and is_a(each.child(), "Cast") and _wall_clocks_cast_in(each)
    )


def _wall_clocks_cast_in(expression: JavaObject) -> list[JavaObject]:
    """Return the event times without a time zone that Spark makes instants of, by the session's zone."""
    return [
        column
        for cast in java_walk(expression)
        if is_a(cast, "Cast") and _type(cast) == _INSTANT
        for column in java_walk(cast.child())
        if _is_event_time(column) and _is_wall_clock(column)
    ]


def _casts_by_zone(condition: JavaObject) -> list[JavaObject]:
    return [] if condition.isEmpty() else _wall_clocks_cast_in(condition.get())


def _is_wall_clock(expression: JavaObject) -> bool:
    return _type(expression) == _WALL_CLOCK


def _type(expression: JavaObject) -> str:
    return str(expression.dataType().typeName())


def _event_times(side: JavaObject) -> list[JavaObject]:
    """Return a side's event time columns. Spark fails on a join if a side has more than one."""
    return [each for each in items(side.output()) if stamp(each) is Stamp.TIME]


def _conjuncts(expression: JavaObject) -> Iterator[JavaObject]:
    if not is_a(expression, "And"):
        yield expression
        return
    yield from _conjuncts(expression.left())
    yield from _conjuncts(expression.right())


def _is_event_time(expression: JavaObject) -> bool:
    is_column = is_a(expression, _ATTRIBUTE)
    return is_column and stamp(expression) is not None


def _takes_one_event_time(node: JavaObject) -> bool:
    return _is_stream_join(node) or (node.nodeName() in _DEDUPLICATIONS and node.isStreaming())


def _is_stream_join(node: JavaObject) -> bool:
    if node.nodeName() != "Join":
        return False
    return node.left().isStreaming() and node.right().isStreaming()


def _columns(attributes: JavaObject) -> tuple[Column, ...]:
    return tuple(_column(attribute) for attribute in items(attributes))


def _column(attribute: JavaObject) -> Column:
    return Column(attribute.exprId().id(), attribute.name(), stamp(attribute))


def _groups(aggregate: JavaObject) -> tuple[Column, ...]:
    """Return the columns by which an aggregation groups.

    A group that is computed is the column of the output that has its value, or a column without an id.
    """
    named = [each for each in items(aggregate.aggregateExpressions()) if is_a(each, "Alias")]
    found: list[Column] = []
    for each in items(aggregate.groupingExpressions()):
        equal = (alias for alias in named if alias.child().semanticEquals(each))
        of = each if _has(each, "exprId") else next(equal, None)
        found.append(Column(_NO_ID, str(each.sql())) if of is None else _column(of))
    return tuple(found)


def _has(thing: JavaObject, method: str) -> bool:
    return any(each.getName() == method for each in thing.getClass().getMethods())


def _expressions(node: JavaObject) -> JavaObject:
    """Return a node's expressions if it may copy columns; None otherwise."""
    match node.nodeName():
        case "Project":
            return node.projectList()
        case "Aggregate":
            return node.aggregateExpressions()
        case _:
            return None


def _copies(projections: JavaObject) -> dict[int, tuple[int, str]]:
    found: dict[int, tuple[int, str]] = {}
    for each in [] if projections is None else items(projections):
        class_name = each.getClass().getSimpleName()
        if class_name == _ATTRIBUTE:
            found[each.exprId().id()] = each.exprId().id(), ""
        elif class_name == "Alias":
            copied = _copied(each.child())
            if copied is not None:
                found[each.exprId().id()] = copied
    return found


def _copied(expression: JavaObject) -> tuple[int, str] | None:
    class_name = expression.getClass().getSimpleName()
    if class_name == _ATTRIBUTE:
        return expression.exprId().id(), ""
    if class_name == "PreciseTimestampConversion":
        fields = [_copied(each) for each in java_walk(expression) if is_a(each, "GetStructField")]
        return (fields[0][0], WINDOW_TIME) if len(fields) == 1 and fields[0] is not None else None
    if class_name == "GetStructField":
        of = expression.child()
        if is_a(of, _ATTRIBUTE):
            fields = of.dataType().fieldNames()
            return of.exprId().id(), str(fields[expression.ordinal()])
    return None


def _aliased(node: JavaObject, prefix: str) -> str:
    """Return the rest of a node's alias, if the node has one with this prefix."""
    alias = str(node.alias()) if node.nodeName() == "SubqueryAlias" else ""
    return alias.removeprefix(prefix) if alias.startswith(prefix) else ""


def _tag(node: JavaObject) -> str:
    condition = node.condition()
    if not is_a(condition, "PythonUDF"):
        return ""
    name = str(condition.name())
    return name if name.startswith(TAG) else ""


def _reported_time(node: JavaObject) -> int | None:
    """Return the id of the event time column of a source's reporter: its second argument."""
    argument = _copied(node.condition().children().apply(1))
    return None if argument is None or argument[1] else argument[0]


def _delay_ms(node: JavaObject) -> int:
    delays = [metadata(each).get(DELAY, 0) for each in items(node.output())]
    return max(delays, default=0)
