"""Checks, before a query starts, that its stages will keep their promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from spark_agent.client.spec import StageSpec, ancestors, upstream
from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import (
    RANGES_TAG,
    SOURCE_TAG,
    Control,
    Node,
    Stamp,
)
from spark_agent.soundness.limited_sources import (
    awaited_topics,
    check_limits,
    is_limited,
    unreported_limited,
)
from spark_agent.soundness.operators import Promise, output_rows, promise_of
from spark_agent.soundness.output_times import OutputTimes
from spark_agent.soundness.topics import checked_topics

T = TypeVar("T")

_ALLOWED_AFTER_REPORT: Final = frozenset(
    {
        "DataFrameDropColumns",
        "Filter",
        "Generate",
        "Project",
        "RebalancePartitions",
        "Repartition",
        "RepartitionByExpression",
        "ResolvedHint",
        "SubqueryAlias",
        "UnresolvedHint",
        "View",
    }
)
"""Operators allowed after `report()`: they neither delay rows nor add others."""


@dataclass(frozen=True, slots=True)
class ReportCall:
    """A call of `report`: the column with the rows' event time, and the declared delay (ms)."""

    stage: str
    event_time: str | None
    delay_ms: int | None
    output: OutputTimes | None = None
    """Output times other than the ends of windows, in the column."""


@dataclass(frozen=True, slots=True)
class EarlyStage:
    """The stage whose early results a query writes, and the percentile of its input."""

    stage: str
    percentile: int
    inputs: frozenset[str]
    """The nearest stages above it."""


@dataclass(frozen=True, slots=True)
class QueryStages:
    """The stages that a query executes, and their promises."""

    sources: tuple[StageSpec, ...]
    keyed: tuple[StageSpec, ...]
    promises: Mapping[str, Promise]
    """Derivation of each keyed stage's promise from Spark's watermark."""
    inputs: Mapping[str, frozenset[str]]
    """By keyed stage: every stage that its input watermark depends on."""
    by_shard: frozenset[str] = frozenset()
    """The sources whose shards wait by themselves, and report a backlog: logs in folders."""
    topics: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """By source whose shards are partitions of Kafka: its topics."""
    limited_topics: frozenset[str] = frozenset()
    """Topics that are read at a limited rate and not reported in this query: others write them."""
    reads_topics: bool = False
    """True if a source is of Kafka."""
    with_marker: frozenset[str] = frozenset()
    """Those of them whose folders may be complete, by a marker."""
    below_idle: frozenset[str] = frozenset()
    """The keyed stages below a source that may be idle."""
    reads_all: bool = True
    """True if each batch reads all available data: every source is supported, and not rate limited."""
    may_wait_for_more: bool = False
    """True if a source may leave data unread until more arrives."""
    has_control_sources: bool = True
    """True if control sources bring a watermark: the feed detects then when the input is drained."""

    @property
    def names(self) -> list[str]:
        """The names of all stages."""
        return [stage.name for stage in (*self.sources, *self.keyed)]

    @property
    def watched(self) -> list[str]:
        """The sources whose shards the service may mark as idle."""
        return [stage.name for stage in self.sources if stage.has_idle_policy]

    @property
    def dynamic(self) -> list[str]:
        """The sources that shards may join."""
        return [stage.name for stage in self.sources if stage.is_dynamic]


