"""Detects which shards of a source are quiet, so that the driver can report them as idle.

A shard is quiet if it had no rows for some time, and after that time nothing was left to read. A
shard whose task failed is not quiet: its batch is not committed, so there is something left to read.
"""

from __future__ import annotations

from collections.abc import Iterable


class QuietShards:
    """The shards of one source stage. Times are the driver's steady clock, in ms."""

    def __init__(self, shards: Iterable[str], *, after_ms: int, now_ms: int) -> None:
        self._after_ms = after_ms
        self._seen_ms = dict.fromkeys(shards, now_ms)
        self._caught_up_ms = now_ms

    def saw(self, shards: Iterable[str], now_ms: int) -> None:
        """Record that a batch had rows of these shards."""
        for shard in shards:
            if shard in self._seen_ms:
                self._seen_ms[shard] = now_ms

    def caught_up(self, now_ms: int) -> None:
        """Record that nothing was left to read at this moment."""
        self._caught_up_ms = now_ms

    def quiet(self) -> list[str]:
        """Return the shards without rows for long enough before `caught_up` was last called.

        >>> shards = QuietShards(["a", "b"], after_ms=100, now_ms=0)
        >>> shards.saw(["a"], 60); shards.caught_up(99); shards.quiet()
        []
        >>> shards.caught_up(120); shards.quiet()
        ['b']
        """
        return [
            shard
            for shard, seen_ms in self._seen_ms.items()
            if self._caught_up_ms - seen_ms >= self._after_ms
        ]
