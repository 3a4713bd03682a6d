"""Sources that run ahead of their group wait, whatever Spark reads them with."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent import Pipeline
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.throttle import source_throttle
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
END_S = 100
FILE_S = 10
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
    return other


def write_files(flow: Flow, first_s: int = FILE_S) -> None:
    """Write a file for each batch; the first one with as many seconds as told."""
    flow.write(steady(range(first_s)))
    for second in range(first_s, END_S, FILE_S):
        flow.write(steady(range(second, second + FILE_S)))


def source_alone(flow: Flow, pipeline: Pipeline) -> DataFrame:
    return flow.source(pipeline)


def with_windows(flow: Flow, pipeline: Pipeline) -> DataFrame:
    return flow.counts(pipeline)


every_query = pytest.mark.parametrize("build", [source_alone, with_windows])


def promises(flow: Flow) -> list[int]:
    """Return the shards' promises, in ms since the start."""
    found = [each["promise"] for each in flow.client.ranges(JOB, SOURCE, limit=10)["ranges"]]
    return [promise_ms - START_MS for promise_ms in found if promise_ms is not None]


def waited(query: StreamingQuery) -> list[dict[str, Any]]:
    """Return the waits in the progress; a control source's offset stays until there is another."""
    sources = [
        source for each in query.recentProgress for source in json.loads(each.json)["sources"]
    ]
    moved = [each["endOffset"] for each in sources if each["startOffset"] != each["endOffset"]]
    return [offset["waited"] for offset in moved if "waited" in offset]


@every_query
def test_a_query_waits_before_the_batch_that_would_pass_the_limit(
    flow: Flow, throttled: Pipeline, other: Other, build: Any
) -> None:
    write_files(flow)
    query = flow.start(throttled, build(flow, throttled))
    until(lambda: SOURCE in throttled.waits, "the query waits")
    assert "its last batch brought 10 s" in throttled.waits[SOURCE]
    # One of the shards is three seconds behind; the query goes on as long as one may.
    assert max(promises(flow)) <= LIMIT_S * 1_000 + 3_000
    assert min(promises(flow)) > (LIMIT_S - FILE_S) * 1_000
    other.is_at(1_000)
    until(lambda: not throttled.waits and flow.output_of(SOURCE) > START_MS + 85_000, "all is read")
    [why] = waited(query)
    assert "too far ahead of shard only of other" in why["because"]


@every_query
def test_a_throttled_query_waits_and_goes_on(
    flow: Flow, throttled: Pipeline, other: Other, build: Any
) -> None:
    """Its first batch, of which nobody could know how much it brings, has taken it past the limit."""
    write_files(flow, first_s=6 * FILE_S)
    query = flow.start(throttled, build(flow, throttled))
    until(lambda: SOURCE in throttled.waits, "the query waits")
    assert "more than 30 s ahead of shard only" in throttled.waits[SOURCE]
    done = batches(query)
    assert min(promises(flow)) > LIMIT_S * 1_000
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
    write_files(flow)
    query = flow.start(throttled, build(flow, throttled))
    until(lambda: SOURCE in throttled.waits, "the query waits")
    query.stop()
    assert query.exception() is None
    until(lambda: SOURCE not in throttled.waits, "nothing waits any more")


@pytest.mark.slow
def test_a_query_is_not_held_back_by_its_own_shards(
    flow: Flow, throttled: Pipeline, other: Other
) -> None:
    """The left sensor is three seconds ahead of the right one: one query reads both."""
    write_files(flow)
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
    write_files(flow)
    monkeypatch.setattr(source_throttle, "WAIT_TIMEOUT_MS", 300)
    ended(flow.start(throttled, flow.counts(throttled), trigger=AVAILABLE_NOW))
    assert flow.output_of(COUNTS) > START_MS + 70_000
    assert "made no progress" in caplog.text
