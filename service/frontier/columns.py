"""The rules of reports for whole columns of ranges at once.

A property test compares each with the scalar rule that its docstring names. Conditions on any range use
`count_nonzero`, which takes a third of the time of `any` for a thousand ranges.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from service.frontier.agreement import Agreement, agree, agree_keyed
from service.frontier.timestamps import MAX, MIN

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def join_promises(promises: Int64s, reported: Int64s) -> Int64s:
    """`reports.join_report` of each range; its idleness is as reported.

    >>> join_promises(np.array([10, 10]), np.array([15, 5])).tolist()
    [15, 10]
    """
    return np.maximum(promises, reported)


def are_behind(promises: Int64s, reported: Int64s) -> Bools:
    """`reports.is_behind` of each range.

    >>> are_behind(np.array([10, 10, 10]), np.array([5, 10, MIN])).tolist()
    [True, False, False]
    """
    lower = reported < promises
    # Mostly no range is behind, and the second comparison is saved.
    return lower & (reported != MIN) if np.count_nonzero(lower) else lower


def weights(promises: Int64s, idle: Bools) -> Int64s:
    """`agreement.weight` of each range.

    >>> weights(np.array([5, 5]), np.array([False, True])).tolist() == [5, MAX]
    True
    """
    return np.where(idle, MAX, promises)


def column_agreement(promises: Int64s, idle: Bools, *, is_keyed: bool) -> Agreement:
    """`agreement.agree` of the shards of a source, or `agreement.agree_keyed` of key ranges.

    >>> promises, idle = np.array([9, 5, MAX]), np.array([False, True, False])
    >>> column_agreement(promises, idle, is_keyed=False)
    Agreement(watermark=9, idle=False)
    >>> column_agreement(promises, idle, is_keyed=True)
    Agreement(watermark=5, idle=False)
    """
    is_final = promises == MAX
    rests = idle & ~is_final
    resting, final = int(np.count_nonzero(rests)), int(np.count_nonzero(is_final))
    if is_keyed:
        return agree_keyed(int(promises.min()), len(promises), resting, final)
    lowest_idle = int(promises.min(initial=MAX, where=rests))
    return agree(int(weights(promises, idle).min()), resting, lowest_idle)


def counted(promises: Int64s, idle: Bools, *, is_keyed: bool) -> Int64s:
    """Return the promises of the ranges that a stage waits for, with MAX for a range that is left out.

    >>> promises = np.array([5, 9])
    >>> counted(promises, np.array([True, False]), is_keyed=False).tolist() == [MAX, 9]
    True
    >>> counted(promises, np.array([True, True]), is_keyed=False).tolist()
    [5, 9]
    >>> counted(promises, np.array([True, False]), is_keyed=True).tolist()
    [5, 9]
    """
    found = promises if is_keyed else weights(promises, idle)
    # Idle shards are left out only while another shard is active.
    return promises if int(found.min()) == MAX and bool(idle.any()) else found


def lowest(values: Int64s, count: int) -> Int64s:
    """Return the indices of the least values, the least first, equal ones in their order.

    >>> lowest(np.array([5, 3, 9, 3]), 3).tolist()
    [1, 3, 0]
    """
    chosen = np.arange(len(values))
    if count < len(values):
        # Often very many have the least value, and the search for others is saved.
        least = np.flatnonzero(values == values.min())
        if len(least) >= count:
            return least[:count]
        bound = np.partition(values, count)[count]
        below, equal = np.flatnonzero(values < bound), np.flatnonzero(values == bound)
        chosen = np.concatenate((below, equal[: count - len(below)]))
    return chosen[np.argsort(values[chosen], kind="stable")]
