"""A broker of Kafka: one process without ZooKeeper, with its files in a folder."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_agent.clock import Clock
from spark_agent.kafka_jars import KafkaJars

_START_MS: Final = 60_000
_STOP_MS: Final = 15_000


class CannotStartBrokerError(Exception):
    """The broker could not be started. The message has the reason."""


def new_cluster_id(draw: Callable[[], uuid.UUID] = uuid.uuid4) -> str:
    """Return the id of a new cluster. One that begins with a hyphen is drawn again, as Kafka does: its
    tools would take it for an option.
    """
    while True:
        drawn = urlsafe_b64encode(draw().bytes).decode().rstrip("=")
        if not drawn.startswith("-"):
            return drawn


@dataclass(frozen=True)
class BrokerFiles:
    """A broker's folder, jars and ports."""

    jars: KafkaJars
    folder: Path
    port: int
    controller_port: int

    @property
    def servers(self) -> str:
        """The address, as `bootstrap.servers` has it."""
        return f"127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command that starts the broker, once `prepare` has run."""
        return [*self._java("kafka.Kafka"), str(self._properties)]

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def prepare(self, settings: Mapping[str, str] | None = None) -> None:
        """Write the settings, and format the folder, unless this is done.

        Raises `CalledProcessError`.
        """
        if self._properties.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {**self._settings(), **(settings or {})}
        lines = (f"{name}={value}\n" for name, value in settings.items())
        self._properties.write_text("".join(lines))
        tool = self._java("kafka.tools.StorageTool")
        subprocess.run(  # noqa: S603  (arguments of our own)
            [*tool, "format", "-t", new_cluster_id(), "-c", str(self._properties)],
            check=True,
            capture_output=True,
        )

    def is_listening(self) -> bool:
        """Return whether the broker accepts connections."""
        try:
            with closing(socket.create_connection(("127.0.0.1", self.port), 1)):
                return True
        except OSError:
            return False

    def _java(self, main: str) -> list[str]:
        java = shutil.which("java") or "java"
        return [java, "-Xmx384m", "-XX:+UseSerialGC", "-cp", f"{self.jars.broker}/*", main]

    def _settings(self) -> dict[str, str]:
        broker, controller = self.port, self.controller_port
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.folder / "logs"),
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            # Else rows that are dated years ago are removed, minutes after they were written.
            "log.retention.ms": "-1",
        }


@dataclass(frozen=True)
class Broker:
    """A running broker."""

    process: subprocess.Popen[bytes]
    servers: str

    def stop(self) -> None:
        """Terminate the broker, and wait for its end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_MS / 1_000)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_broker(jars: KafkaJars, folder: Path, clock: Clock) -> Broker:
    """Start a broker on free ports. Raises `CannotStartBrokerError`."""
    files = BrokerFiles(jars, folder, *_free_ports())
    try:
        files.prepare()
    except subprocess.CalledProcessError as error:
        raise CannotStartBrokerError(f"the broker's folder cannot be formatted: {error}") from None
    log = folder / "kafka.log"
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603  (arguments of our own)
            files.command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            # A session of its own: Ctrl-C must not reach it before Spark's queries are stopped.
            start_new_session=True,
        )
    deadline_ms = clock.steady_ms() + _START_MS
    while not files.is_listening():
        if process.poll() is not None or clock.steady_ms() > deadline_ms:
            process.kill()
            process.wait()
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            reason = last[0] if last else f"not within {_START_MS // 1_000} s"
            raise CannotStartBrokerError(f"the broker did not start: {reason}")
        clock.pause(50)
    return Broker(process, files.servers)


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])
