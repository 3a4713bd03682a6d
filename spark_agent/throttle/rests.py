"""Pauses of shards that read more slowly than one file a batch. Pure."""

from __future__ import annotations

from typing import Final

LONGEST_REST_MS: Final = 60_000
"""The longest pause between two batches to which a rate can lead."""


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
    return min(int(duration_ms * (1 / remaining - 1)), LONGEST_REST_MS)


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
