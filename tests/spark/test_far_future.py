"""A row dated 9999 in the data moves nothing."""

from __future__ import annotations

import pytest

from spark_agent.executor.tally import Count
from spark_agent.jvm.progress import parse_watermark_ms
from spark_agent.sources.control import END_MS
from tests.spark.flow import (
    COUNTS,
    SOURCE,
    START_MS,
    START_S,
    Flow,
    Reading,
    ended,
    spark_watermark,
    steady,
    until,
    windows,
)

pytestmark = pytest.mark.spark

IN_9999 = 253_370_764_800 - START_S
"""9999-01-01T00:00:00Z, in seconds from START_S."""


def test_a_row_dated_9999_moves_neither_watermark(flow: Flow) -> None:
    odd = [Reading("left", "a", IN_9999), Reading("right", "z", IN_9999)]
    first = steady(range(30))
    flow.write([*odd, *first])
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=True)
        ended(query)
        seen = {parse_watermark_ms(p["eventTime"]["watermark"]) for p in query.recentProgress}
        assert pipeline.counts[Count.FAR_FUTURE_ROWS] == len(odd)
    assert seen <= {0, START_MS + 21_000, END_MS}, "Spark's watermark is the service's, or the end"
    assert flow.counted() == windows([*odd, *first]), "and its window came out with the last"


def test_rows_after_it_are_still_on_time(flow: Flow) -> None:
    first, second = steady(range(30)), steady(range(30, 60))
    flow.write([Reading("left", "a", IN_9999), *first])
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), bounded=False)
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the service's watermark")
        assert spark_watermark(query) == START_MS + 21_000
        flow.write(second)
        until(lambda: flow.output_of(COUNTS) == START_MS + 51_000, "the service's watermark")
        assert spark_watermark(query) == START_MS + 51_000
        assert flow.output_of(SOURCE) == START_MS + 51_000
        query.stop()
    expected = {w: n for w, n in windows(first + second).items() if w[1] < 50}
    assert flow.counted() == expected


def test_rows_of_an_unknown_shard_pass_but_promise_nothing(flow: Flow) -> None:
    known = steady(range(30))
    flow.write([*known, Reading("attic", "a", 5), Reading("attic", "a", 99)])
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.source(pipeline), bounded=False)
        until(lambda: flow.output_of(SOURCE) == START_MS + 21_000, "the known shards' word")
        # The count follows the commit, by which the watermark has advanced.
        until(lambda: pipeline.counts[Count.UNKNOWN_SHARD_ROWS] == 2, "both are counted")
        query.stop()
    rows = flow.spark.read.json(str(flow.output))
    assert rows.count() == len(known) + 2
