"""Dynamic shards leave their source once they are final."""

from __future__ import annotations

import logging

from service.aggregator.definitions import Definitions
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import ProblemError
from service.frontier.timestamps import MAX
from service.live.port import LiveStore

log = logging.getLogger(__name__)


class DynamicShards:
    """Removal of joined, final shards from their source, so that they cost nothing more."""

    def __init__(
        self, store: LiveStore, live: RecoveringLiveStore, definitions: Definitions
    ) -> None:
        self._store = store
        self._live = live
        self._definitions = definitions
        self._final: dict[tuple[str, str], int] = {}
        """Number of final shards of each source that stayed at the last check, because they are
        declared."""

    async def apply(self) -> None:
        """Check for final shards now."""
        final: dict[tuple[str, str], int] = {}
        for job, pipeline in self._store.known().items():
            for name in pipeline.dynamic_sources:
                try:
                    final[job, name] = await self._apply(job, name)
                except ProblemError as error:
                    # The job may be deleted, or its stores unavailable: the next check is soon.
                    log.debug("no shard of %s/%s leaves now: %s", job, name, error.detail)
        self._final = final

    async def _apply(self, job: str, stage: str) -> int:
        _, observed = await self._live.observe(job, (stage,))
        seen = observed.get(stage)
        # A retired shard counts as final, and stays: it may report again.
        count = 0 if seen is None else int((seen.promises == MAX).sum()) - len(seen.retired)
        if count and count != self._final.get((job, stage)):
            # `leave` reads them again: the layout may have changed since. The shards that leave must not
            # be counted next time: as many others may be final by then.
            return await self._definitions.leave(job, stage)
        return count
