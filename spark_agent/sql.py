"""Stages written in SQL: views of sources that get their strategy from the clause of a query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from pyspark.sql import DataFrame

from spark_agent.exceptions import UnsoundPlanError
from spark_agent.jvm.nodes import SOURCE_TAG, UNPROMISED_ALIAS, Node
from spark_agent.jvm.sql import WatermarkClause
from spark_agent.soundness.query_stages import stage_of
from spark_agent.strategies import AnyStrategy, BoundedOutOfOrderness

_TRANSPARENT: Final = frozenset({"SubqueryAlias", "View"})


@dataclass(frozen=True, slots=True)
class UnpromisedSource:
    """A source without a strategy."""

    stage: str
    event_time: str
    with_strategy: Callable[[AnyStrategy], DataFrame]


class UnpromisedSources:
    """The sources without a strategy, which a query in SQL has to give them."""

    def __init__(self) -> None:
        self._sources: dict[str, UnpromisedSource] = {}
        """By an id that the sources of another pipeline do not have."""

    def add(self, frame: DataFrame, source: UnpromisedSource) -> DataFrame:
        """Return the source's data frame, by which its views are recognised."""
        id_ = uuid4().hex
        self._sources[id_] = source
        return frame.alias(f"{UNPROMISED_ALIAS}{id_}")

    def check(self, plan: Node) -> None:
        """Check that each source of a plan has a strategy. Raises `UnsoundPlanError`."""
        for node in plan.walk():
            if node.unpromised:
                source = self._of(node)
                raise UnsoundPlanError(
                    f"source {source.stage!r} has not a strategy, so it would promise nothing: give it "
                    f"one, source(…, strategy=…), or make a view of what source() returns, as it is, "
                    f"and read it with pipeline.sql('… FROM view WATERMARK {source.event_time} DELAY OF "
                    f"INTERVAL 10 MINUTES …')"
                )

    def read(self, clause: WatermarkClause, frame: DataFrame, plan: Node) -> DataFrame:
        """Return the rows that a clause reads, with the clause's strategy if they are of a source.

        `frame` is the data frame of the clause's relation, and `plan` is its plan. Raises
        `UnsoundPlanError`.
        """
        view = ".".join(clause.name)
        below = plan
        while below.operator in _TRANSPARENT and not below.unpromised:
            [below] = below.children
        if not below.unpromised:
            self.check(plan)
            _check_without_delay(clause, view, plan)
            return frame
        source = self._of(below)
        if clause.event_time.lower() != source.event_time.lower():
            raise UnsoundPlanError(
                f"WATERMARK {clause.event_time} of {view!r} is not the event time of source "
                f"{source.stage!r}: write WATERMARK {source.event_time}"
            )
        return source.with_strategy(BoundedOutOfOrderness(f"{clause.delay_ms} ms"))

    def _of(self, node: Node) -> UnpromisedSource:
        source = self._sources.get(node.unpromised)
        if source is None:
            raise UnsoundPlanError(
                "a view is of a source of another Pipeline, which cannot report for this one: make a "
                "view of what source() of this pipeline returns"
            )
        return source


def _check_without_delay(clause: WatermarkClause, view: str, plan: Node) -> None:
    """Check that a clause adds no delay to a watermark that is made elsewhere."""
    if not clause.delay_ms:
        return
    stages = [stage_of(node.tag) for node in plan.walk() if node.tag.startswith(SOURCE_TAG)]
    made = (
        f"source {stages[0]!r} has a strategy"
        if stages
        else "it is not a view of source(), and the service has its watermark"
    )
    raise UnsoundPlanError(
        f"the delay of {view!r}, {clause.delay_ms:,} ms, would be a second one, since {made}: write "
        f"DELAY OF INTERVAL 0 SECONDS, or leave the strategy of source() out"
    )
