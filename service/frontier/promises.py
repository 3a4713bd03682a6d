"""The promise that a report contains: *everything I emit from now on has event time ≥ this*."""

from __future__ import annotations

from collections.abc import Iterable

from service.frontier.timestamps import MAX


def source_promise(watermark: int, holds: Iterable[int] = (), *, final: bool = False) -> int:
    """Return the promise of a source's shard: its watermark, held back by rows that it has yet to emit.

    >>> source_promise(1_000), source_promise(1_000, [400, 700])
    (1000, 400)
    >>> source_promise(1_000, final=True) == MAX
    True
    """
    return MAX if final else min((watermark, *holds))


def keyed_promise(observed_input: int, holds: Iterable[int] = ()) -> int:
    """Return the promise of a key range: the input watermark *it has observed*, held back by its state.

    The newest input watermark would be wrong: messages to this worker may precede it, and their results
    are yet to be emitted. (MillWheel, VLDB 2013, §4.3: the low watermark of a computation is capped by
    the oldest work it has not finished.)

    >>> keyed_promise(10_000), keyed_promise(10_000, [9_000]), keyed_promise(10_000, [11_000])
    (10000, 9000, 10000)
    """
    return min((observed_input, *holds))
