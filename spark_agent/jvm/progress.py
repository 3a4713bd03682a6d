# pyright: basic
# ruff: noqa: SLF001
"""Progress and state of running queries, from Spark's internal objects, which are not public API.

The rest of the agent sees plain values: a finished batch is a `CommittedBatch`. See also
`spark_agent.jvm.plan`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent.exceptions import QueryFailedError
from spark_agent.jvm import JavaObject
from spark_agent.sources.control import END_MS
from spark_agent.sources.driver_link import Offset

_LONGEST_NAME: Final = 256
"""Characters that the service takes of the name of a program."""

_ADDRESS: Final = re.compile(r"https?://[^\s\0]{1,1900}")
"""An address that the service takes."""

_TRACEBACK: Final = "Traceback (most recent call last):"
_REFUSAL: Final = f"{QueryFailedError.__module__}.{QueryFailedError.__qualname__}: "
"""Precedes the agent's own words in such a traceback."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """A batch that Spark has committed."""

    epoch: int
    watermark_ms: int
    """Spark's own watermark, which the batch ran with; 0: none yet."""
    read_nothing: bool = False
    """True if it found no new data in any source except control sources."""
    rows: int = 0
    """Number of rows read, except from control sources."""
    dropped_rows: int = 0
    """The number of rows that its operators dropped as late."""
    duration_ms: int = 0
    """Duration of the batch."""
    keeps_nothing: bool = False
    """True if the query's operators keep no rows, so that everything it has read has come out."""


def has_no_new_data(query: StreamingQuery) -> bool:
    """Return whether the latest trigger found no new data in any of the query's sources."""
    return bool(_execution(query).noNewData())


def has_just_found_nothing(query: StreamingQuery) -> bool:
    """Return whether no trigger runs now, and the latest one found no new data."""
    return not query.status["isTriggerActive"] and has_no_new_data(query)


def fail(spark: SparkSession, query: StreamingQuery, message: str) -> None:
    """Make a query fail with an error, at its next trigger at the latest.

    Spark has no public API for that. This is what its own background threads use.
    """
    jvm: JavaObject = spark._jvm
    _execution(query).errorNotifier().markError(jvm.java.lang.IllegalStateException(message))


def is_active(query: StreamingQuery) -> bool:
    """Return whether a query runs, and nobody has asked it to stop."""
    return bool(_execution(query).isActive())


def failure(query: StreamingQuery) -> str | None:
    """Return the most telling line of the error that a query has ended with; None: there is none.

    That Spark is gone is an error, too.
    """
    try:
        error = query.exception()
    except Exception:  # noqa: BLE001  (whatever it is, the query no longer runs)
        return "Spark is gone"
    return None if error is None else most_telling_line(str(error))


def most_telling_line(message: str) -> str:
    r"""Return what is most telling of an error: its first line, without Spark's words about its query.

    Spark wraps an error of Python with its traceback, of which the exception's own line is returned.

    >>> most_telling_line("[STREAM_FAILED] Query [id = 1] terminated with exception: broken\n at line 5")
    'broken'
    >>> traced = "Traceback (most recent call last):\n  File \"a.py\"\nValueError: broken\n\tat b.c"
    >>> most_telling_line(f"[STREAM_FAILED] Query [id = 1] terminated with exception: {traced}")
    'ValueError: broken'
    >>> refused = traced.replace("ValueError", "spark_agent.exceptions.QueryFailedError")
    >>> most_telling_line(f"[FAILED] latestOffset: {refused}\n\nDuring handling of that:\n\n{traced}")
    'ValueError: broken'
    >>> most_telling_line(f"[FAILED] latestOffset: {refused}")
    'broken'
    >>> most_telling_line("broken"), most_telling_line("")
    ('broken', 'an error without a message')
    """
    lines = message.strip().splitlines()
    line = next(iter(lines), "").rpartition("terminated with exception: ")[2].strip()
    if line.endswith(_TRACEBACK):
        line = _exception_line(lines) or line
    return line.removeprefix(_REFUSAL) or "an error without a message"


def _exception_line(lines: Sequence[str]) -> str | None:
    """Return the line of the exception that a text's last traceback of Python ends with."""
    last = max(at for at, line in enumerate(lines) if line.endswith(_TRACEBACK))
    return next(
        (line for line in lines[last + 1 :] if line.strip() and not line[0].isspace()), None
    )


def program_of(spark: SparkSession) -> str:
    """Return the name of the application, for people."""
    return str(spark.sparkContext.appName).replace("\0", "")[:_LONGEST_NAME]


