"""Data that a query reads a second time, without `source()`, as in a self-join.

The watermark covers rows that the reading with `source()` has read. A later listing of the second
reading has these rows, too. But with `availableNow`, Spark fixes the end of each reading at the start of
the run, one after the other. A second reading whose end is fixed first lacks the rows that arrive
meanwhile: they are left for the next run, and the watermark has passed them by then. Spark fixes the
ends in the order of the plan, up to four sources, and beyond that in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from spark_agent.client.spec import StageSpec, ancestors, upstream
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import SOURCE_TAG, Node
from spark_agent.jvm.writer import Trigger
from spark_agent.soundness.query_stages import controlled, stage_of

_ORDERED_SOURCES: Final = 4
"""The largest number of sources whose ends Spark fixes in the order of the plan: a map in Scala keeps
the order of so many entries."""


def check_second_readings(
    plan: Node,
    trigger: Trigger,
    stages: Mapping[str, StageSpec],
    executed: Collection[str],
    sources: int,
) -> None:
    """Check that second readings of an `availableNow` query end last.

    `executed` are the query's stages, `sources` is the number of sources of all its plans. Raises
    `UnsoundPlanError`.
    """
    if not trigger.is_available_now:
        return
    readings = list(_readings(plan, ""))
    second: dict[str, list[Node]] = {}
    for control, union in controlled(plan):
        unreported = [leaf for leaf, stage in _readings(union.children[1], "") if not stage]
        second.setdefault(control.stage, []).extend(unreported)
    for stage, unreported in second.items():
        # One reading is of each stage above that another query executes: its watermark is capped.
        others = upstream(stages, stage, executed)
        if len(unreported) <= len(others):
            continue
        above = ancestors(stages, stage)
        first = [at for at, (_, source) in enumerate(readings) if source in above]
        if not first:
            continue
        at = min(
            i for i, (leaf, _) in enumerate(readings) if any(leaf is each for each in unreported)
        )
        if sources > _ORDERED_SOURCES or at < max(first):
            raise UnsoundPlanError(_error(stage, readings[first[0]][1], sources))


def _readings(node: Node, stage: str) -> Iterator[tuple[Node, str]]:
    """Yield each source of data in the order of the plan, with its source stage; empty: unreported."""
    if node.tag.startswith(SOURCE_TAG):
        stage = stage_of(node.tag)
    if node.is_source and node.control is None:
        yield node, stage
    for child in node.children:
        yield from _readings(child, stage)


def _error(stage: str, source: str, sources: int) -> str:
    found = (
        f"stage {stage!r} reads data without source() beside the rows of source {source!r}, as in a "
        f"self-join, and availableNow fixes the end of each reading at the start of the run"
    )
    if sources > _ORDERED_SOURCES:
        return (
            f"{found}. The plan has {sources} sources, and beyond {_ORDERED_SOURCES} the reading with "
            f"source() may end last: rows that only it has would be late in the next run. Use another "
            f"trigger, or fewer sources"
        )
    return (
        f"{found}. The reading with source() would end last, and rows that only it has would be late in "
        f"the next run. Put it first, as the left side of the join, or use another trigger"
    )
