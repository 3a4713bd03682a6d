"""A relay between two aggregators: a regional stage as one shard of a parent's source.

The relay is an edge of the graph that is longer than the others: the parent's source over relayed shards
has the watermark of a passthrough stage below the regional stages, later. Four facts make it safe.

- The output watermark of a region is a promise, and a promise stays true for ever. A copy of it is
  lower than the original or equal, never higher, so a slow, repeated or overtaken relay is early for
  no one.
- The minimum over regions of the minimum over their ranges is the minimum over all ranges.
- A region that is lost, or whose relay is, promises nothing new, and holds the parent where it is.
- A reset takes promises back. So the name of the shard ends with the generation of the region's job:
  the shard `west.1` is for promises of generation 1 alone. The layout of the parent's stage is in the
  parent's ledger, so no relay can report a region that was reset in the place of the one before.

Idleness is not a promise: a stale copy of it may be wrong. So it is relayed on request only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from uuid import uuid4

from spark_agent.client.client import Client, StageWatermark
from spark_agent.client.errors import LeaseConflict
from spark_agent.client.poller import long_poll_s
from spark_agent.client.reports import RangeReport, Rank
from spark_agent.client.spec import check_name
from spark_agent.clock import Clock, SystemClock
from spark_agent.exceptions import Unavailable, Wrong, WrongAddress

Place = tuple[Client, str, str]
"""A stage of a service: a client of the service, the job, the stage."""

_NO_RUN: Final = Rank(run=0, epoch=0, attempt=0)
_PAUSE_MS: Final = 1_000
"""Pause of a relay while a service is unavailable, or while another relay has the shard."""


class RegionReset(Wrong):
    """The region's job has another generation than the parent's stage is declared for.

    The region was reset, so its promises start over, and the parent's watermark may be ahead of them.
    Reset the parent's job, too, and declare its stage with the shard that the message names.
    """


def shard_of(region: str, generation: int) -> str:
    """Return the name of the shard that stands for a generation of a region in the parent's stage.

    Raises `ValueError` if it is not a valid name.

    >>> shard_of("west", 1)
    'west.1'
    """
    name = f"{region}.{generation}"
    check_name("region", name)
    return name


class Relay:
    """Report the output watermark of a regional stage as one shard of a parent's source.

    `region` and `parent` are a client, a job and a stage each. `name` is the region's name: in the
    parent, its shard is `name` with the generation of the region's job (`Relay.shard`). The stage of the
    parent is not `dynamic`, and has no run.

    Any number of relays may run for a region: one has the lease of the shard, for `ttl_ms`, and the
    others wait until it expires. A region that does not answer is not reported, so its lease expires and
    the parent's stage has the health `no_worker`. `least_ms` is the least time between two reports.
    With `idle`, an idle region does not hold the parent. Its return is relayed, too, so rows that it
    emits before the parent has learned of its return may be late there.

    ```python
    region = Client("http://127.0.0.1:8000"), "parcels", "north"
    parent = Client("http://127.0.0.1:8000"), "continent", "regions"
    relay = Relay(region, parent, name="north")
    parent[0].declare("continent", {"regions": {"shards": [relay.shard()]}})
    print(relay.step().output_ms)    # 1767225600000
    print(parent[0].watermark("continent", "regions").output_ms)    # 1767225600000
    ```
    """

    def __init__(
        self,
        region: Place,
        parent: Place,
        *,
        name: str,
        idle: bool = False,
        ttl_ms: int = 10_000,
        least_ms: int = 100,
        holder: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._region = region
        self._parent = parent
        self._name = name
        self._passes_idleness = idle
        self._ttl_ms = ttl_ms
        self._least_ms = least_ms
        # Two relays with one holder would take the lease from each other.
        self._holder = holder or f"relay-{uuid4().hex[:12]}"
        self._clock = clock or SystemClock()
        self._seen: StageWatermark | None = None
        self._is_reported = False

    def shard(self) -> str:
        """Return the name of the region's shard in the parent, from the region's present generation."""
        client, job, _ = self._region
        return shard_of(self._name, client.generation(job))

    def step(self) -> StageWatermark:
        """Report the region's watermark, once it differs from the last one or the lease must be renewed.

        Return the region's watermark. Raises `LeaseConflict` while another relay has the shard,
        `RegionReset`, and `Unavailable` if one of the services does not answer.
        """
        before = self._seen
        seen = self._read()
        if before is None or before.generation != seen.generation:
            self._check(seen.generation)
        self._is_reported = False
        self._report(seen)
        self._seen, self._is_reported = seen, True
        return seen

    def run(self, *, is_over: Callable[[], bool] = lambda: False) -> None:
        """Relay until the region is final, or `is_over`, through restarts of both services.

        `is_over` is checked after each step: at the latest after a third of the lease, if both services
        answer. Raises `Wrong` where a retry does not help, among others `RegionReset`.
        """
        while not is_over():
            try:
                final = self.step().final
            except WrongAddress:
                raise
            except (LeaseConflict, Unavailable):
                self._clock.pause(min(_PAUSE_MS, self._ttl_ms))
                continue
            if final:
                return
            self._clock.pause(self._least_ms)

    def _read(self) -> StageWatermark:
        """Return the region's watermark; if the last one is reported, by a long poll."""
        client, job, stage = self._region
        if self._seen is None or not self._is_reported:
            return client.watermark(job, stage)
        wait_s = long_poll_s(self._ttl_ms)
        changed = client.watermark_since(job, stage, self._seen.etag, wait_s=wait_s)
        return changed or self._seen

    def _report(self, seen: StageWatermark) -> None:
        is_idle = self._passes_idleness and seen.status == "idle"
        try:
            if seen.final:
                self._send(seen, RangeReport(final=True))
            elif seen.output_ms is None and not is_idle:
                self._hold(seen)
            else:
                self._send(seen, RangeReport(seen.output_ms, idle=is_idle))
        except LeaseConflict:
            # The shard may also have left the layout since the last check.
            self._check(seen.generation)
            raise

    def _send(self, seen: StageWatermark, report: RangeReport) -> None:
        """Send a report with a claim: a lease that has expired is granted again, if it is free."""
        client, job, stage = self._parent
        client.claim_and_report(
            job,
            stage,
            {shard_of(self._name, seen.generation): report},
            holder=self._holder,
            ttl_ms=self._ttl_ms,
            rank=_NO_RUN,
        )

    def _hold(self, seen: StageWatermark) -> None:
        """Claim the shard of a region that has promised nothing yet."""
        client, job, stage = self._parent
        shards = [shard_of(self._name, seen.generation)]
        client.claim(job, stage, shards, holder=self._holder, ttl_ms=self._ttl_ms, rank=_NO_RUN)

    def _check(self, generation: int) -> None:
        """Check that the parent's stage has the shard of this generation of the region."""
        client, job, stage = self._parent
        spec = client.job(job)[0]["stages"].get(stage, {})
        shards: list[str] = spec.get("shards", [])
        place, shard = f"stage {stage!r} of job {job!r}", shard_of(self._name, generation)
        if spec.get("dynamic"):
            raise Wrong(
                f"{place} is dynamic, so a region that was reset would join it: list its shards"
            )
        if shard in shards:
            return
        others = [each for each in shards if _is_of_region(each, self._name)]
        if not others:
            raise Wrong(f"{place} has no shard {shard!r} for region {self._name!r}: declare it")
        raise RegionReset(
            f"region {self._name!r} is in generation {generation} of its job, and {place} has its shard"
            f" {', '.join(others)}: the region was reset, so its watermark starts over. Reset job"
            f" {job!r}, too, and declare its stage with shard {shard!r} instead"
        )


def _is_of_region(shard: str, region: str) -> bool:
    """Return whether a shard stands for some generation of a region.

    >>> _is_of_region("west.2", "west"), _is_of_region("west.coast.2", "west")
    (True, False)
    """
    name, _, generation = shard.rpartition(".")
    return name == region and generation.isdecimal()
