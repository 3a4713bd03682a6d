"""What a reader of several shards asks the driver before each batch, and what it may read then.

Pure: who is held back, and by how much, is decided in `spark_agent.throttle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

_LONGEST_REST_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader could read next."""

    unread: Mapping[str, int]
    """By shard that has unread files: how many."""
    most: int | None = None
    """The most files of a shard in one batch; None: all that there are."""
    ends: bool = False
    """Whether nothing comes besides: the run reads what was there at its start."""

    @classmethod
    def from_dict(cls, sent: Mapping[str, Any]) -> Wanted:
        """Read it from the form in which it is sent."""
        return cls(**sent)

    def to_dict(self) -> dict[str, Any]:
        """Return it in the form in which it is sent."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ShardLimit:
    """How many files a shard may have in the next batch, and why not more."""

    files: int
    because: str


@dataclass(frozen=True, slots=True)
class Admission:
    """What the shards of one source may read in the next batch. A shard that is not named is free."""

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


def files_at(rate: float, most: int) -> int:
    """Return how many files a shard gets in a batch at a rate, if it gets `most` at the full one.

    >>> [files_at(rate, 4) for rate in (1.0, 0.5, 0.3, 0.1)]
    [4, 2, 1, 1]
    """
    return max(1, int(most * rate))


def rest_ms(rate: float, most: int | None, duration_ms: int) -> int:
    """Return how long a shard rests after a batch, where fewer files are not slow enough.

    That is so if it cannot have less than one file, or has all that there are.

    >>> rest_ms(0.5, 4, 1_000), rest_ms(0.125, 4, 1_000), rest_ms(0.5, None, 1_000)
    (0, 1000, 1000)
    """
    by_files = 1.0 if most is None else files_at(rate, most) / most
    remaining = min(rate / by_files, 1.0)
    return min(int(duration_ms * (1 / remaining - 1)), _LONGEST_REST_MS)


class Rests:
    """When each shard read last, and how long that batch took."""

    def __init__(self) -> None:
        self._planned: dict[str, frozenset[str]] = {}
        """By stage: the shards that read in the batch that is planned or runs."""
        self._last: dict[tuple[str, str], tuple[int, int]] = {}
        """By stage and shard: when its last batch ended, and how long it took."""

    def plan(self, stage: str, shards: frozenset[str]) -> None:
        """Note who reads in the next batch."""
        self._planned[stage] = shards

    def end_batch(self, now_ms: int, duration_ms: int) -> None:
        """Note that the planned batch has ended.

        >>> rests = Rests()
        >>> rests.plan("taps", frozenset({"north"}))
        >>> rests.end_batch(5_000, 1_000)
        >>> [rests.is_resting("taps", "north", 0.5, None, now_ms) for now_ms in (5_999, 6_000)]
        [True, False]
        """
        for stage, shards in self._planned.items():
            for shard in shards:
                self._last[stage, shard] = now_ms, duration_ms
        self._planned.clear()

    def is_resting(
        self, stage: str, shard: str, rate: float, most: int | None, now_ms: int
    ) -> bool:
        """Return whether a shard reads nothing now, so that it keeps to a rate."""
        ended_ms, duration_ms = self._last.get((stage, shard), (None, 0))
        return ended_ms is not None and now_ms - ended_ms < rest_ms(rate, most, duration_ms)
