"""Durations of a query's batches in several variants, measured by turns with one of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence

from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.spark.data import SHARDS


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


def batch_ms(query: StreamingQuery) -> float:
    """Return the median duration of a batch with rows (ms), once the query runs."""
    batches = [json.loads(each.json) for each in query.recentProgress]
    # The first batch starts Python, and a last one may have a row of each shard alone.
    full = [each["durationMs"] for each in batches[1:] if each["numInputRows"] > 2 * SHARDS]
    return statistics.median(each["triggerExecution"] for each in full)


def middle(found: list[float]) -> tuple[float, str]:
    """Return the median of ratios, and their range."""
    return statistics.median(found), f"rounds {min(found):.2f}-{max(found):.2f}"
