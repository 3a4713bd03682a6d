"""The README's own examples, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.settings import Settings
from tests.support.server import Service

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    [one] = [text for text in found if containing in text]
    return one


def test_the_http_example(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block("sh", "post()")],
            env={**os.environ, "URL": service.url},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout[done.stdout.rindex('{"job"') :])
    assert (last["stage"], last["output_watermark"]) == ("sessions", 1_767_225_580_000)


@pytest.mark.spark
def test_the_spark_example(tmp_path: Path) -> None:
    """Every hour comes out, the last one too, with all that ran in it."""
    (tmp_path / "taps").mkdir()
    rows = [
        {"tap": tap, "at": f"2026-01-01T0{hour}:{minute}:00Z", "litres": 1.5}
        for hour in range(3)
        for minute in ("05", "35")
        for tap in ("north", "south")
    ]
    (tmp_path / "taps" / "1.json").write_text("\n".join(map(json.dumps, rows)))
    with Service(tmp_path) as service:
        script = (
            "from pyspark.sql import SparkSession\n"
            "spark = (SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false')\n"
            "    .config('spark.sql.shuffle.partitions', '4').getOrCreate())\n"
            + block("python", "Pipeline(").replace("http://127.0.0.1:8000", service.url)
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-5_000:]
    lines = "".join(part.read_text() for part in (tmp_path / "hourly").glob("part-*.json"))
    hours = [json.loads(line) for line in lines.splitlines()]
    assert sorted((hour["tap"], hour["litres"]) for hour in hours) == [
        (tap, 3.0) for tap in ("north", "south") for _ in range(3)
    ]


def test_every_make_target_it_names_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z]+)\b", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_setting_it_names_is_there() -> None:
    named = {name.lower() for name in re.findall(r"TIDEGAUGE_([A-Z_]+)", README)}
    assert named == set(Settings.model_fields)
