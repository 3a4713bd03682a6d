"""The gate of CI: a flaky test is named, and a failing one stays red."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.second_chance import OUTCOMES, SUMMARY, read_outcomes
from tests.support.server import ROOT

FLAKY = """
def test_flaky():
    from pathlib import Path
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        assert False, "the first time"
"""
BROKEN = "def test_broken():\n    assert False\n"
GROUPED = "import pytest\n\n@pytest.mark.xdist_group('one')" + FLAKY


def run(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        OUTCOMES: str(folder / "outcomes"),
        SUMMARY: str(folder / "summary"),
    }
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def gate(folder: Path, **files: str) -> tuple[int, str]:
    """Run the tests and then their second chance; return its exit code and its last line."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    options = ["-q", "-n", "1", "--dist", "loadgroup", "-p", "tests.support.second_chance"]
    first = run(folder, ["pytest", *options])
    assert first.returncode == (1 if files else 5), first.stdout
    second = run(folder, ["tests.support.second_chance", "1"])
    return second.returncode, second.stdout.splitlines()[-1]


def test_a_test_that_passes_alone_is_named_and_does_not_fail_the_run(tmp_path: Path) -> None:
    found = gate(tmp_path, once=FLAKY)
    assert found == (0, "FLAKY test_once.py::test_flaky")
    assert (tmp_path / "summary").read_text() == "- FLAKY test_once.py::test_flaky\n"


def test_a_test_of_a_group_is_found_again(tmp_path: Path) -> None:
    assert gate(tmp_path, once=GROUPED) == (0, "FLAKY test_once.py::test_flaky")


def test_a_test_that_fails_again_is_red(tmp_path: Path) -> None:
    code, line = gate(tmp_path, once=FLAKY, never=BROKEN)
    assert (code, line) == (1, "RED failed again, alone: test_never.py::test_broken")


def test_a_file_that_cannot_be_read_is_red(tmp_path: Path) -> None:
    code, line = gate(tmp_path, worse="import nothing_of_this_name\n")
    assert (code, line.startswith("RED ")) == (1, True), line


def test_a_run_without_tests_is_red(tmp_path: Path) -> None:
    code, line = gate(tmp_path)
    assert (code, line) == (1, "RED a test run was cut off (exit code 5)")
    assert [each.exit_code for each in read_outcomes(tmp_path / "outcomes")] == [5]
