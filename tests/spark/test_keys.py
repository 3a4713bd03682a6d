"""A query on a service that has keys: its driver and its tasks find theirs, and Spark never sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_agent.client.client import Client
from spark_agent.client.errors import Forbidden, Unauthenticated
from spark_agent.executor.tally import Count
from tests.spark.flow import AVAILABLE_NOW, DEADLINE_S, JOB, SPEC, Flow, steady, windows
from tests.support.server import Service

pytestmark = pytest.mark.spark

ADMIN = "operator-0123456789abcdef0123456789abcdef"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    folder = tmp_path / "service"
    folder.mkdir()
    with Service(folder, environment={"TIDEGAUGE_ADMIN_KEY": ADMIN}) as running:
        yield running


@pytest.fixture
def flow(spark: SparkSession, service: Service, tmp_path: Path) -> Flow:
    return Flow(spark, service.url, tmp_path)


def key_file(flow: Flow, tmp_path: Path, role: str) -> Path:
    """A file with a new key."""
    file = tmp_path / f"{role}.key"
    file.write_text(Client(flow.url, key=ADMIN).create_key(role, role, JOB)["secret"])
    return file


def test_without_a_key_nothing_starts(flow: Flow) -> None:
    with pytest.raises(Unauthenticated, match="TIDEGAUGE_KEY_FILE"):
        flow.pipeline()


def test_a_key_that_may_not_run_queries_starts_none(flow: Flow, tmp_path: Path) -> None:
    Client(flow.url, key=ADMIN).declare(JOB, SPEC)
    flow.write(steady(range(10)))
    with flow.pipeline(key_file=key_file(flow, tmp_path, "report")) as pipeline:
        frame = flow.counts(pipeline)
        with pytest.raises(Forbidden, match="role drive"):
            flow.start(pipeline, frame, trigger=AVAILABLE_NOW)


def test_driver_and_tasks_report_with_the_key_of_a_file(
    flow: Flow, service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Client(flow.url, key=ADMIN).declare(JOB, SPEC)
    file = key_file(flow, tmp_path, "drive")
    secret = file.read_text()
    readings = steady(range(60))
    flow.write(readings)
    caplog.set_level("DEBUG", logger="spark_agent")
    with flow.pipeline(key_file=file, patience="30 s") as pipeline:
        frame = flow.counts(pipeline)
        query = flow.start(pipeline, frame, bounded=True, trigger=AVAILABLE_NOW)
        assert query.awaitTermination(DEADLINE_S)
        plan = query._jsq.streamingQuery().lastExecution().toString()  # pyright: ignore
    # Had a task not found the key, the driver would have reported for it, and counted that.
    assert pipeline.counts[Count.REPORTS_DROPPED] == 0
    assert flow.counted() == windows(readings)
    assert secret not in plan
    assert secret not in caplog.text
    assert secret not in service.log()
    written = [each for each in flow.checkpoint.rglob("*") if each.is_file()]
    assert written
    for each in written:
        assert secret.encode() not in each.read_bytes(), each
