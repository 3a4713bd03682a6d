"""Rows of a task's shards, in the form that a strategy with state needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from spark_agent.arrow import Array, ShardRows, times_by_shard
from spark_agent.exceptions import StrategyError
from spark_agent.strategies import Rows
from spark_agent.strategies.resolved import Summary, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_TIMES: Final = 1_000_000
"""Event times of a shard that a task keeps before it makes a digest of them."""


class TaskDigests:
    """Event times of each shard, or the strategy's digests of them."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self._times_ms: dict[str, list[NDArray[np.int64]]] = {}
        self._digests: dict[str, list[bytes]] = {}

    def add(self, names: Array, times: Array, found: Mapping[str, ShardRows]) -> None:
        """Add rows, of which the source's shards have `found`."""
        if not self._summary.needs_times:
            return
        for shard, times_ms in times_by_shard(names, times).items():
            if shard not in found:
                continue
            # Later ones are too far ahead of the clock.
            kept = self._times_ms.setdefault(shard, [])
            kept.append(times_ms[times_ms <= found[shard].newest_ms])
            if self._summary.digest is not None and sum(map(len, kept)) >= _MOST_TIMES:
                self._digest(shard)

    def rows(self, found: Mapping[str, ShardRows]) -> dict[str, Rows]:
        """Return each shard's rows. `found` are all rows that the task has read."""
        return {shard: self._rows(shard, some) for shard, some in found.items()}

    def _rows(self, shard: str, found: ShardRows) -> Rows:
        import numpy as np  # noqa: PLC0415  (only where it is needed: tasks start faster without)

        times_ms = None
        if self._summary.digest is not None:
            self._digest(shard)
        elif self._summary.needs_times:
            times_ms = np.concatenate(self._times_ms[shard])
        return Rows(
            found.rows,
            found.oldest_ms,
            found.newest_ms,
            times_ms=times_ms,
            digests=tuple(self._digests.get(shard, ())),
        )

    def _digest(self, shard: str) -> None:
        import numpy as np  # noqa: PLC0415

        kept = self._times_ms.pop(shard, [])
        if kept and self._summary.digest is not None:
            made: object = self._summary.digest(np.concatenate(kept))
            if not isinstance(made, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise StrategyError(
                    f"{self._summary.digest.__qualname__} has returned {shown(made)}: return bytes"
                )
            self._digests.setdefault(shard, []).append(made)
