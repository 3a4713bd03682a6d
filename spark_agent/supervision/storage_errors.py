"""Errors of the file system of a query's checkpoint, or of another part of Spark's JVM."""

from __future__ import annotations

import logging
from typing import Final

from py4j.protocol import Py4JError

from spark_agent.clock import Clock
from spark_agent.exceptions import QueryFailedError
from spark_agent.jvm.progress import cause_line

_log: Final = logging.getLogger("spark_agent")

PATIENCE_MS: Final = 60_000
"""Duration for which errors are retried. Nothing is reported meanwhile."""


class StorageErrors:
    """Retries errors of the checkpoint's file system for a minute, and then lets the query fail.

    A query whose supervisor has ended by such an error would go on without reports, and a run that ends
    by itself would end well.
    """

    def __init__(self, query: str, clock: Clock) -> None:
        self._query = query
        self._clock = clock
        self._since_ms: int | None = None
        self._latest = ""

    @property
    def latest(self) -> str:
        """The cause of the error that is retried; empty: there is none."""
        return self._latest

    def note(self, error: Py4JError) -> None:
        """Note an error of a step. Raises `QueryFailedError` if the steps have failed for too long."""
        now_ms = self._clock.steady_ms()
        self._latest = cause_line(str(error))
        if self._since_ms is None:
            self._since_ms = now_ms
            _log.warning(
                "query %s: its checkpoint, or Spark, cannot be read, so nothing is reported: %s; "
                "retrying",
                self._query,
                self._latest,
                exc_info=error,
            )
        if now_ms - self._since_ms >= PATIENCE_MS:
            self.check()

    def clear(self) -> None:
        """Note that a step has had no such error."""
        self._since_ms, self._latest = None, ""

    def check(self) -> None:
        """Raise `QueryFailedError` if the last step had an error."""
        if self._since_ms is not None:
            raise QueryFailedError(
                f"tidegauge: query {self._query}: its checkpoint, or Spark, could not be read, so its "
                f"batches were not reported: {self._latest}. Nothing is lost: mend that and start the "
                f"query again"
            )
