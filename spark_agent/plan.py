# pyright: basic
# ruff: noqa: SLF001
"""What the driver reads out of Spark's own objects, all in one place: it is not public API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.control_source import END_MS, FORMAT
from spark_agent.reporting import RANGES_MARK, SOURCE_MARK

JavaObject: TypeAlias = Any

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Passage:
    """The stages that a data frame went through, as its plan tells."""

    sources: tuple[str, ...]
    """Through `Pipeline.source`."""
    watermarked: tuple[str, ...]
    """Through `Pipeline.watermarked`."""
    reported: tuple[str, ...]
    """Through `Pipeline.report`."""
    reported_below_union: tuple[str, ...]
    """Those of `reported` that something was unioned with afterwards."""
    repeated: tuple[str, ...]
    """Stages that it went through `source` or `report` of more than once."""
    own_watermarks: int
    """Calls of `withWatermark` that are not the control source's."""


def passage(frame: DataFrame) -> Passage:
    """Walk the plan: the marks are in it, so they survive whatever is done to the data frame."""
    frame_: JavaObject = frame._jdf
    nodes = list(_walk(frame_.queryExecution().analyzed(), under_union=False))
    marks = [
        (node.functionExpr().name(), under_union)
        for node, under_union in nodes
        if node.nodeName() == "MapInArrow"
    ]
    controls = [node for node, _ in nodes if _is_control(node)]
    reported = [(m.removeprefix(RANGES_MARK), u) for m, u in marks if m.startswith(RANGES_MARK)]
    watermarks = [node for node, _ in nodes if node.nodeName() == "EventTimeWatermark"]
    names = [mark for mark, _ in marks if mark.startswith((SOURCE_MARK, RANGES_MARK))]
    return Passage(
        repeated=_unique(
            mark.removeprefix(SOURCE_MARK).removeprefix(RANGES_MARK)
            for mark in names
            if names.count(mark) > 1
        ),
        sources=_unique(m.removeprefix(SOURCE_MARK) for m, _ in marks if m.startswith(SOURCE_MARK)),
        watermarked=_unique(str(node.extraOptions().get("stage")) for node in controls),
        reported=_unique(stage for stage, _ in reported),
        reported_below_union=_unique(stage for stage, under_union in reported if under_union),
        own_watermarks=len(watermarks) - len(controls),
    )


def _walk(node: JavaObject, *, under_union: bool) -> Iterator[tuple[JavaObject, bool]]:
    yield node, under_union
    children = node.children()
    for i in range(children.size()):
        below = under_union or node.nodeName() == "Union"
        yield from _walk(children.apply(i), under_union=below)


def _is_control(node: JavaObject) -> bool:
    return node.nodeName() == "StreamingRelationV2" and node.sourceName() == FORMAT


def _unique(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def frame_of(writer: DataStreamWriter) -> DataFrame:
    """Return what the writer writes."""
    return writer._df


def ends_by_itself(writer: DataStreamWriter) -> bool:
    """Say whether the writer's trigger is `availableNow` (or its elder brother `once`)."""
    writer_: JavaObject = writer._jwrite
    field = writer_.getClass().getDeclaredField("trigger")
    field.setAccessible(True)
    return field.get(writer_).toString() in {"AvailableNowTrigger", "OneTimeTrigger"}


def parse_watermark_ms(text: str | None) -> int | None:
    """Read the watermark in a query's progress, in Spark's ms; None if it has none.

    >>> parse_watermark_ms("2013-01-01T00:00:15.250Z"), parse_watermark_ms(None)
    (1356998415250, None)
    >>> parse_watermark_ms("+100000-01-01T00:00:00.000Z") == END_MS
    True
    """
    if not text:
        return None
    if text.startswith("+"):
        # Python's calendar ends with the year 9999. Beyond is nothing but the end of time.
        return END_MS
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(milliseconds=1)
