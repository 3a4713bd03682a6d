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

    A step that fails at the service has read the checkpoint, or has not come to it. So the minute is the
    time between errors of consecutive steps.
    """

    def __init__(self, query: str, clock: Clock) -> None:
        self._query = query
        self._clock = clock
        self._noted_ms: int | None = None
        """The instant of the last step's error; None: the last step has not had one."""
        self._failing_ms = 0
        self._is_logged = False
        self._latest = ""

    @property
    def latest(self) -> str:
        """The cause of the error that is retried; empty: there is none."""
        return self._latest

    def note(self, error: Py4JError | ConnectionError) -> None:
        """Note an error of a step. Raises `QueryFailedError` if the steps have failed for too long."""
        now_ms = self._clock.steady_ms()
        self._latest = cause_line(str(error))
        if not self._is_logged:
            self._is_logged = True
            _log.warning(
                "query %s: its checkpoint, or Spark, cannot be read, so nothing is reported: %s; "
                "retrying",
                self._query,
                self._latest,
                exc_info=error,
            )
        if self._noted_ms is not None:
            self._failing_ms += now_ms - self._noted_ms
        self._noted_ms = now_ms
        if self._failing_ms >= PATIENCE_MS:
            self.check()

    def interrupt(self) -> None:
        """Note that a step has failed at the service."""
        self._noted_ms = None

    def clear(self) -> None:
        """Note that a step has not failed."""
        self._noted_ms, self._failing_ms = None, 0
        self._is_logged, self._latest = False, ""

    def check(self) -> None:
        """Raise `QueryFailedError` if the last step had an error."""
        if self._noted_ms is not None:
            raise QueryFailedError(
                f"tidegauge: query {self._query}: its checkpoint, or Spark, could not be read, so its "
                f"batches were not reported: {self._latest}. Nothing is lost: mend that and start the "
                f"query again"
            )
