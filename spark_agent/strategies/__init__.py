"""Strategies: promises of a source's shards, derived from what the query has read of them.

A strategy is one of three kinds, by where its promise comes from. `Strategy`: from a shard's newest row
in a batch, in its task. `StatefulStrategy`: from a small state for each shard, in the driver.
`ClockStrategy`: from the driver's clock, also while there are no rows.
"""

from __future__ import annotations

from spark_agent.strategies.by_clock import IngressTime, WallClock
from spark_agent.strategies.by_newest_row import (
    Ascending,
    BoundedOutOfOrderness,
    Expression,
    NoWatermarks,
    Punctuated,
)
from spark_agent.strategies.learned_lateness import LearnedLateness
from spark_agent.strategies.protocols import (
    EARLIEST_MS,
    ClockStrategy,
    Rows,
    StatefulStrategy,
    Strategy,
)
from spark_agent.strategies.resolved import AnyStrategy

__all__ = [
    "EARLIEST_MS",
    "AnyStrategy",
    "Ascending",
    "BoundedOutOfOrderness",
    "ClockStrategy",
    "Expression",
    "IngressTime",
    "LearnedLateness",
    "NoWatermarks",
    "Punctuated",
    "Rows",
    "StatefulStrategy",
    "Strategy",
    "WallClock",
]
