"""Overhead of each strategy for a query that only reads and reports, by turns with a fixed bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.spark.data import BOUND_S
from benchmarks.spark.turns import ClickBench
from spark_agent import (
    Ascending,
    BoundedOutOfOrderness,
    Expression,
    IngressTime,
    LearnedLateness,
    NoWatermarks,
    Pipeline,
    Punctuated,
    Rows,
    WallClock,
)
from spark_agent.strategies import AnyStrategy

BASELINE: Final = "BoundedOutOfOrderness"
_INGRESS: Final = "IngressTime"


class _WithState:
    """A bound, with a state for each shard."""

    def update(self, state: int | None, rows: Rows) -> int:
        return max(state or 0, rows.newest_ms)

    def promise(self, state: int) -> int:
        return state - 1_000 * BOUND_S


class _WithTimes(_WithState):
    """The same, from all event times."""

    wants_times = True

    def update(self, state: int | None, rows: Rows) -> int:
        assert rows.times_ms is not None
        return max(state or 0, int(rows.times_ms.max()))


class _WithDigests(_WithState):
    """The same, from one number of each task."""

    def digest(self, times_ms: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
        return str(int(times_ms.max())).encode()

    def update(self, state: int | None, rows: Rows) -> int:
        return max(state or 0, *map(int, rows.digests))


STRATEGIES: Final[Mapping[str, Callable[[], AnyStrategy]]] = {
    BASELINE: lambda: BoundedOutOfOrderness(f"{BOUND_S} s"),
    "Ascending": Ascending,
    "NoWatermarks": NoWatermarks,
    "Expression": lambda: Expression(f"at - INTERVAL {BOUND_S} SECONDS"),
    "Punctuated": lambda: Punctuated("amount > 1", bound=f"{BOUND_S} s"),
    "WallClock": lambda: WallClock("5 s"),
    _INGRESS: IngressTime,
    "LearnedLateness": LearnedLateness,
    "a state, from counts": _WithState,
    "a state, from digests": _WithDigests,
    "a state, from all times": _WithTimes,
}


def batch_ms(bench: ClickBench, name: str) -> float:
    """Return the median duration of a batch (ms) with a strategy."""
    event_time = "read_at" if name == _INGRESS else "at"
    return bench.batch_ms(_start, stages={}, strategy=STRATEGIES[name](), event_time=event_time)


def _start(pipeline: Pipeline, rows: DataFrame, folder: Path) -> StreamingQuery:
    writer = rows.writeStream.format("noop").trigger(availableNow=True)
    return pipeline.start(writer.option("checkpointLocation", str(folder / "checkpoint")))
