"""Policies that the author of a pipeline decides, besides its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """When a quiet shard of a source is no longer waited for."""

    after_ms: int
    slack_ms: int | None = None
    """None: it is left out. Else its promise follows the clock, by so much behind."""


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
    def needs_facts(self) -> bool:
        """True if each report matters to it, even one without facts about its work.

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
    """By stage: how far its output may be behind the furthest output of the sources above it."""

    def __bool__(self) -> bool:
        """Return whether anything is throttled."""
        return bool(self.groups or self.max_lag_ms)


NO_THROTTLE = ThrottlePolicy()
