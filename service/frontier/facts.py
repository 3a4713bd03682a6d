"""Facts about a range's work, reported beside its promise, and their consequences for its stage.

A promise speaks of event time alone. Whether work is stuck, late, or simply not there is told by when it
was done: the *processing watermark*, a lower bound on the wall clock of when the oldest unfinished work
came in (Akidau, Chernyak and Lax, *Streaming Systems*, chapter 3, "Processing-time watermarks"). These
facts are soft: they are lost with the live store, and nothing is promised by them. One is not: whether a
range has something unfinished is saved with its promise, since a quiet shard may leave the minimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from service.frontier.columns import Bools, Int64s
from service.frontier.timestamps import MAX


@dataclass(frozen=True, slots=True)
class ReportedFacts:
    """Facts about a range in one report, besides its promise."""

    oldest_work_ms: int | None = None
    """Since when, on the wall clock, its oldest unfinished work has been waiting; None: it has none."""
    pending: bytes | None = None
    """A sketch of the event times in flight; empty: nothing is; None: as reported last."""
    records: int | None = None
    """Records since its last report; None: not said."""
    late: int = 0
    backlog: int = 0
    """Records that it has not read yet."""
    keeps_back: bool = False
    """True if the range keeps a hold: something is still to come out that no other fact here shows."""

    @property
    def is_unfinished(self) -> bool:
        """True if something of it is still to come out.

        >>> ReportedFacts(records=1).is_unfinished, ReportedFacts(backlog=1).is_unfinished
        (False, True)
        """
        return _is_unfinished(self.keeps_back, self.backlog, self.oldest_work_ms, self.pending)

    @property
    def is_quiet(self) -> bool:
        """True if nothing came, and nothing is left to read.

        >>> ReportedFacts(records=0).is_quiet, ReportedFacts().is_quiet
        (True, False)
        """
        return self.records == 0 and not self.backlog

    @property
    def is_nothing(self) -> bool:
        """True if nothing came, and nothing is unfinished.

        >>> ReportedFacts(records=0).is_nothing, ReportedFacts(records=0, keeps_back=True).is_nothing
        (True, False)
        """
        return self.is_quiet and not self.is_unfinished


NO_FACTS = ReportedFacts()


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a range, from all of its reports so far."""

    reported_at_ms: int
    """When its last report was applied, on the service's wall clock; 0: none was."""
    interval_ms: int | None
    """Between its last two reports; None: there was only one."""
    oldest_work_ms: int | None
    pending: bytes | None
    """None: it has never said."""
    backlog: int
    quiet_since_ms: int
    """Since when no record has come, on the clock that leases run by."""
    keeps_back: bool = False
    """As reported last, or by any attempt at the epoch that was committed last."""

    @property
    def is_unfinished(self) -> bool:
        """True if something of it is still to come out."""
        return _is_unfinished(self.keeps_back, self.backlog, self.oldest_work_ms, self.pending)


def _is_unfinished(
    keeps_back: bool, backlog: int, oldest_work_ms: int | None, pending: bytes | None
) -> bool:
    return keeps_back or backlog > 0 or oldest_work_ms is not None or bool(pending)


UNFINISHED = Facts(0, None, None, None, 0, quiet_since_ms=0, keeps_back=True)
"""All that is known of a range, after a loss of the live store, that had something unfinished."""


def merge_facts(
    earlier: Facts | None, reported: ReportedFacts, *, now_ms: int, wall_ms: int
) -> Facts:
    """Merge a report into what its range has said so far.

    What is in flight stays as said until it is said anew; the rest is as reported last. Work that claims
    to have waited since a moment ahead of the service's clock waits since now.

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


def note_activity(earlier: Facts | None, *, now_ms: int) -> Facts:
    """Note that records have come, in a report that waits for its commit: the range is not quiet.

    >>> note_activity(None, now_ms=7).quiet_since_ms
    7
    """
    if earlier is None:
        return Facts(0, None, None, None, 0, now_ms)
    return replace(earlier, quiet_since_ms=now_ms)


@dataclass(frozen=True, slots=True)
class Counts:
    """Records and late rows of a stage."""

    records: int = 0
    late: int = 0

    def plus(self, reported: ReportedFacts) -> Counts:
        """Add what a report counts.

        >>> Counts(5, 1).plus(ReportedFacts(records=2))
        Counts(records=7, late=1)
        """
        return Counts(self.records + (reported.records or 0), self.late + reported.late)


UNKNOWN = -1
"""In place of a processing watermark: some range has never reported."""

NOBODY = MAX
"""In place of a processing watermark: there is nobody whose work could be waiting, so it is now."""


def work_since(
    reported_at_ms: Int64s, promises: Int64s, idle: Bools, facts: Mapping[int, Facts]
) -> int:
    """Return since when the oldest work of a stage's ranges may have been waiting (or `UNKNOWN`,
    `NOBODY`).

    For a range that names its oldest work it is that; for another the moment of its last report (0:
    never), since it may have taken in more by now. A final or idle range counts only if it names work. A
    range whose lease has run out does not report, so its moment stands still.

    >>> at, promises = np.array([50, 60, 40]), np.array([7, 8, MAX])
    >>> work_since(at, promises, np.zeros(3, bool), {})
    50
    >>> work_since(at, promises, np.array([True, False, False]), {})
    60
    >>> work_since(np.array([50, 0, 40]), promises, np.zeros(3, bool), {}) == UNKNOWN
    True
    """
    counted = ~(idle | (promises == MAX))
    moments = np.where(counted, reported_at_ms, NOBODY)
    for index, each in facts.items():
        if each.oldest_work_ms is not None:
            moments[index] = each.oldest_work_ms
    least = int(moments.min()) if len(moments) else NOBODY
    return UNKNOWN if least == 0 else least


def join_work(since: Iterable[int]) -> int:
    """Join the moments of a stage's ranges and of its upstreams: nothing is done before they have
    done it.

    >>> join_work([50, 60, NOBODY]), join_work([50, UNKNOWN]) == UNKNOWN
    (50, True)
    """
    return min(since, default=NOBODY)


def processing_watermark(since: int, now_ms: int) -> int | None:
    """Return the processing watermark; None: some range has never reported.

    It never passes the clock.

    >>> processing_watermark(50, now_ms=70), processing_watermark(NOBODY, now_ms=70)
    (50, 70)
    >>> processing_watermark(UNKNOWN, now_ms=70) is None
    True
    """
    return None if since == UNKNOWN else min(since, now_ms)


def all_said_pending(promises: Int64s, idle: Bools, facts: Mapping[int, Facts]) -> bool:
    """Return whether each range that is neither idle nor final has reported its rows in flight.

    >>> said = Facts(1, None, None, b"", 0, 1)
    >>> all_said_pending(np.array([1, MAX]), np.zeros(2, bool), {0: said})
    True
    >>> all_said_pending(np.array([1, 2]), np.zeros(2, bool), {0: said})
    False
    """
    silent = ~(idle | (promises == MAX))
    for index, each in facts.items():
        if each.pending is not None:
            silent[index] = False
    return not bool(silent.any())
