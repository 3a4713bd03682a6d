"""Passes Spark's events on to the supervisors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from spark_agent.plan import CommittedBatch
from spark_agent.supervisor import Signal, Supervisor

_EARLY_EVENTS: Final = 1_000


class EventRouter:
    """Knows which supervisor follows which query. Never blocks Spark's listener bus."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._supervisors: dict[str, Supervisor] = {}
        self._starting = 0
        # A query's first events may come before `start` has returned its id to us.
        self._early: deque[tuple[str, CommittedBatch | Signal]] = deque(maxlen=_EARLY_EVENTS)

    @contextmanager
    def starting(self) -> Generator[None]:
        """Keep events of unknown queries meanwhile: one of them is being started."""
        with self._lock:
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                if not self._starting:
                    self._early.clear()

    def register(self, run_id: str, supervisor: Supervisor) -> None:
        """Pass a query's events on, the early ones first."""
        with self._lock:
            self._supervisors[run_id] = supervisor
            for early_run_id, event in self._early:
                if early_run_id == run_id:
                    supervisor.notify(event)

    def _dispatch(self, run_id: str, event: CommittedBatch | Signal) -> None:
        with self._lock:
            supervisor = self._supervisors.get(run_id)
            if supervisor is not None:
                supervisor.notify(event)
                if event is Signal.ENDED:
                    del self._supervisors[run_id]
            elif self._starting:
                self._early.append((run_id, event))

    def batch_committed(self, run_id: str, batch: CommittedBatch) -> None:
        """Pass on that a batch is in Spark's commit log."""
        self._dispatch(run_id, batch)

    def query_ended(self, run_id: str) -> None:
        """Pass on that the query has ended, one way or the other."""
        self._dispatch(run_id, Signal.ENDED)
