"""A few cells on the oldest PySpark that the agent runs on, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from spark_agent.versions import OLDEST
from tests.support.server import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1_200)]

VERSION: Final = f"{OLDEST[0]}.{OLDEST[1]}"
FOLDER: Final = ROOT / "build" / f"pyspark-{VERSION}"
"""The folder that PySpark is installed into, once; `make clean` deletes it."""
CELLS: Final = (
    "tumbling, bounded",
    "tumbling, SQL, bounded",
    "sliding, cron",
    "session, processingTime",
    "inner join, availableNow",
    "transformWithState, bounded",
)
"""Cells of each trigger, of SQL, of a join and of Python's state."""


@pytest.fixture(scope="module")
def packages() -> Path:
    """Return a folder with this PySpark. Everything else comes from the environment of the tests."""
    if not FOLDER.exists():
        unfinished = FOLDER.with_suffix(f".{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        installed = subprocess.run(
            [*command, "--target", str(unfinished), f"pyspark=={VERSION}.*"],
            capture_output=True,
            text=True,
            check=False,
        )
        if installed.returncode:
            pytest.skip(f"PySpark {VERSION} cannot be installed: {installed.stderr.strip()[-200:]}")
        unfinished.rename(FOLDER)
    return FOLDER


def test_cells_on_the_oldest_spark(packages: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(packages)}
    for name in ("SPARK_HOME", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environment.pop(name, None)
    cells = [f"tests/spark/matrix/test_matrix.py::test_cell[{cell}]" for cell in CELLS]
    found = "import pyspark; print(pyspark.__version__)"
    command = [sys.executable, "-c", found]
    version = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert version.stdout.startswith(f"{VERSION}.")
    command = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "-q", *cells]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-8_000:]
    assert f"{len(CELLS)} passed" in ended.stdout
