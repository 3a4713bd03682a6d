"""Every strategy under real queries, against the batch answer and the watermarks that readers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import BoundedOutOfOrderness, Pipeline
from spark_agent.executor.tally import Count
from spark_agent.strategies import (
    AnyStrategy,
    Ascending,
    Expression,
    IngressTime,
    NoWatermarks,
    Punctuated,
    Rows,
    WallClock,
)
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    SOURCE,
    START_MS,
    Flow,
    Reading,
    ended,
    steady,
    until,
    windows,
)

MINUTE_MS = 60_000


class Bounded:
    """Flink's `BoundedOutOfOrdernessGenerator`, with a state."""

    def update(self, state: int | None, rows: Rows) -> int:
        return rows.newest_ms if state is None else max(state, rows.newest_ms)

    def promise(self, state: int) -> int:
        return state - 5_000


class BoundedByTimes(Bounded):
    """The same, from all event times."""

    wants_times = True

    def update(self, state: int | None, rows: Rows) -> int:
        assert rows.times_ms is not None
        assert len(rows.times_ms) == rows.count
        assert int(rows.times_ms.min()) == rows.oldest_ms
        return max(state or 0, int(rows.times_ms.max()))


class BoundedByDigest(Bounded):
    """The same, from what the tasks have made of the times."""

    def digest(self, times_ms: Any) -> bytes:
        return str(int(times_ms.max())).encode()

    def update(self, state: int | None, rows: Rows) -> int:
        assert rows.times_ms is None
        return max(state or 0, *(int(each) for each in rows.digests))


STRATEGIES: dict[str, Callable[[], AnyStrategy]] = {
    "text": lambda: "at - INTERVAL 5 SECONDS",
    "expression": lambda: Expression("CASE WHEN key = 'a' THEN at - INTERVAL 5 SECONDS END"),
    "punctuated": lambda: Punctuated(when="key = 'a'", bound="5 s"),
    "punctuated by a column": lambda: Punctuated(when=F.col("key") == "a", bound="5 s"),
    "with a state": Bounded,
    "with all times": BoundedByTimes,
    "with digests": BoundedByDigest,
}
"""Each amounts to a bound of five seconds."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_promises_like_the_bound_that_it_amounts_to(flow: Flow, name: str) -> None:
    readings = steady(range(60))
    flow.write(readings[:180])
    flow.write(readings[180:])
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, STRATEGIES[name]())
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        assert flow.output_of(SOURCE) == START_MS + 56_000 - 5_000
        assert flow.counted() == windows(r for r in readings if r.second < 50)
        assert not pipeline.counts[Count.LATE_ROWS]
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, STRATEGIES[name]())
        ended(flow.start(pipeline, frame, bounded=True, trigger=AVAILABLE_NOW))
    assert flow.counted() == windows(readings)


def test_without_watermarks_nothing_closes_until_the_source_is_final(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, NoWatermarks())
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW))
        assert flow.output_of(SOURCE) == -1
        assert not flow.counted()
        assert flow.client.show("readings", SOURCE)["records"] == 180
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline, NoWatermarks())
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(steady(range(30)))
