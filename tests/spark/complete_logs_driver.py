"""A driver in a process of its own that reads complete folders, and is killed before their report."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from spark_agent.demo.session import spark_session
from spark_agent.supervision.complete_shards import CompleteShards
from spark_agent.supervision.driver_reporter import DriverReporter
from spark_agent.supervision.pending_reports import PendingReports
from tests.spark.flow import AVAILABLE_NOW, RANGES, Flow
from tests.spark.test_complete_logs import read
from tests.spark.test_logs import Folders, counts, pipeline_of


def _kill_if_due(
    self: CompleteShards, reporter: DriverReporter, pending: PendingReports, committed_epoch: int
) -> None:
    if self.is_due(committed_epoch):
        os.killpg(0, signal.SIGKILL)


def run(url: str, folder: Path) -> None:
    with spark_session(folder / "own", RANGES) as spark:
        flow = Flow(spark, url, folder)
        with pipeline_of(flow) as pipeline:
            frame = counts(pipeline, read(pipeline, Folders(folder / "logs")))
            flow.start(pipeline, frame, trigger=AVAILABLE_NOW).awaitTermination()


if __name__ == "__main__":
    CompleteShards.report = _kill_if_due
    run(sys.argv[1], Path(sys.argv[2]))
