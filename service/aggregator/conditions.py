"""Conditions of ranges: each range has one, so their counts add up to the number of ranges."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from service.frontier.columns import Bools, Int64s
from service.frontier.timestamps import MAX, MIN
from service.model.jobs import Census
from service.model.observations import StageObservation


class Condition(StrEnum):
    """The condition of a range: the first that applies."""

    FINAL = "final"
    """Nothing more will come."""
    RETIRED = "retired"
    """The stage does not wait for it, by an operator's declaration."""
    IDLE = "idle"
    """The stage does not wait for it."""
    NEVER_REPORTED = "never_reported"
    """The range has never promised, and the stage waits for it."""
    EXPIRED = "expired"
    """The range has no lease, so it does not move."""
    ACTIVE = "active"


CONDITIONS = tuple(Condition)
_ACTIVE = CONDITIONS.index(Condition.ACTIVE)


def conditions_of(
    promises: Int64s, idle: Bools, retired: Bools, owners: Int64s
) -> npt.NDArray[np.uint8]:
    """Return the condition of each range, as its index in `Condition`.

    >>> found = conditions_of(
    ...     np.array([MAX, MAX, 5, MIN, 7, 8]),
    ...     np.array([0, 0, 1, 0, 0, 0], bool),
    ...     np.array([0, 1, 0, 0, 0, 0], bool),
    ...     np.array([0, 0, 1, 1, 0, 1]),
    ... )
    >>> [CONDITIONS[each].value for each in found]
    ['final', 'retired', 'idle', 'never_reported', 'expired', 'active']
    """
    found = np.full(len(promises), _ACTIVE, dtype=np.uint8)
    # The last written condition stays: so in the opposite order.
    for condition, where in (
        (Condition.EXPIRED, owners == 0),
        (Condition.NEVER_REPORTED, promises == MIN),
        (Condition.IDLE, idle),
        (Condition.FINAL, promises == MAX),
        (Condition.RETIRED, retired),
    ):
        # Rather than `found[where] = …`, which keeps the interpreter's lock.
        np.copyto(found, CONDITIONS.index(condition), where=where)
    return found


EXAMINED: Final = 200_000
"""The largest number of ranges that are examined singly: of a million, this takes 5 ms."""


def count_conditions(seen: StageObservation) -> Mapping[Condition, int] | None:
    """Count a stage's ranges by condition; None: they are too many, and the census is not enough."""
    found = None if seen.census is None else conditions_by_census(seen.census)
    if found is not None or len(seen.promises) > EXAMINED:
        return found
    retired = np.zeros(len(seen.promises), dtype=np.bool_)
    retired[list(seen.retired)] = True
    conditions = conditions_of(seen.promises, seen.idle, retired, seen.owners)
    counts = np.bincount(conditions, minlength=len(CONDITIONS)).tolist()
    return dict(zip(CONDITIONS, counts, strict=True))


def conditions_by_census(census: Census) -> Mapping[Condition, int] | None:
    """Return the counts that follow from a census; None: they do not follow.

    >>> found = conditions_by_census(Census(total=5, reported=4, idle=0, final=1, leased=0, retired=1))
    >>> {condition.value: count for condition, count in (found or {}).items() if count}
    {'final': 1, 'retired': 1, 'never_reported': 1, 'expired': 2}
    >>> conditions_by_census(Census(total=5, reported=4, idle=0, final=0, leased=3)) is None
    True
    """
    never_reported = census.total - census.reported
    rest = census.reported - census.final - census.retired - census.idle
    if census.idle and never_reported:
        # An idle range may never have promised: then it is in both counts.
        return None
    if census.leased not in {0, census.total} and rest not in {0, census.total}:
        # Leases may be on the other ranges, too.
        return None
    active = min(census.leased, rest)
    return {
        Condition.FINAL: census.final,
        Condition.RETIRED: census.retired,
        Condition.IDLE: census.idle,
        Condition.NEVER_REPORTED: never_reported,
        Condition.EXPIRED: rest - active,
        Condition.ACTIVE: active,
    }
