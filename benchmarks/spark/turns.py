"""Durations of a query's batches in several variants, measured by turns with one of them."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.spark.data import BOUND_S, SHARDS, Files
from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.strategies import AnyStrategy

Build: TypeAlias = Callable[[Pipeline, DataFrame, Path], StreamingQuery]
"""Starts a query over the clicks of a source, which may write into the folder."""

_CLICKS: Final = "clicks"


class ClickBench:
    """Runs variants of a query over the same clicks, each as a job of its own."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, files: Files) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._files = files
        self._numbers = itertools.count()

    def batch_ms(
        self,
        build: Build,
        *,
        stages: Mapping[str, int],
        strategy: AnyStrategy | None = None,
        event_time: str = "at",
    ) -> float:
        """Return the median duration of a batch (ms); `stages`: the keyed stages, with their ranges."""
        folder = self._folder / f"job-{next(self._numbers)}"
        spec = {
            _CLICKS: self._files.source,
            **{stage: {"inputs": [_CLICKS], "ranges": ranges} for stage, ranges in stages.items()},
        }
        with Pipeline(self._url, folder.name, spec, spark=self._spark) as pipeline:
            rows = pipeline.source(
                self._files.read(self._spark),
                stage=_CLICKS,
                shard="shard",
                event_time=event_time,
                strategy=strategy or BoundedOutOfOrderness(f"{BOUND_S} s"),
            )
            query = build(pipeline, rows, folder)
            query.awaitTermination()
            found = _batch_ms(query)
        # Spark may still write to its state there.
        shutil.rmtree(folder, ignore_errors=True)
        return found


def ratios(
    variants: Sequence[str],
    baseline: str,
    batch_ms: Callable[[str], float],
    *,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Return the duration of a batch in each variant, relative to the baseline in the same round.

    A first round warms up.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        order = list(variants) if number % 2 else list(variants)[::-1]
        measured = {name: batch_ms(name) for name in order}
        say(f"round {number}: {measured[baseline]:.0f} ms with {baseline}")
        if number:
            for name, each in measured.items():
                found[name].append(each / measured[baseline])
    del found[baseline]
    return found


def _batch_ms(query: StreamingQuery) -> float:
    """Return the median duration of a batch with rows (ms), once the query runs."""
    batches = [json.loads(each.json) for each in query.recentProgress]
    # The first batch starts Python, and a last one may have a row of each shard alone.
    full = [each["durationMs"] for each in batches[1:] if each["numInputRows"] > 2 * SHARDS]
    return statistics.median(each["triggerExecution"] for each in full)


def middle(found: list[float]) -> tuple[float, str]:
    """Return the median of ratios, and their range."""
    return statistics.median(found), f"rounds {min(found):.2f}-{max(found):.2f}"
