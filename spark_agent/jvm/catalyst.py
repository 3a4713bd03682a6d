# pyright: basic
"""Spark's plans and expressions as trees of Java objects, which are not public API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from py4j.java_gateway import get_field

from spark_agent.jvm import JavaObject
from spark_agent.jvm.nodes import Stamp

DELAY: Final = "spark.watermarkDelayMs"
"""The member of a column's metadata by which Spark marks an event time."""


def java_walk(node: JavaObject) -> Iterator[JavaObject]:
    """Yield a node, of a plan or an expression, and every node below."""
    yield node
    for child in items(node.children()):
        yield from java_walk(child)


def items(sequence: JavaObject) -> list[JavaObject]:
    """Return the items of a sequence of Scala's."""
    return [sequence.apply(i) for i in range(sequence.size())]


def stamp(attribute: JavaObject) -> Stamp | None:
    """Derive a column's relation to event time from Spark's metadata."""
    found = metadata(attribute)
    if DELAY not in found:
        return None
    if "spark.sessionWindow" in found:
        return Stamp.SESSION
    return Stamp.WINDOW if "spark.timeWindow" in found else Stamp.TIME


def metadata(attribute: JavaObject) -> dict[str, Any]:
    """Return a column's metadata."""
    return json.loads(attribute.metadata().json())


def number(of: JavaObject, name: str) -> int:
    """Return a public field of a Java object, a whole number."""
    found: JavaObject = get_field(of, name)
    return int(found)


def is_a(expression: JavaObject, class_name: str) -> bool:
    """Return whether the class of an expression has this name."""
    return expression.getClass().getSimpleName() == class_name
