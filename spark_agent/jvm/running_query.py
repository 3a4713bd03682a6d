# pyright: basic
# ruff: noqa: SLF001
"""A started query, from Spark's internal objects, which are not public API."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_agent.jvm import JavaObject
from spark_agent.jvm.progress import CommittedBatch, cause_line, has_run, read_progress
from spark_agent.jvm.topics import TopicIdReader
from spark_agent.jvm.writer import Trigger

_log: Final = logging.getLogger("spark_agent")


class RunningQuery:
    """A query of Spark as the driver inspects and ends it, from just before its start.

    Spark polls a query's control sources before `DataStreamWriter.start` returns the query. So the
    driver makes this object first, and attaches the query once there is one. Until then, the query is
    active, has not run a batch, and keeps an error to fail with. Thread-safe.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._lock = threading.Lock()
        self._query: StreamingQuery | None = None
        self.label = ""
        """The query's name, else its id; empty before its start."""
        self._failure: str | None = None
        self._latest: CommittedBatch | None = None
        self._topics: TopicIdReader | None = None

    def attach(self, query: StreamingQuery) -> None:
        """Set the query, which exists only once Spark has started it."""
        self.label = query.name or str(query.id)
        with self._lock:
            self._query = query
            failure = self._failure
        if failure is not None:
            self._mark_error(query, failure)

    def fail(self, message: str) -> None:
        """Make the query fail with this error, at its next trigger at the latest."""
        _log.error("%s", message)
        with self._lock:
            self._failure = message
            query = self._query
        if query is not None:
            self._mark_error(query, message)

    def _mark_error(self, query: StreamingQuery, message: str) -> None:
        # Spark has no public API for this. Spark's own background threads use the same call.
        try:
            jvm: JavaObject = self._spark._jvm
            error = jvm.java.lang.IllegalStateException(message)
            _execution(query).errorNotifier().markError(error)
        except Exception:
            # Such a query has ended.
            if not self.is_lost:
                raise

    @property
    def failure(self) -> str | None:
        """The error with which the agent makes the query fail, if any."""
        with self._lock:
            return self._failure

    @property
    def has_started(self) -> bool:
        """True once Spark has started the query."""
        return self._query is not None

    @property
    def error(self) -> str | None:
        """The line of the query's error that has its cause; None: the query has not failed.

        A lost connection to Spark is an error, too.
        """
        if self._query is None:
            return None
        try:
            error = self._query.exception()
        except Exception:  # noqa: BLE001  (any error: the query no longer runs)
            return "the connection to Spark is lost"
        return None if error is None else cause_line(str(error))

    @property
    def is_active(self) -> bool:
        """True until the query ends, or is being stopped."""
        return self._query is None or bool(_execution(self._query).isActive())

    @property
    def has_ended(self) -> bool:
        """True once the query, which was started, no longer runs."""
        if self._query is None:
            return False
        try:
            return not self._query.isActive
        except Exception:  # noqa: BLE001  (Spark is gone, and the query with it)
            return True

    @property
    def is_lost(self) -> bool:
        """True once Spark's JVM does not answer: the query has ended with it, without an event.

        A connection that was lost for another reason is replaced in the second attempt.
        """
        return not self._is_reachable() and not self._is_reachable()

    def _is_reachable(self) -> bool:
        try:
            return self._query is None or self._query.isActive is not None
        except Py4JJavaError:
            return True
        except Exception:  # noqa: BLE001  (a lost connection has several)
            return False

    def stop(self) -> None:
        """Stop the query, and wait for its end. An error is logged: `awaitTermination` raises it."""
        if self._query is None:
            return
        try:
            self._query.stop()
        except Exception:  # noqa: BLE001  (the query has failed or ended)
            _log.info("query %s did not stop cleanly", self.label, exc_info=True)

    def has_no_new_data(self) -> bool:
        """Return whether the latest trigger found no new data in any of the query's sources."""
        return self._query is not None and bool(_execution(self._query).noNewData())

    def has_just_found_nothing(self) -> bool:
        """Return whether no trigger runs now, and the latest trigger found no new data."""
        query = self._query
        if query is None or query.status["isTriggerActive"]:
            return False
        return self.has_no_new_data()

    def is_in_batch(self) -> bool:
        """Return whether a trigger runs now that has planned a batch, or is about to."""
        query = self._query
        if query is None:
            return False
        try:
            return query.status["isTriggerActive"] and not self.has_no_new_data()
        except Exception:  # noqa: BLE001  (Spark is gone, and the query with it)
            return False

    def topic_ids(self) -> dict[str, str]:
        """Return the ids of the topics of Kafka that the query reads, by source and topic.

        Only the supervisor's thread calls it.

        Raises `TopicsNotDescribedError`.
        """
        if self._query is None:
            return {}
        if self._topics is None:
            self._topics = TopicIdReader(self._spark, _execution(self._query))
        return self._topics.ids()

    def has_ended_by_itself(self, trigger: Trigger) -> bool:
        """Return whether the end of the query, without an error, means that all its work is done.

        An `availableNow` query runs until a trigger finds nothing more. A `once` query runs one batch.
        """
        if not trigger.ends:
            return False
        try:
            if trigger.is_available_now:
                return self.has_no_new_data()
            return self.recent_batch() is not None
        except Exception:  # noqa: BLE001  (Spark has ended, and the query with it)
            return False

    def latest_batch(self) -> CommittedBatch | None:
        """Return the latest batch that the query has committed since its start, if any.

        Spark records a batch before it plans the next one, but notifies its listeners some time later.
        After ten seconds without a batch, Spark records a trigger that has run none, with the number of
        the next batch. A caller in each trigger misses no batch.
        """
        if self._query is None:
            return None
        wrapped: JavaObject = self._query._jsq
        progress = wrapped.lastProgress()
        body = None if progress is None else _body(progress)
        found = read_progress(body) if body is not None and has_run(body) else None
        with self._lock:
            # A slower thread may bring an older batch.
            if found is not None and (self._latest is None or found.epoch >= self._latest.epoch):
                self._latest = found
            return self._latest

    def batch_after(self, epoch: int) -> CommittedBatch | None:
        """Return the latest batch that Spark has on record, if it is later than `epoch`.

        A trigger that has run none has the number of the next batch. So one record is enough while
        nothing is later, however long the query finds nothing.
        """
        if self._query is None:
            return None
        wrapped: JavaObject = self._query._jsq
        progress = wrapped.lastProgress()
        body = None if progress is None else _body(progress)
        if body is None or body["batchId"] <= (epoch if has_run(body) else epoch + 1):
            return None
        return read_progress(body) if has_run(body) else self.recent_batch()

    def recent_batch(self) -> CommittedBatch | None:
        """Return the latest batch that Spark still has on record, if any.

        A batch that is not on record any more was notified to Spark's listeners long ago.
        """
        if self._query is None:
            return None
        wrapped: JavaObject = self._query._jsq
        for progress in reversed(list(wrapped.recentProgress())):
            body = _body(progress)
            if has_run(body):
                return read_progress(body)
        return None


def _body(progress: JavaObject) -> Mapping[str, Any]:
    return json.loads(progress.json())


def _execution(query: StreamingQuery) -> JavaObject:
    wrapped: JavaObject = query._jsq
    return wrapped.streamingQuery()
