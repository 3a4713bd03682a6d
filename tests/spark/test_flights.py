"""Why the weekly average of the flights is where it is: a log that is behind, its worker, a window, a
throttle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from spark_agent import Pipeline
from spark_agent.client.client import Client
from spark_agent.client.responses import ExplainAnswer, HolderAnswer
from spark_agent.demo.files import Folders
from spark_agent.demo.flights import NEW_YORK, NEWARK, START, write_logs
from spark_agent.demo.queries import (
    JOB,
    SOURCES,
    WEEKLY,
    rotations,
    specification,
    start,
    weekly_averages,
)
from tests.spark.flights_driver import BOUND, files_of, start_rotations
from tests.spark.flow import until
from tests.support.server import ROOT, Service

pytestmark = [pytest.mark.spark, pytest.mark.matrix]

LATE: Final = "UA"
"""The carrier whose log of the last two days is not there yet."""
_DAY_MS: Final = 86_400_000
_START_MS: Final = int(START.timestamp()) * 1_000
BOUND_MS: Final = int(BOUND.total_seconds()) * 1_000
BEHIND_MS: Final = _START_MS + 2 * _DAY_MS - BOUND_MS
"""Promise of that log."""


class Airports:
    """The logs of both, without the late ones."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark = spark
        self.url = url
        self.client = Client(url)
        self.folders = Folders(folder)
        self.files = files_of(spark, self.folders)
        for source in SOURCES:
            write_logs(self.files.flights, source, self.folders.logs(source), 1)
            self.folders.output(rotations(source)).mkdir(parents=True)
        self._late = sorted(self.folders.logs(NEWARK).glob(f"*-{LATE}.json"))[2:]
        for path in self._late:
            path.rename(folder / path.name)
        self._folder = folder

    def deliver(self) -> None:
        """Bring what is late."""
        for path in self._late:
            (self._folder / path.name).rename(path)

    def pipeline(self, **options: object) -> Pipeline:
        spec = specification(self.files)
        return Pipeline(self.url, JOB, spec, spark=self.spark, poll="50 ms", **options)  # type: ignore[arg-type]

    def explain(self, stage: str) -> ExplainAnswer:
        return self.client.explain(JOB, stage, limit=10)

    def holder(self, reason: str) -> Callable[[], HolderAnswer | None]:
        """Return what looks for the one range that holds the weekly average, for this reason."""

        def look() -> HolderAnswer | None:
            found = self.explain(WEEKLY)
            path = [step["stage"] for step in found["path"]]
            if path != [WEEKLY, rotations(NEWARK), NEWARK] or found["holders_total"] != 1:
                return None
            [holder] = found["holders"]
            return holder if holder["reason"] == reason else None

        return look

    @contextmanager
    def newark(self, own: Path) -> Generator[subprocess.Popen[bytes]]:
        """Run Newark's query in a driver of its own."""
        own.mkdir()
        module = "tests.spark.flights_driver"
        command = [sys.executable, "-m", module, self.url, str(self.folders.root), NEWARK, str(own)]
        with (
            (own / "driver.log").open("wb") as log,
            subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as driver,
        ):
            try:
                yield driver
            finally:
                kill(driver)


def kill(driver: subprocess.Popen[bytes]) -> None:
    """Kill a driver with its JVM and its workers."""
    if driver.poll() is None:
        os.killpg(driver.pid, signal.SIGKILL)


@pytest.fixture
def airports(spark: SparkSession, service: Service, tmp_path: Path) -> Airports:
    folder = tmp_path / "flights"
    folder.mkdir()
    return Airports(spark, service.url, folder)


def test_a_late_log_is_named_through_the_whole_chain_and_so_is_its_dead_worker(
    airports: Airports, tmp_path: Path
) -> None:
    with airports.pipeline() as pipeline, airports.newark(tmp_path / "newark") as driver:
        start_rotations(pipeline, airports.files, NEW_YORK)
        averages = weekly_averages(pipeline, airports.files)
        weekly = pipeline.report(averages, stage=WEEKLY, event_time="to")
        start(pipeline, airports.files, weekly, WEEKLY, bounded=False)
        holder = until(airports.holder("behind"), "the late log is named")
        assert holder["range"] == LATE
        assert holder["promise"] == BEHIND_MS
        assert holder["would_be"] == BEHIND_MS + 2 * _DAY_MS
        assert LATE in airports.explain(WEEKLY)["because"]
        kill(driver)
        holder = until(airports.holder("lease_expired"), "nobody reads it any more")
        assert holder["range"] == LATE
        with airports.newark(tmp_path / "again"):
            until(airports.holder("behind"), "somebody reads it again")
            airports.deliver()
            until(
                lambda: (
                    airports.client.watermarks(JOB)[WEEKLY].output_ms == BEHIND_MS + 2 * _DAY_MS - 1
                ),
                "everything is there",
            )


def test_what_a_week_keeps_back_is_named(airports: Airports) -> None:
    """Averages are stamped with the start of their week, so they hold the watermark back by a week."""
    airports.deliver()
    with airports.pipeline() as pipeline:
        for source in SOURCES:
            start_rotations(pipeline, airports.files, source)
        averages = weekly_averages(pipeline, airports.files)
        weekly = pipeline.report(averages, stage=WEEKLY, event_time="from", delay="7 days")
        start(pipeline, airports.files, weekly, WEEKLY, bounded=False)

        def is_named() -> bool:
            found = airports.explain(WEEKLY)
            return (
                [(step["stage"], step["reason"]) for step in found["path"]] == [(WEEKLY, "ranges")]
                and {(each["reason"], each["component"]) for each in found["holders"]}
                == {("buffering", "window")}
                and found["output_watermark"] == BEHIND_MS + 2 * _DAY_MS - 1 - 7 * _DAY_MS
            )

        until(is_named, "the window is named")
        assert "a hold 'window'" in airports.explain(WEEKLY)["because"]


def test_a_source_that_waits_for_the_other_is_named(airports: Airports) -> None:
    """New York may not be more than six hours ahead of Newark, whose late log is two days behind."""
    throttle = {"groups": [{"stages": list(SOURCES), "max_drift_ms": _DAY_MS // 4}]}
    with airports.pipeline(throttle=throttle) as pipeline:
        for source in SOURCES:
            start_rotations(pipeline, airports.files, source)

        def newark_waits() -> bool:
            return airports.client.watermarks(JOB)[NEWARK].output_ms == BEHIND_MS

        def is_named() -> bool:
            found = airports.explain(rotations(NEW_YORK))
            way = [step["stage"] for step in found["path"]]
            reasons = {each["reason"] for each in found["holders"]}
            return way == [rotations(NEW_YORK), NEW_YORK] and reasons == {"throttled"}

        def output_is(at_ms: int) -> Callable[[], bool]:
            return lambda: airports.client.watermarks(JOB)[NEW_YORK].output_ms == at_ms

        until(newark_waits, "all that Newark has is read")
        until(is_named, "New York waits")
        until(output_is(BEHIND_MS + _DAY_MS), "what it has read is published")
        airports.deliver()
        until(output_is(BEHIND_MS + 2 * _DAY_MS), "it goes on")
