"""The output times of windows in a query's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import Column, Node, Stamp, WindowGrid, followed, made_in, origin
from spark_agent.soundness.late_rows import paths_to_controls
from spark_agent.soundness.output_times import DatedBy, OutputTime, OutputTimes

_US_PER_MS: Final = 1_000
_PASSING: Final = frozenset({"DataFrameDropColumns", "Filter", "Project", "SubqueryAlias", "View"})
"""Operators that may come between the windows and `report()`."""
_WINDOWS: Final = frozenset({Stamp.WINDOW, Stamp.SESSION})
LONGEST: Final = (
    "declare the length of the longest session, "
    "report(…, output_time='earliest', longest='2 hours')"
)
_SESSION_KEY: Final = "sessionstarttime"
_FUNCTIONS: Final[Mapping[OutputTime, str]] = {OutputTime.EARLIEST: "Min", OutputTime.LATEST: "Max"}
"""By output time: Spark's name of the function that gives it."""

T = TypeVar("T")


def output_times_of(
    plan: Node, stage: str, column: str | None, dated_by: DatedBy
) -> tuple[str, OutputTimes | None]:
    """Return the column that dates a plan's windows, and its values; None: the ends of the windows.

    `column` is the column's name, if it is given. Raises `UnsoundPlanError`.
    """
    path = _path_to_windows(plan, stage)
    groups = [each for each in path[-1].groups if each.stamp in _WINDOWS]
    if len(groups) > 1:
        raise UnsoundPlanError(
            f"stage {stage!r}: rows are grouped by several windows, "
            f"{', '.join(each.name for each in groups)}, and the output time is of one: group by one"
        )
    [group] = groups
    window = _window_column(path, stage, group)
    output_time, longest_ms = dated_by.output_time, dated_by.longest_ms
    is_session = group.stamp is Stamp.SESSION
    if longest_ms is not None and not (is_session and output_time is OutputTime.EARLIEST):
        raise UnsoundPlanError(
            f"stage {stage!r}: longest= bounds the sessions of output_time='earliest', and "
            f"'{output_time}' over {group.name} has its bound from the query's plan: leave longest= out"
        )
    if output_time is OutputTime.END_OF_WINDOW:
        if column is not None and not _is_end(path, _named(plan, stage, column), group):
            raise UnsoundPlanError(
                f"stage {stage!r}: {column!r} is not the end of a window: name the window, "
                f"report(…, event_time={window!r}), or leave event_time out"
            )
        return column or window, None
    column = _time_column(path, stage, group, column, output_time)
    if not is_session:
        grid = _made(path, stage, group, _grids)
        return column, OutputTimes(window, grid.slide_us, grid)
    if longest_ms is not None:
        return column, OutputTimes(window, longest_ms * _US_PER_MS)
    gap_us = _made(path, stage, group, _gaps)
    if output_time is OutputTime.LATEST:
        return column, OutputTimes(window, gap_us)
    if _SESSION_KEY in {each.name.lower() for each in path[-1].groups}:
        raise UnsoundPlanError(
            f"stage {stage!r}: a key of the sessions is named sessionStartTime, as Spark names their "
            f"start in its state, which is read for output_time='earliest': rename the key"
        )
    return column, OutputTimes(window, gap_us, reads_state=True)


def check_reads_state(plan: Node, stage: str) -> None:
    """Check that a plan has one operator with sessions. Raises `UnsoundPlanError`."""
    sessions = [
        node for node in plan.walk() if any(each.stamp is Stamp.SESSION for each in node.groups)
    ]
    if len(sessions) > 1:
        raise UnsoundPlanError(
            f"stage {stage!r}: the query has several session_window(…), and Spark's state does not "
            f"show which is whose: start a query for each, or {LONGEST}"
        )


