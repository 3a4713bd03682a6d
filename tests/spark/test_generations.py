"""A checkpoint of another generation than its job's: its batches are other ones than the job's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent import OldCheckpointError
from spark_agent.jvm.checkpoint import Checkpoint
from tests.spark.flow import (
    AVAILABLE_NOW,
    COUNTS,
    JOB,
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
from tests.support.server import Service

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("service")]
"""A service of their own each: the number of its first generation is known."""

WORDS = (
    "is of generation {} of job 'readings', by its checkpoint, but the job is in generation {}: "
)


def write(flow: Flow, seconds: range, *, files: int) -> list[Reading]:
    """Readings of these seconds, in this many files and so in as many batches."""
    each = len(seconds) // files
    for first in range(0, len(seconds), each):
        flow.write(steady(seconds[first : first + each]))
    return steady(seconds)


def night(flow: Flow, *, bounded: bool = False, **options: object) -> None:
    """Count what is there."""
    with flow.pipeline() as pipeline:
        frame = flow.counts(pipeline)
        ended(flow.start(pipeline, frame, trigger=AVAILABLE_NOW, bounded=bounded, **options))


def refused(flow: Flow, words: str) -> None:
    before = flow.client.commits(JOB, SOURCE), flow.counted()
    for _ in range(2):
        with pytest.raises(OldCheckpointError, match=words):
            night(flow)
    assert (flow.client.commits(JOB, SOURCE), flow.counted()) == before


def last_epoch(flow: Flow) -> int:
    epoch = flow.client.commits(JOB, SOURCE)["epoch"]
    assert epoch is not None
    return epoch


def start_over(flow: Flow, folder: Path) -> None:
    """As the README says: reset, a new checkpoint and an empty output."""
    with flow.pipeline() as pipeline:
        pipeline.reset()
    flow.checkpoint, flow.output = folder / "checkpoint", folder / "output"
    flow.output.mkdir(parents=True)


def counted_until(flow: Flow, readings: Iterable[Reading], second: int) -> None:
    """All windows that end at `second` or before have come out, once, and are whole."""
    expected = windows(readings)
    assert flow.counted() == {each: expected[each] for each in expected if each[1] + 10 <= second}


def test_a_checkpoint_from_before_a_reset_is_refused(flow: Flow, tmp_path: Path) -> None:
    """Though it has more batches than the job has: they are other ones."""
    readings = write(flow, range(40), files=4)
    night(flow)
    old = flow.checkpoint
    start_over(flow, tmp_path / "again")
    flow.files_per_batch = None
    night(flow)
    readings += write(flow, range(40, 60), files=1)
    right, flow.checkpoint = flow.checkpoint, old
    refused(flow, WORDS.format(1, 2) + "it was reset, .* a new checkpoint and an empty output")
    flow.checkpoint = right
    night(flow)
    counted_until(flow, readings, 51)


def test_nor_does_a_query_of_a_source_alone_go_on_with_it(flow: Flow, tmp_path: Path) -> None:
    write(flow, range(40), files=4)

    def writer(checkpoint: str, sink: str = "noop") -> DataStreamWriter:
        rows = flow.source(pipeline).writeStream.format(sink).trigger(availableNow=True)
        return rows.option("checkpointLocation", str(tmp_path / checkpoint))

    with flow.pipeline() as pipeline:
        ended(pipeline.start(writer("first")))
        pipeline.reset()
        flow.files_per_batch = None
        ended(pipeline.start(writer("second")))
        with pytest.raises(OldCheckpointError, match=WORDS.format(1, 2)):
            pipeline.start(writer("first"))
        # A query that is to continue does so, and is of the new generation from then on.
        flow.write(steady(range(40, 50)))
        ended(pipeline.start(writer("first"), on_lost_checkpoint="continue"))
        assert Checkpoint(flow.spark, writer("first")).read().generation == 2
        ended(pipeline.start(writer("first")))


@pytest.mark.slow
def test_a_ledger_from_before_a_reset_is_refused_until_the_generation_is_begun(
    flow: Flow, service: Service, tmp_path: Path
) -> None:
    """Its batches are of the first generation, whose few batches were further in event time."""
    write(flow, range(120), files=2)
    night(flow)
    service.back_up(tmp_path / "backup")
    start_over(flow, tmp_path / "again")
    shutil.rmtree(flow.inbox)
    flow.inbox.mkdir()
    readings = write(flow, range(40), files=4)
    night(flow)
    counted_until(flow, readings, 31)
    service.restore(tmp_path / "backup")
    assert flow.output_of(COUNTS) > START_MS + 100_000
    readings += write(flow, range(40, 80), files=4)
    refused(flow, WORDS.format(2, 1) + ".* `tidegauge reset readings --generation 2`")
    command = [sys.executable, "-m", "service.cli", "reset", JOB, "--generation", "2", "--yes"]
    subprocess.run([*command, "--url", flow.url], check=True, timeout=60, capture_output=True)
    night(flow, bounded=True)
    assert flow.counted() == windows(readings)


@pytest.mark.slow
def test_a_ledger_from_before_the_query_was_started_is_noticed_while_it_runs(
    flow: Flow, service: Service, tmp_path: Path
) -> None:
    write(flow, range(20), files=2)
    night(flow)
    service.back_up(tmp_path / "backup")
    with flow.pipeline() as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        write(flow, range(20, 40), files=1)
        until(lambda: flow.output_of(COUNTS) == START_MS + 31_000, "the query goes on")
        service.restore(tmp_path / "backup")
        words = (
            r"has run 2, but the newest run .* is 1: its ledger was restored from an older backup"
        )
        with pytest.raises(StreamingQueryException, match=words):
            query.awaitTermination(120)
    write(flow, range(40, 60), files=1)
    night(flow, bounded=True)
    assert flow.counted() == windows(steady(range(60)))


@pytest.mark.matrix
def test_nights_after_one_that_went_on_are_as_usual(flow: Flow, tmp_path: Path) -> None:
    """Their batches are behind the job's for a while, which was allowed once and for all."""
    write(flow, range(60), files=6)
    night(flow)
    last = last_epoch(flow)
    flow.checkpoint, flow.output = tmp_path / "new", tmp_path / "new-output"
    flow.output.mkdir()
    flow.files_per_batch = None
    with pytest.raises(OldCheckpointError, match="begins with batch 0, "):
        night(flow)
    write(flow, range(60, 80), files=2)
    night(flow, on_lost_checkpoint="continue")
    lost = tmp_path / "lost"
    shutil.copytree(flow.checkpoint, lost)
    expected = windows(steady(range(140)))
    for second in range(80, 140, 10):
        write(flow, range(second, second + 10), files=1)
        night(flow)
        closed = {each for each in expected if 80 <= each[1] < second}
        found = {each: rows for each, rows in flow.counted().items() if each[1] >= 80}
        assert found == {each: expected[each] for each in closed}, "whole, in the same night"
    assert last_epoch(flow) > last
    # From there on, a copy of the checkpoint is an old one again.
    flow.checkpoint = lost
    refused(flow, "the query's checkpoint is new, was lost, or is an older copy")


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.slow
def test_a_final_source_is_refused_when_the_service_is_back(
    flow: Flow, service: Service, is_reset: bool
) -> None:
    """It was away at the start, so the query has run without being compared."""
    flow.files_per_batch = None
    write(flow, range(40), files=1)
    night(flow, bounded=True)
    if is_reset:
        with flow.pipeline() as pipeline:
            pipeline.reset()
    words = "was reset" if is_reset else "source 'sensors' of job 'readings' is final"
    service.kill()
    write(flow, range(40, 80), files=1)
    with flow.pipeline(patience="300 ms") as pipeline:
        query = flow.start(pipeline, flow.counts(pipeline))
        until(lambda: batches(query), "a batch without the service")
        service.start()
        with pytest.raises(StreamingQueryException, match=words):
            query.awaitTermination(120)
    assert flow.counted() == windows(steady(range(40)))
