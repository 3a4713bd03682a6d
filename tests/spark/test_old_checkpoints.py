"""A checkpoint that is behind the job: nothing may run from it, or rows would be lost in silence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812  (Spark's own custom)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import OldCheckpointError, Pipeline
from spark_agent.executor.tally import Count
from spark_agent.jvm.checkpoint import Beginning, Checkpoint
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    DEADLINE_S,
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

WORDS = r"checkpoint is new, was lost, or is an older copy"
SECONDS = 20
"""Seconds of readings in each file, and so in each batch."""
ROWS = len(steady(range(SECONDS)))


def writer(flow: Flow, pipeline: Pipeline, checkpoint: Path) -> DataStreamWriter:
    """The readings as they are, in files: Spark's file sink skips a batch that it has."""
    rows = flow.source(pipeline).writeStream.format("json").option("path", str(flow.output))
    return rows.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)


def write(flow: Flow, batch: int) -> None:
    flow.write(steady(range(SECONDS * batch, SECONDS * (batch + 1))))


def run(flow: Flow, batch: int) -> None:
    """Read one more file, in one batch."""
    flow.files_per_batch = None
    write(flow, batch)
    with flow.pipeline() as pipeline:
        ended(pipeline.start(writer(flow, pipeline, flow.checkpoint)))


def refused(flow: Flow, checkpoint: Path, words: str = WORDS) -> None:
    with flow.pipeline() as pipeline, pytest.raises(OldCheckpointError, match=words):
        pipeline.start(writer(flow, pipeline, checkpoint))


def written(flow: Flow) -> int:
    """Return the number of rows of the output."""
    return flow.spark.read.schema("sensor string").json(str(flow.output)).count()


