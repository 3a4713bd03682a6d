"""A PySpark that does not run the agent is rejected in words. The client works with any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spark_agent.versions import OLDEST, refusal

ROOT = Path(__file__).parent.parent.parent.parent


def imported(name: str, folder: Path, *, before: str = "") -> subprocess.CompletedProcess[str]:
    """Import a name where the packages of a folder come before the installed ones."""
    code = f"{before}\nfrom spark_agent import {name}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def pyspark(folder: Path, version: str) -> Path:
    """Write a package with the version of an older PySpark, and without the parts that are newer."""
    package = folder / "pyspark"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = {version!r}\n")
    return folder


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            "4.1.4",
            "spark_agent needs PySpark 4.2 or newer, and this is 4.1.4: in an older one, windows",
        ),
        (
            "3.5.9",
            "spark_agent needs PySpark 4.2 or newer, and this is 3.5.9: in an older one, windows",
        ),
        ("4.2.0", "Spark Connect is not supported"),
    ],
)
@pytest.mark.parametrize("name", ["Pipeline", "Ascending", "OutputTime"])
def test_a_pyspark_that_does_not_run_the_agent(
    tmp_path: Path, name: str, version: str, words: str
) -> None:
    ended = imported(name, pyspark(tmp_path, version))
    assert f"\nspark_agent.exceptions.SparkImportError: {words}" in ended.stderr
    assert "pip install 'tidegauge[spark]'" in ended.stderr


def test_a_pyspark_that_is_not_installed(tmp_path: Path) -> None:
    away = "import sys; sys.modules['pyspark'] = None"
    words = "SparkImportError: spark_agent needs PySpark, which is not installed: pip install"
    assert words in imported("Pipeline", tmp_path, before=away).stderr
    assert imported("Client", tmp_path, before=away).returncode == 0


def test_the_client_works_with_any_pyspark(tmp_path: Path) -> None:
    folder = pyspark(tmp_path, "3.5.9")
    assert imported("Client, Arrival, Unavailable, UnsoundPlanError", folder).returncode == 0


@pytest.mark.parametrize(
    "version",
    ["4.2.0", "4.2.1.dev0", "4.2.0-SNAPSHOT", "4.3.0.dev1", "4.10.0", "5.0.0", "main", ""],
)
def test_newer_and_unreadable_versions_are_accepted(version: str) -> None:
    assert refusal(version) is None


@pytest.mark.parametrize("version", ["4.1.0.dev1", "4.1.5-SNAPSHOT", "4.0.0", "3.5.9", "2.4"])
def test_older_versions_are_rejected(version: str) -> None:
    assert version in str(refusal(version))


def test_the_bound_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pyspark] = [
        each for each in project["optional-dependencies"]["spark"] if each.startswith("pyspark")
    ]
    assert re.findall(r">=([\d.]+)", pyspark) == [".".join(map(str, OLDEST))]
