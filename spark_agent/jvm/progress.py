# pyright: basic
# ruff: noqa: SLF001
"""Progress of queries, as plain values: a finished batch is a `CommittedBatch`.

Spark's listener and the objects behind it are not public API. See also `spark_agent.jvm.plan`.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from spark_agent.exceptions import QueryFailedError
from spark_agent.jvm import JavaObject
from spark_agent.jvm.nodes import LateFate
from spark_agent.sources.control import END_MS
from spark_agent.sources.driver_link import Offset
from spark_agent.sources.kafka import Offsets, offsets_of

_log: Final = logging.getLogger("spark_agent")

_LONGEST_NAME: Final = 256
"""The longest name of a program that the service accepts, in characters."""

_ADDRESS: Final = re.compile(r"https?://[^\s\0]{1,1900}")
"""An address that the service accepts."""

_TRACEBACK: Final = "Traceback (most recent call last):"
_REFUSAL: Final = f"{QueryFailedError.__module__}.{QueryFailedError.__qualname__}: "
"""Prefix of the agent's own message in such a traceback."""

_JAVA_ERROR: Final = re.compile(r"An error occurred while calling \S+\n: (?:[\w.$]+: )?")
"""Precedes the message of a Java exception, in the text of py4j's error."""

_LATE: Final = "tidegauge.late."
LATE_COUNT: Final = "rows"
"""The field of a metric of late rows."""

_WITHOUT_ROWS: Final = frozenset({"dedupe", "dedupeWithinWatermark", "globalLimit"})
"""Operators, by Spark's names in progress events, whose state has no rows that come out."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """A batch that Spark has committed."""

    epoch: int
    watermark_ms: int
    """Spark's own watermark, which the batch ran with; 0: not yet."""
    read_nothing: bool = False
    """True if it found no new data in any source except control sources."""
    rows: int = 0
    """Number of rows read, except from control sources."""
    dropped_rows: int = 0
    """The number of rows that its operators dropped as late."""
    duration_ms: int = 0
    """Duration of the batch."""
    keeps_nothing: bool = False
    """True if the query's operators keep no rows that are still to come out.

    Keys of a deduplication, and the count of a limit, never come out.
    """
    triggered_ms: int = 0
    """The wall clock when its trigger began, before any source was polled for it."""
    late_rows: Mapping[tuple[str, LateFate], int] = field(
        default_factory=dict[tuple[str, LateFate], int]
    )
    """Number of late rows that were set apart, by keyed stage and by what became of them."""
    read: Offsets = field(default_factory=dict[str, Mapping[int, int]])
    """The offsets through which it has read topics of Kafka, by topic and partition."""
    latest: Offsets = field(default_factory=dict[str, Mapping[int, int]])
    """The ends of these partitions when it was planned."""


def late_metric(call: str, stage: str, fate: LateFate) -> str:
    """Return the name of the metric of a query that counts the late rows of one call.

    >>> late_metric("3", "per.hour", LateFate.DROP)
    'tidegauge.late.drop.3.per.hour'
    """
    return f"{_LATE}{fate}.{call}.{stage}"


def _late_rows(metrics: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, LateFate], int]:
    """Return the counts of a batch's observed metrics.

    >>> _late_rows({"mine": {"rows": 9}, "tidegauge.late.drop.3.per.hour": {"rows": 2},
    ...     "tidegauge.late.drop.4.per.hour": {"rows": 1}})
    {('per.hour', <LateFate.DROP: 'drop'>): 3}
    """
    found: Counter[tuple[str, LateFate]] = Counter()
    for name, metric in metrics.items():
        if name.startswith(_LATE):
            fate, _, stage = name.removeprefix(_LATE).split(".", 2)
            found[stage, LateFate(fate)] += metric[LATE_COUNT]
    return dict(found)


def cause_line(message: str) -> str:
    r"""Return the line of an error that has its cause: the first line, without Spark's prefix.

    If an error of Python is wrapped with its traceback, the exception's own line is returned.

    >>> cause_line("[STREAM_FAILED] Query [id = 1] terminated with exception: broken\n at line 5")
    'broken'
    >>> traced = "Traceback (most recent call last):\n  File \"a.py\"\nValueError: broken\n\tat b.c"
    >>> cause_line(f"[STREAM_FAILED] Query [id = 1] terminated with exception: {traced}")
    'ValueError: broken'
    >>> refused = traced.replace("ValueError", "spark_agent.exceptions.QueryFailedError")
    >>> cause_line(f"[FAILED] latestOffset: {refused}\n\nDuring handling of that:\n\n{traced}")
    'ValueError: broken'
    >>> cause_line(f"[FAILED] latestOffset: {refused}")
    'broken'
    >>> cause_line("An error occurred while calling o9.start.\n: java.io.IOException: broken\n\tat a")
    'broken'
    >>> cause_line("broken"), cause_line("")
    ('broken', 'an error without a message')
    """
    lines = _JAVA_ERROR.sub("", message.strip()).splitlines()
    line = next(iter(lines), "").rpartition("terminated with exception: ")[2].strip()
    if line.endswith(_TRACEBACK):
        line = _exception_line(lines) or line
    return line.removeprefix(_REFUSAL) or "an error without a message"


def _exception_line(lines: Sequence[str]) -> str | None:
    """Return the exception at the end of a text's last Python traceback."""
    last = max(at for at, line in enumerate(lines) if line.endswith(_TRACEBACK))
    return next(
        (line for line in lines[last + 1 :] if line.strip() and not line[0].isspace()), None
    )


def program_of(spark: SparkSession) -> str:
    """Return the name of the application, for display."""
    return str(spark.sparkContext.appName).replace("\0", "")[:_LONGEST_NAME]


