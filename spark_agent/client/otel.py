"""The agent's spans: each report and commit. Imported by `tracing` alone, once tracing is on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR: Final = TraceContextTextMapPropagator()


def provider() -> TracerProvider:
    """Return the program's own provider if it has one; else a provider that sends spans by OTLP over
    HTTP, configured by the environment.
    """
    own = trace.get_tracer_provider()
    if isinstance(own, TracerProvider):
        return own
    named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = named or "OTEL_SERVICE_NAME" in os.environ
    made = TracerProvider(
        resource=Resource.create({} if is_named else {"service.name": "tidegauge-agent"})
    )
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


class Tracing:
    """Makes spans."""

    def __init__(self, made_by: TracerProvider) -> None:
        self._tracer = made_by.get_tracer("tidegauge.agent")

    def span(
        self, name: str, attributes: Mapping[str, str | int]
    ) -> AbstractContextManager[object]:
        """Return a span, in which the current one is its parent."""
        return self._tracer.start_as_current_span(name, kind=SpanKind.CLIENT, attributes=attributes)

    def headers(self) -> Mapping[str, str]:
        """Return the headers of the current trace."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        return carrier
