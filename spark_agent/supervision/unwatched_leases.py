"""Leases on shards that their query does not poll just now."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from spark_agent.client.client import Client
from spark_agent.client.errors import LeaseConflict
from spark_agent.client.reports import Lease
from spark_agent.clock import Clock
from spark_agent.started_query import StartedQuery
from spark_agent.supervision.driver_reporter import DriverReporter

_RENEWALS_PER_LEASE: Final = 3


class UnwatchedLeases:
    """Keeps leases on the shards of sources with an idle policy while a batch runs.

    A shard without a lease would pass for one without a worker. But a lease as any other would prove
    that the query polls the shard, while the batch may be reading rows of that shard. So these are
    unwatched, and prove nothing.

    A claim ends the idleness of a shard. So a lease is renewed, and only shards without one are claimed.
    """

    def __init__(
        self,
        query: StartedQuery,
        not_final: Mapping[str, Collection[str]],
        client: Client,
        clock: Clock,
    ) -> None:
        """`not_final` are the shards of each source that are not final yet; they change."""
        self._query = query
        self._not_final = not_final
        self._client = client
        self._clock = clock
        self._interval_ms = query.timing.ttl_ms // _RENEWALS_PER_LEASE
        self._due_ms: int | None = None
        self._leases: dict[str, Sequence[Lease]] = {}

    @property
    def due_ms(self) -> int | None:
        """The instant of the next claims, on the steady clock; None: there are no leases."""
        return self._due_ms

    def keep(self, reporter: DriverReporter) -> None:
        """Renew the leases, and claim what is not under one, as often as needed; at first at once."""
        now_ms = self._clock.steady_ms()
        if self._due_ms is not None and now_ms < self._due_ms:
            return
        pause_ms = self._interval_ms
        for stage in self._query.stages.watched:
            kept = self._client.renew(self._query.job, self._leases.get(stage, ()))
            self._leases[stage] = kept
            held = {shard for lease in kept for shard in lease.granted}
            free = sorted(set(self._not_final[stage]) - held)
            if not free:
                continue
            try:
                lease = reporter.claim_some(stage, free, watched=False)
            except LeaseConflict as conflict:
                free_ms = conflict.free_in_ms
            else:
                self._leases[stage] = [*kept, lease]
                free_ms = lease.free_in_ms
            # A task's lease expires: its shard would be without a worker until the next claim.
            pause_ms = pause_ms if free_ms is None else min(pause_ms, free_ms)
        self._due_ms = now_ms + pause_ms

    def drop(self) -> None:
        """Forget the leases: others have taken their place."""
        self._due_ms = None
        self._leases.clear()
