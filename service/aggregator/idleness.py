"""Idleness by policy: a stage does not wait for quiet shards that are watched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from service.aggregator.store_clocks import StoreClocks
from service.aggregator.throttling import Throttling
from service.clock import Clock
from service.consistency.publisher import Publisher
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import ProblemError
from service.frontier.clock_readings import EVEN, ClockReadings
from service.frontier.graph import Pipeline
from service.frontier.idleness import (
    NEVER_PAUSED,
    PauseSamples,
    keeps_back,
    next_sample,
    quiet_through,
    wait_for_last,
)
from service.frontier.leases import watched_since
from service.frontier.policies import IdlePolicy
from service.frontier.ranges import Layout
from service.frontier.timestamps import MAX, MIN
from service.live.port import LiveStore
from service.model.observations import Instant, Settled, StageObservation

log = logging.getLogger(__name__)


class IdlePolicies:
    """Application of the policies of all jobs, on every replica: late decisions change nothing."""

    def __init__(
        self,
        store: LiveStore,
        live: RecoveringLiveStore,
        throttling: Throttling,
        publisher: Publisher,
        clock: Clock,
    ) -> None:
        self._store = store
        self._live = live
        self._throttling = throttling
        self._publisher = publisher
        self._samples: dict[tuple[str, str], PauseSamples] = {}
        """Samples of paused shards, by job and stage; only of stages with a throttle now or before."""
        self._clocks = StoreClocks(clock)

    async def apply(self) -> None:
        """Apply the policies now."""
        known = self._store.known()
        self._clocks.drop_old()
        self._samples = {at: samples for at, samples in self._samples.items() if at[0] in known}
        for job, pipeline in known.items():
            if not pipeline.idle_policies:
                continue
            try:
                await self._apply(job, pipeline)
            except ProblemError as error:
                # The job may be deleted, or its stores unavailable: the next time is soon.
                log.debug("cannot apply the policies of job %s now: %s", job, error.detail)
            except Exception:
                # An error of one job does not affect the others.
                log.exception("cannot apply the policies of job %s", job)

    async def _apply(self, job: str, pipeline: Pipeline) -> None:
        throttle = await self._throttling.read(job)
        for name, policy in pipeline.idle_policies.items():
            sent_ms = self._clocks.steady_ms()
            now, observed = await self._live.observe(job, (name,))
            clock = self._clocks.note(job, now, sent_ms)
            seen = observed.get(name)
            if seen is None:
                continue
            if seen.is_ahead_of(now.lease_ms):
                # From the next time on, no moment of before counts as one after the set-back.
                await self._live.follow_set_back(job, name, policy.after_ms)
            seen = replace(seen, commits=self._clocks.proved(job, name, seen.commits))
            now = replace(now, wall_ms=self._clocks.wall_ms(job, now))
            advice = throttle.shards.get(name, {})
            paused = [shard for shard, one in advice.items() if one.pause]
            samples = NEVER_PAUSED
            if paused or (job, name) in self._samples or _is_throttled(pipeline, name):
                samples = next_sample(
                    self._samples.get((job, name)), now.lease_ms, paused, after_ms=policy.after_ms
                )
                self._samples[job, name] = samples
            decisions = await self._without_kept_back(
                job, name, seen, decide(policy, seen, now, samples, clock)
            )
            for turn in in_turns(decisions):
                await self._settle(job, name, seen.layout, turn)

    async def _without_kept_back(
        self, job: str, stage: str, seen: StageObservation, decisions: Sequence[Settled]
    ) -> Sequence[Settled]:
        """Leave out decisions that would let the watermark pass a hold or a pending report of a shard.

        A report with records between this check and `settle` makes the decision void.
        """
        passing = [each.index for each in decisions if each.lets_pass]
        if not passing:
            return decisions
        views = await self._live.range_views(job, stage, passing)
        finished = {v.name for v in views if not keeps_back(v.note.holds, v.waiting_promise)}
        unfinished = {index for index in passing if seen.layout.name(index) not in finished}
        return [each for each in decisions if each.index not in unfinished]

    async def _settle(
        self, job: str, stage: str, layout: Layout, decisions: Sequence[Settled]
    ) -> None:
        """Carry decisions out. The agreement of the shards is published before any of them leaves: a
        moment later, the last active one may be idle. Another replica may have settled the turn before,
        so this replica publishes in any case.
        """
        if any(each.idle for each in decisions):
            self._publisher.touch(job, (stage,))
            await self._live.flush(job)
        if await self._live.settle(job, stage, layout, decisions):
            self._publisher.touch(job, (stage,))


def _is_throttled(pipeline: Pipeline, stage: str) -> bool:
    return any(stage in group.stages for group in pipeline.throttle.groups)


def in_turns(decisions: Sequence[Settled]) -> Sequence[Sequence[Settled]]:
    """Return the decisions in the order in which to carry them out.

    First the decisions by which no shard leaves. The shards that have been quiet for the shortest time
    leave last.
    """
    staying = [each for each in decisions if not each.idle]
    leaving = [each for each in decisions if each.idle]
    last = wait_for_last(each.quiet_since_ms for each in leaving)
    if last is None:
        return [turn for turn in (staying, leaving) if turn]
    sooner = [each for each in leaving if each.quiet_since_ms != last]
    later = [each for each in leaving if each.quiet_since_ms == last]
    return [turn for turn in (staying, sooner, later) if turn]


def decide(
    policy: IdlePolicy,
    seen: StageObservation,
    now: Instant,
    samples: PauseSamples,
    clock: ClockReadings = EVEN,
) -> list[Settled]:
    """Return the changes: the shards that become idle or cease to be, and those whose promise follows
    the clock.

    Idle shards are not throttled. If a shard is idle by policy and paused nevertheless, its pause was
    decided a moment before its idleness, maybe by another replica, and its worker may follow the pause.
    So the stage waits for it again. This costs time, whereas an idle shard that is not read would lose
    its records.

    A shard that is idle by policy and not paused stays so, even if this replica has few samples, or few
    readings of the clock since its last step: the replica that decided it had enough. Else each new
    replica would end the idleness that the others have proved.
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
        stays = index in seen.idle_by_policy and not samples.is_paused(shard)
        through_ms = quiet_through(
            facts,
            watched_since_ms=watched_since(int(seen.held_since_ms[index])) if fence else None,
            commits=seen.commits,
            unpaused_since_ms=MIN if stays else samples.unpaused_since(shard),
            now_ms=now.lease_ms,
            after_ms=policy.after_ms,
            clock=clock.trusted() if stays else clock,
        )
        quiet_since_ms = None if facts is None else facts.quiet_since_ms
        if policy.slack_ms is not None:
            if index in seen.idle_by_policy:
                # By a former policy, in a state of an earlier version.
                decisions.append(Settled(index, fence, quiet_since_ms, False, MIN))
                continue
            if through_ms is None:
                continue
            # A batch may be reading what has arrived since.
            follows = now.wall_ms - (now.lease_ms - through_ms) - policy.slack_ms
            # A shard that is idle by its worker's report is left out anyway.
            if promise < follows and not seen.idle[index]:
                decisions.append(Settled(index, fence, quiet_since_ms, False, follows))
        elif through_ms is not None and not seen.idle[index]:
            decisions.append(Settled(index, fence, quiet_since_ms, True, MIN))
        elif through_ms is None and index in seen.idle_by_policy:
            decisions.append(Settled(index, fence, quiet_since_ms, False, MIN))
    return decisions
