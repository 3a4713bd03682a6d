"""Routes Spark's query events to the supervisors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from spark_agent.jvm.progress import CommittedBatch
from spark_agent.supervision.supervisor import Signal, Supervisor

_MOST_UNROUTED: Final = 1_000


class EventRouter:
    """Routes the events of each query to its supervisor. Never blocks Spark's listener bus."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._supervisors: dict[str, Supervisor] = {}
        self._starting = 0
        # A query's first events may arrive before `start` has returned its id.
        self._unrouted: deque[tuple[str, CommittedBatch | Signal]] = deque(maxlen=_MOST_UNROUTED)

    @contextmanager
    def starting(self) -> Generator[None]:
        """Buffer events of unknown queries inside the block: one of them is being started."""
        with self._lock:
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                if not self._starting:
                    self._unrouted.clear()

    def register(self, run_id: str, supervisor: Supervisor) -> None:
        """Route a query's events to its supervisor, starting with the buffered ones."""
        with self._lock:
            self._supervisors[run_id] = supervisor
            for unrouted_run_id, event in self._unrouted:
                if unrouted_run_id == run_id:
                    supervisor.notify(event)

    def _dispatch(self, run_id: str, event: CommittedBatch | Signal) -> None:
        with self._lock:
            supervisor = self._supervisors.get(run_id)
            if supervisor is not None:
                supervisor.notify(event)
                if event is Signal.ENDED:
                    del self._supervisors[run_id]
            elif self._starting:
                self._unrouted.append((run_id, event))

    def batch_committed(self, run_id: str, batch: CommittedBatch) -> None:
        """Route a batch that is in Spark's commit log."""
        self._dispatch(run_id, batch)

    def query_ended(self, run_id: str) -> None:
        """Route the end of a query, successful or not."""
        self._dispatch(run_id, Signal.ENDED)
