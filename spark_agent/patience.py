"""How long a query that ends by itself waits for others. Not thread-safe."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

_log: Final = logging.getLogger("spark_agent")


class Patience:
    """Lets a query go on while those that it waits for make no progress.

    A query that ends by itself may wait for one that runs only tomorrow, and that nobody has told to be
    final. Ahead of its group it costs memory; waiting for ever, it would never end.
    """

    def __init__(self, query: str, patience_ms: int | None) -> None:
        self._query = query
        self._patience_ms = patience_ms
        self._limits: Sequence[int | None] | None = None
        self._since_ms = 0
        self._logged = False

    def may_run(self, limits: Sequence[int | None], because: str, now_ms: int) -> bool:
        """Return whether the next batch may run, with the groups' limits as they are."""
        if self._patience_ms is None:
            return False
        if limits != self._limits:
            self._limits, self._since_ms = limits, now_ms
        if now_ms - self._since_ms < self._patience_ms:
            return False
        if not self._logged:
            self._logged = True
            _log.warning(
                "query %s goes on, although %s. That shard has made no progress for %d s, and this "
                "query has an end: it cannot wait for ever",
                self._query,
                because,
                self._patience_ms // 1_000,
            )
        return True
