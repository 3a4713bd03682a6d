"""Every operator of Spark's that may stand between `watermarked()` and `report()`: what leaves it.

A stage promises what *leaves* it, not what came in. For each operator the table says what it emits,
how far behind Spark's watermark that may be, whether Spark takes a row *at* the watermark for late,
and whether Spark runs batches without data for it. What is not in the table is refused.

The figures of joins are Spark's own (`produceOutputWatermark` comes to the same), but for joins
without bounds on both sides: there Spark names a watermark and emits rows behind it all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from spark_agent.plan import SOURCE_MARK, Column, Node, Stamp


class Emits(StrEnum):
    """What rows leave an operator, and when."""

    AS_THEY_CAME = "each row in the batch that brought it, dated as it was"
    MADE_BY_USER = "rows made by your function, in the batch that brought theirs"
    WHEN_PASSED = "each group when the watermark has passed it"
    PAIRS = "pairs when the second row comes; an outer row once nothing can join it"
    USER_DATED = "rows dated by your function, at any time"
    REDATED = "rows dated by your function; Spark fails on one at or before the last batch's W"


class OutputWatermark(StrEnum):
    """What an operator's output watermark is, as Spark's watermark W goes."""

    SAME = "W"
    BOUNDS = "W less the wider of the join's two bounds"
    DECLARED = "only what you declare: `delay=`"
    OPAQUE = "W; the event time must be declared: `delay=`"


@dataclass(frozen=True, slots=True)
class Operator:
    """A row of the table. `name` is Spark's name of the logical node."""

    name: str
    emits: Emits
    output: OutputWatermark
    in_code: str
    """What a user writes for it."""
    late_at_watermark: bool = False
    """Whether Spark is done at W with what a row dated exactly W belongs to: it drops the row, or parts
    it from a session that it would have prolonged. On-time rows may be dated W, so Spark is then
    given W - 1 ms."""
    buffers: bool = False
    """Whether rows stay in it over batches, so that what leaves it is judged by Spark's watermark."""
    empty_batches: bool = False
    """Whether Spark runs a batch without data for it when the watermark has moved."""
    uses_event_time: bool = False
    """Whether Spark drops, or holds, rows by the event time that it has noted of a column."""


def _passing(in_code: str, *names: str) -> list[Operator]:
    return [Operator(name, Emits.AS_THEY_CAME, OutputWatermark.SAME, in_code) for name in names]


_GROUPING_ID: Final = "spark_grouping_id"
AGGREGATE_BY_TIME: Final = "Aggregate by session or time"
"""An `Aggregate` whose groups a row at the watermark may still belong to."""

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
        empty_batches=True,
    ),
    Operator(
        "TransformWithStateInPySpark",
        Emits.USER_DATED,
        OutputWatermark.DECLARED,
        "transformWithState, transformWithStateInPandas",
        late_at_watermark=True,
        buffers=True,
        empty_batches=True,
    ),
    Operator(
        "UpdateEventTimeWatermarkColumn",
        Emits.REDATED,
        OutputWatermark.SAME,
        "transformWithState(…, eventTimeColumnName=…)",
        late_at_watermark=True,
        buffers=True,
        empty_batches=True,
        uses_event_time=True,
    ),
]
TABLE: Final[Mapping[str, Operator]] = MappingProxyType({row.name: row for row in _ROWS})
"""The operators by Spark's name of their logical nodes."""

_ALTERNATIVES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Sort": "sort where the rows are read: only complete mode can keep an order",
        "FlatMapGroupsInPandas": (
            "use applyInPandasWithState: applyInPandas sees only one batch's rows of a group"
        ),
        "FlatMapGroupsInArrow": (
            "use applyInPandasWithState: applyInArrow sees only one batch's rows of a group"
        ),
        "FlatMapCoGroupsInPandas": "join the two streams, or use transformWithState on their union",
        "EventTimeWatermark": "leave withWatermark out: watermarked() stands in its place",
        "WithCTE": "write the WITH of your SQL as a temporary view of its own",
        "Window": "use groupBy(window(…)): a window function would need all rows at once",
    }
)
_DEFAULT_ALTERNATIVE: Final = (
    "write its output to files with one query, and begin the stage from those in another"
)


class UnsoundPlanError(ValueError):
    """A query's plan cannot keep what its stage would promise; the message says what to write."""


@dataclass(frozen=True, slots=True)
class OutputRows:
    """What is known of the rows that leave a node, when Spark's watermark is W."""

    behind_ms: int = 0
    """They are at most so far behind W."""
    buffered: bool = False
    """Rows stay in an operator below over batches."""
    late_at_watermark: bool = False
    """An operator below would drop rows dated W."""
    declared_only: bool = False
    """How far behind they are, only the user knows."""
    watermarked: bool = False
    """All of them have come through `watermarked()`."""
    stamps: Mapping[int, Stamp] = field(default_factory=dict[int, Stamp])
    """The columns that are known to be event time, or to come from it, by their ids."""


