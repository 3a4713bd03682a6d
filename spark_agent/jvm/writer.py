# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""Trigger, mode, format and options of a `DataStreamWriter`, from Spark's internal objects."""

from __future__ import annotations

import re
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.jvm import JavaObject

_INTERVAL: Final = re.compile(r"ProcessingTimeTrigger\((\d+)\)")


def frame_of(writer: DataStreamWriter) -> DataFrame:
    """Return the data frame that a writer writes."""
    return writer._df


def trigger_of(writer: DataStreamWriter) -> str:
    """Return the class name of the writer's trigger, such as `AvailableNowTrigger`."""
    return str(_setting(writer, "trigger").toString()).partition("(")[0]


def interval_ms_of(writer: DataStreamWriter) -> int:
    """Return how long the writer's trigger waits from batch to batch; 0: not at all."""
    trigger = str(_setting(writer, "trigger").toString())
    found = _INTERVAL.fullmatch(trigger)
    return int(found[1]) if found else 0


def output_mode_of(writer: DataStreamWriter) -> str:
    """Return the writer's output mode: `append`, `update` or `complete`."""
    return str(_setting(writer, "outputMode").toString()).lower()


def is_async(writer: DataStreamWriter) -> bool:
    """Return whether Spark is to commit batches asynchronously, some time after they ran."""
    options = str(_setting(writer, "extraOptions").toString()).lower()
    return "asyncprogresstrackingenabled -> true" in options


def format_of(writer: DataStreamWriter) -> str:
    """Return the name of the writer's format, in lower case."""
    return str(_setting(writer, "source")).lower()


def option_of(writer: DataStreamWriter, name: str) -> str | None:
    """Return one of the writer's options; None: it is not set."""
    found = _setting(writer, "extraOptions").get(name)
    return str(found.get()) if found.isDefined() else None


def _setting(writer: DataStreamWriter, name: str) -> JavaObject:
    writer_: JavaObject = writer._jwrite
    found = writer_.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(writer_)


AVAILABLE_NOW: Final = "AvailableNowTrigger"
ONCE: Final = "OneTimeTrigger"
