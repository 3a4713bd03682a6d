"""An OpenTelemetry collector that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from typing_extensions import override


@dataclass(frozen=True)
class Received:
    """A span, and whose it is."""

    service: str
    span: Span


class Collector:
    """Takes spans by OTLP over HTTP, on a free port."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._bodies: list[bytes] = []
        bodies, paths = self._bodies, self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                paths.add(self.path)
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            @override
            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment by which a process sends its spans here."""
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }

    def spans(self) -> Iterator[Received]:
        """Yield what has arrived."""
        for body in list(self._bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                [service] = [
                    each.value.string_value
                    for each in resource.resource.attributes
                    if each.key == "service.name"
                ]
                for scope in resource.scope_spans:
                    yield from (Received(service, span) for span in scope.spans)
