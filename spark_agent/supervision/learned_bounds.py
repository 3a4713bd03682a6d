"""Bounds of out-of-orderness that a query's strategies have learned: for the log and for metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import Gauge

from spark_agent.started_query import StartedQuery
from spark_agent.strategies import LearnedLateness
from spark_agent.times import duration_text

_log: Final = logging.getLogger("spark_agent")

_BOUND: Final = Gauge(
    "tidegauge_agent_bound_seconds",
    "The largest bound of out-of-orderness that a source's strategy has learned for a shard.",
    ["job", "stage"],
)
_LOGGED_FACTOR: Final = 2
"""A bound is logged again once it has grown or shrunk by this factor."""


class LearnedBounds:
    """The bounds of each source whose strategy is `LearnedLateness`.

    Values are replaced, never changed, so other threads may read them.
    """

    def __init__(self, query: StartedQuery) -> None:
        self._job = query.job
        self._logged: dict[tuple[str, str], int] = {}
        self.of: dict[str, dict[str, int]] = {}
        """By source and shard (ms)."""

    def note(self, stage: str, strategy: object, states: Iterable[tuple[str, Any]]) -> None:
        """Note the bounds of shards whose states have changed."""
        if not isinstance(strategy, LearnedLateness):
            return
        found = {shard: strategy.bound_ms(state) for shard, state in states}
        bounds = {shard: bound_ms for shard, bound_ms in found.items() if bound_ms is not None}
        if not bounds:
            return
        self.of = {**self.of, stage: {**self.of.get(stage, {}), **bounds}}
        _BOUND.labels(self._job, stage).set(max(self.of[stage].values()) / 1_000)
        for shard, bound_ms in bounds.items():
            self._log(stage, shard, bound_ms)

    def _log(self, stage: str, shard: str, bound_ms: int) -> None:
        before_ms = self._logged.get((stage, shard))
        if before_ms is not None:
            smaller, larger = sorted((before_ms, bound_ms))
            if larger < _LOGGED_FACTOR * max(smaller, 1):
                return
        self._logged[stage, shard] = bound_ms
        _log.info("stage %s: the bound of shard %s is %s", stage, shard, duration_text(bound_ms))
