# pyright: basic
"""Windows in a query's plan, read from Spark's internal objects, which are not public API."""

from __future__ import annotations

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import is_a, items, java_walk, stamp
from spark_agent.jvm.nodes import Stamp, WindowGrid


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
