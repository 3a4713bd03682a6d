"""Slowing sources down: alignment within groups, and back-pressure.

*Alignment*: no shard of a group should run ahead of the slowest one by more than a drift, since a join
of them has to keep the rows of the fast ones (Flink, FLIP-182 and FLIP-217, *watermark alignment*).

*Back-pressure*: while a stage is further behind an upstream source than its bound, the source reads at a
fraction of its rate, in inverse proportion to the lag, and never below `MIN_RATE`. (A source that the
stage itself waits for is not ahead of it, and is never slowed down by it.) The rate follows from the lag
alone: without state it can neither oscillate nor persist, and every replica computes the same rate. As
the lag shrinks towards its bound, the rate returns to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from service.frontier.timestamps import MAX, MIN

MIN_RATE: Final = 0.1
RATE_STEP: Final = 0.05
"""Step to which rates are rounded down, so that not every report changes them."""


@dataclass(frozen=True, slots=True)
class ShardAt:
    """A shard of a group."""

    stage: str
    shard: str
    promise: int
    idle: bool = False


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Limit of the shards of a group."""

    stages: tuple[str, ...]
    limit: int | None
    """None: without a limit, since no shard counts."""
    held_by: ShardAt | None = None
    """The slowest shard."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Throttle advice for a shard."""

    pause: bool = False
    until: int | None = None
    """The furthest event time that it may run to; None: without a limit."""
    rate: float = 1.0
    """The fraction of its usual rate at which it should read."""
    because: str = ""


@dataclass(frozen=True, slots=True)
class ThrottleView:
    """Throttle advice for the shards of a job."""

    groups: Sequence[GroupLimit] = ()
    shards: Mapping[str, Mapping[str, Advice]] = field(
        default_factory=dict[str, Mapping[str, Advice]]
    )
    """By stage and shard: only shards that should pause or slow down."""


NO_ADVICE = ThrottleView()


def slowest(shards: Iterable[ShardAt]) -> ShardAt | None:
    """Return the slowest shard that counts: it has promised, and is neither idle nor final.

    >>> slowest([ShardAt("s", "a", 42), ShardAt("s", "b", 44), ShardAt("s", "c", MAX)]).shard
    'a'
    >>> slowest([ShardAt("s", "a", MIN), ShardAt("s", "b", 5, idle=True)]) is None
    True
    """
    counted = (each for each in shards if MIN < each.promise < MAX and not each.idle)
    return min(counted, key=lambda each: (each.promise, each.stage, each.shard), default=None)


def limit_of(lowest: int, max_drift_ms: int) -> int:
    """Return the limit of a group, given its slowest shard.

    >>> limit_of(42, 1_000), limit_of(MAX - 1, 1_000) == MAX
    (1042, True)
    """
    return min(MAX, lowest + max_drift_ms)


def must_pause(promise: int, limit: int | None) -> bool:
    """Return whether a shard is ahead of its limit. A final one has nothing left to pause.

    >>> must_pause(5_000, 1_044), must_pause(44, 1_044), must_pause(MAX, 1_044), must_pause(7, None)
    (True, False, False, False)
    """
    return limit is not None and limit < promise < MAX


def lag_of(output: int, source: int) -> int | None:
    """Return the lag of a stage behind an upstream source; None: not known yet, or the source is final.

    >>> lag_of(400, 1_000), lag_of(MIN, 1_000) is None, lag_of(400, MAX) is None
    (600, True, True)
    """
    return None if output == MIN or source in (MIN, MAX) else max(0, source - output)


def rate_of(lag_ms: int | None, max_lag_ms: int) -> float:
    """Return the fraction of their rate at which the upstream sources of a stage should read.

    >>> rate_of(500, 1_000), rate_of(2_000, 1_000), rate_of(10**9, 1_000), rate_of(None, 1_000)
    (1.0, 0.5, 0.1, 1.0)
    """
    if lag_ms is None or lag_ms <= max_lag_ms:
        return 1.0
    steps = int(max_lag_ms / lag_ms / RATE_STEP + 1e-9)
    return round(max(MIN_RATE, steps * RATE_STEP), 2)
