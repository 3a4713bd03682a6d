"""Why a watermark of a Spark pipeline is where it is, down to the shard, by `explain`."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import Pipeline
from spark_agent.client.responses import HolderAnswer
from tests.spark.flow import (
    COUNTS,
    JOB,
    SOURCE,
    SPEC,
    START_MS,
    Flow,
    Reading,
    batches,
    steady,
    until,
)

pytestmark = pytest.mark.spark


def held_by(flow: Flow) -> HolderAnswer | None:
    """Return the range that holds back the counts, if it is one alone."""
    found = flow.client.explain(JOB, COUNTS, limit=10)
    if [step["stage"] for step in found["path"]] != [COUNTS, SOURCE]:
        return None
    return found["holders"][0] if found["holders_total"] == 1 else None


def test_a_log_that_is_a_day_behind_is_named_through_the_stage_below(flow: Flow) -> None:
    """First it is simply the lowest; once its query was stopped, that is why."""
    flow.write([*steady(range(10)), *(Reading("right", "a", 86_400 + s) for s in range(10))])
    with flow.pipeline(lease_ttl="2 s") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(COUNTS) == START_MS + 4_000, "both sensors have promised")
        number = 0

        def goes_on() -> bool:
            nonlocal number
            number += 1
            flow.write([Reading(s, "b", 1) for s in ("left", "right")])
            holder = held_by(flow)
            return holder is not None and holder["reason"] == "behind"

        until(goes_on, "the one that is behind is named")
        holder = held_by(flow)
        assert holder is not None
        assert holder["range"] == "left"
        assert holder["would_be"] == START_MS + 86_409_000 - 5_000
        query.stop()

        def is_over() -> bool:
            holder = held_by(flow)
            return holder is not None and holder["reason"] == "lease_expired"

        until(is_over, "its worker is gone")
        found = flow.client.explain(JOB, COUNTS, limit=10)
        assert found["holders"][0]["range"] == "left"
        assert "2 of 2 ranges of sensors have no worker since" in found["because"]


def test_what_a_window_keeps_back_is_named(flow: Flow) -> None:
    """Rows are stamped with the start of their window, so it holds the watermark back by its length."""
    flow.write(steady(range(60)))
    with flow.pipeline() as pipeline:
        read = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
        counted = read.groupBy(F.window("at", "30 seconds"), "key").count()
        starts = counted.select("key", F.col("window.start").alias("start"), "count")
        flow.start(
            pipeline, pipeline.report(starts, stage=COUNTS, event_time="start", delay="30 seconds")
        )
        until(lambda: flow.output_of(SOURCE) == START_MS + 51_000, "the source has promised")
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "so has the stage below")
        found = flow.client.explain(JOB, COUNTS, limit=10)
        assert [(step["stage"], step["reason"]) for step in found["path"]] == [(COUNTS, "ranges")]
        assert {(each["reason"], each["component"]) for each in found["holders"]} == {
            ("buffering", "window")
        }
        assert "a hold 'window'" in found["because"]
        # Now one shard is further behind than the window is long, and that is the answer.
        flow.write([Reading("right", "a", 400)])
        holder = until(lambda: held_by(flow), "the shard is named")
        assert holder["range"] == "left"


def processed_ms(flow: Flow) -> int:
    """The processing watermark of the counts, which is none before that of the sensors."""
    return flow.client.show(JOB, COUNTS).get("processing_watermark") or 0


@pytest.mark.parametrize("policy", [{}, {"idle": {"after_ms": 600_000, "then": "exclude"}}])
def test_no_work_waits_while_there_is_nothing_to_read(
    flow: Flow, policy: dict[str, object]
) -> None:
    spec = {**SPEC, SOURCE: {**SPEC[SOURCE], **policy}}
    flow.write(steady(range(30)))
    with Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the windows are closed")
        done = until(lambda: processed_ms(flow), "a processing watermark")
        before = batches(query)
        until(lambda: processed_ms(flow) > done + 5_000, "it goes on without a batch")
        assert batches(query) - before <= 2, "those that closed the windows"
        flow.write(steady(range(30, 60)))
        until(lambda: flow.output_of(COUNTS) == START_MS + 51_000, "and so does the query")
