"""Sources that run ahead of their group wait, whatever Spark reads them with."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Pipeline
from spark_agent import queries as queries_module
from spark_agent.answers import RangeAnswer
from spark_agent.messages import RangeReport, Rank
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    batches,
    ended,
    steady,
    until,
)

pytestmark = pytest.mark.spark

OTHER = "other"
DRIFT_S = 30
LIMIT_S = 20 + DRIFT_S
FILES = 10
THROTTLE = {"groups": [{"stages": [SOURCE, OTHER], "max_drift_ms": DRIFT_S * 1_000}]}


class Other:
    """The other source of the group, which reports by hand."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        run = flow.client.open_run(JOB, [OTHER], "by-hand")
        self._lease = flow.client.claim(
            JOB, OTHER, None, holder="by-hand", ttl_ms=600_000, rank=Rank(run, 0, 0)
        )

    def is_at(self, second: int) -> None:
        report = {"only": RangeReport(START_MS + second * 1_000)}
        self._flow.client.report(JOB, OTHER, self._lease, report)


@pytest.fixture
def throttled(flow: Flow) -> Iterator[Pipeline]:
    spec = SPEC | {OTHER: {"shards": ["only"]}}
    with Pipeline(
        flow.url, JOB, spec, spark=flow.spark, throttle=THROTTLE, poll="50 ms", lease_ttl="2 s"
    ) as pipeline:
        yield pipeline


@pytest.fixture
def other(flow: Flow, throttled: Pipeline) -> Other:
    other = Other(flow)
    other.is_at(20)
    for number in range(FILES):
        flow.write(steady(range(10 * number, 10 * number + 10)))
    return other


def source_alone(flow: Flow, pipeline: Pipeline) -> DataFrame:
    return flow.source(pipeline)


def with_windows(flow: Flow, pipeline: Pipeline) -> DataFrame:
    return flow.counts(pipeline)


every_query = pytest.mark.parametrize("build", [source_alone, with_windows])


def ranges(flow: Flow) -> Sequence[RangeAnswer]:
    return flow.client.ranges(JOB, SOURCE, limit=10)["ranges"]


def waited(query: StreamingQuery) -> list[dict[str, Any]]:
    """What the progress says of waits; a control source's offset stays until there is another."""
    sources = [
        source for each in query.recentProgress for source in json.loads(each.json)["sources"]
    ]
    moved = [each["endOffset"] for each in sources if each["startOffset"] != each["endOffset"]]
    return [offset["waited"] for offset in moved if "waited" in offset]


@every_query
def test_a_throttled_query_waits_and_goes_on(
    flow: Flow, throttled: Pipeline, other: Other, build: Any
) -> None:
    query = flow.start(throttled, build(flow, throttled))
    until(lambda: SOURCE in throttled.waits, "the query waits")
    assert "ahead of shard only" in throttled.waits[SOURCE]
    done = batches(query)
    # Both shards are ahead, the one that started the wait by no more than its last report brought.
    for each in ranges(flow):
        promise_ms = each["promise"]
        assert promise_ms is not None
        assert LIMIT_S * 1_000 < promise_ms - START_MS <= (LIMIT_S + 10) * 1_000
    # Longer than its tasks' leases: the driver keeps them, so nobody takes the shards for abandoned.
    end = time.monotonic() + 3
    until(lambda: time.monotonic() > end, "some time")
    assert batches(query) == done
    assert flow.leased(SOURCE) == 2
    reasons = {each["reason"] for each in flow.client.explain(JOB, SOURCE, limit=10)["holders"]}
    assert reasons == {"throttled"}

    other.is_at(1_000)
    until(lambda: not throttled.waits and flow.output_of(SOURCE) > START_MS + 85_000, "all is read")
    [why] = waited(query)
    assert why["ms"] >= 2_000
    assert "ahead of shard only" in why["because"]


@every_query
def test_a_query_that_waits_can_be_stopped(
    flow: Flow, throttled: Pipeline, other: Other, build: Any
) -> None:
    query = flow.start(throttled, build(flow, throttled))
    until(lambda: SOURCE in throttled.waits, "the query waits")
    query.stop()
    assert query.exception() is None
    until(lambda: SOURCE not in throttled.waits, "nothing waits any more")


def test_a_query_is_not_held_back_by_its_own_shards(
    flow: Flow, throttled: Pipeline, other: Other
) -> None:
    """The left sensor is three seconds ahead of the right one: one query reads both."""
    tight = {"groups": [{"stages": [SOURCE], "max_drift_ms": 1_000}]}
    with Pipeline(
        flow.url,
        JOB,
        SPEC | {OTHER: {"shards": ["only"]}},
        spark=flow.spark,
        throttle=tight,
        replace=True,
        poll="50 ms",
    ) as pipeline:
        flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(SOURCE) > START_MS + 85_000, "all is read")


def test_a_query_with_an_end_does_not_wait_for_ever(
    flow: Flow,
    throttled: Pipeline,
    other: Other,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(queries_module, "_THROTTLE_PATIENCE_MS", 300)
    ended(flow.start(throttled, flow.counts(throttled), trigger=AVAILABLE_NOW))
    assert flow.output_of(COUNTS) > START_MS + 70_000
    assert "made no progress" in caplog.text
