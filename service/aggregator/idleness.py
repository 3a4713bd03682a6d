"""Idleness by policy: quiet shards that are known to be watched are no longer waited for."""

from __future__ import annotations

import logging
from collections.abc import Collection

from service.aggregator.throttling import Throttling
from service.errors import ProblemError
from service.frontier.idleness import is_quiet
from service.frontier.policies import IdlePolicy
from service.frontier.timestamps import MAX, MIN
from service.live.port import LiveStore
from service.live_jobs import LiveJobs
from service.model.observations import Instant, Settled, StageObservation
from service.publisher import Publisher

log = logging.getLogger(__name__)


class IdlePolicies:
    """Applies the policies of all jobs. Every replica does: decisions that are late change nothing."""

    def __init__(
        self, store: LiveStore, live: LiveJobs, throttling: Throttling, publisher: Publisher
    ) -> None:
        self._store = store
        self._live = live
        self._throttling = throttling
        self._publisher = publisher
        self._jobs: dict[str, list[str]] = {}

    async def find(self) -> None:
        """Look which jobs have stages with a policy. Raises `UnavailableError`."""
        self._jobs = {
            job.name: stages
            for job in await self._store.jobs()
            if (stages := [n for n, s in job.pipeline.stages.items() if s.policy.idle])
        }

    async def apply(self) -> None:
        """Apply the policies now."""
        for job, stages in list(self._jobs.items()):
            try:
                await self._apply(job, stages)
            except ProblemError as error:
                # The job may be gone, or its stores away: the next time is soon.
                log.debug("cannot apply the policies of job %s now: %s", job, error.detail)

    async def _apply(self, job: str, stages: Collection[str]) -> None:
        pipeline = await self._live.pipeline(job)
        asked = await self._throttling.read(job)
        for name in stages:
            stage = pipeline.stages.get(name)
            if stage is None or stage.policy.idle is None or stage.layout is None:
                continue
            now, observed = await self._live.observe(job, (name,))
            advice = asked.shards.get(name, {})
            index = stage.layout.index
            paused = {index[shard] for shard, one in advice.items() if one.pause and shard in index}
            decisions = decide(stage.policy.idle, observed[name], now, paused)
            if decisions and await self._live.settle(job, name, decisions):
                self._publisher.touch(job, (name,))


def decide(
    policy: IdlePolicy, seen: StageObservation, now: Instant, paused: Collection[int]
) -> list[Settled]:
    """Return what has to change: which shards are idle now, which no longer are, and whose promise
    follows the clock.
    """
    decisions: list[Settled] = []
    promises = seen.promises.tolist()
    for index, fence in enumerate(seen.owners.tolist()):
        promise = promises[index]
        if promise == MAX:
            continue
        quiet = is_quiet(
            seen.facts.get(index),
            leased_since_ms=int(seen.leased_since_ms[index]) if fence else None,
            commits=seen.commits,
            is_paused=index in paused,
            now_ms=now.lease_ms,
            after_ms=policy.after_ms,
        )
        was_idle = index in seen.idle_by_policy
        facts = seen.facts.get(index)
        quiet_since_ms = None if facts is None else facts.quiet_since_ms
        if policy.slack_ms is not None:
            follows = now.wall_ms - policy.slack_ms
            if quiet and promise < follows:
                idle = bool(seen.idle[index])
                decisions.append(Settled(index, fence, quiet_since_ms, idle, follows))
        elif quiet and not seen.idle[index]:
            decisions.append(Settled(index, fence, quiet_since_ms, True, MIN))
        elif was_idle and not quiet:
            decisions.append(Settled(index, fence, quiet_since_ms, False, MIN))
    return decisions
