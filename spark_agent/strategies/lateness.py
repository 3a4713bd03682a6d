"""Lateness of rows, summarized: the digest of a task, and counts that merge without an error.

A task has all its event times at once, so it keeps exact order statistics at ranks that lie ever
farther apart, counted from the oldest row: each of the 64 oldest, and one in 32 of a rank from there
on. These are the biased quantiles of Cormode, Korn, Muthukrishnan and Srivastava (*Space- and
Time-Efficient Deterministic Algorithms for Biased Quantiles over Data Streams*, PODS 2006) without the
stream. A sketch with a uniform error (KLL) is useless at the quantile 0.999: an error of 1 % is ten
times the share of late rows. REQ sketches (Cormode, Karnin, Liberty, Thaler and Veselý, PODS 2021)
have the right kind of error. But they are random, so a restart would continue differently, and they
keep 24 bits of a time.

The driver places the digests relative to the newest row before the batch, which no task has, and counts
rows in buckets of lateness: the integers of HdrHistogram (Tene), 1/64 wide at most. Such counts add up
exactly, in any order, as those of DDSketch (Masson, Rim and Lee, PVLDB 12(12), 2019).

Both errors are to one side. For each lateness, the counted rows above it are at least the true number,
and at most 1/32 more. A lateness that is read from a bucket is the bucket's end.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

RANK_STEP: Final = 32
"""The inverse of the relative error of a rank."""

_THINNED_RANK_STEP: Final = 16
"""The inverse of the relative error of a rank in thinned counts."""

_BUCKETS_BITS: Final = 6
"""The binary logarithm of the number of buckets in an octave."""
_PER_OCTAVE: Final = 1 << _BUCKETS_BITS
_OCTAVES: Final = 50 - _BUCKETS_BITS
BUCKETS: Final = (_OCTAVES + 1) * _PER_OCTAVE
_MOST_MS: Final = (1 << 50) - 1
"""The greatest lateness of the last bucket. From the year 1 to the year 9999, there are fewer
milliseconds. Spark's times go back to the year -290308: a row from before counts as this late."""

_MOST_ROWS: Final = 1 << 48
"""More rows than a batch has."""


