"""The demonstration's own tidegauge service, a process with embedded stores."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_agent.client.client import Client
from spark_agent.clock import Clock

_START_MS: Final = 30_000
_STOP_MS: Final = 15_000


class CannotServeError(Exception):
    """The service could not be started. The message has the reason and the remedy."""


@dataclass(frozen=True)
class Server:
    """A running service."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self) -> None:
        """Terminate the service, and wait for its end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_MS / 1_000)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_server(folder: Path, port: int | None, clock: Clock) -> Server:
    """Start tidegauge in `folder` on a port, or on a free one. Raises `CannotServeError`."""
    number = _free_port(port)
    log = folder / "tidegauge.log"
    command = [sys.executable, "-m", "service.cli", "serve", "--host", "127.0.0.1"]
    command += ["--port", str(number), "--live-url", "memory://"]
    command += ["--ledger-url", f"sqlite+aiosqlite:///{folder / 'tidegauge.db'}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGAUGE_")}
    with log.open("wb") as out:
        # A session of its own: Ctrl-C must not reach it before Spark's queries are stopped.
        process = subprocess.Popen(  # noqa: S603
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{number}", log)
    _wait_until_ready(server, clock)
    return server


def _wait_until_ready(server: Server, clock: Clock) -> None:
    client = Client(server.url)
    deadline_ms = clock.steady_ms() + _START_MS
    while not client.ready():
        if server.process.poll() is not None or clock.steady_ms() > deadline_ms:
            server.process.kill()
            last = server.log.read_text(errors="replace").strip().splitlines()[-1:]
            why = last[0] if last else f"no answer within {_START_MS // 1_000} s"
            raise CannotServeError(f"tidegauge did not start: {why}")
        clock.pause(50)


def _free_port(port: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise CannotServeError(
                f"port {port} is not available ({os.strerror(error.errno or 0)}): "
                f"choose another one with --port, or leave it out to take a free one"
            ) from None
        return int(probe.getsockname()[1])
