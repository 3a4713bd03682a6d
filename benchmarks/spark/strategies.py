"""Overhead of each strategy for a query that only reads and reports, by turns with a fixed bound."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.spark.data import BOUND_S, SHARDS, Files
from benchmarks.spark.turns import batch_ms
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


class StrategyBench:
    """Runs a query with each strategy."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, files: Files) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._files = files
        self._numbers = itertools.count()

    def batch_ms(self, name: str) -> float:
        """Return the median duration of a batch (ms)."""
        folder = self._folder / f"strategy-{next(self._numbers)}"
        clicks = (
            self._spark.readStream.schema("person long, shard string, at timestamp, amount double")
            .option("maxFilesPerTrigger", self._files.per_batch)
            .parquet(str(self._files.folder))
        )
        spec = {"clicks": {"shards": [str(shard) for shard in range(SHARDS)]}}
        with Pipeline(self._url, folder.name, spec, spark=self._spark) as pipeline:
            source = pipeline.source(
                clicks,
                stage="clicks",
                shard="shard",
                event_time="read_at" if name == _INGRESS else "at",
                strategy=STRATEGIES[name](),
            )
            writer = source.writeStream.format("noop").trigger(availableNow=True)
            writer = writer.option("checkpointLocation", str(folder))
            query = pipeline.start(writer)
            query.awaitTermination()
            found = batch_ms(query)
        shutil.rmtree(folder)
        return found
