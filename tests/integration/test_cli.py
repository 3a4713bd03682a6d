"""The command: what it refuses, it refuses in a line that says what to do, with exit code 2."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import Service


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ledger-url", "sqlite+aiosqlite:////no-such-folder/x.db"], "TIDEGAUGE_LEDGER_URL"),
        (["--ledger-url", "nosuch://x"], "TIDEGAUGE_LEDGER_URL"),
        (["--live-url", "nosuch://x"], "memory://"),
        (["--workers", "2"], "redis://"),
        (["--workers", "2", "--live-url", "redis://127.0.0.1:1"], "postgresql+psycopg://"),
        (["--log-level", "loud"], "TIDEGAUGE_LOG_LEVEL"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    done = run("serve", "--port", "0", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("tidegauge: ")]
    assert says in line
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_said_in_a_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("serve", "--port", str(taken.getsockname()[1]), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("tidegauge: cannot listen on 127.0.0.1:")


def test_a_second_process_on_one_ledger_is_refused(tmp_path: Path) -> None:
    with Service(tmp_path) as service:
        done = run("serve", "--port", "0", TIDEGAUGE_LEDGER_URL=service.ledger_url, cwd=tmp_path)
    assert done.returncode == 2
    assert "one process" in done.stderr


def test_migrate_makes_the_schema(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'ledger.db'}"
    for _ in range(2):
        assert run("migrate", "--ledger-url", url, cwd=tmp_path).returncode == 0
    assert (tmp_path / "ledger.db").exists()


def test_help_has_examples(tmp_path: Path) -> None:
    for command in ("serve", "migrate"):
        assert f"tidegauge {command}" in run(command, "--help", cwd=tmp_path).stdout
