"""Retirement: a range that an operator has declared gone is waited for no longer.

A shard that died for good holds its stage back for ever: it never becomes final, since only its worker
can report it final, and it is not idle, since a worker does not watch it. So an operator may declare it
retired. A retired range counts as final, whatever it has promised. Its own promise is kept, and promises
of other ranges do not change.

A retirement ends with the next report of the range: its worker lives, and its rows must be waited for.
Then the range holds its stage from its kept promise on. The watermark does not go back: rows behind it
are late. A claim, or the end of a lease, does not end a retirement.

If the retirement has made its stage final, all rows of a range that returns are late: a final stage
stays final. Such a range holds nothing back, so it is counted apart, as a *late range*.
"""

from __future__ import annotations

import numpy as np

from service.frontier.columns import Bools, Int64s
from service.frontier.timestamps import MAX


def counted_promise(promise: int, *, retired: bool) -> int:
    """Return the promise of a range as its stage counts it: a retired range counts as final.

    >>> counted_promise(5, retired=False), counted_promise(5, retired=True) == MAX
    (5, True)
    """
    return MAX if retired else promise


def late_ranges(
    promises: Int64s, reported_at_ms: Int64s, raised_at_ms: Int64s, final_since_ms: int
) -> Bools:
    """Return the late ranges of a final stage: they have reported since it is final, and are not final.

    The end of a retirement moves a promise as it counts, and this moment outlasts the live store, which
    loses the moments of reports. An earlier moment proves nothing: after a loss, a range that was final
    may be restored as it was before its last report.

    >>> promises = np.array([7, 7, 7, MAX, 0])
    >>> reported_at_ms, raised_at_ms = np.array([50, 0, 40, 50, 0]), np.array([30, 50, 40, 50, 0])
    >>> late_ranges(promises, reported_at_ms, raised_at_ms, final_since_ms=45).tolist()
    [True, True, False, False, False]
    """
    return (promises != MAX) & (np.maximum(reported_at_ms, raised_at_ms) > final_since_ms)