def check(
    plan: Node, stages: Mapping[str, StageSpec], reports: Mapping[str, ReportCall]
) -> QueryStages:
    """Find the stages that a query executes and their promises. `reports` are by tag.

    Raises `UnsoundPlanError` if the query does not meet its stages' requirements.
    """
    tags = [node.tag for node in plan.walk() if node.tag]
    sources = [stage_of(tag) for tag in tags if tag.startswith(SOURCE_TAG)]
    reported = [stage_of(tag) for tag in tags if tag.startswith(RANGES_TAG)]
    watermarked = _unique(control.stage for control, _ in controlled(plan))
    if not sources and not watermarked and not reported:
        raise UnsoundPlanError(
            "the query does not execute a stage: build it with source() or watermarked()"
        )
    for stage in set(sources + reported):
        if (sources + reported).count(stage) > 1:
            raise UnsoundPlanError(
                f"stage {stage!r} is in this query more than once, but it must be reported exactly "
                f"once. To join or union a source with itself, read its data a second time: with a "
                f"readStream of its own that begins with watermarked(), without source()"
            )
    for stage in watermarked:
        if stage not in reported:
            raise UnsoundPlanError(
                f"stage {stage!r} lacks report(): its ranges would never promise anything"
            )
    for stage in reported:
        if stage not in watermarked:
            raise UnsoundPlanError(
                f"stage {stage!r} lacks watermarked(): its promises would follow a watermark that "
                f"is not its own"
            )
    _check_inputs(plan, stages)
    _check_deduplication(plan)
    topics = checked_topics(plan)
    promises = _promises(plan, reports)
    inputs = {stage: frozenset(ancestors(stages, stage)) for stage in promises}
    logs = [node.logs_source for node in plan.walk() if node.logs_source is not None]
    return QueryStages(
        sources=tuple(stages[each] for each in sources),
        keyed=tuple(stages[each] for each in promises),
        promises=promises,
        inputs=inputs,
        by_shard=frozenset(each.stage for each in logs),
        topics={each.stage: each.topics for each in topics if each.stage},
        limited_topics=frozenset(
            topic for each in unreported_limited(plan) for topic in awaited_topics(each)
        ),
        reads_topics=bool(topics),
        with_marker=frozenset(each.stage for each in logs if each.has_marker),
        below_idle=frozenset(
            stage
            for stage, above in inputs.items()
            if any(stages[each].has_idle_policy for each in above)
        ),
        has_control_sources=bool(watermarked),
        reads_all=not any(is_limited(node) for node in plan.walk()),
        may_wait_for_more=any("minoffsetspertrigger" in node.limits for node in plan.walk()),
    )


def check_early(plan: Node, stages: Mapping[str, StageSpec]) -> EarlyStage | None:
    """Return the stage whose early results a query writes; None: it follows the watermark itself.

    Raises `UnsoundPlanError` if the query does both, or reports under a percentile watermark.
    """
    followed = _unique(control for control, _ in controlled(plan))
    early = {
        EarlyStage(each.stage, each.percentile, frozenset(upstream(stages, each.stage, ())))
        for each in followed
        if each.percentile is not None
    }
    if not early:
        return None
    if len(early) > 1 or any(each.percentile is None for each in followed):
        raise UnsoundPlanError(
            "the query has several calls of watermarked() that differ in stage or percentile: Spark has "
            "one watermark for all of them. Give each the same, or start a query for each"
        )
    [found] = early
    for node in plan.walk():
        if node.tag:
            what = "report()" if node.tag.startswith(RANGES_TAG) else "source()"
            raise UnsoundPlanError(
                f"stage {found.stage!r} closes its windows by a percentile, and the query calls {what}: "
                f"early results may be incomplete, so they cannot carry a promise. Leave the call out "
                f"here. Report in another query, whose watermarked() has no percentile"
            )
    _check_deduplication(plan)
    return found


def check_event_times(several: Sequence[str]) -> None:
    """Check that an operator for one event time does not read several. Raises `UnsoundPlanError`."""
    if several:
        raise UnsoundPlanError(
            f"a join or dropDuplicates reads rows with several event times ({', '.join(several)}), and "
            f"Spark's operators take only one: drop the others before it, or compute "
            f"them after it, for example the window from the event time"
        )


def stage_of(tag: str) -> str:
    """Extract the stage from a reporter's tag.

    >>> stage_of("tidegauge.ranges.3.per.hour")
    'per.hour'
    """
    return tag.split(".", 3)[3]


def _unique(found: Iterator[T]) -> list[T]:
    return list(dict.fromkeys(found))


def controlled(plan: Node) -> Iterator[tuple[Control, Node]]:
    """Yield each control source of a plan, with the union that has the control source and the data."""
    for node in plan.walk():
        if node.is_control_union:
            [control] = [each.control for each in node.children[0].walk() if each.control]
            yield control, node


def _check_inputs(plan: Node, stages: Mapping[str, StageSpec]) -> None:
    for control, union in controlled(plan):
        _, data = union.children
        if output_rows(data).buffered:
            raise UnsoundPlanError(
                f"stage {control.stage!r}: an operator before watermarked() keeps rows across batches, "
                f"and may emit them when the watermark has already passed them: call watermarked() "
                f"before it"
            )
        _check_event_time(control.stage, union)
        above = ancestors(stages, control.stage)
        for node in data.walk():
            if node.tag.startswith(SOURCE_TAG) and stage_of(node.tag) not in above:
                raise UnsoundPlanError(
                    f"stage {control.stage!r} reads source {stage_of(node.tag)!r}, which is not "
                    f"among its inputs in the specification: its watermark would not wait for it"
                )
        check_limits(control.stage, data)


