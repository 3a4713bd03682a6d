"""The times of a test run are those of its tests, by file and by process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.server import ROOT

SLOW = """
import time

def test_slow():
    time.sleep(0.3)

def test_slow_too():
    time.sleep(0.3)
"""


def test_times_of_two_files_in_two_processes(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(SLOW)
    (tmp_path / "test_other.py").write_text("def test_fast():\n    pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.file_times",
        "-n",
        "2",
        "--dist",
    ]
    found = subprocess.run(
        [*command, "loadfile", str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = re.findall(r"^ +([\d.]+) (\S+)$", found, re.MULTILINE)
    times = {name: float(seconds) for seconds, name in lines}
    assert times.keys() == {"test_one.py", "test_other.py", "gw0", "gw1"}
    assert times["test_one.py"] >= 0.6
    assert sum(times[each] for each in ("gw0", "gw1")) >= 0.6
