"""The command: what it refuses, it refuses in a line that says what to do, with exit code 2."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import RedisServer
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


def test_there_is_no_service_without_a_process(tmp_path: Path) -> None:
    done = run("serve", "--port", "0", "--workers", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "--workers" in done.stderr


@pytest.mark.parametrize(
    "wrong", [["--limit", "none"], ["--nosuch"], ["one", "two"], ["-o", "yaml", "--json"]]
)
def test_a_mistyped_status_is_not_critical(tmp_path: Path, wrong: list[str]) -> None:
    """Monitoring takes exit code 2 for a critical problem, and 3 for an unknown health."""
    assert run("status", *wrong, cwd=tmp_path).returncode == 3
    assert run("jobs", *wrong, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("option", ["--url", "--profile"])
def test_a_command_of_this_machine_refuses_the_address_of_a_service(
    tmp_path: Path, option: str
) -> None:
    """It was ignored: `doctor` examined this machine, and not the service that was named."""
    done = run(option, "http://gauge:8080", "doctor", cwd=tmp_path)
    assert done.returncode == 2
    assert "doctor works on this machine" in " ".join(done.stderr.replace("│", " ").split())


def test_a_time_before_now_is_not_an_option(tmp_path: Path) -> None:
    done = run("eta", "scores", "average", "-2h", "--url", "http://127.0.0.1:1", cwd=tmp_path)
    assert "is tidegauge at http://127.0.0.1:1?" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is full")
@pytest.mark.parametrize("arguments", [["schema"], ["--help"], ["doctor", "--json"]])
def test_a_full_disk_is_an_error_in_a_line(tmp_path: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "service", *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "tidegauge: the output cannot be written: No space left on device\n"


def test_a_closed_output_is_not_written_to(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" -m service doctor >&-', sys.executable],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("option", "url"),
    [
        ("--ledger-url", f"nosuch://user:{SECRET}@host/db"),
        ("--ledger-url", f"postgresql://host/db?user=me&password={SECRET}"),
        ("--ledger-url", f"postgresql+psycopg://user:x/{SECRET}@host:y/db"),
        ("--ledger-url", f"postgresql+psycopg://user:{SECRET}@host:port/db"),
        ("--ledger-url", f"user:{SECRET}@host"),
        ("--ledger-url", f"postgresql+psycopg://user:{SECRET}@127.0.0.1:1/db"),
        ("--live-url", f"nosuch://user:{SECRET}@host"),
        ("--live-url", f"user:{SECRET}@host"),
        ("--live-url", f"redis://:{SECRET}@host:port"),
        ("--live-url", f"redis://:a/{SECRET}@host"),
        ("--live-url", f"redis://host?passwd={SECRET}"),
        ("--live-url", f"redis+sentinel://host/?sentinel_password={SECRET}"),
        ("--live-url", f"rediss://:{SECRET}@[::1/0"),
    ],
)
def test_a_url_is_refused_without_its_password(tmp_path: Path, option: str, url: str) -> None:
    done = run("serve", "--port", "0", option, url, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "tidegauge: " in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["TIDEGAUGE_LEDGER_URL", "TIDEGAUGE_LIVE_URL"])
def test_a_url_can_come_from_a_file(tmp_path: Path, name: str) -> None:
    """So that its password is in no list of processes and in no environment."""
    file = tmp_path / "url"
    done = run("serve", "--port", "0", **{f"{name}_FILE": str(file)}, cwd=tmp_path)
    assert done.returncode == 2
    assert str(file) in done.stderr
    file.write_text("nosuch://host/of-the-file\n")
    done = run("serve", "--port", "0", **{f"{name}_FILE": str(file)}, cwd=tmp_path)
    assert done.returncode == 2
    assert "nosuch://host/of-the-file" in done.stderr


def test_a_taken_port_is_said_in_a_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("serve", "--port", str(taken.getsockname()[1]), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("tidegauge: cannot listen on 127.0.0.1:")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://HERE/99", "DB index is out of range. Choose another database"),
        ("redis://HERE?db=-1", "DB index is out of range"),
        ("redis://HERE/orders", "'orders' is not the number of a database"),
        ("redis+sentinel://HERE/primary/0", "unknown command"),
        ("redis+cluster://HERE", "the server is not a Cluster"),
    ],
)
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("doctor",)], ids=lambda c: c[0])
def test_a_redis_that_cannot_be_used_is_said_in_a_line(
    tmp_path: Path, redis_server: RedisServer, command: tuple[str, ...], url: str, says: str
) -> None:
    url = url.replace("HERE", f"127.0.0.1:{redis_server.port}")
    done = run(*command, "--live-url", url, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert line.startswith(f"tidegauge: TIDEGAUGE_LIVE_URL '{url}' cannot be used: ")
    assert says in line


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("doctor",), ("migrate",)])
def test_settings_that_are_no_text_are_said_in_a_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / ".env").write_bytes(b"TIDEGAUGE_PORT=\xff")
    done = run(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "tidegauge: the file .env cannot be read: it is not UTF-8\n",
    )


def test_several_processes_refuse_a_wrong_database_in_a_line(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
) -> None:
    done = run(
        *("serve", "--port", "0", "--workers", "2", "--live-url", f"{redis_server.url}/99"),
        *("--ledger-url", postgres_server.database()),
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert "DB index is out of range" in line


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
