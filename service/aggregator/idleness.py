"""Idleness by policy: quiet shards that are known to be watched are no longer waited for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from service.aggregator.throttling import Throttling
from service.consistency.publisher import Publisher
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import ProblemError
from service.frontier.graph import Pipeline
from service.frontier.idleness import (
    NEVER_PAUSED,
    Looks,
    is_quiet,
    keeps_back,
    next_look,
    wait_for_last,
)
from service.frontier.policies import IdlePolicy
from service.frontier.timestamps import MAX, MIN
from service.live.port import LiveStore
from service.model.observations import Instant, Settled, StageObservation

log = logging.getLogger(__name__)


class IdlePolicies:
    """Applies the policies of all jobs. Every replica does: decisions that are late change nothing."""

    def __init__(
        self,
        store: LiveStore,
        live: RecoveringLiveStore,
        throttling: Throttling,
        publisher: Publisher,
    ) -> None:
        self._store = store
        self._live = live
        self._throttling = throttling
        self._publisher = publisher
        self._looks: dict[tuple[str, str], Looks] = {}
        """Shards that were to pause, by job and stage; only of stages that are throttled, or were."""

    async def apply(self) -> None:
        """Apply the policies now."""
        known = self._store.known()
        self._looks = {at: looks for at, looks in self._looks.items() if at[0] in known}
        for job, pipeline in known.items():
            policies = {n: s.policy.idle for n, s in pipeline.stages.items() if s.policy.idle}
            if not policies:
                continue
            try:
                await self._apply(job, pipeline, policies)
            except ProblemError as error:
                # The job may be gone, or its stores away: the next time is soon.
                log.debug("cannot apply the policies of job %s now: %s", job, error.detail)
            except Exception:
                # One job's trouble is no other job's.
                log.exception("cannot apply the policies of job %s", job)

    async def _apply(
        self, job: str, pipeline: Pipeline, policies: Mapping[str, IdlePolicy]
    ) -> None:
        asked = await self._throttling.read(job)
        for name, policy in policies.items():
            now, observed = await self._live.observe(job, (name,))
            seen = observed.get(name)
            if seen is None:
                continue
            advice = asked.shards.get(name, {})
            paused = [shard for shard, one in advice.items() if one.pause]
            looks = NEVER_PAUSED
            if paused or (job, name) in self._looks or _is_throttled(pipeline, name):
                looks = next_look(
                    self._looks.get((job, name)), now.lease_ms, paused, after_ms=policy.after_ms
                )
                self._looks[job, name] = looks
            decisions = await self._without_kept_back(
                job, name, seen, decide(policy, seen, now, looks)
            )
            for turn in in_turns(decisions):
                await self._settle(job, name, turn)

    async def _without_kept_back(
        self, job: str, stage: str, seen: StageObservation, decisions: Sequence[Settled]
    ) -> Sequence[Settled]:
        """Leave out the decisions that would let the watermark pass what a shard keeps back.

        A report that brings records between this look and `settle` makes the decision void.
        """
        passing = [each.index for each in decisions if each.idle or each.promise != MIN]
        if not passing:
            return decisions
        views = await self._live.range_views(job, stage, passing)
        finished = {v.name for v in views if not keeps_back(v.note.holds, v.waiting_promise)}
        unfinished = {index for index in passing if seen.layout.name(index) not in finished}
        return [each for each in decisions if each.index not in unfinished]

    async def _settle(self, job: str, stage: str, decisions: Sequence[Settled]) -> None:
        """Carry decisions out. What the shards agree on is published before any of them leaves: a moment
        later, the last active one may be idle. Another replica may have settled the turn before, so this
        replica publishes, whoever did.
        """
        if any(each.idle for each in decisions):
            self._publisher.touch(job, (stage,))
            await self._live.flush(job)
        if await self._live.settle(job, stage, decisions):
            self._publisher.touch(job, (stage,))


def _is_throttled(pipeline: Pipeline, stage: str) -> bool:
    return any(stage in group.stages for group in pipeline.throttle.groups)


def in_turns(decisions: Sequence[Settled]) -> Sequence[Sequence[Settled]]:
    """Return the decisions in the order in which to carry them out.

    First what lets no shard leave: it waits for nothing. Who has been quiet for the shortest time
    leaves last.
    """
    staying = [each for each in decisions if not each.idle]
    leaving = [each for each in decisions if each.idle]
    last = wait_for_last(each.quiet_since_ms for each in leaving)
    if last is None:
        return [turn for turn in (staying, leaving) if turn]
    sooner = [each for each in leaving if each.quiet_since_ms != last]
    later = [each for each in leaving if each.quiet_since_ms == last]
    return [turn for turn in (staying, sooner, later) if turn]


def decide(policy: IdlePolicy, seen: StageObservation, now: Instant, looks: Looks) -> list[Settled]:
    """Return what has to change: which shards are idle now, which no longer are, and whose promise
    follows the clock.

    Throttling asks no idle shard to pause. If one is idle by policy and paused all the same, its pause
    was decided a moment before its idleness, maybe by another replica, and its worker may heed it. So it
    is waited for again: that costs time, whereas an idle shard that nobody reads would cost its records.

    One that is idle by policy and not paused stays so, even if this replica has not looked for long: who
    decided it had. Else each replica that starts would end the idleness that the others have proved.
    """
    decisions: list[Settled] = []
    promises = seen.promises.tolist()
    for index, (fence, shard) in enumerate(
        zip(seen.owners.tolist(), seen.layout.names, strict=True)
    ):
        promise = promises[index]
        if promise == MAX:
            continue
        facts = seen.facts.get(index)
        stays = index in seen.idle_by_policy and not looks.is_paused(shard)
        quiet = is_quiet(
            facts,
            held_since_ms=int(seen.held_since_ms[index]) if fence else None,
            commits=seen.commits,
            unpaused_since_ms=MIN if stays else looks.unpaused_since(shard),
            now_ms=now.lease_ms,
            after_ms=policy.after_ms,
        )
        quiet_since_ms = None if facts is None else facts.quiet_since_ms
        if policy.slack_ms is not None:
            follows = now.wall_ms - policy.slack_ms
            # One that is idle by its worker's word is left out anyway.
            if quiet and promise < follows and not seen.idle[index]:
                decisions.append(Settled(index, fence, quiet_since_ms, False, follows))
        elif quiet and not seen.idle[index]:
            decisions.append(Settled(index, fence, quiet_since_ms, True, MIN))
        elif not quiet and index in seen.idle_by_policy:
            decisions.append(Settled(index, fence, quiet_since_ms, False, MIN))
    return decisions