def committed(flow: Flow, stage: str = SOURCE) -> tuple[int | None, int | None]:
    """The run of a stage, and its last epoch."""
    found = flow.client.commits(JOB, stage)
    return found["run"], found["epoch"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.parametrize("batches_old", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_old_copy_is_refused_however_often_it_is_tried(
    flow: Flow, tmp_path: Path, batches_old: int
) -> None:
    """And before anything has run, so that each attempt leaves all as it is: a batch that the file sink
    has would be skipped, with whatever it reads now, and the next one would go on behind the gap.
    """
    old = tmp_path / "old"
    for batch in range(3):
        if batch == 3 - batches_old:
            shutil.copytree(flow.checkpoint, old)
        run(flow, batch)
    write(flow, 3)
    before = committed(flow), files(old), files(flow.output), flow.output_of(SOURCE)
    for _ in range(2):
        refused(flow, old)
    assert (committed(flow), files(old), files(flow.output), flow.output_of(SOURCE)) == before
    run(flow, 4)
    assert committed(flow)[1] == 3
    assert written(flow) == 5 * ROWS, "of the right checkpoint, nothing is lost"


def test_a_batch_that_a_copy_has_planned_anew_is_refused(flow: Flow) -> None:
    """As when somebody has tried it without tidegauge: it is planned, with other rows in it."""
    for batch in range(2):
        run(flow, batch)
    (flow.checkpoint / "commits" / "1").unlink()
    (flow.checkpoint / "commits" / ".1.crc").unlink()
    refused(flow, flow.checkpoint)


@pytest.mark.parametrize("committed_by_spark", [False, True])
@pytest.mark.slow
def test_a_restart_is_not_refused_wherever_the_driver_was_killed(
    flow: Flow, service: Service, committed_by_spark: bool
) -> None:
    """Before Spark has committed the batch, or between that and the service's commit."""
    run(flow, 0)
    with flow.pipeline(patience="300 ms") as pipeline:
        pipeline.start(writer(flow, pipeline, flow.checkpoint).trigger(processingTime="0 seconds"))
        until(lambda: committed(flow)[0] == 2, "the query has its run")
        service.kill()
        write(flow, 1)
        commit = flow.checkpoint / "commits" / "1"
        until(commit.exists, "a batch without the service")
    service.start()
    if not committed_by_spark:
        (flow.checkpoint / "commits" / "1").unlink()
        (flow.checkpoint / "commits" / ".1.crc").unlink()
    assert committed(flow) == (2, 0)
    run(flow, 2)
    assert committed(flow) == (3, 2)
    assert written(flow) == 3 * ROWS


def test_an_old_copy_goes_on_where_that_is_wanted(
    flow: Flow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(flow, 0)
    shutil.copytree(flow.checkpoint, tmp_path / "old")
    run(flow, 1)
    write(flow, 2)
    caplog.clear()
    with flow.pipeline() as pipeline:
        rows = writer(flow, pipeline, tmp_path / "old")
        with pytest.raises(OldCheckpointError, match="start over with an empty output"):
            pipeline.start(rows, on_lost_checkpoint="continue")
        flow.output = tmp_path / "elsewhere"
        rows = rows.option("path", str(flow.output))
        ended(pipeline.start(rows, on_lost_checkpoint="continue"))
    assert (
        "begins with batch 1, but the job already has batches of its stages up to 1" in caplog.text
    )
    # Not by Spark, which misses the first batch in the folder's log.
    lines = [line for each in flow.output.glob("*.json") for line in each.read_text().splitlines()]
    assert len(lines) == 2 * ROWS, "all that the copy has not read"


JSON_CLASS = "org.apache.spark.sql.execution.datasources.v2.json.JsonDataSourceV2"


@pytest.mark.parametrize(
    ("name", "keeps"), [("JSON", True), (JSON_CLASS, True), (None, True), ("noop", False)]
)
def test_the_output_is_found_however_its_format_is_named(
    flow: Flow, name: str | None, keeps: bool
) -> None:
    """By a class, or not at all: Spark's file sink would skip a batch all the same."""
    run(flow, 0)
    rows = flow.readings().writeStream.option("PATH", str(flow.output))
    found = Checkpoint(flow.spark, rows if name is None else rows.format(name)).read()
    assert (found.written, found.skips) == ((0, True) if keeps else (None, False))


@pytest.mark.slow
def test_who_is_refused_fences_nobody(flow: Flow, tmp_path: Path) -> None:
    flow.files_per_batch = None
    write(flow, 0)
    with flow.pipeline() as healthy, flow.pipeline() as other:
        query = flow.start(healthy, flow.counts(healthy))
        until(lambda: flow.output_of(COUNTS) > START_MS, "the ranges have promised")
        before = committed(flow, SOURCE)[0], committed(flow, COUNTS)[0]
        checkpoint, flow.checkpoint = flow.checkpoint, tmp_path / "new"
        with pytest.raises(OldCheckpointError, match=WORDS):
            flow.start(other, flow.counts(other))
        flow.checkpoint = checkpoint
        assert (committed(flow, SOURCE)[0], committed(flow, COUNTS)[0]) == before
        promised = flow.output_of(COUNTS)
        write(flow, 1)
        until(lambda: flow.output_of(COUNTS) > promised, "the query goes on, and reports")
        assert query.isActive


def test_an_output_that_is_ahead_is_refused_whatever_the_job_knows(
    flow: Flow, service: Service, tmp_path: Path
) -> None:
    """Spark's file sink would skip what it has, and nobody would miss it."""
    run(flow, 0)
    shutil.copytree(flow.checkpoint, tmp_path / "old")
    run(flow, 1)
    write(flow, 2)
    before = files(flow.output)
    with flow.pipeline() as pipeline:
        pipeline.reset()
    refused(flow, tmp_path / "new", "begins with batch 0, but its output .* up to 1")
    refused(flow, tmp_path / "old", "is of generation 1 .* but the job is in generation 2")
    service.kill()
    with flow.pipeline(patience="300 ms") as pipeline:
        rows = writer(flow, pipeline, tmp_path / "old")
        with pytest.raises(OldCheckpointError, match="start over with an empty output"):
            pipeline.start(rows)
    service.start()
    assert files(flow.output) == before
    shutil.rmtree(flow.output)
    shutil.rmtree(flow.checkpoint)
    run(flow, 3)
    assert written(flow) == 4 * ROWS


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.slow
def test_an_output_of_many_batches_is_not_ahead_of_its_own_checkpoint(
    flow: Flow, service: Service, is_done: bool
) -> None:
    """The sink's log is compacted; and a driver may be killed after a batch was written."""
    flow.files_per_batch = 1
    for batch in range(11):
        write(flow, batch)
    with flow.pipeline() as pipeline:
        ended(pipeline.start(writer(flow, pipeline, flow.checkpoint)))
        rows = writer(flow, pipeline, flow.checkpoint)
        expected = Beginning(11, 10, 10, str(flow.output), generation=1, run=1)
        assert Checkpoint(flow.spark, rows).read() == expected
    if not is_done:
        (flow.checkpoint / "commits" / "10").unlink()
        (flow.checkpoint / "commits" / ".10.crc").unlink()
        assert Checkpoint(flow.spark, rows).read() == replace(expected, next_batch=10)
        service.lose_ledger()
    write(flow, 11)
    with flow.pipeline() as pipeline:
        ended(pipeline.start(writer(flow, pipeline, flow.checkpoint)))
    assert written(flow) == 12 * ROWS


def test_while_the_service_is_away_it_is_noticed_when_it_is_back(
    flow: Flow, service: Service, tmp_path: Path
) -> None:
    run(flow, 0)
    shutil.copytree(flow.checkpoint, tmp_path / "old")
    run(flow, 1)
    before = committed(flow)
    with flow.pipeline(patience="300 ms") as pipeline:
        service.kill()
        write(flow, 2)
        rows = writer(flow, pipeline, tmp_path / "old").format("noop")
        query = pipeline.start(rows.trigger(processingTime="0 seconds"))
        until(lambda: batches(query) == 1, "a batch has run")
        service.start()
        with pytest.raises(StreamingQueryException, match=f"begins with batch 1, .* {WORDS}"):
            query.awaitTermination(DEADLINE_S)
    assert committed(flow) == before, "nobody was fenced"


def test_a_batch_that_the_job_gets_in_the_meantime_fails(flow: Flow) -> None:
    """The tasks look, too: what was right at the start may not be so any more."""
    flow.files_per_batch = None
    with flow.pipeline() as pipeline:
        query = pipeline.start(
            writer(flow, pipeline, flow.checkpoint).trigger(processingTime="0 seconds")
        )
        run = until(lambda: committed(flow)[0], "the query has its run")
        flow.client.commit(JOB, run, 5, {SOURCE: None})
        write(flow, 0)
        with pytest.raises(StreamingQueryException, match=f"ran batch 0, .* up to 5: .* {WORDS}"):
            query.awaitTermination(DEADLINE_S)
    assert written(flow) == 0


@pytest.fixture
def without_checkpoint(flow: Flow, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Flow:
    """A flow that has run before, whose checkpoint is lost."""
    for second in range(0, 40, 10):
        flow.write(steady(range(second, second + 10)))
    with flow.pipeline() as pipeline:
        ended(flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW))
    flow.checkpoint, flow.output = tmp_path / "checkpoint-2", tmp_path / "output-2"
    flow.output.mkdir()
    caplog.clear()
    return flow


def test_who_has_lost_its_checkpoint_is_not_started(without_checkpoint: Flow) -> None:
    flow = without_checkpoint
    with flow.pipeline() as pipeline:
        for _ in range(2):
            with pytest.raises(OldCheckpointError, match=f"begins with batch 0, .* {WORDS}"):
                flow.start(pipeline, flow.counts(pipeline), trigger=AVAILABLE_NOW)
    assert not flow.checkpoint.exists()
    assert flow.counted() == {}


@pytest.mark.slow
def test_nor_is_who_only_reads_what_another_query_reports(flow: Flow, tmp_path: Path) -> None:
    flow.files_per_batch = None
    flow.write(steady(range(40)))
    output = tmp_path / "counts"

    def start(pipeline: Pipeline, checkpoint: str) -> StreamingQuery:
        rows = pipeline.watermarked(flow.readings(), stage=COUNTS, event_time="at")
        counted = rows.groupBy(F.window("at", "10 seconds")).count()
        rows = pipeline.report(counted, stage=COUNTS).writeStream.format("json")
        rows = rows.option("checkpointLocation", str(tmp_path / checkpoint))
        return pipeline.start(rows.option("path", str(output / checkpoint)))

    with flow.pipeline() as pipeline:
        source = flow.source(pipeline).writeStream.format("noop")
        pipeline.start(source.option("checkpointLocation", str(tmp_path / "source")))
        start(pipeline, "first")
        until(lambda: flow.output_of(COUNTS) == START_MS + 31_000, "windows have closed")
    with flow.pipeline() as pipeline, pytest.raises(OldCheckpointError, match=WORDS):
        start(pipeline, "second")
    assert not (output / "second").exists()


def test_a_lost_checkpoint_is_told_as_such(
    without_checkpoint: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    flow = without_checkpoint
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline)
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, on_lost_checkpoint="continue"))
        assert pipeline.counts[Count.LATE_ROWS] > 0
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "the query's checkpoint is new, was lost, or is an older copy" in told
    assert "its strategy promises too much" not in told


@pytest.mark.parametrize("where", ["option", "URI", "session"])
@pytest.mark.matrix
def test_the_next_batch_is_that_which_spark_runs(flow: Flow, tmp_path: Path, where: str) -> None:
    """Wherever its checkpoint is, and whatever else is in it."""
    spark, root = flow.spark, tmp_path / "check, points"
    folder = root / "readings"

    def rows() -> DataStreamWriter:
        found = flow.readings().writeStream.format("noop").trigger(availableNow=True)
        match where:
            case "option":
                return found.option("CHECKPOINTLocation", str(folder))
            case "URI":
                return found.option("checkpointLocation", f"file://{folder}")
            case _:
                return found.queryName("readings")

    if where == "session":
        spark.conf.set("spark.sql.streaming.checkpointLocation", str(root))
    try:
        for batch in range(12):
            assert Checkpoint(spark, rows()).read().next_batch == batch
            flow.write(steady(range(1)))
            query = rows().start()
            ended(query)
            assert [each["batchId"] for each in query.recentProgress] == [batch]
        (folder / "offsets" / ".12.0123.tmp").touch()
        (folder / "commits" / "11").unlink()
        assert Checkpoint(spark, rows()).read().next_batch == 11
        shutil.rmtree(folder / "commits")
        assert Checkpoint(spark, rows()).read().next_batch == 11
        shutil.rmtree(folder / "offsets")
        (folder / "offsets").mkdir()
        assert Checkpoint(spark, rows()).read().next_batch == 0
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    assert Checkpoint(spark, flow.readings().writeStream.format("console")).read() == Beginning(0)
