"""The right to report for a range: leases, the ranks of claims, and runs.

A range has at most one current lease. It is *fenced* from the moment the next one is granted, so reports
of its old holder have no effect, however late they arrive (Gray and Cheriton, SOSP 1989, for leases;
Kleppmann, *How to do distributed locking*, 2016, on the check of the token at the place of its use).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Rank of a claim. Of two claims to one range, the greater takes over.

    >>> Rank(run=2, epoch=5) > Rank(run=2, epoch=4, attempt=9) > Rank()
    True
    """

    run: int = 0
    """0: without a run."""
    epoch: int = 0
    attempt: int = 0


def is_current(deadline_ms: int, now_ms: int) -> bool:
    """Return whether a lease is current. It ends at its deadline, and is never renewed after it.

    >>> is_current(deadline_ms=1_000, now_ms=999), is_current(deadline_ms=1_000, now_ms=1_000)
    (True, False)
    """
    return now_ms < deadline_ms


def takes_over(rank: Rank, held_by: Rank, *, same_holder: bool) -> bool:
    """Return whether a claim takes over a range that is under a current lease.

    An equal rank of another holder does not: the first of two equals keeps the range.

    >>> takes_over(Rank(epoch=5, attempt=1), Rank(epoch=5), same_holder=False)
    True
    >>> takes_over(Rank(), Rank(), same_holder=False), takes_over(Rank(), Rank(), same_holder=True)
    (False, True)
    """
    return same_holder or rank > held_by


def continues_watch(*, watched: bool, before: bool) -> bool:
    """Return whether a lease continues the proof of the lease before it, that the range is watched: both
    are, and there is not a gap between them. `before`: the earlier lease is current, and watched.

    >>> continues_watch(watched=True, before=True), continues_watch(watched=True, before=False)
    (True, False)
    >>> continues_watch(watched=False, before=True)
    False
    """
    return watched and before


def held_moment(now_ms: int, *, watched: bool) -> int:
    """Return the begin of a lease as the stores keep it: of an unwatched lease, its complement.

    >>> held_moment(5, watched=True), held_moment(5, watched=False)
    (5, -6)
    """
    return now_ms if watched else ~now_ms


def held_since(moment_ms: int) -> int:
    """Return the begin of a lease from its moment.

    >>> held_since(held_moment(5, watched=True)), held_since(held_moment(5, watched=False))
    (5, 5)
    """
    return moment_ms if moment_ms >= 0 else ~moment_ms


def watched_since(moment_ms: int) -> int | None:
    """Return the instant since which a lease, and those before it without a gap, prove that their range
    is watched. None: the lease proves nothing.

    >>> watched_since(held_moment(5, watched=True)), watched_since(held_moment(5, watched=False))
    (5, None)
    """
    return moment_ms if moment_ms >= 0 else None


def opens_run(run: int, current: int) -> bool:
    """Return whether a run takes over a stage from the current one. Runs only rise.

    >>> opens_run(3, current=2), opens_run(2, current=2)
    (True, False)
    """
    return run > current


def is_of_run(run: int, current: int) -> bool:
    """Return whether a claim or a commit belongs to the stage's run. 0: without a run.

    >>> is_of_run(2, current=2), is_of_run(0, current=2), is_of_run(3, current=2)
    (True, False, False)
    """
    return run == current


def is_fenced(run: int, current: int) -> bool:
    """Return whether a lease is void since a newer run has taken over its stage.

    >>> is_fenced(1, current=2), is_fenced(2, current=2)
    (True, False)
    """
    return run < current
