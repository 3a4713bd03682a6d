# pyright: basic, reportCallIssue=false, reportOptionalCall=false
# ruff: noqa: SLF001
"""Trigger, mode, format and options of a `DataStreamWriter`, from Spark's internal objects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_agent.jvm import JavaObject

AVAILABLE_NOW: Final = "AvailableNowTrigger"
ONCE: Final = "OneTimeTrigger"

_INTERVAL: Final = re.compile(r"ProcessingTimeTrigger\((\d+)\)")


def frame_of(writer: DataStreamWriter) -> DataFrame:
    """Return the data frame that a writer writes."""
    return writer._df


@dataclass(frozen=True, slots=True)
class Trigger:
    """The trigger of a query's batches."""

    kind: str
    """Spark's class of the trigger, such as `AvailableNowTrigger`."""
    interval_ms: int = 0
    """The shortest time from batch to batch."""

    @property
    def is_available_now(self) -> bool:
        """True if the query reads the data available at its start, and ends."""
        return self.kind == AVAILABLE_NOW

    @property
    def ends(self) -> bool:
        """True if the query ends by itself."""
        return self.kind in {AVAILABLE_NOW, ONCE}


def trigger_of(writer: DataStreamWriter) -> Trigger:
    """Return the writer's trigger."""
    text = str(setting(writer, "trigger").toString())
    interval = _INTERVAL.fullmatch(text)
    return Trigger(text.partition("(")[0], int(interval[1]) if interval else 0)


def output_mode_of(writer: DataStreamWriter) -> str:
    """Return the writer's output mode: `append`, `update` or `complete`."""
    return str(setting(writer, "outputMode").toString()).lower()


def is_async(writer: DataStreamWriter) -> bool:
    """Return whether Spark commits batches asynchronously, some time after they ran."""
    options = str(setting(writer, "extraOptions").toString()).lower()
    return "asyncprogresstrackingenabled -> true" in options


def format_of(writer: DataStreamWriter) -> str:
    """Return the name of the writer's format, in lower case."""
    return str(setting(writer, "source")).lower()


def option_of(writer: DataStreamWriter, name: str) -> str | None:
    """Return one of the writer's options; None: not set."""
    found = setting(writer, "extraOptions").get(name)
    return str(found.get()) if found.isDefined() else None


def setting(writer: DataStreamWriter, name: str) -> JavaObject:
    """Return a setting of the writer, by the name of its field."""
    writer_: JavaObject = writer._jwrite
    found = writer_.getClass().getDeclaredField(name)
    found.setAccessible(True)
    return found.get(writer_)
