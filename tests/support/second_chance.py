"""Second chance for failed tests in CI: each runs once more, alone, at the end.

As a pytest plugin (`-p tests.support.second_chance`) it appends the outcome of a test run to the file
that `TIDEGAUGE_TEST_OUTCOMES` names. As a command it reads that file, and repeats what has failed. A
test that passes then is flaky: it is named. More than `MOST_FLAKY` failures are red without a repeat.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pytest

OUTCOMES: Final = "TIDEGAUGE_TEST_OUTCOMES"
SUMMARY: Final = "GITHUB_STEP_SUMMARY"
MOST_FLAKY: Final = 3
_GROUP: Final = re.compile(r"@[\w.-]+$")
"""Suffix that pytest-xdist gives to the tests of a group."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one test run."""

    exit_code: int
    """As of pytest: 0 all passed, 1 some failed; anything else is not a result."""
    failed: list[str]
    """Node ids of the tests that failed, also before or after their own code."""


class Recorder:
    """Records the outcome of a test run as a line of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed test."""
        if report.failed:
            self._failed[_GROUP.sub("", report.nodeid)] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be collected."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the outcome."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(Outcome(int(exitstatus), list(self._failed)))) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder, but not in the processes of pytest-xdist, which report to this one."""
    path = os.environ.get(OUTCOMES)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)))


def read_outcomes(path: Path) -> list[Outcome]:
    """Read the outcomes of test runs."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def judge(
    outcomes: Sequence[Outcome], expected_runs: int, passes: Callable[[str], bool]
) -> tuple[list[str], str | None]:
    """Return the flaky tests, and the reason why the whole is red; None: it is green.

    >>> some = Outcome(1, ["a", "b"])
    >>> judge([some, Outcome(0, [])], 2, lambda test: True)
    (['a', 'b'], None)
    >>> judge([some], 1, lambda test: test == "a")
    (['a'], 'failed again, alone: b')
    >>> judge([Outcome(1, list("abcd"))], 1, lambda test: True)
    ([], '4 tests failed, more than 3: a, b, c, d')
    >>> judge([Outcome(2, ["a"])], 1, lambda test: True)
    ([], 'a test run was cut off (exit code 2)')
    >>> judge([Outcome(0, [])], 2, lambda test: True)
    ([], '1 of 2 test runs came to their end')
    >>> judge([Outcome(1, [])], 1, lambda test: True)
    ([], 'a test run failed, but none of its tests')
    """
    if len(outcomes) != expected_runs:
        return [], f"{len(outcomes)} of {expected_runs} test runs came to their end"
    for each in outcomes:
        if each.exit_code not in {0, 1}:
            return [], f"a test run was cut off (exit code {each.exit_code})"
        if each.exit_code == 1 and not each.failed:
            return [], "a test run failed, but none of its tests"
    failed = list(dict.fromkeys(test for each in outcomes for test in each.failed))
    if len(failed) > MOST_FLAKY:
        return [], f"{len(failed)} tests failed, more than {MOST_FLAKY}: {', '.join(failed)}"
    flaky = [test for test in failed if passes(test)]
    still = [test for test in failed if test not in flaky]
    return flaky, f"failed again, alone: {', '.join(still)}" if still else None


def passes_alone(test: str) -> bool:
    """Return whether a test passes in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-m", "", test]
    environment = {name: value for name, value in os.environ.items() if name != OUTCOMES}
    return subprocess.run(command, env=environment, check=False).returncode == 0


def main(path: Path, expected_runs: int) -> int:
    """Repeat what failed, print the summary, and return the exit code of the whole."""
    flaky, reason = judge(read_outcomes(path), expected_runs, passes_alone)
    lines = [f"FLAKY {test}" for test in flaky]
    if reason is not None:
        lines.append(f"RED {reason}")
    for line in lines:
        print(line, flush=True)  # noqa: T201  (its output)
    summary = os.environ.get(SUMMARY)
    if summary and lines:
        with Path(summary).open("a") as file:
            file.write("".join(f"- {line}\n" for line in lines))
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main(Path(os.environ[OUTCOMES]), int(sys.argv[1])))
