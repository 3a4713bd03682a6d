"""Fixtures: one real Spark for all tests, a real service for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from pyspark.sql import SparkSession

from spark_agent import Pipeline
from spark_agent.demo.session import link_spark_home
from spark_agent.kafka_jars import JarsUnavailableError, KafkaJars
from tests.spark.flow import RANGES, Flow
from tests.support.kafka_server import KafkaServer
from tests.support.local_files import FILE_MANAGER_SETTING, ONE_STEP
from tests.support.server import ROOT, Service


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the tests between two processes, each of which has one Spark for all of its tests."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            half = crc32(item.nodeid.encode()) % 2
            item.add_marker(pytest.mark.xdist_group(f"spark-{half}"))


@pytest.fixture(scope="session")
def broker_jars(kafka_jars: KafkaJars | JarsUnavailableError) -> KafkaJars:
    """The jars of Kafka. Tests of brokers are skipped without them."""
    if isinstance(kafka_jars, JarsUnavailableError):
        pytest.skip(str(kafka_jars))
    return kafka_jars


@pytest.fixture(scope="session")
def broker(
    broker_jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaServer]:
    """One that nobody mistreats."""
    with KafkaServer(broker_jars, tmp_path_factory.mktemp("kafka")) as running:
        yield running


@pytest.fixture(scope="session")
def spark(
    kafka_jars: KafkaJars | JarsUnavailableError, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """One whose Java keeps its compiled code: the default, 48 MiB for one compiler, fills in minutes."""
    folder = tmp_path_factory.mktemp("spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_HOME"] = str(link_spark_home(folder / "home"))
    os.environ["PYTHONPATH"] = str(ROOT)  # workers unpickle what the tests define
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config(
            "spark.driver.extraJavaOptions",
            "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=512m -XX:+UseSerialGC",
        )
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", RANGES)
        .config("spark.sql.streaming.pollingDelay", "20ms")
        .config("spark.sql.streaming.numRecentProgressUpdates", 1_000)
        .config(FILE_MANAGER_SETTING, ONE_STEP)
        .config("spark.jars", getattr(kafka_jars, "connector_files", ""))
        .config("spark.local.dir", str(folder))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    folder = tmp_path / "service"
    folder.mkdir()
    with Service(folder) as running:
        yield running


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that nobody mistreats."""
    with Service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def pipeline(flow: Flow) -> Iterator[Pipeline]:
    with flow.pipeline() as pipeline:
        yield pipeline


@pytest.fixture
def flow(spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Flow]:
    """One against the test's own service if it has one, else against one that tests share in turn."""
    if "service" in request.fixturenames:
        yield Flow(spark, request.getfixturevalue("service").url, tmp_path)
        return
    flow = Flow(spark, request.getfixturevalue("shared_service").url, tmp_path)
    yield flow
    for job in flow.client.jobs()["jobs"]:
        flow.client.delete(job["job"])
