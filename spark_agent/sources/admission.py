"""Admission of shards to a batch: the request of a source before it, and the driver's answer.

Pure: who is held back, and by how much, is decided in `spark_agent.throttle.source_throttle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files that a source could read next."""

    unread: Mapping[str, int]
    """By shard that has unread files: how many."""
    most: int | None = None
    """The most files of a shard in one batch; None: all that there are."""
    ends: bool = False
    """True if nothing comes besides: the run reads what was there at its start."""

    @classmethod
    def from_dict(cls, sent: Mapping[str, Any]) -> Wanted:
        """Read it from the form in which it is sent."""
        return cls(**sent)

    def to_dict(self) -> dict[str, Any]:
        """Return it in the form in which it is sent."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ShardLimit:
    """Limit on a shard's files in the next batch, with its reason."""

    files: int
    because: str


@dataclass(frozen=True, slots=True)
class Admission:
    """Limits of one source's shards in the next batch. A shard that is not named has none."""

    limits: Mapping[str, ShardLimit] = field(default_factory=dict[str, ShardLimit])

    @classmethod
    def from_dict(cls, sent: Mapping[str, Any]) -> Admission:
        """Read it from the form in which it is sent."""
        return cls({shard: ShardLimit(**limit) for shard, limit in sent.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return it in the form in which it is sent."""
        return {shard: asdict(limit) for shard, limit in self.limits.items()}

    def take(self, unread: Mapping[str, Sequence[str]], most: int | None) -> dict[str, list[str]]:
        """Return the files that the next batch reads, by shard; `most` is the most of each shard.

        >>> paused = Admission({"north": ShardLimit(0, "it is ahead")})
        >>> paused.take({"north": ["7"], "south": ["3", "4", "5"]}, 2)
        {'south': ['3', '4']}
        """
        taken: dict[str, list[str]] = {}
        for shard, names in unread.items():
            limit = self.limits.get(shard)
            count = len(names) if most is None else most
            count = count if limit is None else min(limit.files, count)
            if some := list(names[:count]):
                taken[shard] = some
        return taken

    @property
    def because(self) -> dict[str, str]:
        """Why shards get nothing, or less than they could have."""
        return {shard: limit.because for shard, limit in self.limits.items()}
