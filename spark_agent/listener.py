"""Passes Spark's events on to the keepers."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from spark_agent.keeper import Keeper, Signal
from spark_agent.plan import Progressed, read_progress

_EARLY_EVENTS: Final = 1_000


class Board(StreamingQueryListener):
    """Knows which keeper follows which query. Never blocks Spark's listener bus."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._keepers: dict[str, Keeper] = {}
        self._starting = 0
        # A query's first events may come before `start` has returned its id to us.
        self._early: deque[tuple[str, Progressed | Signal]] = deque(maxlen=_EARLY_EVENTS)

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

    def register(self, run_id: str, keeper: Keeper) -> None:
        """Pass a query's events on, the early ones first."""
        with self._lock:
            self._keepers[run_id] = keeper
            for early_run_id, event in self._early:
                if early_run_id == run_id:
                    keeper.tell(event)

    def _pass_on(self, run_id: str, event: Progressed | Signal) -> None:
        with self._lock:
            keeper = self._keepers.get(run_id)
            if keeper is not None:
                keeper.tell(event)
                if event is Signal.ENDED:
                    del self._keepers[run_id]
            elif self._starting:
                self._early.append((run_id, event))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Nothing to do: `start` knows."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Pass on that a batch is in Spark's commit log."""
        progress = event.progress
        self._pass_on(str(progress.runId), read_progress(json.loads(progress.json)))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Nothing to do."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Pass on that the query has ended, one way or the other."""
        self._pass_on(str(event.runId), Signal.ENDED)
