"""Real Prometheus and Alertmanager servers, and somebody whom alerts are sent to."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import httpx
from ruamel.yaml import YAML

from tests.support.binaries import end, free_port, launch, wait_until
from tests.support.required import program

INTERVAL = "250ms"


def prometheus_program() -> Path:
    return program("prometheus", install="apt-get install prometheus")


def promtool() -> Path:
    return program("promtool", install="apt-get install prometheus")


def alertmanager_program() -> Path:
    return program(
        "alertmanager", "prometheus-alertmanager", install="apt-get install prometheus-alertmanager"
    )


class _Server:
    """A server with `/-/ready`, started on entry and ended on exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        try:
            return httpx.get(f"{self.url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4_000:]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = launch(self._command(), self.folder / "log", cwd=self.folder)
        try:
            wait_until(self._ready, f"{type(self).__name__} ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            end(process, signal.SIGTERM)


class Prometheus(_Server):
    """Scrapes services every quarter of a second, as `deploy/prometheus.yml` says otherwise."""

    def __init__(
        self,
        folder: Path,
        targets: Sequence[str],
        *,
        rules: str | None = None,
        alertmanager: Alertmanager | None = None,
    ) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        configuration: dict[str, Any] = {
            "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
            "scrape_configs": [
                {
                    "job_name": "tidegauge",
                    "honor_labels": True,
                    "static_configs": [{"targets": list(targets)}],
                }
            ],
        }
        if rules is not None:
            (folder / "alerts.yml").write_text(rules)
            configuration["rule_files"] = ["alerts.yml"]
        if alertmanager is not None:
            known = [{"targets": [f"127.0.0.1:{alertmanager.port}"]}]
            configuration["alerting"] = {"alertmanagers": [{"static_configs": known}]}
        with (folder / "prometheus.yml").open("w") as file:
            YAML().dump(configuration, file)

    def _command(self) -> Sequence[str | Path]:
        return [
            prometheus_program(),
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": expression}, timeout=30)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return answer.json()["data"]["result"]


class Alertmanager(_Server):
    """Sends each alert, and its end, to a webhook at once."""

    def __init__(self, folder: Path, webhook: str) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        configuration = {
            "route": {
                "receiver": "test",
                "group_by": ["..."],
                "group_wait": "10ms",
                "group_interval": "100ms",
            },
            "receivers": [
                {"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
            ],
        }
        with (folder / "alertmanager.yml").open("w") as file:
            YAML().dump(configuration, file)

    def _command(self) -> Sequence[str | Path]:
        return [
            alertmanager_program(),
            f"--config.file={self.folder / 'alertmanager.yml'}",
            f"--storage.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--cluster.listen-address=",
        ]


class Webhook:
    """Takes what Alertmanager sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: list[dict[str, Any]] = []
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.take(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def take(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._received.extend(message["alerts"])

    def states(self, name: str, **labels: str) -> list[str]:
        """Return the states of an alert, in order: firing, resolved."""
        wanted = {"alertname": name, **labels}.items()
        with self._lock:
            return [each["status"] for each in self._received if wanted <= each["labels"].items()]

    def received(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._received)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
