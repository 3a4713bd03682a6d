"""Shards of one source, kept close to each other in event time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spark_agent.client.client import Throttle
from spark_agent.client.responses import GroupAnswer
from spark_agent.times import MAX_MS, instant_text

Promises = Mapping[str, int | None]
"""By shard, in ms. None: it has not promised."""


@dataclass
class Advances:
    """Advances of the shards of one source."""

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
        """Return how far the last batch that moved it took a shard; 0: it has not moved yet."""
        return self._steps_ms.get(shard, 0)


def past_limit(
    groups: Sequence[GroupAnswer], stage: str, promises: Promises, advances: Advances
) -> dict[str, str]:
    """Return which shards another batch like the last one would take past a group's limit, and why.

    Never the shard that the group waits for: one query must go on.
    """
    found: dict[str, str] = {}
    for group in groups:
        limit_ms, slowest = group["limit"], group["held_by"]
        if stage not in group["stages"] or limit_ms is None or slowest is None:
            continue
        for shard, promise_ms in promises.items():
            if promise_ms is None or promise_ms == MAX_MS:
                continue
            if (slowest["stage"], slowest["range"]) == (stage, shard):
                continue
            if advances.after_next(shard, promise_ms) > limit_ms:
                found[shard] = (
                    f"shard {shard} of {stage} is at {instant_text(promise_ms)}, and its last batch "
                    f"brought {advances.step_ms(shard) / 1_000:g} s: another one would take it past "
                    f"{instant_text(limit_ms)}, too far ahead of shard {slowest['range']} of "
                    f"{slowest['stage']}"
                )
    return found


def pauses(throttle: Throttle, stage: str) -> Mapping[str, str]:
    """Return the shards that the advice pauses, with the reason."""
    return {
        shard: f"shard {shard} of {stage} is throttled: {advice['because']}"
        for shard, advice in throttle.shards.get(stage, {}).items()
        if advice["pause"]
    }


def slowest_rate(throttle: Throttle, stage: str) -> tuple[float, str]:
    """Return the least rate of a stage's shards by the advice, and the reason."""
    rates = [
        (
            float(advice["rate"]),
            f"{stage} is to read at a rate of {advice['rate']}: {advice['because']}",
        )
        for advice in throttle.shards.get(stage, {}).values()
    ]
    return min(rates, default=(1.0, ""))
