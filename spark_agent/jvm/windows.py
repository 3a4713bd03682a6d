# pyright: basic
"""Windows in a query's plan, read from Spark's internal objects, which are not public API."""

from __future__ import annotations

from typing import Final

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import is_a, items, java_walk, number, stamp
from spark_agent.jvm.nodes import Stamp, WindowGrid

_HOUR_US: Final = 3_600_000_000
_DAY_US: Final = 24 * _HOUR_US


def windows_of(node: JavaObject) -> dict[int, WindowGrid]:
    """Return the windows that a node computes, as Spark's rule for `window(…)` has written them.

    The rule computes tumbling windows in a projection, and sliding ones in an expansion, with a
    projection for each of the windows that a row is in.
    """
    match node.nodeName():
        case "Project":
            made = [
                (each, each.child()) for each in items(node.projectList()) if is_a(each, "Alias")
            ]
        case "Expand":
            made = list(zip(items(node.output()), items(node.projections().apply(0)), strict=True))
        case _:
            return {}
    grids = {
        column.exprId().id(): _grid(value)
        for column, value in made
        if stamp(column) is Stamp.WINDOW and is_a(value, "CreateNamedStruct")
    }
    return {id_: grid for id_, grid in grids.items() if grid is not None}


def gaps_of(node: JavaObject) -> dict[int, int]:
    """Return the longest gaps (µs) of the sessions that a node computes, unless rows differ in them.

    Spark's rule for `session_window(…)` computes a session of one row in a projection: `t`, `t + gap`.
    """
    if node.nodeName() != "Project":
        return {}
    found: dict[int, int] = {}
    for each in items(node.projectList()):
        if is_a(each, "Alias") and stamp(each) is Stamp.SESSION:
            gap_us = _gap_us(each.child())
            if gap_us is not None:
                found[each.exprId().id()] = gap_us
    return found


def _gap_us(session: JavaObject) -> int | None:
    additions = [each for each in java_walk(session) if is_a(each, "TimestampAddInterval")]
    if len(additions) != 1 or not additions[0].right().foldable():
        return None
    gap = additions[0].right().eval(None)
    if gap is None or number(gap, "months"):
        return None
    # Where clocks are changed, a day may have an hour more.
    day_us = _DAY_US + (0 if additions[0].zoneId().getRules().isFixedOffset() else _HOUR_US)
    return number(gap, "days") * day_us + number(gap, "microseconds")


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
