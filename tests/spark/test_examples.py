"""Every program in `examples/`, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession, functions

from spark_agent import BoundedOutOfOrderness, Client, Pipeline
from spark_agent.client.reports import RangeReport, Rank
from tests.support.documents import example_of
from tests.support.server import ROOT, Service

EXAMPLES = ROOT / "examples"
PARTITIONS = "spark.sql.shuffle.partitions"


@pytest.fixture
def examples(spark: SparkSession) -> Iterator[None]:
    """The tests' Spark for the programs, which set the number of its state partitions."""
    before = spark.conf.get(PARTITIONS)
    yield
    spark.conf.set(PARTITIONS, str(before))


@pytest.fixture
def url(shared_service: Service) -> Iterator[str]:
    yield shared_service.url
    client = Client(shared_service.url)
    for job in client.jobs()["jobs"]:
        client.delete(job["job"])


@pytest.mark.spark
@pytest.mark.usefixtures("examples")
def test_the_example_of_a_pipeline(url: str, spark: SparkSession, tmp_path: Path) -> None:
    rows = [
        {"tap": tap, "at": f"2026-01-01T0{hour}:05:00Z", "litres": 1.5}
        for hour in range(3)
        for tap in ("north", "south")
    ]
    (tmp_path / "taps").mkdir()
    (tmp_path / "taps/1.json").write_text("\n".join(map(json.dumps, rows)))
    schema = "tap string, at timestamp, litres double"
    names = {
        "Pipeline": Pipeline,
        "BoundedOutOfOrderness": BoundedOutOfOrderness,
        "F": functions,
        "url": url,
        "folder": tmp_path,
        "taps": spark.readStream.schema(schema).json(f"{tmp_path}/taps"),
    }
    spark.conf.set(PARTITIONS, "4")
    exec(example_of(Pipeline), names)
    hours = spark.read.json(f"{tmp_path}/hourly").select("window.start", "tap").collect()
    assert sorted((row["start"][11:13], row["tap"]) for row in hours) == [
        ("00", "north"),
        ("00", "south"),
    ], "the second hour closes with a row ten minutes after its end"


def run(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[str]:
    """Run a program in this process; return the lines that it prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.spark
@pytest.mark.usefixtures("examples")
def test_windows_and_what_waits_for_them(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hours = map(json.loads, run("windows.py", capsys, monkeypatch, url, str(tmp_path)))
    assert sorted(
        (hour["tap"], hour["window"]["start"][:13], hour["litres"]) for hour in hours
    ) == [(tap, f"2026-01-01T0{hour}", 3.0) for tap in ("north", "south") for hour in (0, 1)]
    waiting = [url, str(tmp_path), "2026-01-01T02:00:00Z"]
    assert run("wait_for_input.py", capsys, monkeypatch, *waiting) == ["windows 4 litres 12.0"]
    earlier = [url, str(tmp_path), "2026-01-01T01:00:00Z"]
    assert run("wait_for_input.py", capsys, monkeypatch, *earlier) == ["windows 2 litres 6.0"]
    polling = [url, "water", "hourly", "2026-01-01T02:00:00Z"]
    assert run("sensor.py", capsys, monkeypatch, *polling) == [
        "complete: hourly has reached 2026-01-01T02:00:00Z"
    ]
    with pytest.raises(SystemExit, match="nosuch"):
        run("sensor.py", capsys, monkeypatch, url, "water", "nosuch", "2026-01-01T02:00:00Z")


def test_the_sensor_polls_until_the_watermark_is_there(shared_service: Service) -> None:
    client = Client(shared_service.url)
    client.declare("polled", {"in": {"shards": ["a"]}})
    command = [sys.executable, "examples/sensor.py", shared_service.url, "polled", "in"]
    with subprocess.Popen(
        [*command, "2026-01-01T00:00:00Z", "0.05"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as sensor:
        assert sensor.stdout is not None
        assert sensor.stdout.readline().startswith("incomplete: in is at")
        rank = Rank(client.open_run("polled", ["in"], holder="worker"), 0, 0)
        lease = client.claim("polled", "in", None, holder="worker", ttl_ms=60_000, rank=rank)
        client.report("polled", "in", lease, {"a": RangeReport(1_767_225_600_000)})
        assert sensor.stdout.read().endswith("complete: in has reached 2026-01-01T00:00:00Z\n")
        assert sensor.wait(timeout=60) == 0
    client.delete("polled")


@pytest.mark.spark
@pytest.mark.usefixtures("examples")
def test_a_join(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = map(json.loads, run("join.py", capsys, monkeypatch, url, str(tmp_path)))
    assert sorted(pair["id"] for pair in pairs) == [0, 1]


@pytest.mark.spark
@pytest.mark.usefixtures("examples")
def test_deduplication(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = map(json.loads, run("deduplication.py", capsys, monkeypatch, url, str(tmp_path)))
    assert sorted(message["message"] for message in messages) == [1, 2]


@pytest.mark.spark
@pytest.mark.usefixtures("examples")
def test_early_results(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = run("early_results.py", capsys, monkeypatch, url, str(tmp_path))
    assert printed == ["complete 53", "early 55"]


@pytest.mark.spark
@pytest.mark.usefixtures("examples")
def test_three_nights(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run("nightly.py", capsys, monkeypatch, url, str(tmp_path)) == [
        "night 1 days 0",
        "night 2 days 1",
        "night 3 days 3",
    ]


def test_every_example_is_described_and_run() -> None:
    text = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text() + (ROOT / "tests/integration/test_relays.py").read_text()
    for program in EXAMPLES.glob("*.py"):
        assert f"[{program.name}]({program.name})" in text
        assert f'"{program.name}"' in tests or f"examples/{program.name}" in tests
        written = program.read_text()
        assert f"python examples/{program.name} " in written, "its docstring has the command"
        assert 30 <= len(written.splitlines()) <= 60
        assert re.match(r'"""[A-Z]', written)
