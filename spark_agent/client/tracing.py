"""Traces of the agent's calls, off by default. The environment variables of OpenTelemetry turn them on.

While tracing is off, nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from spark_agent.client.otel import Tracing


_log: Final = logging.getLogger("spark_agent")

_EXPORTER_VARIABLE: Final = "OTEL_TRACES_EXPORTER"
_OTLP: Final = "otlp"


@dataclass(slots=True)
class Switch:
    """State of tracing in this process. Executors have processes of their own."""

    tracing: Tracing | None = None
    """None: tracing is off."""
    is_read: bool = False
    """True once the environment was read."""

    def get(self) -> Tracing | None:
        """Return the maker of spans; None: tracing is off."""
        if not self.is_read:
            self.is_read = True
            self.tracing = _start(os.environ)
        return self.tracing


SWITCH: Final = Switch()


def span(name: str, job: str, **attributes: str | int) -> AbstractContextManager[object]:
    """Return a span to make calls in; an empty context while tracing is off."""
    tracing = SWITCH.get()
    if tracing is None:
        return nullcontext()
    return tracing.span(name, {"tidegauge.job": job, **_of_tidegauge(attributes)})


def headers() -> Mapping[str, str]:
    """Return the headers that continue the current trace in the service."""
    tracing = SWITCH.get()
    return {} if tracing is None else tracing.headers()


def _of_tidegauge(attributes: Mapping[str, str | int]) -> Mapping[str, str | int]:
    return {f"tidegauge.{name}": value for name, value in attributes.items()}


def _start(environment: Mapping[str, str]) -> Tracing | None:
    """Begin to trace. A failure is only logged: a task never fails because of tracing."""
    wanted = environment.get(_EXPORTER_VARIABLE, "").strip().lower()
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if wanted in ("", "none") or disabled:
        return None
    if wanted != _OTLP:
        _log.warning("invalid %s %r: write %r or 'none'", _EXPORTER_VARIABLE, wanted, _OTLP)
        return None
    try:
        from spark_agent.client.otel import Tracing, provider  # noqa: PLC0415 - not while it is off
    except ModuleNotFoundError as error:
        _log.warning(
            "%s=%s needs the package %s: pip install 'tidegauge[otel]'",
            _EXPORTER_VARIABLE,
            _OTLP,
            error.name,
        )
        return None
    try:
        return Tracing(provider())
    except Exception as error:  # noqa: BLE001 - whatever OpenTelemetry makes of its environment
        _log.warning("not tracing: OpenTelemetry rejects its settings: %s", error)
        return None
