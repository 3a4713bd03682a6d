"""Policies of a pipeline's author, besides its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """Conditions under which a source does not wait for a quiet shard."""

    after_ms: int
    slack_ms: int | None = None
    """None: the shard is left out. Else its promise follows the clock, this far behind."""


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """Policies of one stage."""

    percentiles: tuple[int, ...] = ()
    """Percentiles (1 to 99) whose watermarks are computed."""
    idle: IdlePolicy | None = None
    is_dynamic: bool = False
    """True if shards join with their first claim, and leave once they are final."""
    is_throttled: bool = False
    """True if its shards may be throttled."""

    @property
    def leaves_quiet_out(self) -> bool:
        """True if quiet shards become idle.

        >>> StagePolicy(idle=IdlePolicy(5)).leaves_quiet_out
        True
        >>> StagePolicy(idle=IdlePolicy(5, slack_ms=7)).leaves_quiet_out
        False
        """
        return self.idle is not None and self.idle.slack_ms is None

    @property
    def needs_facts(self) -> bool:
        """True if every report is necessary, even one without facts about its work.

        >>> StagePolicy().needs_facts, StagePolicy((33,)).needs_facts
        (False, True)
        """
        return bool(self.percentiles) or self.idle is not None


NO_POLICY = StagePolicy()


@dataclass(frozen=True, slots=True)
class ThrottleGroup:
    """Sources whose shards may not run ahead of the slowest of them by more than a drift."""

    stages: tuple[str, ...]
    max_drift_ms: int


@dataclass(frozen=True, slots=True)
class ThrottlePolicy:
    """Throttling of a job's sources."""

    groups: tuple[ThrottleGroup, ...] = ()
    max_lag_ms: Mapping[str, int] = field(default_factory=dict[str, int])
    """By stage: the largest distance of its output behind the furthest of its upstream sources."""

    def __bool__(self) -> bool:
        """Return whether anything is throttled."""
        return bool(self.groups or self.max_lag_ms)


NO_THROTTLE = ThrottlePolicy()
