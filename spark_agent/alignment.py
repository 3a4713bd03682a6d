"""The rule by which a shard waits before a batch that would take it past its group's limit. Pure.

Else it would be ahead by the drift and one batch. Who waits is for the caller to say: a whole query,
which Spark makes of all its sources, or a single shard of a source of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_agent.advances import Advances, Promises
from spark_agent.answers import MAX_MS, GroupAnswer
from spark_agent.client import Throttle
from spark_agent.times import instant_text


def past_limit(
    groups: Sequence[GroupAnswer], stage: str, promises: Promises, advances: Advances
) -> dict[str, str]:
    """Return which shards another batch like the last one would take past a group's limit, and why.

    Never the shard that the group waits for: somebody must go on.
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
    """Return the shards that are asked to pause, with the reason."""
    return {
        shard: f"shard {shard} of {stage} is throttled: {asked['because']}"
        for shard, asked in throttle.shards.get(stage, {}).items()
        if asked["pause"]
    }


def slowest_rate(throttle: Throttle, stage: str) -> tuple[float, str]:
    """Return the least rate that is asked of a stage's shards, and why."""
    rates = [
        (
            float(asked["rate"]),
            f"{stage} is to read at a rate of {asked['rate']}: {asked['because']}",
        )
        for asked in throttle.shards.get(stage, {}).values()
    ]
    return min(rates, default=(1.0, ""))
