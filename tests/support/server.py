"""The real service as a process of its own, to be killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.support.binaries import free_port

ROOT = Path(__file__).resolve().parents[2]
START_S = 240
"""Only a service that hangs takes so long: beside others, its imports alone have taken a minute."""
STOP_S = 60


class Service:
    """One service on one ledger and one port, through any number of processes."""

    def __init__(
        self,
        folder: Path,
        *,
        options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._tls = tls
        self.ledger_url = f"sqlite+aiosqlite:///{folder / 'ledger.db'}"
        self._options = options
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and come back once it is ready."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start without waiting."""
        assert self._process is None, "already running"
        self._log = (self.folder / "service.log").open("ab")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGAUGE_")}
        environment |= {"PYTHONPATH": str(ROOT)} | self._environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", *self._arguments()],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def _arguments(self) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [*where, "--ledger-url", self.ledger_url, *self._options]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"ended with {self._process.returncode}\n{self.log()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not ready after {START_S} s\n{self.log()}")
            time.sleep(0.02)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"{self.url}/readyz", timeout=5, context=self._tls
            ) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def log(self) -> str:
        """The end of its log."""
        return (self.folder / "service.log").read_text(errors="replace")[-8000:]

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        """Return the number of its open files and sockets."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def kill(self) -> None:
        """Kill it, as a machine failure would: without a shutdown or a last checkpoint."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Terminate it and wait for an orderly end, which uvicorn also shows by the signal."""
        status = self._end(signal.SIGTERM)
        assert status in {0, -signal.SIGTERM}, f"ended with {status}\n{self.log()}"

    def restart(self) -> None:
        self.stop()
        self.start()

    def lose_ledger(self) -> None:
        """Kill it, and start it without what it knew."""
        self.kill()
        for each in self._ledger_files():
            each.unlink()
        self.start()

    def back_up(self, folder: Path) -> None:
        """Stop it, copy its ledger into a new folder, and start it again."""
        folder.mkdir()
        self.stop()
        for each in self._ledger_files():
            shutil.copy(each, folder)
        self.start()

    def restore(self, folder: Path) -> None:
        """Kill it, and start it with a copy of its ledger."""
        self.kill()
        for each in self._ledger_files():
            each.unlink()
        for each in folder.iterdir():
            shutil.copy(each, self.folder)
        self.start()

    def _ledger_files(self) -> list[Path]:
        return list(self.folder.glob("ledger.db*"))

    def _end(self, how: signal.Signals) -> int:
        assert self._process is not None, "not running"
        process, self._process = self._process, None
        process.send_signal(how)
        try:
            return process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"did not end {STOP_S} s after {how.name}\n{self.log()}") from None
        finally:
            if self._log is not None:
                self._log.close()

    def __enter__(self) -> Service:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self.kill()
