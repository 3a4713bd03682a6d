"""Effect of a report on its range."""

from __future__ import annotations

from service.frontier.graph import Status
from service.frontier.retirement import counted_promise
from service.frontier.timestamps import MAX, MIN


def join_report(promise: int, reported: int, *, idle: bool) -> tuple[int, bool]:
    """Join a report with a range's promise, which never goes back; idleness is as reported last.

    An accepted promise stays true for ever, so the larger of two counts, in any order of arrival.
    `MIN` promises nothing.

    >>> join_report(10, 15, idle=False), join_report(10, 5, idle=False)
    ((15, False), (10, False))
    >>> join_report(10, MIN, idle=True)
    (10, True)

    The end of a lease acts like an empty report: the promise stays, and idleness ends, since the shard
    may have data that its next worker has yet to read.

    >>> join_report(10, MIN, idle=False)
    (10, False)
    """
    return max(promise, reported), idle


def is_behind(promise: int, reported: int) -> bool:
    """Return whether a report promises less than its range has promised before: it changes nothing.

    >>> is_behind(10, 5), is_behind(10, 10), is_behind(10, MIN)
    (True, False, False)
    """
    return MIN < reported < promise


def may_observe(observed_input: int | None, published_input: int) -> bool:
    """Return whether a worker can have observed this input watermark. None: not observed.

    >>> may_observe(10, published_input=10), may_observe(11, published_input=10)
    (True, False)
    """
    return observed_input is None or observed_input <= published_input


def range_status(promise: int, *, idle: bool, retired: bool = False) -> Status:
    """Return the status of a range. A retired range counts as final.

    >>> range_status(MIN, idle=False), range_status(5, idle=False), range_status(5, idle=True)
    (<Status.UNKNOWN: 'unknown'>, <Status.ACTIVE: 'active'>, <Status.IDLE: 'idle'>)
    >>> range_status(MAX, idle=True), range_status(5, idle=False, retired=True)
    (<Status.FINAL: 'final'>, <Status.FINAL: 'final'>)
    """
    if counted_promise(promise, retired=retired) == MAX:
        return Status.FINAL
    if idle:
        return Status.IDLE
    return Status.UNKNOWN if promise == MIN else Status.ACTIVE
