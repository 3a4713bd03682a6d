"""Rows in flight of a source: read, and not yet passed by a promise.

Percentile watermarks follow from their event times. For each shard the event times are kept as a KLL
sketch (Karnin, Lang and Liberty, *Optimal Quantile Approximation in Streams*, FOCS 2016), which takes a
few kilobytes for any number of rows. Tasks sketch the rows that they read. The driver merges the
sketches of a shard's batches, and removes rows that its promise has passed. All this happens only for a
source whose stage declares `percentiles`; otherwise NumPy and the library of sketches are not even
imported.

The bytes are those of Apache DataSketches' *doubles* sketch, the format of the service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import reduce
from typing import Any, Final

from spark_agent.arrow import Array, ShardRows, times_by_shard
from spark_agent.client.reports import NOTHING_IN_FLIGHT, InFlight
from spark_agent.strategies import EARLIEST_MS
from spark_agent.strategies.resolved import TaskPromise, promised_ms

_K: Final = 200
"""The sketch's accuracy: ranks are off by less than 2 %."""

_TRIM_FROM: Final = 0.1
"""The part of a sketch that a promise must have passed before the sketch is rebuilt. A rebuild costs
time for each row that is left."""

_CHUNKS: Final = 32
"""Number of sketches of a shard that a task keeps separately, so that passed ones are dropped as a
whole."""

Sketch = Any
"""A `datasketches.kll_doubles_sketch`; the library is not typed."""


def sketch_of(times_ms: Iterable[int]) -> Sketch:
    """Sketch event times.

    >>> sketch_of(range(1_000)).n
    1000
    """
    import numpy as np  # noqa: PLC0415  (see the module)

    sketch = _empty()
    sketch.update(np.fromiter(times_ms, dtype=np.float64))
    return sketch


def merged(sketches: Iterable[Sketch]) -> Sketch:
    """Merge sketches.

    >>> merged([sketch_of([1, 2]), sketch_of([3])]).n
    3
    """

    def merge(found: Sketch, sketch: Sketch) -> Sketch:
        found.merge(sketch)
        return found

    return reduce(merge, sketches, _empty())


def trimmed(sketch: Sketch, before_ms: int) -> Sketch:
    """Remove the event times before an instant, unless the part is small.

    >>> trimmed(sketch_of(range(100)), 60).n, trimmed(sketch_of(range(100)), 5).n
    (40, 100)
    """
    import numpy as np  # noqa: PLC0415

    if sketch.is_empty() or sketch.get_rank(before_ms, False) < _TRIM_FROM:
        return sketch
    kept = _empty()
    for time_ms, weight in sketch:
        if time_ms >= before_ms:
            kept.update(np.full(weight, time_ms))
    return kept


def _empty() -> Sketch:
    import datasketches  # noqa: PLC0415

    return datasketches.kll_doubles_sketch(_K)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def unpacked(packed: bytes) -> Sketch:
    """Unpack a task's sketch.

    >>> unpacked(sketch_of([1, 2]).serialize()).n
    2
    """
    import datasketches  # noqa: PLC0415

    return datasketches.kll_doubles_sketch.deserialize(packed)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


class TaskInFlight:
    """Rows of each shard that a task has read and its promise will not pass."""

    def __init__(self, promise: TaskPromise) -> None:
        self._promise = promise
        self._chunks: dict[str, list[tuple[int, Sketch]]] = {}
        """By shard: sketches, each with its newest event time (ms)."""

    def add(self, names: Array, times: Array, rows: Mapping[str, ShardRows]) -> None:
        """Add rows. `rows` are those of each declared shard so far, with these."""
        for shard, times_ms in times_by_shard(names, times).items():
            if shard not in rows:
                continue
            latest_ms = rows[shard].newest_ms
            promised = promised_ms(self._promise, rows[shard].mark_ms)
            promise_ms = EARLIEST_MS if promised is None else promised
            kept = times_ms[(times_ms >= promise_ms) & (times_ms <= latest_ms)]
            chunks = [each for each in self._chunks.get(shard, []) if each[0] >= promise_ms]
            if len(kept):
                chunks.append((int(kept.max()), sketch_of(kept)))
            self._chunks[shard] = _fewer(chunks)

    def packed(self) -> dict[str, bytes]:
        """Return a sketch of each shard."""
        return {
            shard: merged(sketch for _, sketch in chunks).serialize()
            for shard, chunks in self._chunks.items()
        }


def _fewer(chunks: list[tuple[int, Sketch]]) -> list[tuple[int, Sketch]]:
    if len(chunks) <= _CHUNKS:
        return chunks
    return [(max(newest for newest, _ in chunks), merged(sketch for _, sketch in chunks))]


class StageInFlight:
    """Rows in flight of a source's shards, from the batches that the driver ran."""

    def __init__(self) -> None:
        self._sketches: dict[str, Sketch] = {}
        self._unreported: set[str] = set()

    def add(self, shard: str, packed: bytes, promise_ms: int) -> None:
        """Add the rows of a committed batch, and remove rows that its promise has passed."""
        before = [self._sketches[shard]] if shard in self._sketches else []
        self._sketches[shard] = trimmed(merged([*before, unpacked(packed)]), promise_ms)
        self._unreported.add(shard)

    def keep_only(self, shards: Collection[str]) -> None:
        """Drop the rows of other shards, which have become quiet."""
        for shard in self._sketches.keys() - shards:
            del self._sketches[shard]
            self._unreported.add(shard)

    def clear(self) -> None:
        """Drop everything: the job starts over."""
        self._sketches.clear()
        self._unreported.clear()

    def unreported(self, most: int) -> dict[str, InFlight]:
        """Return the rows in flight that are not reported yet, of `most` shards at most."""
        return {shard: self._of(shard) for shard in sorted(self._unreported)[:most]}

    def _of(self, shard: str) -> InFlight:
        sketch = self._sketches.get(shard)
        if sketch is None or sketch.is_empty():
            return NOTHING_IN_FLIGHT
        return InFlight(sketch.n, sketch.serialize())

    def repeat(self) -> None:
        """Mark everything as unreported: the service may have lost the reports."""
        self._unreported.update(self._sketches)

    def mark_reported(self, shards: Iterable[str]) -> None:
        """Note that these shards are reported."""
        self._unreported.difference_update(shards)
