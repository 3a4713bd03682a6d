# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""What the driver reads of plans and writers from Spark's internal objects, which are not public API.

The rest of the agent sees plain values: a plan is a tree of `Node`s. Support for Spark Connect would
need a second implementation of this module, and of `spark_agent.running`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.control_source import FORMAT
from spark_agent.sources.logs import FORMAT as LOGS

JavaObject: TypeAlias = Any

_PROBE_MS: Final = 4_000_000_000_000
"""A sample watermark for asking Spark about a join: large enough for py4j to pass a Java long."""

_DELAY: Final = "spark.watermarkDelayMs"

MARK: Final = "tidegauge."
"""The prefix of the names of the agent's own functions in a plan."""
SOURCE_MARK: Final = f"{MARK}source."
RANGES_MARK: Final = f"{MARK}ranges."
"""Prefixes of the two reporters' names in a plan. A unique number and the stage follow."""

_CONTROL_CHAIN: Final = frozenset({"Filter", "EventTimeWatermark", "Project"})
_DEDUPLICATIONS: Final = frozenset({"Deduplicate", "DeduplicateWithinWatermark"})
_LIMITS: Final = frozenset(
    {
        "maxbytespertrigger",
        "maxfilespertrigger",
        "maxoffsetspertrigger",
        "maxrecordsperread",
        "maxrowsperbatch",
        "minoffsetspertrigger",
    }
)
"""Options, in lower case, that make a source leave available data for a later batch."""


_UNLIMITED: Final = frozenset(
    {"avro", "csv", "json", "kafka", "memory", "orc", "parquet", "rate", "socket", "text"}
    | {FORMAT, LOGS}
)
"""Sources that read all that is there unless an option of `_LIMITS` says otherwise, or that tell what
they leave. Others have limits of their own: a Delta table reads a thousand files at a time."""
_INTERVAL: Final = re.compile(r"ProcessingTimeTrigger\((\d+)\)")
_EQUALITIES: Final = frozenset({"EqualTo", "EqualNullSafe"})


