"""Data that a query reads a second time, without `source()`, as in a self-join.

The watermark covers rows that the reading with `source()` has read. A later listing of the second
reading has these rows, too. But with `availableNow`, Spark fixes the end of each reading at the start of
the run, one after the other. A second reading whose end is fixed first lacks the rows that arrive
meanwhile: they are left for the next run, and the watermark has passed them by then. Spark fixes the
ends in the order of the plan, up to four sources, and beyond that in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final

from spark_agent.client.spec import StageSpec, ancestors, upstream
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import SOURCE_TAG, Node
from spark_agent.jvm.writer import Trigger
from spark_agent.soundness.query_stages import controlled, stage_of

_ORDERED_SOURCES: Final = 4
"""The largest number of sources whose ends Spark fixes in the order of the plan: a map in Scala keeps
the order of so many entries."""
_PATTERN: Final = frozenset("*?[{\\")
_ALTERNATIVES: Final = frozenset("[{\\")
"""Signs of patterns of Hadoop's that `fnmatch` reads in another way, or not at all."""


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
    for control, union in controlled(plan):
        above = ancestors(stages, control.stage)
        # The watermark of another query's stage is capped by what its readings have at the start.
        reads_others = bool(upstream(stages, control.stage, executed))
        unreported = [leaf for leaf, stage in _readings(union.children[1], "") if not stage]
        for at, (second, _) in enumerate(readings):
            if not any(second is each for each in unreported):
                continue
            for first_at, (first, source) in enumerate(readings):
                if source not in above or (reads_others and not may_share_rows(first, second)):
                    continue
                if sources > _ORDERED_SOURCES or at < first_at:
                    raise UnsoundPlanError(_error(control.stage, source, sources))


def may_share_rows(one: Node, other: Node) -> bool:
    """Return whether two sources may read the same rows: of a path, a topic, or a format of its own.

    >>> def files(path: str) -> Node:
    ...     return Node("StreamingRelation", paths=frozenset({path}))
    >>> may_share_rows(files("file:/taps"), files("file:/taps"))
    True
    >>> may_share_rows(files("file:/taps"), files("file:/pipes"))
    False
    """
    if one.paths or other.paths:
        pairs = itertools.product(one.paths, other.paths)
        return any(_may_overlap(*pair) for pair in pairs)
    if one.topics_source is None or other.topics_source is None:
        return one.format == other.format
    return one.topics_source.may_share(other.topics_source)


def _may_overlap(one: str, other: str) -> bool:
    """Return whether a path may have files of another path, or of a folder within.

    >>> _may_overlap("file:/in", "file:/in/taps/"), _may_overlap("file:/in", "file:/in-2")
    (True, False)
    >>> _may_overlap("file:/in/tap*", "file:/in/taps"), _may_overlap("file:/in/tap*", "file:/in/out")
    (True, False)
    >>> _may_overlap("file:/in/{a,b/c}", "file:/in/b/c")
    True
    """
    if "{" in one or "{" in other:
        # Alternatives may have a slash.
        return True
    segments = zip(one.rstrip("/").split("/"), other.rstrip("/").split("/"), strict=False)
    return all(_may_equal(*pair) for pair in segments)


def _may_equal(one: str, other: str) -> bool:
    patterns = [each for each in (one, other) if _PATTERN.intersection(each)]
    if len(patterns) == 1 and not _ALTERNATIVES.intersection(patterns[0]):
        return fnmatchcase(other if patterns[0] is one else one, patterns[0])
    return bool(patterns) or one == other


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
            f"source() may end last: rows that only it has would be late in the next run. Each reading "
            f"counts, each watermarked(), and each source() that is throttled or promises by the clock. "
            f"Use another trigger, or fewer sources"
        )
    return (
        f"{found}. The reading with source() would end last, and rows that only it has would be late in "
        f"the next run. Put it first, as the left side of the join, or use another trigger"
    )
