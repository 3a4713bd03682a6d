"""Triggers as Spark means them: a run over what is there ends, and can be run again tomorrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)

from spark_agent import FinalSourceError, Pipeline
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.executor.tally import Count
from spark_agent.times import MAX_MS
from tests.spark.flow import (
    AVAILABLE_NOW,
    BOUND,
    COUNTS,
    JOB,
    RANGES,
    SHARDS,
    SOURCE,
    START_MS,
    Flow,
    Reading,
    batches,
    ended,
    steady,
    until,
    windows,
)

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_every_day_a_run_closes_what_it_can_and_the_next_goes_on(flow: Flow) -> None:
    everything: list[Reading] = []
    for day in range(4):
        today = steady(range(30 * day, 30 * (day + 1)))
        everything += today
        flow.write(today)
        with flow.pipeline() as pipeline:
            ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
            assert pipeline.counts.total() == 0
        seen = START_MS + 1_000 * (30 * day + 21)
        assert flow.output_of(SOURCE) == flow.output_of(COUNTS) == seen, "closed in the same run"
        expected = windows(everything)
        closed = 30 * day + 20
        assert flow.counted() == {w: n for w, n in expected.items() if w[1] < closed}
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(everything)
    assert flow.watermark(COUNTS).final


def test_it_reads_what_was_there_at_the_start_and_nothing_else(flow: Flow) -> None:
    first, second = steady(range(30)), steady(range(30, 60))
    flow.write(first[:90])
    flow.write(first[90:])
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW)
        until(lambda: batches(query) or not query.isActive, "a batch")
        flow.write(second)
        ended(query)
        assert flow.output_of(SOURCE) == START_MS + 21_000
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
        assert flow.output_of(COUNTS) == START_MS + 51_000


def test_a_run_of_two_stages_with_inputs_of_their_own_ends(flow: Flow, tmp_path: Path) -> None:
    """Spark adopts the smaller of their watermarks, and batches went on until it had the larger one."""
    spec = {
        "a": {"shards": ["left"]},
        "b": {"shards": ["right"]},
        "per-a": {"inputs": ["a"], "ranges": RANGES},
        "per-b": {"inputs": ["b"], "ranges": RANGES},
    }
    other = Flow(flow.spark, flow.url, tmp_path / "other")
    flow.write([Reading("left", "k", second) for second in range(60)])
    other.write([Reading("right", "k", second) for second in range(30)])
    with Pipeline(flow.url, JOB, spec, spark=flow.spark, poll="50 ms") as pipeline:
        left, right = (
            pipeline.report(
                pipeline.watermarked(
                    pipeline.source(
                        each.readings(),
                        stage=stage,
                        shard="sensor",
                        event_time="at",
                        strategy=BOUND,
                    ),
                    stage=f"per-{stage}",
                    event_time="at",
                )
                .groupBy(F.window("at", "10 seconds"), "key")
                .count(),
                stage=f"per-{stage}",
            )
            for stage, each in (("a", flow), ("b", other))
        )
        ended(flow.start(pipeline, left.union(right), trigger=AVAILABLE_NOW))
    assert flow.output_of("a") == START_MS + 54_000
    assert flow.output_of("per-b") == flow.output_of("b") == START_MS + 24_000


def test_once_is_one_batch(flow: Flow) -> None:
    readings = steady(range(30))
    flow.write(readings)
    with flow.pipeline() as pipeline:
        for _ in range(3):
            query = flow.start(pipeline, flow.counts(pipeline), trigger={"once": True})
            ended(query)
            assert batches(query) == 1
        until(lambda: flow.output_of(COUNTS) == START_MS + 21_000, "the third one has closed by it")


def test_a_final_source_is_not_run_again(flow: Flow, tmp_path: Path) -> None:
    readings = steady(range(30))
    flow.write(readings)
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
        flow.write(steady(range(30, 40)))
        with pytest.raises(
            FinalSourceError, match=rf"'sensors' of job '{JOB}' is final.*reset\(\)"
        ):
            flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW)
        pipeline.reset()
        flow.checkpoint, flow.output = tmp_path / "checkpoint-2", tmp_path / "output-2"
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
    assert flow.counted() == windows(readings + steady(range(30, 40)))


def test_a_job_is_not_reset_under_a_running_query(flow: Flow) -> None:
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        with pytest.raises(RuntimeError, match="still executes sensors, counts: stop it before"):
            pipeline.reset()
        query.stop()
        pipeline.reset()


def test_a_bounded_run_that_died_before_its_end_is_brought_to_it(flow: Flow) -> None:
    readings = steady(range(30))
    flow.write(readings)
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
        # The driver has made its sources final, and dies before the last windows are out.
        run = flow.client.open_run(JOB, [SOURCE], holder="driver")
        lease = flow.client.claim(
            JOB, SOURCE, None, holder="driver", ttl_ms=10_000, rank=Rank(run, 0, 0)
        )
        final = {shard: RangeReport(final=True) for shard in SHARDS}
        flow.client.report(JOB, SOURCE, lease, final)
        assert flow.output_of(SOURCE) == MAX_MS
        with pytest.raises(FinalSourceError):
            flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW)
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
        assert pipeline.counts[Count.LATE_ROWS] == 0
    assert flow.counted() == windows(readings)


def test_a_bounded_query_of_a_source_alone_makes_it_final(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.source(pipeline), trigger=AVAILABLE_NOW, bounded=True)
        ended(query)
        until(lambda: flow.watermark(SOURCE).final, "the source is final")


@pytest.mark.parametrize("trigger", [AVAILABLE_NOW, None], ids=["availableNow", "processingTime"])
def test_a_bounded_query_over_an_empty_folder_ends(
    flow: Flow, trigger: dict[str, object] | None
) -> None:
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=trigger, bounded=True))
    assert flow.watermark(COUNTS).final


def test_a_bounded_query_without_a_stateful_operator_ends(flow: Flow, pipeline: Pipeline) -> None:
    readings = steady(range(30))
    flow.write(readings)
    rows = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
    frame = pipeline.report(rows.where("key != 'b'"), stage=COUNTS)
    ended(flow.start(pipeline, frame, bounded=True))
    assert flow.watermark(COUNTS).final
    written = flow.spark.read.json(str(flow.output)).count()
    assert written == sum(r.key != "b" for r in readings)


def test_a_query_that_has_ended_has_given_its_leases_back(flow: Flow, pipeline: Pipeline) -> None:
    """Else it would look like one that died, until they run out."""
    flow.write(steady(range(30)))
    ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    until(lambda: flow.leased(SOURCE) == flow.leased(COUNTS) == 0, "the leases are given back", 20)