@cache
def _ranks() -> Integers:
    """Return the ranks whose rows a digest keeps, from the oldest row's on, which is 0."""
    import numpy as np  # noqa: PLC0415  (executors without such a strategy do not load NumPy for it)

    found = [0]
    while found[-1] < _MOST_ROWS:
        found.append(found[-1] + max(1, found[-1] // RANK_STEP))
    return np.array(found, np.int64)


def pack(times_ms: Integers) -> bytes:
    """Return the digest of a task's event times: a few hundred bytes, empty for no rows.

    >>> import numpy as np
    >>> len(pack(np.arange(1_000_000))) < 2_000, pack(np.array([]))
    (True, b'')
    """
    import numpy as np  # noqa: PLC0415

    if not len(times_ms):
        return b""
    ordered = np.sort(np.asarray(times_ms, np.int64))
    ranks = _ranks()
    kept = ordered[ranks[: np.searchsorted(ranks, len(ordered))]]
    head = [len(ordered), ordered[-1], kept[0]]
    return zlib.compress(np.concatenate([head, np.diff(kept)]).astype("<i8").tobytes(), 1)


@dataclass(frozen=True, slots=True)
class Digest:
    """Rows of one task, by the oldest of each group of neighbors."""

    rows: int
    newest_ms: int
    oldest_ms: Integers
    """The oldest event time of each group of rows, ascending."""
    counts: Integers
    """The number of rows of each group."""

    def rows_between(self, start_ms: int, end_ms: int) -> int:
        """Return the number of rows from one event time to before another."""
        return int(self.counts[(self.oldest_ms >= start_ms) & (self.oldest_ms < end_ms)].sum())


def unpack(packed: bytes) -> Digest:
    """Return the rows of a digest that is not empty.

    >>> import numpy as np
    >>> digest = unpack(pack(np.array([3_000, 1_000, 2_000])))
    >>> digest.rows, digest.newest_ms, digest.oldest_ms.tolist()
    (3, 3000, [1000, 2000, 3000])
    """
    import numpy as np  # noqa: PLC0415

    members = np.frombuffer(zlib.decompress(packed), "<i8").astype(np.int64)
    rows, newest_ms, oldest_ms = int(members[0]), int(members[1]), np.cumsum(members[2:])
    return Digest(
        rows, newest_ms, oldest_ms, np.diff(_ranks()[: len(oldest_ms)], append=np.int64(rows))
    )


def count_rows(digests: Iterable[Digest], newest_ms: int) -> Integers:
    """Return the number of rows in each bucket of lateness behind `newest_ms`.

    >>> import numpy as np
    >>> counts = count_rows([unpack(pack(np.array([5, 10, 30])))], newest_ms=10)
    >>> counts[0], counts[5], counts.sum()
    (np.int64(2), np.int64(1), np.int64(3))
    """
    import numpy as np  # noqa: PLC0415

    counts = np.zeros(BUCKETS, np.int64)
    for each in digests:
        lateness_ms = np.clip(newest_ms - each.oldest_ms, 0, _MOST_MS)
        np.add.at(counts, _buckets(lateness_ms), each.counts)
    return counts


def _buckets(lateness_ms: Integers) -> Integers:
    """Return the bucket of each lateness: 1 ms wide to 127 ms, then 64 in each octave."""
    import numpy as np  # noqa: PLC0415

    # Exact: each lateness is below 2^53.
    bits = np.frexp(lateness_ms.astype(np.float64))[1].astype(np.int64)
    octave = np.maximum(bits - _BUCKETS_BITS - 1, 0)
    return octave * _PER_OCTAVE + (lateness_ms >> octave)


def bucket_end_ms(bucket: int) -> int:
    """Return the greatest lateness of a bucket.

    >>> bucket_end_ms(127), bucket_end_ms(128), bucket_end_ms(129)
    (127, 129, 131)
    """
    octave = max(bucket // _PER_OCTAVE - 1, 0)
    return ((bucket - octave * _PER_OCTAVE + 1) << octave) - 1


def at_rank(counts: Integers, rank: int) -> int:
    """Return the lateness of the row with this rank, rounded up. Rank 1 has the greatest lateness.

    0 if there are fewer rows.

    >>> import numpy as np
    >>> counts = count_rows([unpack(pack(np.array([0, 5, 10, 30])))], newest_ms=10)
    >>> [at_rank(counts, rank) for rank in (1, 2, 3, 9)]
    [10, 5, 0, 0]
    """
    import numpy as np  # noqa: PLC0415

    from_the_greatest = np.cumsum(counts[::-1])
    index = int(np.searchsorted(from_the_greatest, rank))
    return bucket_end_ms(BUCKETS - 1 - index) if index < BUCKETS else 0


def sparse(counts: Integers, rows: int, most: int) -> list[int]:
    """Return the counts of the `rows` rows of greatest lateness as pairs.

    A pair is the distance of a bucket from the one before, and its count. There are at most `most`
    pairs. The other rows are counted in the lowest of these buckets: their lateness may be read as too
    great, never as too small.

    >>> import numpy as np
    >>> counts = count_rows([unpack(pack(np.array([0, 5, 10, 30])))], newest_ms=10)
    >>> sparse(counts, 9, 9), sparse(counts, 2, 9), sparse(counts, 9, 1)
    ([0, 2, 5, 1, 5, 1], [5, 3, 5, 1], [10, 4])
    """
    import numpy as np  # noqa: PLC0415

    used = np.flatnonzero(counts)
    found = counts[used]
    from_the_greatest = np.cumsum(found[::-1])
    kept = min(int(np.searchsorted(from_the_greatest, rows)) + 1, most, len(used))
    if not kept:
        return []
    amounts = found[-kept:].copy()
    amounts[0] += found[:-kept].sum()
    distances = np.diff(used[-kept:], prepend=0)
    return np.column_stack([distances, amounts]).ravel().tolist()


def thin(counts: Integers, step: float) -> Integers:
    """Return fewer buckets, with the rows of some counted in a greater one.

    For each lateness, the rows above it are counted as `step` more, or as 1/16 more, at most.

    >>> import numpy as np
    >>> counts = count_rows([unpack(pack(np.arange(100)))], newest_ms=99)
    >>> np.flatnonzero(thin(counts, 20)).tolist()
    [19, 39, 59, 79, 99]
    """
    import numpy as np  # noqa: PLC0415

    thinned = np.zeros_like(counts)
    greater, bucket, rows = 0, 0, 0
    for each in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[each])
        if rows and rows + count <= max(step, greater / _THINNED_RANK_STEP):
            rows += count
        else:
            greater, bucket, rows = greater + rows, each, count
        thinned[bucket] = rows
    return thinned


def dense(pairs: Sequence[int]) -> Integers:
    """Return the number of rows in each bucket, from what `sparse` returns.

    >>> counts = dense([5, 3, 5, 1])
    >>> counts[5], counts[10], counts.sum()
    (np.int64(3), np.int64(1), np.int64(4))
    """
    import numpy as np  # noqa: PLC0415

    counts: Any = np.zeros(BUCKETS, np.int64)
    counts[np.cumsum(pairs[::2], dtype=np.int64)] = pairs[1::2]
    return counts
