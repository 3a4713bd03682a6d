"""The time budget of CI: a test that would begin after it is skipped, in words."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.server import ROOT
from tests.support.time_budget import UNTIL

PASSES = "def test_one():\n    pass\n"


@pytest.mark.parametrize(
    ("left_s", "outcome"), [(600, "1 passed"), (-1, "the time of this run is over")]
)
def test_a_test_begins_in_time_or_is_skipped(tmp_path: Path, left_s: int, outcome: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_one.py").write_text(PASSES)
    plugin = ["-p", "tests.support.time_budget"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-n", "1", *plugin],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), UNTIL: str(time.time() + left_s)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert outcome in done.stdout
