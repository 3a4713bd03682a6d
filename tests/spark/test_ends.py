"""A query ends its run with its outcome, so that nobody takes it for dead, or for alive."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent.client.responses import RunLine
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
    SOURCE,
    START_MS,
    Flow,
    batches,
    ended,
    steady,
    until,
)
from tests.support.server import Service

pytestmark = pytest.mark.spark


def runs(flow: Flow) -> Sequence[RunLine]:
    return flow.client.runs(JOB)["runs"]


def healths(flow: Flow) -> set[str | None]:
    return {flow.client.show(JOB, stage).get("health") for stage in (SOURCE, COUNTS)}


def test_an_available_now_query_finishes(flow: Flow) -> None:
    """`explain` said "has no worker" after a clean end, as after a crash."""
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
        until(lambda: runs(flow)[0]["outcome"], "it has ended, before the pipeline has")
    [run] = runs(flow)
    assert (run["outcome"], run["because"]) == ("finished", None)
    assert sorted(run["stages"]) == sorted([SOURCE, COUNTS])
    # After its last commit.
    commits = flow.client.commits(JOB, COUNTS)
    assert commits["epoch"] == run["epoch"] is not None
    assert run["program"] == flow.spark.sparkContext.appName
    address = flow.spark.sparkContext.uiWebUrl
    assert run["links"] == ({"spark": address} if address else {})
    assert healths(flow) == {"ended"}
    assert flow.leased(SOURCE) == flow.leased(COUNTS) == 0
    assert flow.client.job_problems(JOB) == {"job": JOB, "health": "ended", "problems": []}
    because = flow.client.explain(JOB, COUNTS)["because"]
    assert f": the last run of {SOURCE} finished at " in because
    assert "no worker" not in because
    # The next night.
    flow.write(steady(range(30, 60)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    assert [each["outcome"] for each in runs(flow)] == ["finished", "finished"]


def test_a_drained_query_finishes(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), bounded=True))
    assert runs(flow)[0]["outcome"] == "finished"
    assert healths(flow) == {"final"}


@pytest.mark.parametrize(
    "by", ["query", *(pytest.param(by, marks=pytest.mark.slow) for by in ("pipeline", "context"))]
)
def test_a_query_that_is_stopped_says_so(flow: Flow, by: str) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "a commit")
        assert healths(flow) == {"ok"}
        if by == "query":
            query.stop()
            until(lambda: runs(flow)[0]["outcome"], "it has ended, before the pipeline has")
        elif by == "pipeline":
            pipeline.stop()
    assert [each["outcome"] for each in runs(flow)] == ["stopped"]
    assert healths(flow) == {"no_worker"}
    [source, counts] = flow.client.job_problems(JOB)["problems"]
    for each in (source, counts):
        assert each["because"].endswith("last run was stopped)")


def test_an_available_now_query_that_is_stopped_before_its_end_is_not_finished(flow: Flow) -> None:
    for second in range(60):
        flow.write(steady([second]))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW)
        until(lambda: batches(query) >= 2, "a few batches")
        query.stop()
    assert [each["outcome"] for each in runs(flow)] == ["stopped"]


def test_a_query_that_fails_says_why(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline).withColumn("fails", F.raise_error(F.lit("broken")))
        query = flow.start(pipeline, frame, trigger=AVAILABLE_NOW)
        with pytest.raises(StreamingQueryException, match="broken"):
            query.awaitTermination()
        until(lambda: runs(flow)[0]["outcome"], "it has ended, before the pipeline has")
    [run] = runs(flow)
    assert run["outcome"] == "failed"
    assert "broken" in (run["because"] or "")
    assert "\n" not in (run["because"] or "")
    assert healths(flow) == {"failed"}
    [first, *_] = flow.client.job_problems(JOB)["problems"]
    assert (first["health"], first["severity"]) == ("failed", "critical")
    assert "broken" in first["because"]


def test_a_query_ends_well_without_the_service_and_says_that_nobody_was_told(
    flow: Flow, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline(patience="200 ms") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "a commit")
        service.kill()
        query.stop()
    assert query.exception() is None
    [told] = [each for each in caplog.messages if "could not be ended" in each]
    assert "has been stopped" in told
    service.start()
    assert runs(flow)[0]["outcome"] is None
