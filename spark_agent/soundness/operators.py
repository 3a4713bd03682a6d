"""The Spark operators allowed between `watermarked()` and `report()`, and the rows that leave each.

A stage's promise is about the rows that *leave* it, not those that enter it. For each operator the
table has the rows that it emits, their largest distance behind Spark's watermark, whether Spark
considers a row *at* the watermark late, and whether Spark runs batches without data for it. Other
operators are rejected.

The bounds of joins are Spark's own (`produceOutputWatermark` agrees), except for joins without
bounds on both sides: for those Spark gives an output watermark and still emits rows behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from spark_agent.client.reports import StageProgress
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import SOURCE_TAG, WINDOW_TIME, Column, Node, Stamp
from spark_agent.soundness.output_times import OpenSessions, OutputTimes
from spark_agent.sources.control import END_MS


class Emits(StrEnum):
    """Rows that leave an operator, by time."""

    AS_THEY_CAME = "each row in the batch that read it, with its event time unchanged"
    MADE_BY_USER = "rows made by your function, in the batch that read their input"
    WHEN_PASSED = "each group once the watermark has passed it"
    PAIRS = "a pair when its second row arrives; an outer row once nothing can match it"
    USER_DATED = "rows dated by your function, at any time"
    REDATED = "rows dated by your function; Spark fails on one at or before the last batch's W"


class OutputWatermark(StrEnum):
    """An operator's output watermark, in terms of Spark's watermark W."""

    SAME = "W"
    BOUNDS = "W minus the larger of the join's two bounds"
    DECLARED = "only what you declare: `delay=`"
    OPAQUE = "W; the event time must be declared: `delay=`"


_MADE_BY_FUNCTION: Final = frozenset({OutputWatermark.DECLARED, OutputWatermark.OPAQUE})


@dataclass(frozen=True, slots=True)
class Operator:
    """A row of the table. `name` is Spark's name for the logical node."""

    name: str
    emits: Emits
    output: OutputWatermark
    in_code: str
    """Code that a user writes to get the operator."""
    late_at_watermark: bool = False
    """True if a row dated exactly W is late at W: Spark drops it, or splits it from a session that it
    would have extended. On-time rows may be dated W, so Spark is then given W - 1 ms."""
    buffers: bool = False
    """True if it keeps rows across batches, until Spark's watermark releases them."""
    empty_batches: bool = False
    """True if Spark runs a batch without data for it when the watermark has advanced."""
    component: str = ""
    """Name of the hold of its rows, in reports and explanations; empty: without a hold."""
    uses_event_time: bool = False
    """True if Spark drops or holds rows by a column that its metadata marks as event time."""


def _passing(in_code: str, *names: str) -> list[Operator]:
    return [Operator(name, Emits.AS_THEY_CAME, OutputWatermark.SAME, in_code) for name in names]


_GROUPING_ID: Final = "spark_grouping_id"
AGGREGATE_BY_TIME: Final = "Aggregate by session or time"
"""An `Aggregate` with groups to which a row at the watermark may still belong."""

