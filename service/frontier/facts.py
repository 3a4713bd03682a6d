"""Facts about a range's work, reported beside its promise, and their consequences for its stage.

A promise is about event time alone. Stuck and late work shows in the time of its processing: the
*processing watermark* is a lower bound on the wall-clock arrival of the oldest unfinished work (Akidau,
Chernyak and Lax, *Streaming Systems*, chapter 3, "Processing-time watermarks"). These facts are soft:
they are lost with the live store, and no promise depends on them. One fact is not soft: unfinished work
of a range is saved with its promise, since a quiet shard may leave the minimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from service.frontier.columns import Bools, Int64s
from service.frontier.timestamps import MAX


@dataclass(frozen=True, slots=True)
class ReportedFacts:
    """Facts about a range in one report, besides its promise."""

    oldest_work_ms: int | None = None
    """Wall-clock arrival of its oldest unfinished work; None: all work is finished."""
    pending: bytes | None = None
    """A sketch of the event times in flight; empty: nothing in flight; None: as reported last."""
    records: int | None = None
    """Records since its last report; None: not reported."""
    late: int = 0
    backlog: int = 0
    """Records that are not read yet."""
    keeps_back: bool = False
    """True if the range keeps a hold: output is still to come that the other facts do not show."""

    @property
    def is_unfinished(self) -> bool:
        """True if output of it is still to come.

        >>> ReportedFacts(records=1).is_unfinished, ReportedFacts(backlog=1).is_unfinished
        (False, True)
        """
        return _is_unfinished(self.keeps_back, self.backlog, self.oldest_work_ms, self.pending)

    @property
    def is_quiet(self) -> bool:
        """True if no record came, and no backlog is left.

        >>> ReportedFacts(records=0).is_quiet, ReportedFacts().is_quiet
        (True, False)
        """
        return self.records == 0 and not self.backlog

    @property
    def is_nothing(self) -> bool:
        """True if no record came, and no work is unfinished.

        >>> ReportedFacts(records=0).is_nothing, ReportedFacts(records=0, keeps_back=True).is_nothing
        (True, False)
        """
        return self.is_quiet and not self.is_unfinished


NO_FACTS = ReportedFacts()

LEFT_UNFINISHED = ReportedFacts(records=0, keeps_back=True)
"""The facts of a report that waits, once more after others of its range are applied (`note_waiting`)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a range, from all of its reports so far."""

    reported_at_ms: int
    """Instant of its last applied report, on the service's wall clock; 0: never."""
    interval_ms: int | None
    """Time between its last two reports; None: only one report so far."""
    oldest_work_ms: int | None
    pending: bytes | None
    """None: never reported."""
    backlog: int
    quiet_since_ms: int
    """Instant of its last record, on the clock of leases."""
    keeps_back: bool = False
    """As reported last, or by any attempt at the last committed epoch, or in an epoch that waits or was
    dropped since."""

    @property
    def is_unfinished(self) -> bool:
        """True if output of it is still to come."""
        return _is_unfinished(self.keeps_back, self.backlog, self.oldest_work_ms, self.pending)


def _is_unfinished(
    keeps_back: bool, backlog: int, oldest_work_ms: int | None, pending: bytes | None
) -> bool:
    return keeps_back or backlog > 0 or oldest_work_ms is not None or bool(pending)


UNFINISHED = Facts(0, None, None, None, 0, quiet_since_ms=0, keeps_back=True)
"""The facts of a range with unfinished work after a loss of the live store."""


def merge_facts(
    earlier: Facts | None, reported: ReportedFacts, *, now_ms: int, wall_ms: int
) -> Facts:
    """Merge a report into the facts of its range so far.

    Rows in flight stay as reported until the next report of them; the rest is as reported last. An
    arrival of work ahead of the service's clock is taken as now.

    >>> first = merge_facts(None, ReportedFacts(oldest_work_ms=70, pending=b"x"), now_ms=5, wall_ms=60)
    >>> first.oldest_work_ms, first.quiet_since_ms, first.interval_ms
    (60, 5, None)
    >>> later = merge_facts(first, ReportedFacts(records=0), now_ms=7, wall_ms=62)
    >>> later.oldest_work_ms, later.quiet_since_ms, later.interval_ms, later.pending == b"x"
    (None, 5, 2, True)
    """
    oldest = reported.oldest_work_ms
    return Facts(
        reported_at_ms=wall_ms,
        interval_ms=wall_ms - earlier.reported_at_ms
        if earlier and earlier.reported_at_ms
        else None,
        oldest_work_ms=None if oldest is None else min(oldest, wall_ms),
        pending=earlier.pending if earlier and reported.pending is None else reported.pending,
        backlog=reported.backlog,
        quiet_since_ms=earlier.quiet_since_ms if earlier and reported.is_quiet else now_ms,
        keeps_back=reported.keeps_back,
    )


