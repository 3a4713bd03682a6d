"""The description of the package that Airflow reads."""

from __future__ import annotations

from typing import Any


def provider_info() -> dict[str, Any]:
    """Return the members that Airflow's providers have."""
    return {
        "package-name": "tidegauge-airflow",
        "name": "tidegauge",
        "description": "A sensor that waits for a watermark of tidegauge.",
        "connection-types": [
            {
                "connection-type": "tidegauge",
                "hook-class-name": "tidegauge_airflow.hook.TidegaugeHook",
                "hook-name": "tidegauge",
            }
        ],
    }