_ROWS: Final = [
    *_passing("select, withColumn, drop", "Project", "DataFrameDropColumns"),
    *_passing("filter, where, having", "Filter"),
    *_passing("alias, a view, SQL", "SubqueryAlias", "View"),
    *_passing("explode, sliding windows, unpivot", "Generate", "Expand", "Unpivot"),
    *_passing(
        "sample, observe, hint", "Sample", "CollectMetrics", "ResolvedHint", "UnresolvedHint"
    ),
    *_passing(
        "repartition, coalesce", "Repartition", "RepartitionByExpression", "RebalancePartitions"
    ),
    *_passing("union", "Union"),
    *_passing(
        "readStream", "StreamingRelation", "StreamingRelationV2", "StreamingDataSourceV2Relation"
    ),
    Operator("MapInPandas", Emits.MADE_BY_USER, OutputWatermark.OPAQUE, "mapInPandas"),
    Operator("MapInArrow", Emits.MADE_BY_USER, OutputWatermark.OPAQUE, "mapInArrow"),
    Operator(
        "Aggregate",
        Emits.WHEN_PASSED,
        OutputWatermark.SAME,
        "groupBy(window(…))",
        buffers=True,
        component="window",
        empty_batches=True,
        uses_event_time=True,
    ),
    Operator(
        AGGREGATE_BY_TIME,
        Emits.WHEN_PASSED,
        OutputWatermark.SAME,
        "groupBy(session_window(…)), groupBy(event time)",
        late_at_watermark=True,
        buffers=True,
        component="session",
        empty_batches=True,
        uses_event_time=True,
    ),
    Operator(
        "Join",
        Emits.PAIRS,
        OutputWatermark.BOUNDS,
        "join of two streams with time bounds on both sides",
        late_at_watermark=True,
        buffers=True,
        component="join",
        empty_batches=True,
        uses_event_time=True,
    ),
    Operator(
        "Deduplicate",
        Emits.AS_THEY_CAME,
        OutputWatermark.SAME,
        "dropDuplicates, distinct",
        late_at_watermark=True,
        empty_batches=True,
        uses_event_time=True,
    ),
    Operator(
        "DeduplicateWithinWatermark",
        Emits.AS_THEY_CAME,
        OutputWatermark.SAME,
        "dropDuplicatesWithinWatermark",
        late_at_watermark=True,
        empty_batches=True,
        uses_event_time=True,
    ),
    *_passing("limit", "GlobalLimit", "LocalLimit"),
    Operator(
        "FlatMapGroupsInPandasWithState",
        Emits.USER_DATED,
        OutputWatermark.DECLARED,
        "applyInPandasWithState",
        late_at_watermark=True,
        buffers=True,
        component="state",
        empty_batches=True,
    ),
    Operator(
        "TransformWithStateInPySpark",
        Emits.USER_DATED,
        OutputWatermark.DECLARED,
        "transformWithState, transformWithStateInPandas",
        late_at_watermark=True,
        buffers=True,
        component="state",
        empty_batches=True,
    ),
    Operator(
        "UpdateEventTimeWatermarkColumn",
        Emits.REDATED,
        OutputWatermark.SAME,
        "transformWithState(…, eventTimeColumnName=…)",
        late_at_watermark=True,
        buffers=True,
        component="state",
        empty_batches=True,
        uses_event_time=True,
    ),
]
TABLE: Final[Mapping[str, Operator]] = MappingProxyType({row.name: row for row in _ROWS})
"""The operators, by Spark's names for their logical nodes."""

_ALTERNATIVES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Sort": "sort where the output is read: only complete mode can keep an order",
        "FlatMapGroupsInPandas": (
            "use applyInPandasWithState: applyInPandas sees only one batch's rows of a group"
        ),
        "FlatMapGroupsInArrow": (
            "use applyInPandasWithState: applyInArrow sees only one batch's rows of a group"
        ),
        "Distinct": (
            "write UNION ALL for UNION, and for SELECT DISTINCT a GROUP BY of its columns, with the "
            "event time among them; or call dropDuplicates() on the data frame"
        ),
        "FlatMapCoGroupsInPandas": "join the two streams, or use transformWithState on their union",
        "EventTimeWatermark": "leave withWatermark out: watermarked() replaces it",
        "WithCTE": "turn the WITH clause of your SQL into a temporary view",
        "PipeOperator": "write the query without |>, as SELECT … FROM … WHERE …",
        "Window": "use groupBy(window(…)): a window function would need all rows at once",
    }
)
CAST: Final = (
    "cast the timestamp_ntz before source(), .withColumn('at', F.col('at').cast('timestamp'))"
)
_DEFAULT_ALTERNATIVE: Final = (
    "write its output to files in one query, and start the stage from those files in another"
)


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Properties of the rows that leave a node, when Spark's watermark is W."""

    behind_ms: int = 0
    """Largest distance of a row behind W."""
    buffered: bool = False
    """True if an operator below keeps rows across batches."""
    component: str = ""
    """The nearest such operator's name for the hold of its rows."""
    late_at_watermark: bool = False
    """True if an operator below would drop rows dated W."""
    declared_only: bool = False
    """True if only a declaration bounds their distance behind W."""
    watermarked: bool = False
    """True if all of them have passed `watermarked()`."""
    allowed_lateness_ms: int = 0
    """Distance of Spark's watermark behind the stage's, for windows that fire more than once."""
    stamps: Mapping[int, Stamp] = field(default_factory=dict[int, Stamp])
    """By column id: the columns that are event time, or derived from it."""
    marks: Mapping[int, Stamp] = field(default_factory=dict[int, Stamp])
    """Likewise, with those that a user's function makes, and its schema marks as event time."""


