# pyright: basic
# ruff: noqa: SLF001
"""Streaming relations of a query's plan: its sources, with their options.

Spark's objects are not public API. See also `spark_agent.jvm.plan`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from spark_agent.jvm import JavaObject
from spark_agent.jvm.catalyst import items
from spark_agent.jvm.checkpoint import configuration
from spark_agent.jvm.nodes import Control, LateFate, LogsSource, TopicsSource
from spark_agent.sources.control import FORMAT
from spark_agent.sources.kafka import (
    FAIL_OPTION,
    ISOLATION_OPTION,
    SERVERS_OPTION,
    STAGE_OPTION,
    TOPIC_LIMIT,
    TOPICS_OPTION,
)
from spark_agent.sources.kafka import FORMAT as KAFKA
from spark_agent.sources.logs import FORMAT as LOGS

_LIMITS: Final = frozenset(
    {
        "maxbytespertrigger",
        "maxfilespertrigger",
        "maxoffsetspertrigger",
        "maxrecordsperread",
        "maxrowsperbatch",
        "minoffsetspertrigger",
    }
)
"""Options, in lower case, that make a source leave available data for a later batch."""


_UNLIMITED: Final = frozenset(
    {"avro", "csv", "json", "kafka", "memory", "orc", "parquet", "rate", "socket", "text"}
    | {FORMAT, LOGS}
)
"""Formats that read all available rows unless an option of `_LIMITS` is set, or that report the unread
rest. Others may have limits of their own: a Delta table reads a thousand files at a time."""


def limits_of(node: JavaObject) -> tuple[str, ...]:
    """Return the options of a relation that limit its rows in one batch, in lower case."""
    return tuple(sorted(_LIMITS & _options(node).keys()))


def control_of(node: JavaObject) -> Control | None:
    """Return the control source that a relation is, if it is one."""
    if node.sourceName() != FORMAT:
        return None
    options = node.extraOptions()
    percentile = options.get("percentile")
    return Control(
        options.get("stage"),
        options.get("control"),
        is_gate=options.get("gate") == "true",
        percentile=int(percentile) if percentile else None,
        late=LateFate(options.get("late")),
        allowed_lateness_ms=int(options.get("allowedLatenessMs")),
    )


def logs_source_of(node: JavaObject) -> LogsSource | None:
    """Return the source of logs in folders that a relation is, if it is one."""
    if node.sourceName() != LOGS:
        return None
    options = node.extraOptions()
    return LogsSource(
        options.get("stage"), options.get("source"), has_marker=bool(options.get("complete"))
    )


def topics_source_of(node: JavaObject) -> TopicsSource | None:
    """Return the source of Kafka's topics that a relation is, if it is one."""
    if node.sourceName() != KAFKA:
        return None
    options = node.extraOptions()
    names, servers = (
        frozenset(each.strip() for each in str(options.get(name) or "").split(",") if each.strip())
        for name in (TOPICS_OPTION, SERVERS_OPTION)
    )
    fails = str(options.get(FAIL_OPTION) or "true").lower() == "true"
    limit = options.get(TOPIC_LIMIT)
    stage = options.get(STAGE_OPTION) or ""
    found = TopicsSource(stage, names, limit, fails_on_loss=fails, servers=servers)
    level = options.get(ISOLATION_OPTION)
    return replace(found, isolation=str(level).lower()) if level else found


def format_with_limits(node: JavaObject) -> str:
    """Return the format of a source that may limit its batches without an option; empty: it does not."""
    name = format_of(node)
    return "" if name.lower() in _UNLIMITED else name


def format_of(node: JavaObject) -> str:
    """Return the format of a source, or the name of its table; empty: not a source."""
    match node.nodeName():
        case "StreamingRelation":
            return str(node.dataSource().className())
        case "StreamingRelationV2":
            return str(node.sourceName())
        case _:
            return ""


def paths_of(node: JavaObject, spark: SparkSession) -> frozenset[str]:
    """Return the qualified paths that a relation reads; empty: it does not read files.

    A relation of a table has the table's location among its options.
    """
    options = _options(node)
    if format_of(node) == LOGS:
        return frozenset({f"file:{options['folder']}"})
    return frozenset({_qualified(options["path"], spark)} if options.get("path") else ())


def _qualified(text: str, spark: SparkSession) -> str:
    """Return a path with its file system, from the root on."""
    jvm: JavaObject = spark._jvm
    try:
        path = jvm.org.apache.hadoop.fs.Path(text)
        files = path.getFileSystem(configuration(spark))
        return str(files.makeQualified(path).toString())
    except Py4JJavaError:
        # A format of another kind has its own meaning of a path.
        return text


def _options(node: JavaObject) -> dict[str, str]:
    """Return a streaming relation's options, with names in lower case."""
    match node.nodeName():
        case "StreamingRelation":
            found = {
                str(name): str(node.dataSource().options().apply(name))
                for name in items(node.dataSource().options().keys().toSeq())
            }
        case "StreamingRelationV2":
            options = node.extraOptions()
            found = {str(name): str(options.get(name)) for name in options.keySet().toArray()}
        case _:
            found = {}
    return {name.lower(): value for name, value in found.items()}
