"""Reports in an epoch wait, and take effect only when the epoch is committed, as a whole.

An epoch may have several attempts: a task is retried, or runs twice at the same time. Their reports are
joined to the smaller promise, which is true for every attempt that Spark may choose.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from service.frontier.facts import NO_FACTS, ReportedFacts
from service.frontier.timestamps import MIN

MAX_WAITING_EPOCHS = 64
"""The largest number of epochs of one stage that wait for their commit."""


class Arrival(StrEnum):
    """The outcome of a report of an epoch."""

    WAITS = "waits"
    STALE = "stale"
    """The epoch, or a later one, is already committed."""
    TOO_MANY = "too many"
    """The stage has too many epochs that wait for their commit."""


def arrival(epoch: int, committed: int | None, waiting: Collection[int]) -> Arrival:
    """Return the outcome of a report of an epoch. `committed` is the stage's last committed epoch.

    >>> arrival(3, committed=2, waiting=[]), arrival(2, committed=2, waiting=[])
    (<Arrival.WAITS: 'waits'>, <Arrival.STALE: 'stale'>)
    >>> arrival(99, None, range(MAX_WAITING_EPOCHS)), arrival(5, None, range(MAX_WAITING_EPOCHS))
    (<Arrival.TOO_MANY: 'too many'>, <Arrival.WAITS: 'waits'>)
    """
    if committed is not None and epoch <= committed:
        return Arrival.STALE
    if epoch not in waiting and len(waiting) >= MAX_WAITING_EPOCHS:
        return Arrival.TOO_MANY
    return Arrival.WAITS


class Admission(StrEnum):
    """The outcome of a commit."""

    FRESH = "fresh"
    REPEATED = "repeated"
    """The epoch is already committed: a retry changes nothing, and is not an error."""
    STALE = "stale"


def admission(epoch: int, committed: int | None) -> Admission:
    """Return the outcome of the commit of an epoch. Epochs may be skipped, but never go back.

    >>> admission(4, committed=2), admission(2, committed=2), admission(1, committed=2)
    (<Admission.FRESH: 'fresh'>, <Admission.REPEATED: 'repeated'>, <Admission.STALE: 'stale'>)
    >>> admission(0, committed=None)
    <Admission.FRESH: 'fresh'>
    """
    if committed is None or epoch > committed:
        return Admission.FRESH
    return Admission.REPEATED if epoch == committed else Admission.STALE


@dataclass(frozen=True, slots=True)
class Waiting:
    """Report of a range in an epoch that is not committed yet."""

    promise: int
    capped_at_commit: bool
    """True if the promise lacks the input watermark, which the commit adds."""
    idle: bool
    fence: int
    """Fence of the lease under which it was reported."""
    facts: ReportedFacts | None = None
    unfinished: bool = False
    """True if any attempt's report was unfinished (`ReportedFacts.is_unfinished`)."""

    @property
    def facts_at_commit(self) -> ReportedFacts | None:
        """The facts that are applied when the epoch is committed."""
        return replace(self.facts or NO_FACTS, keeps_back=True) if self.unfinished else self.facts


def join_attempts(earlier: Waiting, later: Waiting) -> Waiting:
    """Join the reports of two attempts at an epoch for one range: the smaller promise counts.

    The range is idle only if both attempts were, and neither has promised anything: beside another
    attempt's promise, an idle attempt contradicts data that was read. (Under one lease both reports are
    of the same attempt, which repeats itself.) The commit checks idleness against the later lease. The
    facts are those of the attempt with the smaller promise, so that each record counts once; of two
    equal promises, those of the later attempt. But work that either attempt has left unfinished is
    unfinished, since Spark may choose either attempt.

    >>> joined = join_attempts(Waiting(9, False, True, fence=1), Waiting(7, True, False, fence=2))
    >>> joined.promise, joined.capped_at_commit, joined.idle, joined.fence
    (7, True, False, 2)
    >>> first, second = Waiting(5, False, True, fence=1), Waiting(7, False, True, fence=2)
    >>> join_attempts(first, second).idle, join_attempts(first, first).idle
    (False, True)
    """
    promises_nothing = earlier.promise == later.promise == MIN
    return Waiting(
        min(earlier.promise, later.promise),
        earlier.capped_at_commit or later.capped_at_commit,
        earlier.idle and later.idle and (promises_nothing or earlier.fence == later.fence),
        later.fence,
        (later if later.promise <= earlier.promise else earlier).facts,
        earlier.unfinished or later.unfinished,
    )


def lacks_cap(observed_input: int | None, *, capped_at_commit: bool) -> bool:
    """Return whether a commit lacks the input watermark that a report has left to it.

    >>> lacks_cap(None, capped_at_commit=True), lacks_cap(5, capped_at_commit=True)
    (True, False)
    """
    return capped_at_commit and observed_input is None


def promise_at_commit(promise: int, observed_input: int | None) -> int:
    """Return a range's promise at the commit of its epoch, with the epoch's input watermark.

    >>> promise_at_commit(9, observed_input=7), promise_at_commit(9, observed_input=None)
    (7, 9)
    """
    return promise if observed_input is None else min(promise, observed_input)


def idle_at_commit(*, idle: bool, same_lease: bool, is_current: bool) -> bool:
    """Return whether a range is idle once its epoch is committed.

    A promise stays true for every later holder of the range. Idleness does not: the next worker may have
    read data. So idleness counts only while the lease that reported it is current.

    >>> idle_at_commit(idle=True, same_lease=True, is_current=True)
    True
    >>> idle_at_commit(idle=True, same_lease=False, is_current=True)
    False
    """
    return idle and same_lease and is_current
