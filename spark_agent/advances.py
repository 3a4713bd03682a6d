"""How far each shard came in the last batch: about as far as the next one may take it.

A query stops between batches. One that waited only once it is beyond its group's limit would be ahead by
the drift and one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Promises = Mapping[str, int | None]
"""By shard, in ms. None: it has not promised."""


@dataclass
class Advances:
    """Of the shards of one source."""

    _epoch: int | None = None
    _promises: Promises = field(default_factory=dict[str, int | None])
    _steps_ms: dict[str, int] = field(default_factory=dict[str, int])

    def record(self, epoch: int, promises: Promises) -> None:
        """Note where the shards are after an epoch. A shard that has not moved keeps its last step.

        >>> advances = Advances()
        >>> advances.record(0, {"a": 10})
        >>> advances.record(1, {"a": 70})
        >>> advances.record(2, {"a": 70})
        >>> advances.after_next("a", 70)
        130
        """
        if epoch == self._epoch:
            return
        for shard, promise in promises.items():
            before = self._promises.get(shard)
            if promise is not None and before is not None and promise > before:
                self._steps_ms[shard] = promise - before
        self._epoch, self._promises = epoch, promises

    def after_next(self, shard: str, promise: int) -> int:
        """Return where the next batch would take a shard, if it brings as much as the last one.

        >>> Advances().after_next("a", 70)
        70
        """
        return promise + self._steps_ms.get(shard, 0)

    def step_ms(self, shard: str) -> int:
        """Return how far the last batch that moved it took a shard; 0: that is not known yet."""
        return self._steps_ms.get(shard, 0)
