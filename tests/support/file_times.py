"""Times of a test run, by file and by process.

As a pytest plugin (`-p tests.support.file_times`) it prints, after a run, the files whose tests took the
longest, and how long each process was busy. It shows where the minutes of CI go.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

MOST_FILES: Final = 30


class FileTimes:
    """Adds up the durations of tests, with what came before and after them (s)."""

    def __init__(self) -> None:
        self._files_ms: Counter[str] = Counter()
        self._processes_ms: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's duration."""
        duration_ms = round(report.duration * 1_000)
        self._files_ms[report.nodeid.partition("::")[0]] += duration_ms
        self._processes_ms[getattr(report, "worker_id", "this process")] += duration_ms

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest files, and all processes."""
        terminalreporter.section("seconds by file and by process")
        for name, total_ms in [
            *self._files_ms.most_common(MOST_FILES),
            *sorted(self._processes_ms.items()),
        ]:
            terminalreporter.write_line(f"{total_ms / 1_000:8.1f} {name}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the times, but not in the processes of pytest-xdist, which report to this one."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileTimes())