def _check_event_time(stage: str, union: Node) -> None:
    """Raise if the event time of `watermarked` was computed after `source`."""
    _, data = union.children
    for position, column in enumerate(union.output):
        if column.stamp is Stamp.TIME and _is_recomputed(data, data.output[position].id):
            raise UnsoundPlanError(
                f"stage {stage!r}: watermarked() uses {column.name!r}, which is not the event time "
                f"that source() uses, so its age is not bounded: compute it (or call "
                f"mapInPandas) before source(), and give both the same column"
            )


def _is_recomputed(node: Node, column: int) -> bool:
    """Return whether a column is another than its source's event time, or a computed one."""
    if node.tag.startswith(SOURCE_TAG):
        return node.event_time is not None and column != node.event_time
    if node.operator == "Union":
        position = next(i for i, each in enumerate(node.output) if each.id == column)
        return any(_is_recomputed(each, each.output[position].id) for each in node.children)
    if node.operator == "Project":
        origin, part = node.copies.get(column, (column, ""))
        computed = bool(part) or column not in node.copies
        [child] = node.children
        return _has_source(child) if computed else _is_recomputed(child, origin)
    from_below = [c for c in node.children if any(each.id == column for each in c.output)]
    if not from_below:
        return _has_source(node)
    return any(_is_recomputed(child, column) for child in from_below)


def _has_source(node: Node) -> bool:
    return any(each.tag.startswith(SOURCE_TAG) for each in node.walk())


def _promises(plan: Node, reports: Mapping[str, ReportCall]) -> dict[str, Promise]:
    return dict(_promises_below(plan, [], reports))


def _promises_below(
    node: Node, above: list[Node], reports: Mapping[str, ReportCall]
) -> Iterator[tuple[str, Promise]]:
    """Find every report, and check the operators after it."""
    if node.tag.startswith(RANGES_TAG):
        stage = stage_of(node.tag)
        for each in above:
            if each.operator not in _ALLOWED_AFTER_REPORT and not _is_reported(each):
                raise UnsoundPlanError(_error_after_report(stage, each.operator))
        _check_reported_time(node, above, reports[node.tag])
        yield stage, _promise(node, reports[node.tag])
    for child in node.children:
        yield from _promises_below(child, [*above, node], reports)


def _check_reported_time(node: Node, above: Sequence[Node], report: ReportCall) -> None:
    """Raise if the event time is recomputed after the report: downstream stages use the new one."""
    if report.event_time is None:
        return
    copies = {each.id for each in node.output if each.name == report.event_time}
    for project in (each for each in reversed(above) if each.operator == "Project"):
        origins = {each.id: project.copies.get(each.id, (each.id, "")) for each in project.output}
        copies = {id_ for id_, (origin, part) in origins.items() if origin in copies and not part}
        for each in project.output:
            if each.name.lower() == report.event_time.lower() and each.id not in copies:
                raise UnsoundPlanError(
                    f"stage {report.stage!r}: {each.name!r} is computed after report(), which has "
                    f"promised by its earlier value, so rows could be older than the promise: "
                    f"compute it before report(), or under another name"
                )


def _is_reported(node: Node) -> bool:
    """Return whether every row that leaves a node has passed a report, and is not delayed after it."""
    if node.tag.startswith(RANGES_TAG):
        return True
    passes = node.operator in _ALLOWED_AFTER_REPORT or node.operator == "Union"
    return passes and bool(node.children) and all(_is_reported(each) for each in node.children)


def _error_after_report(stage: str, operator: str) -> str:
    if operator == "Union":
        return (
            f"stage {stage!r}: its rows are unioned after report() with rows that did not pass "
            f"through report(), although they leave with the stage's rows: report both sides"
        )
    return (
        f"stage {stage!r}: Spark's operator {operator} comes after report(), where it could delay "
        f"or change rows that the stage has promised: call report() last"
    )


def _promise(node: Node, report: ReportCall) -> Promise:
    [below] = node.children
    column = None
    if report.event_time is not None:
        column = next(each for each in below.output if each.name == report.event_time)
    return promise_of(report.stage, output_rows(below), column, report.delay_ms, report.output)


def _check_deduplication(plan: Node) -> None:
    """Raise if a `dropDuplicatesWithinWatermark` would keep its keys for zero time."""
    for node in plan.walk():
        if node.operator != "DeduplicateWithinWatermark":
            continue
        for each in node.walk():
            if each.operator == "EventTimeWatermark" and each.delay_ms == 0:
                raise UnsoundPlanError(
                    "dropDuplicatesWithinWatermark keeps a key for the delay of its watermark, "
                    "which is zero here, so duplicates would pass: declare the largest distance "
                    "of duplicates, "
                    "watermarked(…, deduplicate_within='1 hour')"
                )