def note_waiting(earlier: Facts | None, reported: ReportedFacts, *, now_ms: int) -> Facts | None:
    """Note a report that waits for its commit. None: it reports nothing, and neither did one before.

    A range with records is not quiet. Unfinished work counts at once, until a report without it is
    applied and none with it waits: the epoch may never be committed, since a newer run or a later epoch
    drops it, and the rows are there all the same.

    >>> note_waiting(None, ReportedFacts(records=1), now_ms=7).quiet_since_ms
    7
    >>> noted = note_waiting(None, ReportedFacts(records=0, keeps_back=True), now_ms=7)
    >>> noted.is_unfinished, merge_facts(noted, NO_FACTS, now_ms=8, wall_ms=8).is_unfinished
    (True, False)
    """
    if reported.is_nothing:
        return earlier
    noted = earlier or Facts(0, None, None, None, 0, now_ms)
    return replace(
        noted,
        quiet_since_ms=noted.quiet_since_ms if reported.is_quiet else now_ms,
        keeps_back=noted.keeps_back or reported.is_unfinished,
    )


MAX_COUNT: Final = 2**63 - 1
"""The largest count that the ledger and Redis can keep. A count stays there."""


def add_count(count: int, more: int) -> int:
    """Add to a count. The sum saturates: a greater one would keep its job from being recorded.

    >>> add_count(5, 2), add_count(MAX_COUNT - 1, 2) == MAX_COUNT
    (7, True)
    """
    return min(count + more, MAX_COUNT)


@dataclass(frozen=True, slots=True)
class Counts:
    """Records, late rows and corrections of a stage."""

    records: int = 0
    late: int = 0
    corrections: int = 0
    """Values of windows that had been emitted before, which correct them."""

    def plus(self, reported: ReportedFacts) -> Counts:
        """Add the counts of a report.

        >>> Counts(5, 1).plus(ReportedFacts(records=2))
        Counts(records=7, late=1, corrections=0)
        """
        records = add_count(self.records, reported.records or 0)
        return Counts(records, add_count(self.late, reported.late), self.corrections)

    def plus_committed(self, late: int, corrections: int) -> Counts:
        """Add the counts of a commit.

        >>> Counts(5, 1).plus_committed(late=2, corrections=3)
        Counts(records=5, late=3, corrections=3)
        """
        all_late, all_corrections = (
            add_count(self.late, late),
            add_count(self.corrections, corrections),
        )
        return Counts(self.records, all_late, all_corrections)


UNKNOWN = -1
"""In place of a processing watermark: a range has never reported."""

NO_WORK = MAX
"""In place of a processing watermark: no range counts, so it is now."""


def work_since(
    reported_at_ms: Int64s,
    promises: Int64s,
    idle: Bools,
    facts: Mapping[int, Facts],
    *,
    finished: bool = False,
) -> int:
    """Return the earliest possible arrival of the oldest unfinished work of a stage's ranges (or
    `UNKNOWN`, `NO_WORK`).

    For a range that reports its oldest work, this is its arrival. For another, it is the moment of its
    last report (0: never), since more work may have arrived since. A final or idle range counts only if
    it reports work, and so does a range of a run that has `finished`. A range whose lease has expired
    does not report, so its moment stands still.

    >>> at, promises = np.array([50, 60, 40]), np.array([7, 8, MAX])
    >>> work_since(at, promises, np.zeros(3, bool), {})
    50
    >>> work_since(at, promises, np.array([True, False, False]), {})
    60
    >>> work_since(at, promises, np.zeros(3, bool), {}, finished=True) == NO_WORK
    True
    >>> work_since(np.array([50, 0, 40]), promises, np.zeros(3, bool), {}) == UNKNOWN
    True
    """
    done = finished & (reported_at_ms > 0)
    counted = ~(idle | (promises == MAX) | done)
    moments = np.where(counted, reported_at_ms, NO_WORK)
    for index, each in facts.items():
        if each.oldest_work_ms is not None:
            moments[index] = each.oldest_work_ms
    least = int(moments.min()) if len(moments) else NO_WORK
    return UNKNOWN if least == 0 else least


def join_work(since: Iterable[int]) -> int:
    """Join the moments of a stage's ranges and of its upstreams: the earliest counts.

    >>> join_work([50, 60, NO_WORK]), join_work([50, UNKNOWN]) == UNKNOWN
    (50, True)
    """
    return min(since, default=NO_WORK)


def processing_watermark(since: int, now_ms: int) -> int | None:
    """Return the processing watermark; None: a range has never reported.

    It never passes the clock.

    >>> processing_watermark(50, now_ms=70), processing_watermark(NO_WORK, now_ms=70)
    (50, 70)
    >>> processing_watermark(UNKNOWN, now_ms=70) is None
    True
    """
    return None if since == UNKNOWN else min(since, now_ms)


def all_report_pending(promises: Int64s, idle: Bools, facts: Mapping[int, Facts]) -> bool:
    """Return whether each range that is neither idle nor final has reported its rows in flight.

    >>> facts = Facts(1, None, None, b"", 0, 1)
    >>> all_report_pending(np.array([1, MAX]), np.zeros(2, bool), {0: facts})
    True
    >>> all_report_pending(np.array([1, 2]), np.zeros(2, bool), {0: facts})
    False
    """
    silent = ~(idle | (promises == MAX))
    for index, each in facts.items():
        if each.pending is not None:
            silent[index] = False
    return not bool(silent.any())
