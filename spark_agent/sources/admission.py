"""Admission of shards to a batch: a source's request before each batch, and the driver's answer.

Pure. `spark_agent.throttle.source_throttle` makes the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files that a source could read next."""

    unread: Mapping[str, int]
    """Number of unread files, by shard that has some."""
    most: int | None = None
    """The largest number of files of a shard in one batch; None: without a limit."""
    ends: bool = False
    """True if the run reads only the files that were there at its start."""
    complete: Sequence[str] = ()
    """Shards that the offset of a batch in Spark's commit log has as complete. Each is sent once."""
    completing: Sequence[str] = ()
    """Shards that the offset of the next batch has as complete: they have nothing unread now."""

    @classmethod
    def from_dict(cls, sent: Mapping[str, Any]) -> Wanted:
        """Decode the form that the link sends."""
        shards = {name: tuple(sent[name]) for name in ("complete", "completing")}
        return cls(sent["unread"], sent["most"], ends=sent["ends"], **shards)

    def to_dict(self) -> dict[str, Any]:
        """Encode for the link."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ShardLimit:
    """Limit on a shard's files in the next batch, with its reason."""

    files: int
    because: str


@dataclass(frozen=True, slots=True)
class Admission:
    """Limits of one source's shards in the next batch. Other shards are not limited."""

    limits: Mapping[str, ShardLimit] = field(default_factory=dict[str, ShardLimit])

    @classmethod
    def from_dict(cls, sent: Mapping[str, Any]) -> Admission:
        """Decode the form that the link sends."""
        return cls({shard: ShardLimit(**limit) for shard, limit in sent.items()})

    def to_dict(self) -> dict[str, Any]:
        """Encode for the link."""
        return {shard: asdict(limit) for shard, limit in self.limits.items()}

    def take(self, unread: Mapping[str, Sequence[str]], most: int | None) -> dict[str, list[str]]:
        """Return the files that the next batch reads, by shard, and `most` of each shard at most.

        >>> paused = Admission({"north": ShardLimit(0, "it is ahead")})
        >>> paused.take({"north": ["7"], "south": ["3", "4", "5"]}, 2)
        {'south': ['3', '4']}
        """
        taken = {
            shard: list(names[: self._most(shard, len(names), most)])
            for shard, names in unread.items()
        }
        return {shard: names for shard, names in taken.items() if names}

    def _most(self, shard: str, unread: int, most: int | None) -> int:
        limit = self.limits.get(shard)
        count = unread if most is None else min(unread, most)
        return count if limit is None else min(limit.files, count)

    def leaves(self, wanted: Wanted) -> frozenset[str]:
        """Return the shards of which the next batch leaves some files unread.

        >>> paused = Admission({"north": ShardLimit(0, "it is ahead")})
        >>> sorted(paused.leaves(Wanted({"north": 1, "south": 3, "west": 2}, most=2)))
        ['north', 'south']
        """
        return frozenset(
            shard
            for shard, count in wanted.unread.items()
            if self._most(shard, count, wanted.most) < count
        )

    @property
    def because(self) -> dict[str, str]:
        """Reasons of the limits, by shard."""
        return {shard: limit.because for shard, limit in self.limits.items()}
