"""Traces by OpenTelemetry, from an agent's report to its publication; and nothing of them while off."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from service.server.app import create_app
from service.settings import Settings
from service.telemetry import otel as service_otel
from service.telemetry import tracing as service_tracing
from spark_agent.client import otel as agent_otel
from spark_agent.client import tracing as agent_tracing
from spark_agent.client.client import Client
from spark_agent.client.errors import UnknownStage
from spark_agent.client.reports import RangeReport, Rank
from tests.support.api import ok
from tests.support.binaries import free_port, wait_until
from tests.support.collector import Collector
from tests.support.server import Service


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Everything that agent and service in this process trace."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(service_tracing.SWITCH, "tracing", service_otel.Tracing(provider))
    monkeypatch.setattr(agent_tracing.SWITCH, "tracing", agent_otel.Tracing(provider))
    monkeypatch.setattr(agent_tracing.SWITCH, "is_read", True)
    return exporter


@pytest.fixture
def url(spans: InMemorySpanExporter, tmp_path: Path) -> Iterator[str]:
    """A service in a thread of this process."""
    assert not spans.get_finished_spans()
    settings = Settings(
        _env_file=None,  # pyright: ignore[reportCallIssue]
        ledger_url=f"sqlite+aiosqlite:///{tmp_path}/ledger.db",
    )
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the service has started")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_one_trace_from_a_report_to_its_publication(url: str, spans: InMemorySpanExporter) -> None:
    client = Client(url)
    client.declare("scores", {"s": {"shards": ["a"]}})
    run = client.open_run("scores", ["s"], holder="me")
    lease = client.claim("scores", "s", None, holder="me", ttl_ms=60_000, rank=Rank(run, 0, 0))
    spans.clear()
    client.report("scores", "s", lease, {"a": RangeReport(1_000)})
    found = of_names(spans, "report", "publish")
    report, publish = found["report", "tidegauge.agent"], found["publish", "tidegauge.service"]
    request, live = found["report", "tidegauge.service"], found["live.report", "tidegauge.service"]
    assert len({context_of(each) for each in found.values()}) == 1, "it is one trace"
    assert parent_of(request) == id_of(report)
    assert parent_of(live) == parent_of(publish) == id_of(request)
    assert [link.context.span_id for link in publish.links] == [id_of(request)]
    attributes = dict(request.attributes or {})
    assert attributes["tidegauge.job"] == "scores"
    assert attributes["tidegauge.stage"] == "s"
    assert attributes["http.response.status_code"] == 200
    assert dict(report.attributes or {})["tidegauge.ranges"] == 1

    spans.clear()
    client.report("scores", "s", lease, {"a": RangeReport(2_000)}, epoch=1)
    client.commit("scores", run, 1, {"s": None})
    found = of_names(spans, "commit", "publish")
    commit, publish = found["commit", "tidegauge.agent"], found["publish", "tidegauge.service"]
    assert context_of(publish) == context_of(commit)

    spans.clear()
    with pytest.raises(UnknownStage):
        client.report("scores", "nosuch", lease, {"a": RangeReport(1_000)})
    refused = of_names(spans, "report")["report", "tidegauge.service"]
    assert dict(refused.attributes or {})["http.response.status_code"] == 404
    assert refused.status.status_code is StatusCode.UNSET, "a refusal is an answer"


def of_names(spans: InMemorySpanExporter, *names: str) -> dict[tuple[str, str], ReadableSpan]:
    """Wait for spans of these names; return all, by name and by who made them."""

    def found() -> dict[tuple[str, str], ReadableSpan]:
        ended = spans.get_finished_spans()
        return {(each.name, scope_of(each)): each for each in ended}

    def are_there() -> bool:
        both = {("report", "tidegauge.service"), ("report", "tidegauge.agent")}
        needed = both if "report" in names else {(names[0], "tidegauge.agent")}
        return needed <= found().keys() and set(names) <= {name for name, _ in found()}

    wait_until(are_there, f"spans {names}")
    return found()


def scope_of(span: ReadableSpan) -> str:
    return span.instrumentation_scope.name if span.instrumentation_scope else ""


def context_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


OFF = """
import sys
import threading
import spark_agent.client.client
from spark_agent.client import tracing as agents
with agents.span("report", "j"):
    assert agents.headers() == {}
assert not any(name.startswith("opentelemetry") for name in sys.modules)
from service.telemetry import tracing
from service.server.app import create_app
tracing.start()
create_app()
assert tracing.SWITCH.tracing is None
# FastAPI imports the API by itself, where it is installed.
assert not any(name.startswith(("opentelemetry.sdk", "opentelemetry.exp")) for name in sys.modules)
"""


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_off_means_that_nothing_of_it_is_imported(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF],
        env={"PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_exporter_that_is_not_known_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        service_tracing.start({"OTEL_TRACES_EXPORTER": "zipkin"})
    assert "OTEL_TRACES_EXPORTER is 'zipkin': only 'otlp' and 'none' are known" in caplog.text
    assert service_tracing.SWITCH.tracing is None


def test_settings_that_opentelemetry_refuses_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a service nor a task may fail by them."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with caplog.at_level(logging.WARNING):
        service_tracing.start({"OTEL_TRACES_EXPORTER": "otlp"})
    assert "OpenTelemetry refuses its settings" in caplog.text
    assert service_tracing.SWITCH.tracing is None


def test_a_service_sends_its_spans_to_a_collector(tmp_path: Path) -> None:
    parent = f"00-{7:032x}-{9:016x}-01"
    with Collector() as collector:
        with Service(tmp_path, environment=collector.environment) as service:
            ok(httpx.get(f"{service.url}/v1/jobs", headers={"traceparent": parent}))
            service.stop()
        received = list(collector.spans())
        assert collector.paths == {"/v1/traces"}
    assert {each.service for each in received} == {"tidegauge"}
    [span] = [each.span for each in received if each.span.name == "list_pipelines"]
    assert (span.trace_id, span.parent_span_id) == (bytes(15) + b"\7", bytes(7) + b"\t")
