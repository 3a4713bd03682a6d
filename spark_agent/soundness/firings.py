"""Windows that fire again for late rows: their rule, and checks of a query that has such windows.

A window fires when the stage's watermark W has passed its end, and again in each batch that brings rows
for it, until the watermark has passed its end by the allowed lateness (Akidau et al., VLDB 2015, section
2.3: accumulating panes; Flink's `allowedLateness`). Spark itself runs with W minus the allowed lateness,
so Spark keeps the window until then, and emits its newest value in each batch that changes it. The agent
keeps back the values of windows that W has not passed.

W of a batch is in the checkpoint, so a repeated batch has the same firings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import RANGES_TAG, Node, Stamp, WindowGrid, origin
from spark_agent.soundness.late_rows import has_state, paths_to_controls, windows_of
from spark_agent.soundness.operators import Promise, row_name

_PASSING = frozenset({"Project", "SubqueryAlias", "View", "DataFrameDropColumns"})
"""Operators that may follow the windows: each row that enters them leaves them."""


@dataclass(frozen=True, slots=True)
class Firing:
    """The firings of a stage's windows."""

    stage: str
    allowed_lateness_ms: int
    windows: WindowGrid
    window: str
    """The column with a window, or with its end, in the rows that leave the query."""
    keys: tuple[str, ...]
    """The columns that identify a window and its key in the rows that leave the query."""

    def watermark_ms(self, spark_ms: int) -> int | None:
        """Return the stage's watermark W (ms) in a batch, by Spark's watermark; None: not yet.

        >>> hour = WindowGrid(3_600_000_000, 3_600_000_000, 0)
        >>> late = Firing("daily", 9_000, hour, "window", ("window",))
        >>> late.watermark_ms(51_000), late.watermark_ms(0)
        (60000, None)
        """
        promise = Promise(allowed_lateness_ms=self.allowed_lateness_ms)
        return promise.input_ms(spark_ms) if spark_ms > 0 else None

    def fires(self, before_ms: int | None, now_ms: int | None) -> bool:
        """Return whether a window has its end after W of the batch before, and not after W of this one.

        >>> hour = WindowGrid(3_600_000_000, 3_600_000_000, 0)
        >>> late = Firing("daily", 9_000, hour, "window", ("window",))
        >>> late.fires(3_599_999, 3_600_000), late.fires(3_600_000, 7_199_999), late.fires(None, 5)
        (True, False, True)
        """
        if now_ms is None or now_ms == before_ms:
            return False
        first_open_us = self.windows.first_open_us
        return before_ms is None or first_open_us(now_ms) > first_open_us(before_ms)


def firing_of(plan: Node) -> Firing | None:
    """Return the firings of a query's windows; None: each window fires once.

    Raises `UnsoundPlanError` if the query does more than to aggregate windows.
    """
    found = [
        (path, control)
        for path, control in paths_to_controls(plan)
        if control.percentile is None and not control.is_gate
    ]
    late = {control.allowed_lateness_ms for _, control in found}
    if late <= {0}:
        return None
    path, control = found[0]
    stage, lateness_ms = control.stage, control.allowed_lateness_ms
    if len(late) > 1:
        raise UnsoundPlanError(
            f"stage {stage!r}: its data frames differ in allowed_lateness, and Spark has one watermark "
            f"for them all: give each the same"
        )
    at = _windows_at(path, stage)
    for other, _ in found:
        if [each for each in other if has_state(each)] != [path[at]]:
            raise UnsoundPlanError(
                f"stage {stage!r}: with allowed_lateness, one groupBy(window(…)) is the only operator "
                f"with state in a query, since Spark corrects only the last one's results: write its "
                f"results, and read them in another query"
            )
    window, keys = _keys(path[: at + 1], stage)
    return Firing(stage, lateness_ms, windows_of(path[at:], stage), window, keys)


def _windows_at(path: Sequence[Node], stage: str) -> int:
    """Return the place of the windows among the nodes, and check those that follow them."""
    for at, node in enumerate(path):
        if node.is_control_union:
            break
        if node.operator == "Aggregate" and row_name(node) == "Aggregate":
            return at
        if node.operator == "Filter" and not node.tag.startswith(RANGES_TAG):
            raise UnsoundPlanError(
                f"stage {stage!r}: a filter follows its windows, and a correction that does not pass it "
                f"would leave the value before it standing: filter where the output is read"
            )
        if node.operator != "Filter" and node.operator not in _PASSING:
            raise UnsoundPlanError(
                f"stage {stage!r}: with allowed_lateness, Spark's operator {node.operator} is not "
                f"supported here. Tumbling or sliding windows, groupBy(window(…)), fire again, and only "
                f"select, withColumn and drop may follow them"
            )
    raise UnsoundPlanError(
        f"stage {stage!r}: allowed_lateness is of windows, and the query has none: leave it out, or use "
        f"groupBy(window(…))"
    )


def _keys(path: Sequence[Node], stage: str) -> tuple[str, tuple[str, ...]]:
    """Return the columns of the first node that have the window, and all groups, of the last node."""
    names = [column.name.lower() for column in path[0].output]
    origins = {column.name: origin(path, column.id) for column in path[0].output}
    keys: dict[int, str] = {}
    window = ""
    for name, (copied, part) in origins.items():
        for group in path[-1].groups:
            is_window = group.stamp is Stamp.WINDOW
            if copied == group.id and (not part or (is_window and part == "end")):
                keys.setdefault(group.id, name)
                window = window or (name if is_window else "")
    missing = [group.name for group in path[-1].groups if group.id not in keys]
    if missing:
        raise UnsoundPlanError(
            f"stage {stage!r}: with allowed_lateness, a row is recognised by the columns of groupBy(), "
            f"and {', '.join(missing)} is not among the columns that are written: keep it. Of a window, "
            f"window.end is enough"
        )
    if len(set(names)) < len(names):
        raise UnsoundPlanError(f"stage {stage!r}: two of the columns that are written are alike")
    return window, tuple(keys.values())
