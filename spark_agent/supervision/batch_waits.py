"""Notes of a query's next batch and of its shards, between its feed and its supervisor."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

from spark_agent.exceptions import QueryFailedError, final_message
from spark_agent.sources.admission import Wanted
from spark_agent.started_query import StartedQuery

_log: Final = logging.getLogger("spark_agent")


class BatchWaits:
    """The reasons why a query's next batch, or a shard in it, waits, the shards with unread files, and
    those whose folders are complete.

    The feed sets them, on Spark's thread; the supervisor and `Pipeline.waits` read them. Thread-safe:
    values are replaced, never changed, and every source has its entry from the start.
    """

    def __init__(self, query: StartedQuery) -> None:
        self._query = query.name
        self._job = query.job
        self._declared = {each.name: frozenset(each.shards) for each in query.stages.sources}
        self._complete: dict[str, Mapping[str, int]] = {}
        """By source: its complete shards, with the epoch by whose commit the checkpoint has that."""
        self.final_sources: Collection[str] = ()
        """The sources with a marker that were final when the query was started."""
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

    def note_complete(self, stage: str, wanted: Wanted, latest_epoch: int) -> None:
        """Note a source's complete shards. The next batch is the one after `latest_epoch`.

        Raises `QueryFailedError` if a final source has unread files: their rows would be late.
        """
        if stage in self.final_sources:
            unread = sorted(self._declared[stage].intersection(wanted.unread))
            if unread:
                raise QueryFailedError(
                    f"tidegauge: {final_message(self._job, stage, unread=unread)}"
                )
        if wanted.complete or wanted.completing:
            # The offset of the next batch has the latter. Spark commits the batches before the next one
            # before it polls its sources.
            self._complete[stage] = {
                **self._complete.get(stage, {}),
                **dict.fromkeys(wanted.completing, latest_epoch + 1),
                **dict.fromkeys(wanted.complete, -1),
            }

    def complete_after(self, epoch: int) -> dict[str, set[str]]:
        """Return the complete shards of each source that a checkpoint has with the commit of an epoch;
        -1: that of the query's start.
        """
        return {
            stage: {shard for shard, since in shards.items() if since <= epoch}
            for stage, shards in list(self._complete.items())
        }

    def note_shards(self, stage: str, *, unread: Collection[str], waits: Mapping[str, str]) -> None:
        """Note a source's shards that have unread files, and those of them that wait."""
        before = self._shards.get(stage, {})
        for shard, because in waits.items():
            if shard not in before:
                _log.info("query %s goes on, with less of one shard: %s", self._query, because)
        self.unread[stage], self._shards[stage] = unread, waits
