# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""What the driver reads out of Spark's own objects, all in one place: it is not public API.

The rest of the agent sees plain values: a plan is a tree of `Node`s, a batch that is done is a
`CommittedBatch`. A twin of this module for Spark Connect would have to fill the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, TypeAlias

from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.control_source import END_MS, FORMAT
from spark_agent.link import Offset

JavaObject: TypeAlias = Any

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PROBE_MS: Final = 4_000_000_000_000
"""A watermark to ask Spark about a join with: large enough to travel as a Java long."""

_DELAY: Final = "spark.watermarkDelayMs"

MARK: Final = "tidegauge."
"""What the names of the agent's own functions in a plan begin with."""
SOURCE_MARK: Final = f"{MARK}source."
RANGES_MARK: Final = f"{MARK}ranges."
"""Names of the two reporters in Spark's plan, before a number of their own and the stage."""

_CONTROL_CHAIN: Final = frozenset({"Filter", "EventTimeWatermark", "Project"})
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
"""Options by which a source leaves for a later batch what it could read now, in lower case."""


_EQUALITIES: Final = frozenset({"EqualTo", "EqualNullSafe"})


class Stamp(StrEnum):
    """What a column's value is to event time."""

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
    """A column of a node: Spark's id of it, and what Spark itself knows of its event time."""

    id: int
    name: str
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far (ms) behind the watermark the rows of a stream-stream join may be; None: unbounded."""

    left_ms: int | None
    right_ms: int | None
    one_sided_equality: bool = False
    """The event time of one side is equal to something that is not the event time of the other."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control source: the stage whose input watermark it brings, and its id at the driver."""

    stage: str
    id: str


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a query's logical plan."""

    operator: str
    """Spark's name of it, such as `Aggregate`."""
    children: tuple[Node, ...] = ()
    output: tuple[Column, ...] = ()
    streaming: bool = True
    mark: str = ""
    """Name of the agent's function in it, if it is one of the agent's own nodes."""
    event_time: int | None = None
    """Of a source's reporter: the column that it goes by, by its id."""
    copies: Mapping[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    """Columns that are others, renamed (id by id), or a field of theirs, by the field's name."""
    groups: tuple[Column, ...] = ()
    """What an aggregation groups by."""
    bounds: Bounds | None = None
    """Of a join of two streams."""
    control: Control | None = None
    limits: tuple[str, ...] = ()
    """Options that limit how much of a source one batch reads."""
    delay_ms: int = 0
    """Of a watermark's definition."""

    def walk(self) -> Iterator[Node]:
        """Yield it and every node below."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_control_union(self) -> bool:
        """Whether it is where `Pipeline.watermarked` brings a control source and the data together."""
        return self.operator == "Union" and _leads_to_control(self.children[0])


def _leads_to_control(node: Node) -> bool:
    while node.operator in _CONTROL_CHAIN and len(node.children) == 1:
        node = node.children[0]
    return node.control is not None


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """Spark has committed a batch."""

    epoch: int
    watermark_ms: int
    """Spark's own watermark, which the batch ran with; 0: none yet."""
    read_nothing: bool = False
    """Nothing was new in any source but the control sources."""
    dropped_rows: int = 0
    """Rows that its operators dropped as late."""


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
        """Read it as it stands before optimisation: the marks are in it, whatever is done to it."""
        analyzed: JavaObject = frame._jdf.queryExecution().analyzed()
        joins = iter(())
        if any(_is_stream_join(node) for node in _java_walk(analyzed)):
            # The conditions of joins are read as Spark will run them: with what a later `where`
            # adds, and without `BETWEEN`, which Spark takes apart only here.
            optimized = self._optimizer.execute(analyzed)
            joins = iter([self._bounds(n) for n in _java_walk(optimized) if _is_stream_join(n)])
        return self._node(analyzed, joins)

    def _node(self, node: JavaObject, joins: Iterator[Bounds]) -> Node:
        name, streaming = node.nodeName(), node.isStreaming()
        # Before the children: the joins' bounds are listed from the top.
        bounds = next(joins, Bounds(None, None)) if _is_stream_join(node) else None
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
            limits=tuple(sorted(_LIMITS & set(_options(node)))),
            delay_ms=_delay_ms(node) if name == "EventTimeWatermark" else 0,
        )

    def _bounds(self, join: JavaObject) -> Bounds:
        if self._joins.isWatermarkInJoinKeys(join):
            return Bounds(0, 0, one_sided_equality=_has_one_sided_equality(join))
        left, right = join.left(), join.right()
        return Bounds(self._behind(left, right, join), self._behind(right, left, join))

    def _behind(self, of: JavaObject, other: JavaObject, join: JavaObject) -> int | None:
        """Say how far behind the watermark the rows of one side may be; None: unbounded.

        Spark takes a comparison of any column with the other side's event time for a bound on this
        side's, such as a deadline or a window's end, and forgets rows too early by it. So a bound
        counts only if it is there with the event times alone; what Spark then goes by is never less.
        """
        sound = self._bound(self._set(_event_times(of)), self._set(_event_times(other)), join)
        if sound is None:
            return None
        return max(sound, self._bound(of.outputSet(), other.outputSet(), join) or 0)

    def _bound(self, of: JavaObject, other: JavaObject, join: JavaObject) -> int | None:
        probe = self._option.apply(_PROBE_MS)
        found = self._joins.getStateValueWatermark(of, other, join.condition(), probe)
        return None if found.isEmpty() else max(_PROBE_MS - found.get(), 0)

    def _set(self, attributes: list[JavaObject]) -> JavaObject:
        found = self._attributes.empty()
        for each in attributes:
            found = getattr(found, "$plus$plus")(self._attributes.apply(each))
        return found


