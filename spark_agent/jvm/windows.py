# pyright: basic
"""Windows in a query's plan, read from Spark's internal objects, which are not public API."""

from __future__ import annotations

from typing import Final

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import is_a, items, java_walk, number, stamp
from spark_agent.jvm.nodes import Stamp, WindowGrid

_ATTRIBUTE: Final = "AttributeReference"
_EXTREMES: Final = frozenset({"Min", "Max"})
_DAY_US: Final = 86_400_000_000


def windows_of(node: JavaObject) -> dict[int, WindowGrid]:
    """Return the windows that a node computes, as Spark's rule for `window(…)` has written them.

    The rule computes tumbling windows in a projection, and sliding ones in an expansion, with a
    projection for each of the windows that a row is in.
    """
    grids = {
        column.exprId().id(): _grid(value)
        for column, value in _made(node)
        if stamp(column) is Stamp.WINDOW
    }
    return {id_: grid for id_, grid in grids.items() if grid is not None}


def window_times_of(node: JavaObject) -> dict[int, int]:
    """Return the column with the rows' time of each window and session that a node computes, by ids."""
    found: dict[int, int] = {}
    for column, value in _made(node):
        # The gap of a session may depend on other columns, its start does not.
        start = items(value.children())[1]
        times = {each.exprId().id() for each in java_walk(start) if is_a(each, _ATTRIBUTE)}
        if len(times) == 1:
            found[column.exprId().id()] = times.pop()
    return found


def _made(node: JavaObject) -> list[tuple[JavaObject, JavaObject]]:
    """Return the columns with windows or sessions that a node computes, and their values."""
    match node.nodeName():
        case "Project":
            found = [
                (each, each.child()) for each in items(node.projectList()) if is_a(each, "Alias")
            ]
        case "Expand":
            found = list(zip(items(node.output()), items(node.projections().apply(0)), strict=True))
        case _:
            return []
    return [
        (column, value)
        for column, value in found
        if is_a(value, "CreateNamedStruct") and stamp(column) in {Stamp.WINDOW, Stamp.SESSION}
    ]


def extremes_of(node: JavaObject) -> dict[int, tuple[str, int]]:
    """Return the columns that are the least or the greatest value of a column, over all rows."""
    if node.nodeName() != "Aggregate":
        return {}
    found: dict[int, tuple[str, int]] = {}
    for each in items(node.aggregateExpressions()):
        if not is_a(each, "Alias") or not is_a(each.child(), "AggregateExpression"):
            continue
        call = each.child()
        function = call.aggregateFunction()
        name = function.getClass().getSimpleName()
        if name in _EXTREMES and call.filter().isEmpty() and is_a(function.child(), _ATTRIBUTE):
            found[each.exprId().id()] = name, function.child().exprId().id()
    return found


def gaps_of(node: JavaObject) -> dict[int, int]:
    """Return the gaps (µs) of the sessions that a node computes, unless rows differ in them.

    Spark's rule for `session_window(…)` computes a session of one row in a projection: `t`, `t + gap`.
    """
    gaps = {
        column.exprId().id(): _gap_us(value)
        for column, value in _made(node)
        if stamp(column) is Stamp.SESSION
    }
    return {id_: gap_us for id_, gap_us in gaps.items() if gap_us is not None}


def _gap_us(session: JavaObject) -> int | None:
    additions = [each for each in java_walk(session) if is_a(each, "TimestampAddInterval")]
    if len(additions) != 1 or not additions[0].right().foldable():
        return None
    gap = additions[0].right().eval(None)
    if gap is None or number(gap, "months"):
        return None
    if number(gap, "days") and not additions[0].zoneId().getRules().isFixedOffset():
        # Days differ in length where clocks are changed.
        return None
    return number(gap, "days") * _DAY_US + number(gap, "microseconds")


def _grid(window: JavaObject) -> WindowGrid | None:
    """Read `((t - (t - offset) % slide) - i * slide) + size`, a window's end; None: another value."""
    end = items(window.children())[-1]
    remainder = next((each for each in java_walk(end) if is_a(each, "Remainder")), None)
    ends = next((each for each in java_walk(end) if is_a(each, "Add")), None)
    if remainder is None or ends is None or not is_a(remainder.left(), "Subtract"):
        return None
    size, slide, offset = ends.right(), remainder.right(), remainder.left().right()
    if not all(is_a(each, "Literal") for each in (size, slide, offset)):
        return None
    return WindowGrid(int(size.value()), int(slide.value()), int(offset.value()))
