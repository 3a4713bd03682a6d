"""The two servers that are compared, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.server import Service, free_port

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
def service(folder: Path) -> Generator[Service]:
    """The service on a new ledger."""
    folder.mkdir()
    with Service(folder, options=("--log-level", "warning")) as running:
        yield running


def resident_bytes(pid: int) -> int:
    """How much memory a process has now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no VmRSS of {pid}")


def processor_seconds(pid: int) -> float:
    """How much processor time a process has had, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100