class Stamp(StrEnum):
    """How a column's value relates to event time."""

    TIME = "time"
    """A row's event time."""
    WINDOW = "window"
    """A window: a struct of start and end."""
    SESSION = "session"
    """A session window, likewise."""
    END = "end"
    """The end of a window."""
    START = "start"
    """The start of a window."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a node, with Spark's id and what Spark's metadata says about event time."""

    id: int
    name: str
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far (ms) behind the watermark the rows of a stream-stream join may be; None: unbounded."""

    left_ms: int | None
    right_ms: int | None
    one_sided_equality: bool = False
    """One side's event time is equated with something that is not the other side's event time."""
    full_outer: bool = False
    null_keys: tuple[str, ...] = ()
    """Of a full outer join: equated columns that may be null on both sides."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control source: the stage whose input watermark it brings, and its id at the driver."""

    stage: str
    id: str
    is_gate: bool = False
    """Whether it brings nothing, and only holds batches back while its source stage is throttled."""
    percentile: int | None = None
    """It brings this percentile of the stage's input, for early results; None: the input watermark."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A source of ours: the stage whose shards it reads, and its id at the driver."""

    stage: str
    id: str


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a query's logical plan."""

    operator: str
    """Spark's name for it, such as `Aggregate`."""
    children: tuple[Node, ...] = ()
    output: tuple[Column, ...] = ()
    streaming: bool = True
    mark: str = ""
    """The name of the agent's function in it, if it is one of the agent's own nodes."""
    event_time: int | None = None
    """Of a source's reporter: the id of its event time column."""
    copies: Mapping[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    """By column id: the column that it copies, and the name of the field if it copies only that."""
    groups: tuple[Column, ...] = ()
    """What an aggregation groups by."""
    bounds: Bounds | None = None
    """Of a join of two streams."""
    control: Control | None = None
    reader: Reader | None = None
    limits: tuple[str, ...] = ()
    """Options that limit how much of a source one batch reads."""
    reads_all: bool = True
    """Of a source: whether each batch certainly reads all that is there."""
    delay_ms: int = 0
    """The delay of a `withWatermark`."""

    def walk(self) -> Iterator[Node]:
        """Yield it and every node below."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_control_union(self) -> bool:
        """Whether it is the union of control source and data that `Pipeline.watermarked` makes."""
        return self.operator == "Union" and _leads_to_control(self.children[0])


def _leads_to_control(node: Node) -> bool:
    while node.operator in _CONTROL_CHAIN and len(node.children) == 1:
        node = node.children[0]
    return node.control is not None and not node.control.is_gate


class PlanReader:
    """Reads the plan of a streaming data frame."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: JavaObject = spark._jvm
        self._optimizer: JavaObject = spark._jsparkSession.sessionState().optimizer()
        package = jvm.org.apache.spark.sql.catalyst.analysis
        self._joins: JavaObject = getattr(getattr(package, "StreamingJoinHelper$"), "MODULE$")
        expressions = jvm.org.apache.spark.sql.catalyst.expressions
        self._attributes: JavaObject = getattr(getattr(expressions, "AttributeSet$"), "MODULE$")
        self._option: JavaObject = jvm.scala.Option

    def read(self, frame: DataFrame) -> Node:
        """Read the analysed plan: before optimisation all marks are still in it."""
        analyzed: JavaObject = frame._jdf.queryExecution().analyzed()
        joins = iter(())
        if any(_is_stream_join(node) for node in _java_walk(analyzed)):
            # Join conditions are read as Spark will run them: with the conditions of a later
            # `where`, and with `BETWEEN` already split into two comparisons.
            optimized = self._optimizer.execute(analyzed)
            joins = iter([self._bounds(n) for n in _java_walk(optimized) if _is_stream_join(n)])
        return self._node(analyzed, joins)

    def several_event_times(self, frame: DataFrame) -> list[str]:
        """Return an operator's event time columns, if it has several at one input: Spark fails on that.

        Columns that nothing needs later do not count: Spark's optimiser removes them first.
        """
        analyzed: JavaObject = frame._jdf.queryExecution().analyzed()
        if not any(_takes_one_event_time(node) for node in _java_walk(analyzed)):
            return []
        for node in _java_walk(self._optimizer.execute(analyzed)):
            for child in _items(node.children()) if _takes_one_event_time(node) else ():
                found = [each.name for each in _columns(child.output()) if each.stamp is not None]
                if len(found) > 1:
                    return found
        return []

    def _node(self, node: JavaObject, joins: Iterator[Bounds]) -> Node:
        name, streaming = node.nodeName(), node.isStreaming()
        # Before the children: the joins' bounds are listed top-down.
        bounds = next(joins, Bounds(None, None)) if _is_stream_join(node) else None
        if bounds is not None and bounds.full_outer:
            bounds = replace(bounds, null_keys=_null_keys(node))
        children = tuple(self._node(child, joins) for child in _items(node.children()))
        mark = _mark(node) if name == "Filter" else ""
        if not streaming:
            return Node(name, streaming=False)
        return Node(
            operator=name,
            children=children,
            output=_columns(node.output()),
            mark=mark,
            event_time=_reported_time(node) if mark.startswith(SOURCE_MARK) else None,
            copies=_copies(_expressions(node)),
            groups=_named(node.groupingExpressions()) if name == "Aggregate" else (),
            bounds=bounds,
            control=_control(node) if name == "StreamingRelationV2" else None,
            reader=_reader(node) if name == "StreamingRelationV2" else None,
            limits=tuple(sorted(_LIMITS & set(_options(node)))),
            reads_all=_reads_all(node),
            delay_ms=_delay_ms(node) if name == "EventTimeWatermark" else 0,
        )

    def _bounds(self, join: JavaObject) -> Bounds:
        full_outer = join.joinType().sql() == "FULL OUTER"
        if self._joins.isWatermarkInJoinKeys(join):
            return Bounds(0, 0, _has_one_sided_equality(join), full_outer)
        left, right = join.left(), join.right()
        behind_ms = self._behind(left, right, join), self._behind(right, left, join)
        return Bounds(*behind_ms, full_outer=full_outer)

    def _behind(self, of: JavaObject, other: JavaObject, join: JavaObject) -> int | None:
        """Return how far behind the watermark the rows of one side may be; None: unbounded.

        Spark takes a comparison of any column (such as a deadline or a window's end) with the other
        side's event time for a bound on this side's event time, and evicts rows too early by it. So a
        bound counts only if the two event times alone imply it. The larger of that bound and the one
        that Spark uses is returned.
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
    """Return what a full outer join equates and may be null on both sides.

    Spark's state of such a join takes two nulls for equal. For the other joins Spark filters nulls out
    of one side. `<=>` asks for it.
    """
    filtered = _filtered_nulls(join.left()) | _filtered_nulls(join.right())
    return tuple(
        str(each.sql())
        for each in _equalities(join)
        if each.getClass().getSimpleName() == "EqualTo"
        and _may_be_null(each.left(), filtered)
        and _may_be_null(each.right(), filtered)
    )


def _filtered_nulls(side: JavaObject) -> set[int]:
    """Return the ids of the columns out of which a filter has taken the nulls."""
    return {
        each.child().exprId().id()
        for each in _items(side.constraints().toSeq())
        if each.getClass().getSimpleName() == "IsNotNull"
        and each.child().getClass().getSimpleName() == "AttributeReference"
    }


def _may_be_null(expression: JavaObject, filtered: set[int]) -> bool:
    if not expression.nullable():
        return False
    is_column = expression.getClass().getSimpleName() == "AttributeReference"
    return not (is_column and expression.exprId().id() in filtered)


def _has_one_sided_equality(join: JavaObject) -> bool:
    equal = _equalities(join)
    return any(_is_event_time(part.left()) != _is_event_time(part.right()) for part in equal)


def _event_times(side: JavaObject) -> list[JavaObject]:
    """Return a side's event time columns. Spark fails on a join if a side has more than one."""
    return [each for each in _items(side.output()) if _stamp(each) is Stamp.TIME]


def _conjuncts(expression: JavaObject) -> Iterator[JavaObject]:
    if expression.getClass().getSimpleName() != "And":
        yield expression
        return
    yield from _conjuncts(expression.left())
    yield from _conjuncts(expression.right())


def _is_event_time(expression: JavaObject) -> bool:
    is_column = expression.getClass().getSimpleName() == "AttributeReference"
    return is_column and _stamp(expression) is not None


def _java_walk(node: JavaObject) -> Iterator[JavaObject]:
    yield node
    for child in _items(node.children()):
        yield from _java_walk(child)


def _items(sequence: JavaObject) -> list[JavaObject]:
    return [sequence.apply(i) for i in range(sequence.size())]


def _takes_one_event_time(node: JavaObject) -> bool:
    return _is_stream_join(node) or (node.nodeName() in _DEDUPLICATIONS and node.isStreaming())


def _is_stream_join(node: JavaObject) -> bool:
    if node.nodeName() != "Join":
        return False
    return node.left().isStreaming() and node.right().isStreaming()


def _columns(attributes: JavaObject) -> tuple[Column, ...]:
    return tuple(_column(attribute) for attribute in _items(attributes))


def _column(attribute: JavaObject) -> Column:
    return Column(attribute.exprId().id(), attribute.name(), _stamp(attribute))


def _stamp(attribute: JavaObject) -> Stamp | None:
    """Read from Spark's metadata whether a column is event time, or a window over it."""
    metadata = _metadata(attribute)
    if _DELAY not in metadata:
        return None
    if "spark.sessionWindow" in metadata:
        return Stamp.SESSION
    return Stamp.WINDOW if "spark.timeWindow" in metadata else Stamp.TIME


def _metadata(attribute: JavaObject) -> dict[str, Any]:
    return json.loads(attribute.metadata().json())


def _named(expressions: JavaObject) -> tuple[Column, ...]:
    return tuple(_column(each) for each in _items(expressions) if _has(each, "exprId"))


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
    for each in [] if projections is None else _items(projections):
        class_name = each.getClass().getSimpleName()
        if class_name == "AttributeReference":
            found[each.exprId().id()] = each.exprId().id(), ""
        elif class_name == "Alias":
            copied = _copied(each.child())
            if copied is not None:
                found[each.exprId().id()] = copied
    return found


def _copied(expression: JavaObject) -> tuple[int, str] | None:
    class_name = expression.getClass().getSimpleName()
    if class_name == "AttributeReference":
        return expression.exprId().id(), ""
    if class_name == "GetStructField":
        of = expression.child()
        if of.getClass().getSimpleName() == "AttributeReference":
            fields = of.dataType().fieldNames()
            return of.exprId().id(), str(fields[expression.ordinal()])
    return None


def _mark(node: JavaObject) -> str:
    condition = node.condition()
    if condition.getClass().getSimpleName() != "PythonUDF":
        return ""
    name = str(condition.name())
    return name if name.startswith(MARK) else ""


def _reported_time(node: JavaObject) -> int | None:
    """Return the id of the column that a source's reporter takes as event time: its second argument."""
    argument = _copied(node.condition().children().apply(1))
    return None if argument is None or argument[1] else argument[0]


def _control(node: JavaObject) -> Control | None:
    if node.sourceName() != FORMAT:
        return None
    options = node.extraOptions()
    percentile = options.get("percentile")
    return Control(
        options.get("stage"),
        options.get("control"),
        is_gate=options.get("gate") == "true",
        percentile=int(percentile) if percentile else None,
    )


def _reader(node: JavaObject) -> Reader | None:
    if node.sourceName() != LOGS:
        return None
    options = node.extraOptions()
    return Reader(options.get("stage"), options.get("source"))


def _reads_all(node: JavaObject) -> bool:
    """Return whether a source is one that is known to read everything, and is not limited."""
    match node.nodeName():
        case "StreamingRelation":
            known = str(node.dataSource().className()).lower() in _UNLIMITED
        case "StreamingRelationV2":
            known = str(node.sourceName()).lower() in _UNLIMITED
        case _:
            return True
    return known and not _LIMITS & set(_options(node))


def _options(node: JavaObject) -> list[str]:
    """Return the names of a streaming relation's options, in lower case."""
    match node.nodeName():
        case "StreamingRelation":
            names = _items(node.dataSource().options().keys().toSeq())
        case "StreamingRelationV2":
            names = list(node.extraOptions().keySet().toArray())
        case _:
            names = []
    return [str(name).lower() for name in names]


def _delay_ms(node: JavaObject) -> int:
    delays = [_metadata(each).get(_DELAY, 0) for each in _items(node.output())]
    return max(delays, default=0)


def frame_of(writer: DataStreamWriter) -> DataFrame:
    """Return the data frame that a writer writes."""
    return writer._df


def trigger_of(writer: DataStreamWriter) -> str:
    """Return the class name of the writer's trigger, such as `AvailableNowTrigger`."""
    return str(_setting(writer, "trigger").toString()).partition("(")[0]


def interval_ms_of(writer: DataStreamWriter) -> int:
    """Return how long the writer's trigger waits from batch to batch; 0: not at all."""
    trigger = str(_setting(writer, "trigger").toString())
    found = _INTERVAL.fullmatch(trigger)
    return int(found[1]) if found else 0


def output_mode_of(writer: DataStreamWriter) -> str:
    """Return the writer's output mode: `append`, `update` or `complete`."""
    return str(_setting(writer, "outputMode").toString()).lower()


def is_async(writer: DataStreamWriter) -> bool:
    """Return whether Spark is to commit batches asynchronously, some time after they ran."""
    options = str(_setting(writer, "extraOptions").toString()).lower()
    return "asyncprogresstrackingenabled -> true" in options


def format_of(writer: DataStreamWriter) -> str:
    """Return the name of the writer's format, in lower case."""
    return str(_setting(writer, "source")).lower()


def option_of(writer: DataStreamWriter, name: str) -> str | None:
    """Return one of the writer's options; None: it is not set."""
    found = _setting(writer, "extraOptions").get(name)
    return str(found.get()) if found.isDefined() else None


def _setting(writer: DataStreamWriter, name: str) -> JavaObject:
    writer_: JavaObject = writer._jwrite
    found = writer_.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(writer_)