def links_of(spark: SparkSession) -> dict[str, str]:
    """Return the addresses of the application's pages: Spark's UI, if it runs."""
    address = spark.sparkContext.uiWebUrl
    return {} if not address or not _ADDRESS.fullmatch(address) else {"spark": address}


def has_run(body: Mapping[str, Any]) -> bool:
    """Return whether a progress event is of a batch, rather than of a trigger that has run none."""
    return "addBatch" in body["durationMs"]


class Listener:
    """A listener for every batch that Spark commits and every query that ends, by run id.

    PySpark's own listener converts each event to Python objects with hundreds of calls to the JVM,
    in every batch of every query. This one needs a single JSON text.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        batch_committed: Callable[[str, CommittedBatch], None],
        query_ended: Callable[[str], None],
    ) -> None:
        context: JavaObject = spark.sparkContext
        gateway: JavaObject = context._gateway
        ensure_callback_server_started(gateway)
        self._batch_committed = batch_committed
        self._query_ended = query_ended
        package = gateway.jvm.org.apache.spark.sql.streaming
        self._listener: JavaObject = package.PythonStreamingQueryListenerWrapper(self)
        self._queries: JavaObject = spark.streams._jsqm
        self._queries.addListener(self._listener)

    def close(self) -> None:
        """Remove the listener from Spark, unless the connection to Spark is lost."""
        try:
            self._queries.removeListener(self._listener)
        except (Py4JError, ConnectionError):
            _log.info("the connection to Spark is lost, and the listener with it", exc_info=True)

    def onQueryStarted(self, event: JavaObject) -> None:  # noqa: N802
        """Ignore: the pipeline starts its queries itself."""

    def onQueryProgress(self, event: JavaObject) -> None:  # noqa: N802
        """Pass the batch on, unless the event is of a trigger that has run none."""
        body = json.loads(event.progress().json())
        if not has_run(body):
            return
        self._batch_committed(body["runId"], read_progress(body))

    def onQueryIdle(self, event: JavaObject) -> None:  # noqa: N802
        """Ignore."""

    def onQueryTerminated(self, event: JavaObject) -> None:  # noqa: N802
        """Pass the end of a query on."""
        self._query_ended(str(event.runId().toString()))

    class Java:
        """The Java interface of this class in the JVM."""

        implements: Final = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]


def read_progress(body: Mapping[str, Any]) -> CommittedBatch:
    """Decode a batch's progress event.

    >>> read_progress({"batchId": 7, "eventTime": {"watermark": "1970-01-01T00:00:05.000Z"},
    ...   "sources": [{"startOffset": {"logOffset": 1}, "endOffset": {"logOffset": 2}}]})
    CommittedBatch(epoch=7, watermark_ms=5000, read_nothing=False, rows=0, dropped_rows=0, \
duration_ms=0, keeps_nothing=True, triggered_ms=0, late_rows={}, read={}, latest={})
    """
    return CommittedBatch(
        epoch=body["batchId"],
        watermark_ms=parse_watermark_ms(body.get("eventTime", {}).get("watermark")),
        read_nothing=all(
            # Spark reports only its own wrapper's class, so the offsets identify a control source.
            Offset.is_stored(source["endOffset"]) or source["startOffset"] == source["endOffset"]
            for source in body["sources"]
        ),
        rows=sum(
            int(source.get("numInputRows", 0))
            for source in body["sources"]
            if not Offset.is_stored(source["endOffset"])
        ),
        dropped_rows=sum(
            int(operator.get("numRowsDroppedByWatermark", 0))
            for operator in body.get("stateOperators", ())
        ),
        duration_ms=int(body.get("durationMs", {}).get("triggerExecution", 0)),
        keeps_nothing=all(
            operator.get("numRowsTotal") == 0 and not _has_timers(operator)
            for operator in body.get("stateOperators", ())
            if operator.get("operatorName") not in _WITHOUT_ROWS
        ),
        triggered_ms=parse_watermark_ms(body.get("timestamp")),
        late_rows=_late_rows(body.get("observedMetrics", {})),
        read=_offsets(body["sources"], "endOffset", min),
        latest=_offsets(body["sources"], "latestOffset", max),
    )


def _offsets(
    sources: Sequence[Mapping[str, Any]], name: str, pick: Callable[[int, int], int]
) -> dict[str, dict[int, int]]:
    """Return the offsets that sources have under a name. Of a topic that is read twice, one is picked.

    >>> twice = [{"endOffset": {"taps": {"0": 7}}}, {"endOffset": {"taps": {"0": 9}}}]
    >>> _offsets([*twice, {"endOffset": {"logOffset": 1}}], "endOffset", min)
    {'taps': {0: 7}}
    """
    found: dict[str, dict[int, int]] = {}
    for source in sources:
        for topic, offsets in offsets_of(source.get(name)).items():
            known = found.setdefault(topic, {})
            for partition, offset in offsets.items():
                known[partition] = pick(offset, known.get(partition, offset))
    return found


def _has_timers(operator: Mapping[str, Any]) -> bool:
    """Return whether an operator may keep timers, which its number of rows does not count."""
    return str(operator.get("operatorName", "")).startswith("transformWithState")


def parse_watermark_ms(text: str | None) -> int:
    """Read the watermark, or another instant, in a query's progress, in Spark's ms; 0: not yet.

    >>> parse_watermark_ms("2013-01-01T00:00:15.250Z"), parse_watermark_ms(None)
    (1356998415250, 0)
    >>> parse_watermark_ms("+100000-01-01T00:00:00.000Z") == END_MS
    True
    """
    if not text:
        return 0
    if text.startswith("+"):
        # Python's calendar ends with the year 9999. The only later watermark is the end of time.
        return END_MS
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(milliseconds=1)