def output_rows(node: Node) -> OutputRows:
    """Derive the rows that leave a node from those that leave its children.

    Raises `UnsoundPlanError`.
    """
    if not node.streaming or node.tag.startswith(SOURCE_TAG):
        # A source's strategy bounds the rows that leave it.
        return OutputRows()
    if node.is_control_union:
        [control] = [each.control for each in node.children[0].walk() if each.control]
        return OutputRows(
            watermarked=True,
            allowed_lateness_ms=control.allowed_lateness_ms,
            stamps=_spark_stamps(node),
            marks=_spark_stamps(node),
        )
    row = TABLE.get(row_name(node))
    if row is None:
        advice = _ALTERNATIVES.get(node.operator, _DEFAULT_ALTERNATIVE)
        raise UnsoundPlanError(
            f"Spark's operator {node.operator} is not supported, because the age of the rows that leave "
            f"it is unknown: {advice}"
        )
    children = [output_rows(child) for child in node.children if child.streaming]
    below = _merge(children)
    return _apply(node, row, below, children)


def row_name(node: Node) -> str:
    """Return the name of a node's row in the table. Raises `UnsoundPlanError`."""
    if node.operator != "Aggregate":
        return node.operator
    if any(column.name == _GROUPING_ID for column in node.groups):
        raise UnsoundPlanError(
            "rollup and cube have groups over all time, which no watermark ever closes: group by the "
            "window and the columns that you want, and compute the totals where the output is read"
        )
    stamps = {column.stamp for column in node.groups} - {None}
    if not stamps:
        raise UnsoundPlanError(
            "an aggregation does not group by an event time of Spark's, so its groups never "
            "close: call watermarked() before it, and group by window(…) over the event time, as it is: "
            "a cast or a shift makes another column of it. If a function of yours (mapInPandas, "
            "mapInArrow) comes between, call watermarked() after that function"
        )
    times = [column.name for column in node.groups if column.stamp is not None]
    if len(times) > 1:
        raise UnsoundPlanError(
            f"an aggregation groups by several event times ({', '.join(times)}), and Spark's operators "
            f"take only one: group by one of them, and compute the other from the rows, for example "
            f"with max()"
        )
    return "Aggregate" if stamps == {Stamp.WINDOW} else AGGREGATE_BY_TIME


def _merge(children: list[OutputRows]) -> OutputRows:
    """Combine the rows of several children, taking the worst case of each property."""
    return OutputRows(
        behind_ms=max((child.behind_ms for child in children), default=0),
        buffered=any(child.buffered for child in children),
        component=next((child.component for child in children if child.component), ""),
        late_at_watermark=any(child.late_at_watermark for child in children),
        declared_only=any(child.declared_only for child in children),
        watermarked=bool(children) and all(child.watermarked for child in children),
        allowed_lateness_ms=max((child.allowed_lateness_ms for child in children), default=0),
        stamps={column: stamp for child in children for column, stamp in child.stamps.items()},
        marks={column: stamp for child in children for column, stamp in child.marks.items()},
    )


def _apply(node: Node, row: Operator, below: OutputRows, children: list[OutputRows]) -> OutputRows:
    """Derive the rows that leave an operator from those that enter it."""
    if row.name == "Join":
        return _apply_join(node, row, below, children)
    if row.uses_event_time and row.emits is not Emits.REDATED:
        taken = node.groups if node.operator == "Aggregate" else node.children[0].output
        _check_marks(row, taken, below.marks)
    return replace(
        below,
        buffered=below.buffered or row.buffers,
        component=row.component or below.component,
        late_at_watermark=below.late_at_watermark or row.late_at_watermark,
        # Only an event time column of its own ends this: after a state function Spark's other
        # operators have no watermark, and neither hold nor drop rows by it.
        declared_only=row.output is OutputWatermark.DECLARED
        or (below.declared_only and row.emits is not Emits.REDATED),
        stamps=_output_stamps(node, row, below.stamps, [each.stamps for each in children]),
        marks=_spark_stamps(node)
        if row.output in _MADE_BY_FUNCTION
        else _output_stamps(node, row, below.marks, [each.marks for each in children]),
    )


def _output_stamps(
    node: Node,
    row: Operator,
    below: Mapping[int, Stamp],
    children: Sequence[Mapping[int, Stamp]],
) -> Mapping[int, Stamp]:
    """Return the columns of an operator's output that are event time."""
    if row.output in _MADE_BY_FUNCTION:
        return {}
    if row.uses_event_time:
        # An aggregation in SQL may also name a part of its window, such as window.end.
        groups = {column.id: column.stamp for column in node.groups if column.stamp is not None}
        return _spark_stamps(node) | _copied_stamps(node, groups)
    match row.name:
        case "Project" | "Expand":
            return _projected_stamps(node, below)
        case "Union":
            return _union_stamps(node, children)
        case _:
            return below


