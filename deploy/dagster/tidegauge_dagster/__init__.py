"""A sensor for Dagster: a run for each partition of time that a watermark of tidegauge has passed."""

from tidegauge_dagster.resource import TidegaugeResource
from tidegauge_dagster.sensor import watermark_sensor

__all__ = ["TidegaugeResource", "watermark_sensor"]
