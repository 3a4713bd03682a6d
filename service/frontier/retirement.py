"""Retirement: a range that an operator has declared gone is waited for no longer.

A shard that died for good holds its stage back for ever: it never becomes final, since only its worker
can report it final, and it is not idle, since a worker does not watch it. So an operator may declare it
retired. A retired range counts as final, whatever it has promised. Its own promise is kept, and promises
of other ranges do not change.

A retirement ends with the next report of the range: its worker lives, and its rows must be waited for.
Then the range holds its stage from its kept promise on. The watermark does not go back: rows behind it
are late. A claim, or the end of a lease, does not end a retirement.
"""

from __future__ import annotations

from service.frontier.timestamps import MAX


def counted_promise(promise: int, *, retired: bool) -> int:
    """Return the promise of a range as its stage counts it: a retired range counts as final.

    >>> counted_promise(5, retired=False), counted_promise(5, retired=True) == MAX
    (5, True)
    """
    return MAX if retired else promise