def _spark_stamps(node: Node) -> dict[int, Stamp]:
    """Return the columns that Spark marks as event time: these operators drop or hold rows by them."""
    return {column.id: column.stamp for column in node.output if column.stamp is not None}


def _check_marks(row: Operator, columns: Sequence[Column], marks: Mapping[int, Stamp]) -> None:
    """Raise if Spark's operator takes a column for event time that is none.

    Spark's marks are metadata, which a union copies from its first branch, and `DataFrame.to` from a
    schema. Rows behind the watermark by such a column would be dropped, although they are on time.
    """
    for column in columns:
        if column.stamp is not None and column.id not in marks:
            raise UnsoundPlanError(
                f"{row.in_code}: Spark takes {column.name!r} for event time by the metadata of a "
                f"schema or of a union's first branch, although the column is computed after "
                f"watermarked(), at least in part, so Spark would drop rows by it that are on time: "
                f"compute the event time before source() and watermarked(), or give the computed column "
                f"another name and place"
            )


def _projected_stamps(node: Node, stamps: Mapping[int, Stamp]) -> dict[int, Stamp]:
    """Return the columns that are event time: those below, copies of them, and windows of them."""
    made = {
        column.id: column.stamp
        for column in node.output
        if column.stamp is not None and node.window_times.get(column.id) in stamps
    }
    found = made | _copied_stamps(node, stamps)
    return {**stamps, **found} if node.operator == "Expand" else found


def _copied_stamps(node: Node, stamps: Mapping[int, Stamp]) -> dict[int, Stamp]:
    """Return the stamps of columns that are renamed, or are a field of another column."""
    parts = {
        column: _stamp_of_part(stamps.get(origin), part)
        for column, (origin, part) in node.copies.items()
    }
    return {column: stamp for column, stamp in parts.items() if stamp is not None}


def _stamp_of_part(stamp: Stamp | None, part: str) -> Stamp | None:
    if not part:
        return stamp
    if stamp not in {Stamp.WINDOW, Stamp.SESSION}:
        return None
    return {"end": Stamp.END, "start": Stamp.START, WINDOW_TIME: Stamp.TIME}.get(part)


def _union_stamps(node: Node, children: Sequence[Mapping[int, Stamp]]) -> dict[int, Stamp]:
    """Return a union's columns that have the same stamp in each branch; columns match by position."""
    found: dict[int, Stamp] = {}
    for position, column in enumerate(node.output):
        branches = [branch.output[position].id for branch in node.children]
        if column.stamp is not None and any(
            id_ in branch.cast_by_zone for id_, branch in zip(branches, node.children, strict=True)
        ):
            raise UnsoundPlanError(
                f"a union has a timestamp and a timestamp_ntz as event time {column.name!r}, and Spark "
                f"makes the one of the other by the session's time zone, so rows would be late that are "
                f"not: {CAST}"
            )
        stamps = {
            child.get(branch.output[position].id)
            for branch, child in zip(node.children, children, strict=True)
        }
        if len(stamps) == 1 and (stamp := stamps.pop()) is not None:
            found[column.id] = stamp
    return found


