"""A sensor for Apache Airflow: a task that waits until a watermark of tidegauge has passed a moment."""

from tidegauge_airflow.hook import TidegaugeHook
from tidegauge_airflow.sensor import WatermarkSensor
from tidegauge_airflow.trigger import WatermarkTrigger

__all__ = ["TidegaugeHook", "WatermarkSensor", "WatermarkTrigger"]