def _has_one_sided_equality(join: JavaObject) -> bool:
    condition = join.condition()
    parts = [] if condition.isEmpty() else list(_conjuncts(condition.get()))
    equal = [part for part in parts if part.getClass().getSimpleName() in _EQUALITIES]
    return any(_is_event_time(part.left()) != _is_event_time(part.right()) for part in equal)


def _event_times(side: JavaObject) -> list[JavaObject]:
    """Return a side's event time; Spark fails on a join with a side that has more than one."""
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


def _is_stream_join(node: JavaObject) -> bool:
    if node.nodeName() != "Join":
        return False
    return node.left().isStreaming() and node.right().isStreaming()


def _columns(attributes: JavaObject) -> tuple[Column, ...]:
    return tuple(_column(attribute) for attribute in _items(attributes))


def _column(attribute: JavaObject) -> Column:
    return Column(attribute.exprId().id(), attribute.name(), _stamp(attribute))


def _stamp(attribute: JavaObject) -> Stamp | None:
    """Read what Spark notes of a column: that it is event time, or a window over it."""
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
    """Return what a node computes, as far as columns may be copied by it; None: nothing."""
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
    """Read which column a source's reporter is shown as the event time: the second."""
    shown = _copied(node.condition().children().apply(1))
    return None if shown is None or shown[1] else shown[0]


def _control(node: JavaObject) -> Control | None:
    if node.sourceName() != FORMAT:
        return None
    options = node.extraOptions()
    return Control(options.get("stage"), options.get("control"))


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
    """Return what the writer writes."""
    return writer._df


def trigger_of(writer: DataStreamWriter) -> str:
    """Name the writer's trigger, as Spark's classes do: `AvailableNowTrigger` and so on."""
    return str(_setting(writer, "trigger").toString()).partition("(")[0]


def output_mode_of(writer: DataStreamWriter) -> str:
    """Name the writer's output mode: `append`, `update` or `complete`."""
    return str(_setting(writer, "outputMode").toString()).lower()


def is_async(writer: DataStreamWriter) -> bool:
    """Say whether Spark is to commit its batches later than it runs them."""
    options = str(_setting(writer, "extraOptions").toString()).lower()
    return "asyncprogresstrackingenabled -> true" in options


def _setting(writer: DataStreamWriter, name: str) -> JavaObject:
    writer_: JavaObject = writer._jwrite
    found = writer_.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(writer_)


def has_no_new_data(query: StreamingQuery) -> bool:
    """Say whether the newest trigger has found nothing new in any of the query's sources."""
    return bool(_execution(query).noNewData())


def fail(spark: SparkSession, query: StreamingQuery, message: str) -> None:
    """Let a query end with an error, at its next trigger at the latest.

    Spark has no public way to. This is the one by which its own background work does it.
    """
    jvm: JavaObject = spark._jvm
    _execution(query).errorNotifier().markError(jvm.java.lang.IllegalStateException(message))


