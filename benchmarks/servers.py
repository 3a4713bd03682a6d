"""The servers that are compared, each a process of its own, and what they use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.binaries import free_port
from tests.support.server import Service

ROOT = Path(__file__).parents[1]


@contextmanager
def baseline() -> Generator[str]:
    """The server that does nothing; its URL."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.baseline", str(port)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{url}/bare", process)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def service(
    folder: Path,
    *,
    live_url: str = "memory://",
    ledger_url: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Generator[Service]:
    """The service; without a ledger named, on a new one."""
    folder.mkdir()
    options = ("--log-level", "warning", "--live-url", live_url)
    made = Service(folder, options=options, environment=environment)
    made.ledger_url = ledger_url or made.ledger_url
    with made as running:
        yield running


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no VmRSS of {pid}")


def processor_seconds(pid: int, *, family: bool = False) -> float:
    """Return the processor time of a process, all threads; with its family, of its children too."""
    own = _stat(Path(f"/proc/{pid}/stat"))
    # Those that have ended are in its own account.
    ticks = sum(own[11 : 15 if family else 13])
    if family:
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                other = _stat(path)
                ticks += sum(other[11:13]) if other[1] == pid else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(path: Path) -> list[int]:
    """The fields after the name; the first of them, a letter, as 0."""
    return [0, *map(int, path.read_text().rsplit(")", 1)[1].split()[1:])]
