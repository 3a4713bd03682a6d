"""The agreement of many promises: their minimum, once every member has promised.

The same rule serves twice: for the ranges of a stage (its output watermark) and for the upstreams of
a stage (its input watermark). A *member* of the agreement is a range, or an upstream:

- *unknown*: it has never promised. Unknown is neither zero nor absent: the watermark does not advance.
- *active*: it has promised, and more may come.
- *idle*: it is left out of the minimum.
- *final*: it has promised `MAX`. It holds nothing back, but does not advance the others either. A
  retired range counts as final (see `retirement`).

While a member is idle and none is active, the promises of all members stay true: the watermark is the
minimum over *all* promises, including those of the idle members. One final and one idle member must not
jump to the end of time (a known bug of Flink, FLINK-38477).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from service.frontier.timestamps import MAX, MIN


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an agreement: its promise, and its idleness."""

    promise: int = MIN
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result: a watermark to advance to (`MIN`: stand still), and the idleness of all members."""

    watermark: int
    idle: bool = False
    leaves_out: bool = field(default=False, compare=False, repr=False)
    """True if a member is left out (see `leaves_out`). It may return before this is published."""
    has_returned: bool = field(default=False, compare=False, repr=False)
    """True if a member has returned since the last revision (see `awaits_revision`)."""
    records: int = field(default=0, compare=False, repr=False)
    """Records that the members have reported, for the history."""
    late: int = field(default=0, compare=False, repr=False)
    """Late rows, likewise."""


STAND_STILL = Agreement(MIN)
FINAL = Agreement(MAX)


def weight(promise: int, *, idle: bool) -> int:
    """Return a member's weight in the minimum: `MAX` if it is idle.

    >>> weight(5, idle=False), weight(5, idle=True) == MAX
    (5, True)
    """
    return MAX if idle else promise


def agree(lowest: int, idle: int, lowest_idle: int) -> Agreement:
    """Return the agreement, from three numbers that a store can update with each report.

    `lowest` is the least `weight` of all members, `idle` the number of members that are idle and not
    final, `lowest_idle` their least promise. If `lowest` is `MAX`, no member is active: then the
    watermark is the least promise of all, and only then `lowest_idle` counts.

    >>> agree(lowest=17, idle=1, lowest_idle=3)
    Agreement(watermark=17, idle=False)
    >>> agree(lowest=MAX, idle=1, lowest_idle=3)
    Agreement(watermark=3, idle=True)
    >>> agree(lowest=MAX, idle=0, lowest_idle=MAX) == FINAL
    True
    >>> agree(lowest=MIN, idle=3, lowest_idle=3) == STAND_STILL
    True
    """
    if lowest < MAX:
        return Agreement(lowest)
    return Agreement(lowest_idle, idle=True) if idle else FINAL


def agree_keyed(lowest: int, total: int, idle: int, final: int) -> Agreement:
    """Return the agreement of a keyed stage's ranges. Idle ranges stay in the minimum.

    An idle key range has emitted everything that it held, so its promise is complete. `lowest` is the
    least promise. The ranges are idle together if each is idle or final, and not all are final. Idleness
    of the stage depends on its upstreams, too (see `Pipeline.propagate`).

    >>> agree_keyed(lowest=7, total=3, idle=2, final=0)
    Agreement(watermark=7, idle=False)
    >>> agree_keyed(lowest=7, total=3, idle=2, final=1)
    Agreement(watermark=7, idle=True)
    """
    return Agreement(lowest, are_idle_together(total, idle, final))


def are_idle_together(total: int, idle: int, final: int) -> bool:
    """Return whether each of the members is idle or final, and not all are final.

    >>> are_idle_together(3, 2, 0), are_idle_together(3, 2, 1), are_idle_together(3, 0, 3)
    (False, True, False)
    """
    return idle > 0 and idle + final == total


def leaves_out(idle: int, retired: int, *, keyed: bool) -> bool:
    """Return whether the watermark of ranges may pass the promise of one that is not final.

    Idle key ranges stay in the minimum. Their stage as a whole is left out downstream, while it is idle.

    >>> leaves_out(1, 0, keyed=False), leaves_out(1, 0, keyed=True), leaves_out(0, 1, keyed=True)
    (True, False, True)
    """
    return retired > 0 or (idle > 0 and not keyed)


def awaits_revision(returned_at: int | None, revision: int) -> bool:
    """Return whether a member that has returned must wait for a newer revision of its job.

    A member *returns* if it was left out, and is waited for again: a range that was idle or retired, and
    all key ranges of a stage if they were idle together. An advance that was computed without the member
    may still be on its way into the ledger. Were the member answered now, the advance
    could pass the watermark of the answer. Such an advance is recorded only if nothing newer is: so the
    first revision after the return shows the advance, or excludes it.

    `revision` is the visible one, `returned_at` the one that was visible when a member of the stage last
    returned (None: none has).

    >>> awaits_revision(None, 7), awaits_revision(7, 7), awaits_revision(7, 8)
    (False, True, False)
    """
    return returned_at is not None and revision <= returned_at


def agreement(members: Iterable[Member]) -> Agreement:
    """Return the agreement of the members, of which there must be at least one.

    >>> agreement([Member(25), Member(10), Member(17)]).watermark
    10
    >>> agreement([Member(25), Member(10, idle=True), Member(17)]).watermark
    17
    >>> agreement([Member(25), Member()]) == STAND_STILL
    True
    >>> agreement([Member(MAX), Member(3, idle=True), Member(8, idle=True)])
    Agreement(watermark=3, idle=True)
    >>> agreement([Member(MAX), Member(MAX, idle=True)]) == FINAL
    True
    """
    lowest, idle, lowest_idle = MAX, 0, MAX
    for member in members:
        lowest = min(lowest, weight(member.promise, idle=member.idle))
        if member.idle and member.promise != MAX:
            idle += 1
            lowest_idle = min(lowest_idle, member.promise)
    return agree(lowest, idle, lowest_idle)