def _path_to_windows(plan: Node, stage: str) -> Sequence[Node]:
    """Return the nodes from the root of a plan to its windows."""
    path = [plan]
    while path[-1].operator in _PASSING:
        path.append(path[-1].children[0])
    if path[-1].operator != "Aggregate" or not any(
        each.stamp in _WINDOWS for each in path[-1].groups
    ):
        raise UnsoundPlanError(
            f"stage {stage!r}: output_time is of windows, and Spark's {path[-1].operator} comes "
            f"before report(): call report() on the rows of groupBy(window(…)) or "
            f"groupBy(session_window(…)) before it, or declare with delay= how far they may be behind "
            f"the watermark"
        )
    return path


def _named(plan: Node, stage: str, name: str) -> Column:
    found = [each for each in plan.output if each.name == name]
    alike = [each for each in plan.output if each.name.lower() == name.lower()]
    if len(found) != 1 or len(alike) != 1:
        raise UnsoundPlanError(
            f"stage {stage!r}: {len(found)} columns are named {name!r}, and Spark does not distinguish "
            f"upper and lower case, of {', '.join(each.name for each in plan.output)}: name one, and "
            f"rename those that are alike"
        )
    return found[0]


def _time_column(
    path: Sequence[Node], stage: str, group: Column, name: str | None, output_time: OutputTime
) -> str:
    """Return the column with the earliest or the latest time of each window's rows."""
    plan, windows = path[0], path[-1]
    function = _FUNCTIONS[output_time]
    times = {each.id for each in windows.children[0].output if each.stamp is Stamp.TIME}
    for each in plan.output if name is None else [_named(plan, stage, name)]:
        copied, part = origin(path, each.id)
        called, of = windows.extremes.get(copied, ("", copied))
        if called == function and of in times and not part and _is_time_of(windows, group, of):
            return _named(plan, stage, each.name).name
    called = function.lower()
    found = "none of the columns is" if name is None else f"{name!r} is not"
    raise UnsoundPlanError(
        f"stage {stage!r}: {found} {called}() of the event time over all rows of the window: with "
        f"output_time='{output_time}', write .agg(F.{called}('at').alias({name or 'at'!r}), …), of the "
        f"column by which window(…) or session_window(…) groups"
    )


def _is_time_of(windows: Node, group: Column, time: int) -> bool:
    """Return whether a window is computed from a column, in all rows that the aggregation reads.

    Another column of event time may be anywhere in the window, or outside of it.
    """
    paths = [nodes for nodes, _ in paths_to_controls(windows)]
    return bool(paths) and all(_made_from(path[1:], group.id, time) for path in paths)


def _made_from(path: Sequence[Node], window: int, time: int) -> bool:
    for (node, window_id), (_, time_id) in zip(
        followed(path, window), followed(path, time), strict=False
    ):
        if window_id in node.window_times:
            return node.window_times[window_id] == node.copies.get(time_id, (time_id, ""))[0]
    return False


def _is_end(path: Sequence[Node], column: Column, group: Column) -> bool:
    return origin(path, column.id) in {(group.id, ""), (group.id, "end")}


def _window_column(path: Sequence[Node], stage: str, group: Column) -> str:
    """Return the name of the column with the window, or with its end."""
    for each in path[0].output:
        if _is_end(path, each, group):
            return _named(path[0], stage, each.name).name
    raise UnsoundPlanError(
        f"stage {stage!r}: {group.name} is not among the columns that are reported, and the output time "
        f"depends on it: keep the window, or window.end, and drop it after report()"
    )


def _made(
    path: Sequence[Node], stage: str, group: Column, made: Callable[[Node], Mapping[int, T]]
) -> T:
    """Return the windows or sessions by which rows are grouped, alike for all rows."""
    found = {
        made_in(below, group.id, made)
        for nodes, _ in paths_to_controls(path[-1])
        for below in [nodes[1:]]
    }
    only = found.pop() if len(found) == 1 else None
    if only is None:
        raise UnsoundPlanError(
            f"stage {stage!r}: the length of {group.name} cannot be read from the query's plan, or is "
            f"not the same for all rows: group by window(…) or session_window(…) of the event time of "
            f"watermarked(), with a fixed length, not in months, and in hours where clocks are changed"
        )
    return only


def _grids(node: Node) -> Mapping[int, WindowGrid]:
    return node.windows


def _gaps(node: Node) -> Mapping[int, int]:
    return node.gaps_us
