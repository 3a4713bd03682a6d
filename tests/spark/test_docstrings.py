"""The examples in the docstrings of the pipeline's public errors run as they stand."""

from __future__ import annotations

import re
import shutil

import pytest
from pyspark.sql.streaming.readwriter import DataStreamWriter

import spark_agent
from spark_agent import (
    FinalSourceError,
    OldCheckpointError,
    Pipeline,
    StageTakenError,
    UnsoundPlanError,
)
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
    SOURCE,
    Flow,
    ended,
    steady,
    until,
)
from tests.support.documents import example_of, promised_output

pytestmark = pytest.mark.spark


def run(public: type, **names: object) -> None:
    """Run the example of a class with these names."""
    errors = {name: getattr(spark_agent, name) for name in spark_agent.__all__}
    exec(example_of(public), {**errors, **names})


def written(flow: Flow, pipeline: Pipeline) -> DataStreamWriter:
    return (
        flow.source(pipeline)
        .writeStream.format("json")
        .option("path", str(flow.output))
        .option("checkpointLocation", str(flow.checkpoint))
        .trigger(availableNow=True)
    )


def test_an_unsound_plan(
    flow: Flow, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    windowed = pipeline.watermarked(flow.source(pipeline), stage=COUNTS, event_time="at")
    run(UnsoundPlanError, pipeline=pipeline, windowed=windowed)
    pattern = promised_output(example_of(UnsoundPlanError))
    assert re.fullmatch(pattern, capsys.readouterr().out)


def test_a_stage_of_another_query(
    flow: Flow, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    def writer(name: str) -> DataStreamWriter:
        counts = flow.counts(pipeline).writeStream.format("noop")
        return counts.option("checkpointLocation", f"{flow.checkpoint}-{name}")

    flow.write(steady(range(30)))
    run(StageTakenError, pipeline=pipeline, writer=writer)
    assert capsys.readouterr().out == "the stage is already executed\n"


def test_a_lost_checkpoint(flow: Flow) -> None:
    flow.files_per_batch = None
    flow.write(steady(range(20)))
    with flow.pipeline() as pipeline:
        ended(pipeline.start(written(flow, pipeline)))
    before = flow.client.generation(JOB)
    shutil.rmtree(flow.checkpoint)
    with flow.pipeline() as pipeline, pytest.raises(OldCheckpointError):
        run(OldCheckpointError, pipeline=pipeline, writer=written(flow, pipeline))
    assert flow.client.generation(JOB) == before + 1


def test_a_final_source(flow: Flow) -> None:
    flow.write(steady(range(30)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW, bounded=True))
        until(lambda: flow.watermark(SOURCE).final, "the source is final")
        before = flow.client.generation(JOB)
        counts = flow.counts(pipeline).writeStream.format("json")
        counts = counts.option("path", str(flow.output)).trigger(availableNow=True)
        writer = counts.option("checkpointLocation", str(flow.checkpoint))
        run(FinalSourceError, pipeline=pipeline, writer=writer)
        assert flow.client.generation(JOB) == before + 1