def output_rows(node: Node) -> OutputRows:
    """Derive what leaves a node from what leaves its children. Raises `UnsoundPlanError`."""
    if not node.streaming or node.mark.startswith(SOURCE_MARK):
        # What leaves a source, its strategy says.
        return OutputRows()
    if node.is_control_union:
        return OutputRows(watermarked=True, stamps=_spark_stamps(node))
    row = TABLE.get(_row_name(node))
    if row is None:
        advice = _ALTERNATIVES.get(node.operator, _DEFAULT_ALTERNATIVE)
        raise UnsoundPlanError(
            f"what leaves Spark's operator {node.operator} is not known to tidegauge: {advice}"
        )
    children = [output_rows(child) for child in node.children if child.streaming]
    below = _merge(children)
    return _apply(node, row, below, children)


def _row_name(node: Node) -> str:
    if node.operator != "Aggregate":
        return node.operator
    if any(column.name == _GROUPING_ID for column in node.groups):
        raise UnsoundPlanError(
            "rollup and cube have groups over all time, which no watermark ever closes: group by the "
            "window and the columns that you want, and take the totals where the rows are read"
        )
    stamps = {column.stamp for column in node.groups} - {None}
    if not stamps:
        raise UnsoundPlanError(
            "an aggregation groups by no event time that Spark knows of, so nothing ever closes its "
            "groups: call watermarked() before it, and group by window(…) over the event time; where a "
            "function of yours stands between (mapInPandas, mapInArrow), call watermarked() behind "
            "that function"
        )
    return "Aggregate" if stamps == {Stamp.WINDOW} else AGGREGATE_BY_TIME


def _merge(children: list[OutputRows]) -> OutputRows:
    """Take the worst of each."""
    return OutputRows(
        behind_ms=max((child.behind_ms for child in children), default=0),
        buffered=any(child.buffered for child in children),
        late_at_watermark=any(child.late_at_watermark for child in children),
        declared_only=any(child.declared_only for child in children),
        watermarked=bool(children) and all(child.watermarked for child in children),
        stamps={column: stamp for child in children for column, stamp in child.stamps.items()},
    )


def _apply(node: Node, row: Operator, below: OutputRows, children: list[OutputRows]) -> OutputRows:
    """Take what comes from below through one operator."""
    if row.name == "Join":
        return _apply_join(node, row, below, children)
    return replace(
        below,
        buffered=below.buffered or row.buffers,
        late_at_watermark=below.late_at_watermark or row.late_at_watermark,
        # Nothing but that column ends it: behind a state function Spark's other operators have no
        # watermark, and hold or drop nothing by it.
        declared_only=row.output is OutputWatermark.DECLARED
        or (below.declared_only and row.emits is not Emits.REDATED),
        stamps=_output_stamps(node, row, below.stamps, children),
    )


def _output_stamps(
    node: Node, row: Operator, below: Mapping[int, Stamp], children: list[OutputRows]
) -> Mapping[int, Stamp]:
    """Say which columns that leave an operator are known to be event time."""
    if row.output in {OutputWatermark.DECLARED, OutputWatermark.OPAQUE}:
        return {}
    if row.uses_event_time:
        # An aggregation in SQL may also name a part of its window, such as window.end.
        groups = {column.id: column.stamp for column in node.groups if column.stamp is not None}
        return _spark_stamps(node) | _copied_stamps(node, groups)
    match row.name:
        case "Project":
            return _projected_stamps(node, below)
        case "Union":
            return _union_stamps(node, children)
        case _:
            return below


def _spark_stamps(node: Node) -> dict[int, Stamp]:
    """Take Spark's own word: at these operators it drops, or holds, rows by the marked column."""
    return {column.id: column.stamp for column in node.output if column.stamp is not None}


def _projected_stamps(node: Node, stamps: Mapping[int, Stamp]) -> dict[int, Stamp]:
    found = {
        column.id: column.stamp
        for column in node.output
        if column.stamp is not None and column.id not in node.copies and stamps
    }
    return found | _copied_stamps(node, stamps)


def _copied_stamps(node: Node, stamps: Mapping[int, Stamp]) -> dict[int, Stamp]:
    """Follow the columns that are others, renamed, or a part of theirs."""
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
    return {"end": Stamp.END, "start": Stamp.START}.get(part)


def _union_stamps(node: Node, children: list[OutputRows]) -> dict[int, Stamp]:
    """Columns of a union that are the same kind of time in each branch, which go by position."""
    found: dict[int, Stamp] = {}
    for position, column in enumerate(node.output):
        stamps = {
            child.stamps.get(branch.output[position].id)
            for branch, child in zip(node.children, children, strict=True)
        }
        if len(stamps) == 1 and (stamp := stamps.pop()) is not None:
            found[column.id] = stamp
    return found


