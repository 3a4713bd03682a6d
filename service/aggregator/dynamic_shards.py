"""Dynamic shards leave their source once they are final."""

from __future__ import annotations

import logging

import numpy as np

from service.aggregator.definitions import Definitions
from service.errors import ProblemError
from service.frontier.timestamps import MAX
from service.live.port import LiveStore
from service.live_jobs import LiveJobs

log = logging.getLogger(__name__)


class DynamicShards:
    """Lets shards that have joined a source, and are final, leave it, so that they cost nothing more."""

    def __init__(self, store: LiveStore, live: LiveJobs, definitions: Definitions) -> None:
        self._store = store
        self._live = live
        self._definitions = definitions
        self._staying: dict[tuple[str, str], frozenset[str]] = {}
        """Final shards that were told to leave and are declared, so they stay."""

    async def apply(self) -> None:
        """Look for final shards now. Raises `UnavailableError`."""
        staying: dict[tuple[str, str], frozenset[str]] = {}
        for job in await self._store.jobs():
            for name, stage in job.pipeline.stages.items():
                if stage.policy.is_dynamic:
                    try:
                        staying[job.name, name] = await self._apply(job.name, name)
                    except ProblemError as error:
                        # The job may be gone, or its stores away: the next time is soon.
                        log.debug("no shard of %s/%s leaves now: %s", job.name, name, error.detail)
        self._staying = staying

    async def _apply(self, job: str, stage: str) -> frozenset[str]:
        _, observed = await self._live.observe(job, (stage,))
        final = np.flatnonzero(observed[stage].promises == MAX).tolist()
        if not final:
            return frozenset()
        layout = (await self._live.pipeline(job)).stages[stage].layout
        if layout is None or final[-1] >= len(layout):
            return frozenset()
        names = frozenset(layout.name(index) for index in final)
        known = self._staying.get((job, stage), frozenset[str]())
        if names - known:
            await self._definitions.leave(job, stage, names)
        return names