def has_failed(query: StreamingQuery) -> bool:
    """Say whether a query has ended with an error, such as that Spark is gone."""
    try:
        return query.exception() is not None
    except Exception:  # noqa: BLE001  (whatever it is, there is no query any more)
        return True


def _execution(query: StreamingQuery) -> JavaObject:
    wrapped: JavaObject = query._jsq
    return wrapped.streamingQuery()


def last_progress(query: StreamingQuery) -> CommittedBatch | None:
    """Return the newest batch that a query has done since it started; None if there is none.

    Spark notes it before it plans the next batch, and tells its listeners only some time later.
    """
    wrapped: JavaObject = query._jsq
    progress = wrapped.lastProgress()
    return None if progress is None else read_progress(json.loads(progress.json()))


class Listener:
    """Hears from Spark of every batch that is done and of every query that has ended, by run id.

    PySpark's own listener turns each event into Python objects by some hundreds of calls to the JVM,
    in every batch of every query. All that is needed of it is one JSON text.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        batch_committed: Callable[[str, CommittedBatch], None],
        query_ended: Callable[[str], None],
    ) -> None:
        context: JavaObject = spark.sparkContext
        gateway: JavaObject = context._gateway
        ensure_callback_server_started(gateway)
        self._batch_committed = batch_committed
        self._query_ended = query_ended
        package = gateway.jvm.org.apache.spark.sql.streaming
        self._listener: JavaObject = package.PythonStreamingQueryListenerWrapper(self)
        self._queries: JavaObject = spark.streams._jsqm
        self._queries.addListener(self._listener)

    def close(self) -> None:
        """Hear no more."""
        self._queries.removeListener(self._listener)

    def onQueryStarted(self, event: JavaObject) -> None:  # noqa: N802
        """Nothing to do: who starts a query knows of it."""

    def onQueryProgress(self, event: JavaObject) -> None:  # noqa: N802
        """Read the batch."""
        body = json.loads(event.progress().json())
        self._batch_committed(body["runId"], read_progress(body))

    def onQueryIdle(self, event: JavaObject) -> None:  # noqa: N802
        """Nothing to do."""

    def onQueryTerminated(self, event: JavaObject) -> None:  # noqa: N802
        """Read which query it was."""
        self._query_ended(str(event.runId().toString()))

    class Java:
        """What py4j shows this class to the JVM as."""

        implements: Final = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]


def read_progress(body: Mapping[str, Any]) -> CommittedBatch:
    """Read a batch's progress, as Spark writes it.

    >>> read_progress({"batchId": 7, "eventTime": {"watermark": "1970-01-01T00:00:05.000Z"},
    ...   "sources": [{"startOffset": {"logOffset": 1}, "endOffset": {"logOffset": 2}}]})
    CommittedBatch(epoch=7, watermark_ms=5000, read_nothing=False, dropped_rows=0)
    """
    return CommittedBatch(
        epoch=body["batchId"],
        watermark_ms=parse_watermark_ms(body.get("eventTime", {}).get("watermark")),
        read_nothing=all(
            _is_control(source["endOffset"]) or source["startOffset"] == source["endOffset"]
            for source in body["sources"]
        ),
        dropped_rows=sum(
            int(operator.get("numRowsDroppedByWatermark", 0))
            for operator in body.get("stateOperators", ())
        ),
    )


def _is_control(offset: object) -> bool:
    """Tell a control source by its offsets: Spark describes it by its own class only."""
    return isinstance(offset, dict) and offset.keys() == Offset(None, 0).to_dict().keys()


def parse_watermark_ms(text: str | None) -> int:
    """Read the watermark in a query's progress, in Spark's ms; 0 if it has none.

    >>> parse_watermark_ms("2013-01-01T00:00:15.250Z"), parse_watermark_ms(None)
    (1356998415250, 0)
    >>> parse_watermark_ms("+100000-01-01T00:00:00.000Z") == END_MS
    True
    """
    if not text:
        return 0
    if text.startswith("+"):
        # Python's calendar ends with the year 9999. Beyond is nothing but the end of time.
        return END_MS
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(milliseconds=1)