def _apply_join(
    node: Node, row: Operator, below: OutputRows, children: list[OutputRows]
) -> OutputRows:
    if node.bounds is None:
        # With a table that does not stream: each row passes in its batch.
        return below
    if not all(child.watermarked for child in children):
        raise UnsoundPlanError(
            "a join of two streams needs watermarked() on both sides, each before the join: "
            "else Spark keeps their rows for ever"
        )
    if node.bounds.one_sided_equality:
        raise UnsoundPlanError(
            "the join compares the event time of one side with a value that is not the event time "
            "of the other, and Spark would drop that other side's rows by it, on-time ones too: "
            "compare the two event times, or leave the equality to columns that are no event time "
            "and bound the event times, a.at BETWEEN b.at - INTERVAL 1 HOUR AND b.at"
        )
    left_ms, right_ms = node.bounds.left_ms, node.bounds.right_ms
    if left_ms is None or right_ms is None:
        side = "left" if left_ms is None else "right"
        raise UnsoundPlanError(
            f"the join has no bound on how old its {side} side may be, so rows of any age could "
            f"leave it: bound both sides' event times in the join's condition, for example "
            f"a.at BETWEEN b.at - INTERVAL 1 HOUR AND b.at, or join on the event time itself. Months "
            f"and years are no bounds, nor are comparisons with another column, such as a deadline or "
            f"a window's end; they may stand beside"
        )
    return replace(
        below,
        buffered=row.buffers,
        late_at_watermark=row.late_at_watermark,
        behind_ms=below.behind_ms + max(left_ms, right_ms),
        stamps=_spark_stamps(node),
    )


@dataclass(frozen=True, slots=True)
class Promise:
    """How a stage's promise follows from Spark's watermark, both in ms."""

    behind_ms: int = 0
    spark_lag_ms: int = 0
    """1 where Spark is given W - 1 ms instead of W."""
    buffered: bool = False

    def spark_ms(self, watermark_ms: int) -> int:
        """Turn the stage's input watermark into the one that Spark is given.

        >>> Promise().spark_ms(60_000), Promise(spark_lag_ms=1).spark_ms(60_000)
        (60000, 59999)
        """
        return watermark_ms - self.spark_lag_ms

    def promise_ms(self, spark_ms: int) -> int:
        """Say from which event time on everything is that leaves after a batch with this watermark.

        Where no operator buffers, rows leave with the batch that reads them. All rows before the
        input watermark have then been read, so what still comes is at or after it, although Spark
        was given a millisecond less.

        >>> Promise().promise_ms(60_000), Promise(spark_lag_ms=1).promise_ms(59_999)
        (60000, 60000)
        >>> Promise(behind_ms=1_000, spark_lag_ms=1, buffered=True).promise_ms(59_999)
        58999
        """
        return spark_ms - self.behind_ms + (0 if self.buffered else self.spark_lag_ms)


def promise_of(
    stage: str, rows: OutputRows, column: Column | None, delay_ms: int | None
) -> Promise:
    """Say what a stage may promise of rows stamped with a column; None: with no event time.

    `delay_ms` is how much older than the operators' figure the user lets rows be. Raises
    `UnsoundPlanError` where the figure is nobody's or the column's time is not known, and no
    delay is declared.
    """
    if not rows.watermarked:
        raise UnsoundPlanError(
            f"stage {stage!r}: rows reach report() that did not come through watermarked(): call "
            f"watermarked() on every stream before the stage's operators"
        )
    if delay_ms is None:
        _check_known(stage, rows, column)
    return Promise(
        behind_ms=rows.behind_ms + (delay_ms or 0),
        spark_lag_ms=int(rows.late_at_watermark),
        buffered=rows.buffered,
    )


def _check_known(stage: str, rows: OutputRows, column: Column | None) -> None:
    if rows.declared_only:
        raise UnsoundPlanError(
            f"stage {stage!r}: only you know how old the rows are that your state function emits: "
            f"say report(…, event_time='ended_at', delay='2 hours') with the longest that a row may "
            f"be behind the watermark, or give transformWithState an eventTimeColumnName"
        )
    stamp = None if column is None else rows.stamps.get(column.id)
    if column is None or stamp in {Stamp.TIME, Stamp.WINDOW, Stamp.SESSION, Stamp.END}:
        return
    if stamp is Stamp.START:
        raise UnsoundPlanError(
            f"stage {stage!r}: {column.name!r} is the start of a window, and a window leaves when "
            f"the watermark has passed its end: stamp rows with the end, or declare the longest "
            f"that a window lasts, report(…, event_time={column.name!r}, delay='1 hour')"
        )
    raise UnsoundPlanError(
        f"stage {stage!r}: how old {column.name!r} may be cannot be read from the plan: stamp rows "
        f"with the event time itself, a window's end or window_time(), or declare how far behind "
        f"the watermark it may be, report(…, event_time={column.name!r}, delay='0 s') if never"
    )
