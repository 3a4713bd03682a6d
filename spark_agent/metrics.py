"""The driver's Prometheus counters; `prometheus_client.start_http_server` exposes them."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter

_ROWS: Final = Counter(
    "tidegauge_agent_events",
    "What should be rare, by job, stage and kind (early_rows, late_rows, …).",
    ["job", "stage", "kind"],
)


def count_rows(job: str, stage: str, kind: str, count: int) -> None:
    """Add to the counter of one kind."""
    _ROWS.labels(job, stage, kind).inc(count)
