"""The agreement of many promises: their minimum, once every member has promised.

The same rule serves twice: for the ranges of a stage (its output watermark) and for the upstreams of
a stage (its input watermark). A *member* of the agreement is one range, or one upstream:

- *unknown*: it never promised. That is neither zero nor absence: the watermark does not advance.
- *active*: it promised, and more may come.
- *idle*: it asked not to be waited for. It is left out of the minimum.
- *final*: it promised `MAX`. It holds nothing back, but does not advance the rest either: while a
  member is idle, only an active one may do that (otherwise one final and one idle member would jump
  to the end of time, a known bug of Flink, FLINK-38477).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.frontier.timestamps import MAX, MIN


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an agreement: its promise, and whether it asked not to be waited for."""

    promise: int = MIN
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result: a watermark to advance to (`MIN`: stand still), and idleness."""

    watermark: int
    idle: bool = False


STAND_STILL = Agreement(MIN)
IDLE = Agreement(MIN, idle=True)
FINAL = Agreement(MAX)


def weight(promise: int, *, idle: bool) -> int:
    """Return a member's weight in the minimum: `MAX` if it is not waited for.

    >>> weight(5, idle=False), weight(5, idle=True) == MAX
    (5, True)
    """
    return MAX if idle else promise


def agree(lowest: int, idle: int) -> Agreement:
    """Return the agreement, from two numbers that a store can update with each report.

    `lowest` is the least `weight` of all members, `idle` the number of members that are idle and not
    final. If the least weight is `MAX`, no member is active: then one idle member is enough to
    stand still.

    >>> agree(lowest=17, idle=1)
    Agreement(watermark=17, idle=False)
    >>> agree(lowest=MAX, idle=1) == IDLE, agree(lowest=MAX, idle=0) == FINAL
    (True, True)
    >>> agree(lowest=MIN, idle=3) == STAND_STILL
    True
    """
    if lowest < MAX:
        return Agreement(lowest)
    return IDLE if idle else FINAL


def agreement(members: Iterable[Member]) -> Agreement:
    """Return the agreement of the members, of which there must be at least one.

    >>> agreement([Member(25), Member(10), Member(17)]).watermark
    10
    >>> agreement([Member(25), Member(10, idle=True), Member(17)]).watermark
    17
    >>> agreement([Member(25), Member()]) == STAND_STILL
    True
    >>> agreement([Member(MAX), Member(3, idle=True)]) == IDLE
    True
    >>> agreement([Member(MAX), Member(MAX, idle=True)]) == FINAL
    True
    """
    lowest, idle = MAX, 0
    for member in members:
        lowest = min(lowest, weight(member.promise, idle=member.idle))
        idle += member.idle and member.promise != MAX
    return agree(lowest, idle)
