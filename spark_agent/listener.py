"""Passes Spark's events on to the keepers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from spark_agent.keeper import Keeper, Signal
from spark_agent.plan import Progressed

_EARLY_EVENTS: Final = 1_000


class Board:
    """Knows which keeper follows which query. Never blocks Spark's listener bus."""

    def __init__(self) -> None:
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

    def progressed(self, run_id: str, done: Progressed) -> None:
        """Pass on that a batch is in Spark's commit log."""
        self._pass_on(run_id, done)

    def ended(self, run_id: str) -> None:
        """Pass on that the query has ended, one way or the other."""
        self._pass_on(run_id, Signal.ENDED)