def _apply_join(
    node: Node, row: Operator, below: OutputRows, children: list[OutputRows]
) -> OutputRows:
    if node.bounds is None:
        # A join with a static table: each row passes in its batch.
        return below
    if not all(child.watermarked for child in children):
        raise UnsoundPlanError(
            "a join of two streams needs watermarked() on both sides, each before the join: "
            "otherwise Spark keeps their rows for ever"
        )
    if node.bounds.one_sided_equality:
        raise UnsoundPlanError(
            "the join equates the event time of one side with a value that is not the event time of "
            "the other, and Spark would drop that other side's rows by it, even on-time ones: equate "
            "the two event times, or use the equality only on columns that are not event times, and "
            "bound the event times, a.at BETWEEN b.at - INTERVAL 1 HOUR AND b.at"
        )
    if node.bounds.cast_by_zone:
        raise UnsoundPlanError(
            f"the join compares a timestamp_ntz, {node.bounds.cast_by_zone[0]!r}, with a timestamp, by "
            f"Spark's session time zone, and the watermark compares it as UTC, so Spark would drop rows "
            f"that are to be joined: {CAST}"
        )
    if node.bounds.hidden:
        raise UnsoundPlanError(
            f"an outer or semi join of two streams has a timestamp_ntz as event time, in whose bounds "
            f"Spark does not find an interval: {CAST}, join on the event times, or use an "
            f"inner join"
        )
    if node.bounds.null_keys:
        raise UnsoundPlanError(
            f"a full outer join of two streams may meet null on both sides of "
            f"{', '.join(node.bounds.null_keys)}, and Spark takes two nulls there for equal: filter "
            f"nulls out of one side, after watermarked(), watermarked(…).where('key IS NOT NULL'), or "
            f"give them a value of their own with coalesce(); use `<=>` if nulls are to be equal"
        )
    for side in node.children:
        _check_marks(row, side.output, below.marks)
    left_ms, right_ms = node.bounds.left_ms, node.bounds.right_ms
    if left_ms is None or right_ms is None:
        side = "left" if left_ms is None else "right"
        raise UnsoundPlanError(
            f"the join does not bound the age of its {side} side, so rows of any age could "
            f"leave it: bound both sides' event times in the join's condition, for example "
            f"a.at BETWEEN b.at - INTERVAL 1 HOUR AND b.at, or join on the event time itself. Intervals "
            f"of months or years do not count as bounds, nor do comparisons with other columns, such as "
            f"a deadline or a window's end; those may be added to the bounds"
        )
    return replace(
        below,
        buffered=row.buffers,
        component=row.component,
        late_at_watermark=row.late_at_watermark,
        behind_ms=below.behind_ms + max(left_ms, right_ms),
        stamps=_spark_stamps(node),
        marks=_spark_stamps(node),
    )


@dataclass(frozen=True, slots=True)
class Promise:
    """Derivation of a stage's promise from Spark's watermark, both in ms."""

    behind_ms: int = 0
    """Largest distance behind the watermark of the rows that operators keep."""
    declared_ms: int = 0
    """A further distance that the user has declared."""
    spark_lag_ms: int = 0
    """Distance of Spark's watermark behind the service's: 1 where Spark is given W - 1 ms."""
    buffered: bool = False
    component: str = field(default="", compare=False)
    """Name of the hold of the rows that operators keep."""
    allowed_lateness_ms: int = 0
    """A further distance of Spark's watermark, so that Spark keeps windows that have fired.

    The windows fire by the stage's watermark all the same, so the promise does not wait for them.
    """
    output: OutputTimes | None = None
    """Output times of its windows other than their ends."""

    def spark_ms(self, watermark_ms: int) -> int:
        """Convert the stage's input watermark to the one given to Spark.

        Nothing is late at the end of time, so Spark keeps nothing then.

        >>> Promise().spark_ms(60_000), Promise(spark_lag_ms=1).spark_ms(60_000)
        (60000, 59999)
        >>> late = Promise(allowed_lateness_ms=9_000)
        >>> late.spark_ms(60_000), late.spark_ms(END_MS) == END_MS
        (51000, True)
        """
        lateness_ms = 0 if watermark_ms == END_MS else self.allowed_lateness_ms
        return watermark_ms - self.spark_lag_ms - lateness_ms

    def input_ms(self, spark_ms: int) -> int:
        """Return the stage's input watermark when Spark has this one: the reverse of `spark_ms`.

        >>> Promise(allowed_lateness_ms=9_000).input_ms(51_000)
        60000
        """
        lateness_ms = 0 if spark_ms >= END_MS - 1 else self.allowed_lateness_ms
        return spark_ms + self.spark_lag_ms + lateness_ms

    def promise_ms(self, spark_ms: int) -> int:
        """Return the promise after a batch with this Spark watermark: later rows are not older.

        Without a buffering operator, rows leave with the batch that reads them. All rows before the
        input watermark have been read by then, so later rows are at or after it, although Spark was
        given a millisecond less.

        >>> Promise().promise_ms(60_000), Promise(spark_lag_ms=1).promise_ms(59_999)
        (60000, 60000)
        >>> Promise(behind_ms=1_000, spark_lag_ms=1, buffered=True).promise_ms(59_999)
        58999
        >>> sessions = OutputTimes("session_window", reach_us=9_000_000)
        >>> Promise(spark_lag_ms=1, buffered=True, output=sessions).promise_ms(59_999)
        50999
        """
        lag_ms = self.spark_lag_ms if self.buffered else 0
        passed_ms = self.input_ms(spark_ms) - self.behind_ms - self.declared_ms - lag_ms
        return passed_ms if self.output is None else self.output.earliest_ms(passed_ms)

    @property
    def reads_state(self) -> bool:
        """True if the promise depends on the sessions that Spark keeps."""
        return self.output is not None and self.output.reads_state

    def progress(self, spark_ms: int, kept: OpenSessions | None = None) -> StageProgress:
        """Return the progress to commit after a batch with this Spark watermark.

        `kept` are the sessions that were open after this batch or an earlier one. Rows that are read
        later begin sessions, or go on with these. So an old reading gives a promise that is lower, and
        holds. Without any, there is not a promise yet.

        >>> Promise(behind_ms=1_000, component="join").progress(60_000)
        StageProgress(input_ms=60000, holds={'join': 59000})
        >>> Promise().progress(60_000)
        StageProgress(input_ms=60000, holds={})
        >>> starts = OutputTimes("session_window", reach_us=5_000_000, reads_state=True)
        >>> sessions = Promise(buffered=True, component="open_session", output=starts)
        >>> sessions.progress(60_000, OpenSessions(3, 58_000, 7_000)).holds
        {'open_session': 7000}
        >>> sessions.progress(60_000, OpenSessions(3, 58_000, None)).holds, sessions.progress(60_000)
        ({'open_session': 53000}, StageProgress(input_ms=None, holds={}))
        """
        input_ms = self.input_ms(spark_ms)
        if not self.reads_state:
            promise_ms = self.promise_ms(spark_ms)
        elif kept is None:
            return StageProgress(None)
        else:
            begins_ms = self.promise_ms(kept.spark_ms)
            promise_ms = begins_ms if kept.earliest_ms is None else min(begins_ms, kept.earliest_ms)
        holds = {self.component or "delay": promise_ms} if promise_ms < input_ms else {}
        return StageProgress(input_ms, holds)

    @property
    def may_idle(self) -> bool:
        """True if the promise is the input watermark itself while Spark keeps nothing.

        Rows that are read later are not older than the input watermark, nor are windows, pairs and
        output times that are made of such rows alone. A declared distance may be behind them, too.
        """
        return not self.declared_ms


