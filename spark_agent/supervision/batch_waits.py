"""Waits of a query's next batch and of single shards in it, between its feed and its supervisor."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.started_query import StartedQuery

_log: Final = logging.getLogger("spark_agent")


class BatchWaits:
    """The reasons why a query's next batch, or a shard in it, waits, and the shards with unread files.

    The feed sets them, on Spark's thread; the supervisor and `Pipeline.waits` read them. Thread-safe:
    values are replaced, never changed, and every source has its entry from the start.
    """

    def __init__(self, query: StartedQuery) -> None:
        self._query = query.name
        self.because: str | None = None
        """The reason why the next batch waits, if it does."""
        self.unread: dict[str, Collection[str]] = dict.fromkeys(query.stages.by_shard, ())
        """By source of ours: its shards that have unread files."""
        self._shards: dict[str, Mapping[str, str]] = {stage: {} for stage in query.stages.by_shard}

    @property
    def shards(self) -> dict[str, dict[str, str]]:
        """By source stage: shards that read nothing or less in the next batch, and the reasons."""
        return {stage: dict(waits) for stage, waits in self._shards.items() if waits}

    @property
    def has_unread(self) -> bool:
        """True if a shard has unread files."""
        return any(self.unread.values())

    def note_shards(self, stage: str, *, unread: Collection[str], waits: Mapping[str, str]) -> None:
        """Note a source's shards that have unread files, and those of them that wait."""
        before = self._shards.get(stage, {})
        for shard, because in waits.items():
            if shard not in before:
                _log.info("query %s goes on, with less of one shard: %s", self._query, because)
        self.unread[stage], self._shards[stage] = unread, waits