def links_of(spark: SparkSession) -> dict[str, str]:
    """Return the addresses where more is shown of the application: Spark's own page, if it has one."""
    address = spark.sparkContext.uiWebUrl
    return {} if not address or not _ADDRESS.fullmatch(address) else {"spark": address}


def has_ended_by_itself(query: StreamingQuery, *, available_now: bool) -> bool:
    """Return whether a query that ends by itself has done so, rather than been stopped before.

    One that reads what is there runs until a trigger finds nothing more; any other runs one batch.
    """
    try:
        return has_no_new_data(query) if available_now else recent_batch(query) is not None
    except Exception:  # noqa: BLE001  (Spark is gone, and the query with it)
        return False


def _execution(query: StreamingQuery) -> JavaObject:
    wrapped: JavaObject = query._jsq
    return wrapped.streamingQuery()


class LatestBatch:
    """The latest batch that a query has committed since it started.

    Spark records it before it plans the next batch, but notifies its listeners some time later. After
    ten seconds without a batch, it records a trigger that has run none, with the number of the next
    batch. Whoever looks in each trigger misses no batch.
    """

    def __init__(self) -> None:
        self._latest: CommittedBatch | None = None

    def of(self, query: StreamingQuery) -> CommittedBatch | None:
        """Return it; None: there is none. Always of the same query, and not from several threads."""
        wrapped: JavaObject = query._jsq
        progress = wrapped.lastProgress()
        body = None if progress is None else json.loads(progress.json())
        if body is not None and _has_run(body):
            self._latest = read_progress(body)
        return self._latest


def recent_batch(query: StreamingQuery) -> CommittedBatch | None:
    """Return the latest batch that a query has committed since it started; None: there is none, or it
    was long ago, and Spark has told its listeners.
    """
    wrapped: JavaObject = query._jsq
    for progress in reversed(list(wrapped.recentProgress())):
        body = json.loads(progress.json())
        if _has_run(body):
            return read_progress(body)
    return None


def _has_run(body: Mapping[str, Any]) -> bool:
    """Return whether a progress is of a batch, and not of a trigger that has run none."""
    return "addBatch" in body["durationMs"]


class Listener:
    """Listens for every batch that Spark commits and every query that ends, by run id.

    PySpark's own listener converts each event to Python objects with hundreds of calls to the JVM,
    in every batch of every query. One JSON text is all that is needed.
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
        """Remove the listener from Spark."""
        self._queries.removeListener(self._listener)

    def onQueryStarted(self, event: JavaObject) -> None:  # noqa: N802
        """Nothing to do: the pipeline starts its queries itself."""

    def onQueryProgress(self, event: JavaObject) -> None:  # noqa: N802
        """Read the batch, unless the event is of a trigger that has run none."""
        body = json.loads(event.progress().json())
        if not _has_run(body):
            return
        self._batch_committed(body["runId"], read_progress(body))

    def onQueryIdle(self, event: JavaObject) -> None:  # noqa: N802
        """Nothing to do."""

    def onQueryTerminated(self, event: JavaObject) -> None:  # noqa: N802
        """Read which query ended."""
        self._query_ended(str(event.runId().toString()))

    class Java:
        """The Java interface as which py4j exposes this class to the JVM."""

        implements: Final = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]


def read_progress(body: Mapping[str, Any]) -> CommittedBatch:
    """Read a batch's progress, as Spark writes it.

    >>> read_progress({"batchId": 7, "eventTime": {"watermark": "1970-01-01T00:00:05.000Z"},
    ...   "sources": [{"startOffset": {"logOffset": 1}, "endOffset": {"logOffset": 2}}]})
    CommittedBatch(epoch=7, watermark_ms=5000, read_nothing=False, rows=0, dropped_rows=0, \
duration_ms=0, keeps_nothing=True)
    """
    return CommittedBatch(
        epoch=body["batchId"],
        watermark_ms=parse_watermark_ms(body.get("eventTime", {}).get("watermark")),
        read_nothing=all(
            # Spark reports only its own wrapper's class, so a control source is known by its offsets.
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
        ),
    )


def _has_timers(operator: Mapping[str, Any]) -> bool:
    """Return whether an operator may keep timers, which its number of rows does not count."""
    return str(operator.get("operatorName", "")).startswith("transformWithState")


def parse_watermark_ms(text: str | None) -> int:
    """Read the watermark in a query's progress, in Spark's ms; 0 if it has none.

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
