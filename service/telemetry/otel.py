"""The service's spans: requests, steps of the live store, and rounds of publishing.

Only `service.telemetry.tracing` imports this, once traces are enabled.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.errors import ProblemError

_LONGEST_NAME: Final = 128
"""Names in a path are whatever a client sends."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()


def exporting() -> TracerProvider:
    """Return a provider that sends spans by OTLP over HTTP, as the environment's variables configure."""
    named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = named or "OTEL_SERVICE_NAME" in os.environ
    provider = TracerProvider(
        resource=Resource.create({} if is_named else {"service.name": "tidegauge"})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Tracing:
    """Makes spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tidegauge.service")

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    @contextmanager
    def request(
        self, endpoint: str, method: str, headers: Mapping[str, str], named: Mapping[str, str]
    ) -> Generator[Span]:
        """Trace a request. It goes on with the trace of its header `traceparent`, if it has one.

        A refusal is an answer. Only what is the service's own fault is an error of the span.
        """
        with self._tracer.start_as_current_span(
            endpoint,
            context=_PROPAGATOR.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                **{f"tidegauge.{name}": value[:_LONGEST_NAME] for name, value in named.items()},
            },
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except ProblemError as error:
                span.set_attribute("http.response.status_code", error.status)
                span.set_attribute("error.type", error.slug)
                if error.status >= 500:
                    span.set_status(StatusCode.ERROR)
                raise
            except Exception as error:
                span.record_exception(error)
                span.set_status(StatusCode.ERROR)
                raise

    @contextmanager
    def live_step(self, name: str, job: str) -> Generator[None]:
        """Trace a step of the live store, if it is part of a request: others are taken all the time."""
        if not trace.get_current_span().is_recording():
            yield
            return
        with self._tracer.start_as_current_span(
            f"live.{name}", kind=SpanKind.CLIENT, attributes={"tidegauge.job": job}
        ):
            yield

    def requester(self) -> SpanContext | None:
        """Return who is served here, for the span of the round that publishes it; None: nobody."""
        span = trace.get_current_span()
        return span.get_span_context() if span.is_recording() else None

    @contextmanager
    def publication(self, requests: Sequence[SpanContext]) -> Generator[Span]:
        """Trace a round of publishing in the trace of its first request, linked to all requests."""
        first = trace.set_span_in_context(trace.NonRecordingSpan(requests[0]))
        with self._tracer.start_as_current_span(
            "publish", context=first, links=[Link(each) for each in requests]
        ) as span:
            yield span
