"""Readings of the sessions that a query keeps, beside its batches.

A reading takes a job of Spark's, so a thread of its own waits for it. An old reading gives a lower
promise, which holds, so the batches do not wait. A run that ends by itself waits for its last reading.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Final

from spark_agent.clock import Clock
from spark_agent.jvm.open_sessions import ReadSessions
from spark_agent.jvm.progress import CommittedBatch
from spark_agent.soundness.output_times import OpenSessions
from spark_agent.sources.control import END_MS
from spark_agent.started_query import StartedQuery

_log: Final = logging.getLogger("spark_agent")

_SHORTEST_PAUSE_MS: Final = 2_000
_PAUSES: Final = 5
"""The pause after a reading is so many times its duration: readings take little of the cluster."""


@dataclass(frozen=True, slots=True)
class _Done:
    sessions: OpenSessions | None
    """None: it has failed."""


class SessionReadings:
    """The newest reading of a query's sessions. Only the supervisor's thread calls it."""

    def __init__(self, query: StartedQuery, clock: Clock) -> None:
        self._query = query
        self._clock = clock
        self._batch: CommittedBatch | None = None
        self._orders: queue.SimpleQueue[CommittedBatch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_reading = False
        self._began_ms = 0
        self._next_ms = 0
        self._has_failed_at_end = False
        self.newest: OpenSessions | None = None

    def add(self, batch: CommittedBatch) -> None:
        """Note a batch that Spark has committed."""
        if self._query.open_sessions is None:
            return
        # Before the first watermark there is not a promise, and at the end of time it has its own.
        self._batch = batch if 0 < batch.watermark_ms < END_MS - 1 else None
        if self._batch is not None and batch.keeps_nothing and self._query.counts_state:
            self.newest = OpenSessions(batch.epoch, batch.watermark_ms, None)

    @property
    def is_due(self) -> bool:
        """True if the newest batch has not been read. What fails at an end is not repeated."""
        if self._batch is None or self._has_failed_at_end:
            return False
        return self.newest is None or self.newest.epoch < self._batch.epoch

    def poll(self, *, at_end: bool) -> bool:
        """Begin a reading if one is due, and return whether one has come."""
        has_come = self._take(at_end=at_end)
        now_ms = self._clock.steady_ms()
        if self._is_reading or self._batch is None or (now_ms < self._next_ms and not at_end):
            return has_come
        if self.is_due:
            self._begin(self._batch, now_ms)
        return has_come

    def close(self) -> None:
        """End the thread, once it has read what it reads."""
        if self._thread is not None:
            self._orders.put(None)

    def _begin(self, batch: CommittedBatch, now_ms: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run,
                args=(self._query.open_sessions,),
                name=f"tidegauge-sessions-{self._query.name}",
                daemon=True,
            )
            self._thread.start()
        self._is_reading = True
        self._began_ms = now_ms
        self._orders.put(batch)

    def _take(self, *, at_end: bool) -> bool:
        try:
            done = self._done.get_nowait()
        except queue.Empty:
            return False
        self._is_reading = False
        now_ms = self._clock.steady_ms()
        pause_ms = max(_SHORTEST_PAUSE_MS, _PAUSES * (now_ms - self._began_ms))
        self._next_ms = now_ms + pause_ms
        if done.sessions is None:
            self._has_failed_at_end = at_end
            return False
        if self.newest is not None and done.sessions.epoch <= self.newest.epoch:
            return False
        self.newest = done.sessions
        return True

    def _run(self, read: ReadSessions) -> None:
        while (batch := self._orders.get()) is not None:
            self._done.put(_Done(self._sessions(read, batch)))

    def _sessions(self, read: ReadSessions, batch: CommittedBatch) -> OpenSessions | None:
        try:
            earliest_ms = read(batch.epoch)
        except Exception as error:  # noqa: BLE001  (the query goes on, whatever Spark raises)
            _log.warning(
                "query %s: the open sessions after batch %d cannot be read from Spark's state, so its "
                "promise waits for the next reading: %s",
                self._query.name,
                batch.epoch,
                str(error).partition("\n")[0],
            )
            return None
        return OpenSessions(batch.epoch, batch.watermark_ms, earliest_ms)
