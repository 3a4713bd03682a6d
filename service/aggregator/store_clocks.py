"""Clocks of the live store, as a replica reads them beside its own.

Each job may have another server, and so another clock. Its wall clock and the clock of leases are the
same in Redis, and two in memory.
"""

from __future__ import annotations

import logging
from typing import Final

from service.clock import Clock
from service.frontier.clock_readings import ClockReadings, next_reading
from service.frontier.idleness import Commits
from service.model.observations import Instant

log = logging.getLogger(__name__)

_KEPT_MS: Final = 60_000
"""Time for which the readings of a job are kept without a further one. A job that changes its layout is
missing for a moment."""


class StoreClocks:
    """Readings of the store's clocks, by job."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lease: dict[str, ClockReadings] = {}
        self._wall: dict[str, ClockReadings] = {}
        self._void: dict[str, dict[str, tuple[int, Commits | None]]] = {}
        """By job and stage: the commits at the first observation after a set-back, and its number."""

    def steady_ms(self) -> int:
        """Return the time before a reading is requested."""
        return self._clock.steady_ms()

    def note(self, job: str, now: Instant, sent_ms: int) -> ClockReadings:
        """Note a reading of a job's clocks; return the readings of the clock of leases."""
        received_ms = self._clock.steady_ms()
        at = {"sent_ms": sent_ms, "received_ms": received_ms}
        before = self._wall.get(job)
        self._wall[job] = wall = next_reading(before, now.wall_ms, **at)
        self._lease[job] = lease = next_reading(self._lease.get(job), now.lease_ms, **at)
        if before is not None and wall.steps != before.steps:
            log.warning(
                "the clock of job %s's live store was set from %d to %d ms, in at most %d ms: quiet"
                " shards are watched anew, and promises by the clock stay %d ms behind it",
                job,
                before.last_ms,
                wall.last_ms,
                received_ms - before.sent_ms,
                wall.ahead_ms,
            )
        return lease

    def wall_ms(self, job: str, now: Instant) -> int:
        """Return the wall clock that promises may follow: without the time by which the clock was set
        ahead, and not ahead of this machine's own.

        Either clock may be wrong. A promise that is too low costs time, one that is too high costs rows.
        """
        return min(now.wall_ms - self._wall[job].ahead_ms, self._clock.wall_ms())

    def proved(self, job: str, stage: str, commits: Commits | None) -> Commits | None:
        """Return a stage's commits, if they are of the time after the last set-back.

        A moment of before looks like one of after once the clock has reached it again. So the commits of
        before are remembered, and count no more until the next one.
        """
        number = self._lease[job].set_back
        if not number:
            return commits
        void = self._void.setdefault(job, {})
        known = void.get(stage)
        if known is None or known[0] != number:
            void[stage] = number, commits
            return None
        return None if known[1] == commits else commits

    def drop_old(self) -> None:
        """Drop the readings of jobs that were not read lately, as of deleted ones."""
        oldest_ms = self._clock.steady_ms() - _KEPT_MS
        for job in [job for job, each in self._lease.items() if each.received_ms < oldest_ms]:
            for kept in (self._lease, self._wall, self._void):
                kept.pop(job, None)
