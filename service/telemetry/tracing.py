"""Traces of requests: off, unless the environment turns them on, as OpenTelemetry's standard defines.

While it is off, nothing of OpenTelemetry is imported, and each place that would have a span costs one
`if`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from service.telemetry.otel import Tracing


log = logging.getLogger(__name__)

EXPORTER_VARIABLE: Final = "OTEL_TRACES_EXPORTER"
DISABLED_VARIABLE: Final = "OTEL_SDK_DISABLED"
OTLP: Final = "otlp"


@dataclass(slots=True)
class Switch:
    """State of tracing in this process."""

    tracing: Tracing | None = None
    """None: it is off."""


SWITCH: Final = Switch()


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Begin to trace, if the environment enables it.

    What cannot be done is logged: it must not keep a service from starting that others wait for.
    """
    wanted = environment.get(EXPORTER_VARIABLE, "").strip().lower()
    disabled = environment.get(DISABLED_VARIABLE, "").strip().lower() == "true"
    if wanted in ("", "none") or disabled or SWITCH.tracing is not None:
        return
    if wanted != OTLP:
        log.warning("%s is %r: only %r and 'none' are known", EXPORTER_VARIABLE, wanted, OTLP)
        return
    try:
        from service.telemetry.otel import Tracing, exporting  # noqa: PLC0415 - not imported while it is off
    except ModuleNotFoundError as error:
        log.warning(
            "%s=%s needs the package %s: pip install 'tidegauge[otel]'",
            EXPORTER_VARIABLE,
            OTLP,
            error.name,
        )
        return
    try:
        SWITCH.tracing = Tracing(exporting())
    except Exception as error:  # noqa: BLE001 - whatever OpenTelemetry makes of its environment
        log.warning("not tracing: OpenTelemetry refuses its settings: %s", error)


def stop() -> None:
    """Send what is left, and trace no more."""
    tracing, SWITCH.tracing = SWITCH.tracing, None
    if tracing is not None:
        tracing.close()
