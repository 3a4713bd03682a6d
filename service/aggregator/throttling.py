"""Throttling: the present advice for the shards of a job."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from service.clock import Clock
from service.consistency.recovering_live_store import RecoveringLiveStore
from service.errors import UnavailableError
from service.frontier.durations import duration_text
from service.frontier.graph import Pipeline
from service.frontier.policies import ThrottleGroup
from service.frontier.throttle import (
    NO_ADVICE,
    Advice,
    GroupLimit,
    ShardAt,
    ThrottleView,
    lag_of,
    limit_of,
    must_pause,
    rate_of,
    slowest,
)
from service.frontier.timestamps import iso
from service.model.jobs import JobView, StageView
from service.model.observations import StageObservation
from service.tasks import Shutdown

POLL_S = 0.1
"""Poll interval of requests that wait for a change."""


class Throttling:
    """Advice from the present state of the live store, and so the same on all replicas."""

    def __init__(self, live: RecoveringLiveStore, clock: Clock, shutdown: Shutdown) -> None:
        self._live = live
        self._clock = clock
        self._shutdown = shutdown

    async def advice_for(self, job: str, stage: str, shards: Iterable[str]) -> Mapping[str, Advice]:
        """Return the advice for shards of a source; empty while unknown."""
        try:
            found = (await self.read(job)).shards.get(stage, {})
        except UnavailableError:
            return {}
        return {shard: found[shard] for shard in shards if shard in found}

    async def wait(
        self, job: str, until: Callable[[ThrottleView], bool], timeout_s: float
    ) -> ThrottleView:
        """Return the advice once it meets `until`, or its state after the timeout.

        The advice changes with promises, which wake no waiting request, so it is polled.
        """
        deadline_ms = self._clock.steady_ms() + int(timeout_s * 1_000)
        while True:
            view = await self.read(job)
            left_s = (deadline_ms - self._clock.steady_ms()) / 1_000
            if until(view) or left_s <= 0:
                return view
            if not await self._shutdown.sleep(min(POLL_S, left_s)):
                return view

    async def read(self, job: str, view: JobView | None = None) -> ThrottleView:
        """Return the throttle advice for a job's shards. Raises `UnknownJobError`.

        `view`: the job, if it was just read. Without it, the job is read only if a limit depends on
        published watermarks, so that most polls are one step of the live store.
        """
        while True:
            pipeline = await self._live.pipeline(job) if view is None else view.pipeline
            if not pipeline.throttle:
                return NO_ADVICE
            now = view
            if now is None and pipeline.throttle.max_lag_ms:
                now, _ = await self._live.snapshot(job)
                pipeline = now.pipeline
            observed = await self._observe(job, pipeline)
            # The cached pipeline may be out of date. Any step of the store checks and replaces it.
            if now is not None or await self._live.pipeline(job) is pipeline:
                return decide(pipeline, {} if now is None else now.stages, observed)

    async def _observe(self, job: str, pipeline: Pipeline) -> Mapping[str, StageObservation]:
        grouped = [name for group in pipeline.throttle.groups for name in group.stages]
        if not grouped:
            return {}
        _, observed = await self._live.observe(job, grouped)
        return observed


def version_of(view: ThrottleView) -> int:
    """Return a number that changes with the advice, and is the same on every replica."""
    digest = hashlib.blake2b(msgspec.json.encode(view), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def decide(
    pipeline: Pipeline, stages: Mapping[str, StageView], observed: Mapping[str, StageObservation]
) -> ThrottleView:
    """Return the advice, from published watermarks and the promises of the sources' shards.

    `stages`: the published ones; they may be left out if no stage has a bound on its lag.
    """
    groups: list[GroupLimit] = []
    shards: dict[str, dict[str, Advice]] = {}
    rates = _rates(pipeline, stages)
    for group in pipeline.throttle.groups:
        at = [shard for name in group.stages for shard in _shards(name, observed.get(name))]
        found = _limit(group, at)
        groups.append(found)
        for shard in at:
            if must_pause(shard.promise, found.limit) and not shard.idle and found.held_by:
                because = _ahead(shard, found.held_by, group)
                shards.setdefault(shard.stage, {})[shard.shard] = Advice(
                    pause=True, until=found.limit, because=because
                )
    limits = {name: found.limit for found in groups for name in found.stages}
    for name, slow in rates.items():
        layout = pipeline.stages[name].layout
        for shard in layout.names if layout is not None else ():
            by_group = shards.setdefault(name, {}).get(shard)
            shards[name][shard] = Advice(
                pause=by_group is not None and by_group.pause,
                until=limits.get(name),
                rate=slow.rate,
                because=slow.because if by_group is None else f"{by_group.because}; {slow.because}",
            )
    return ThrottleView(groups, shards)


def _limit(group: ThrottleGroup, at: list[ShardAt]) -> GroupLimit:
    held_by = slowest(at)
    if held_by is None:
        return GroupLimit(group.stages, None)
    return GroupLimit(group.stages, limit_of(held_by.promise, group.max_drift_ms), held_by)


def _shards(stage: str, seen: StageObservation | None) -> list[ShardAt]:
    if seen is None:
        return []
    rows = zip(seen.layout.names, seen.promises.tolist(), seen.idle.tolist(), strict=True)
    return [ShardAt(stage, shard, promise, idle) for shard, promise, idle in rows]


def _ahead(shard: ShardAt, held_by: ShardAt, group: ThrottleGroup) -> str:
    return (
        f"it is at {iso(shard.promise)}, more than {duration_text(group.max_drift_ms)} ahead of shard"
        f" {held_by.shard} of {held_by.stage} at {iso(held_by.promise)}"
    )


@dataclass(frozen=True, slots=True)
class _Slow:
    rate: float
    because: str


def _rates(pipeline: Pipeline, stages: Mapping[str, StageView]) -> dict[str, _Slow]:
    """Return the rate of each source that should slow down: the least of its downstream stages' rates.

    Only sources that are ahead of a stage by more than its bound slow down. A source that the stage
    waits for would make it fall behind even more.
    """
    found: dict[str, _Slow] = {}
    for name, max_lag_ms in pipeline.throttle.max_lag_ms.items():
        output = stages[name].watermark.output
        for source in pipeline.sources_above[name]:
            ahead = stages[source].watermark.output
            rate = rate_of(lag_of(output, ahead), max_lag_ms)
            if rate < 1.0 and (source not in found or rate < found[source].rate):
                because = f"{name} is more than {duration_text(max_lag_ms)} behind {source}"
                found[source] = _Slow(rate, because)
    return found