def promise_of(
    stage: str,
    rows: OutputRows,
    column: Column | None,
    delay_ms: int | None,
    output: OutputTimes | None = None,
) -> Promise:
    """Derive a stage's promise for rows stamped with a column; None: rows without an event time.

    `delay_ms` is the declared delay, added to the operators' own. `output` are the output times of
    windows. Without either, raises `UnsoundPlanError` if the plan does not bound the age of the rows
    or of the column.
    """
    if not rows.watermarked:
        raise UnsoundPlanError(
            f"stage {stage!r}: some rows that reach report() did not come through watermarked(): call "
            f"watermarked() on every stream before the stage's operators"
        )
    if delay_ms is None and output is None:
        _check_bounded(stage, rows, column)
    return Promise(
        behind_ms=rows.behind_ms,
        declared_ms=delay_ms or 0,
        spark_lag_ms=int(rows.late_at_watermark),
        buffered=rows.buffered,
        component=rows.component if output is None else _component(output),
        allowed_lateness_ms=rows.allowed_lateness_ms,
        output=output,
    )


def _component(output: OutputTimes) -> str:
    return "open_session" if output.reads_state else "output_time"


def _check_bounded(stage: str, rows: OutputRows, column: Column | None) -> None:
    if rows.declared_only:
        raise UnsoundPlanError(
            f"stage {stage!r}: the plan does not bound the age of the rows that your state "
            f"function emits: "
            f"declare their largest distance behind the watermark, report(…, event_time='ended_at', "
            f"delay='2 hours'), or give transformWithState an eventTimeColumnName"
        )
    stamp = None if column is None else rows.stamps.get(column.id)
    if column is None or stamp in {Stamp.TIME, Stamp.WINDOW, Stamp.SESSION, Stamp.END}:
        return
    if stamp is Stamp.START:
        raise UnsoundPlanError(
            f"stage {stage!r}: {column.name!r} is the start of a window, but a window leaves when "
            f"the watermark has passed its end: stamp rows with the end, or declare the length of "
            f"the longest window, report(…, event_time={column.name!r}, delay='1 hour')"
        )
    raise UnsoundPlanError(
        f"stage {stage!r}: the plan does not bound the age of {column.name!r}: stamp rows with "
        f"the event time itself, a window's end or window_time(), or declare its largest distance "
        f"behind "
        f"the watermark, report(…, event_time={column.name!r}, delay='0 s') if it is never behind"
    )
